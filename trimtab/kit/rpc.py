"""gRPC as the mesh uses it: channel and server options with their reasons, and errors that keep their meaning across processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import grpc
import psutil
import structlog
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from trimtab.errors import BY_REASON, EngineFault, Internal, Outcome, TrimtabError, Violation, outcome_of
from trimtab.kit import tls as certificates
from trimtab.kit.tls import Tls, channel_credentials, from_environment, server_credentials

DOMAIN = "trimtab"
MAX_MESSAGE_BYTES = 16 << 20
"""Between our own processes."""
MAX_REQUEST_BYTES = 4 << 20
"""From a client. A 128K-token prompt is under 1 MiB as ids or text. Well below MAX_MESSAGE_BYTES, since a request travels inside a larger
message on a link that many streams share: one that did not fit there would cut them all."""
MAX_METADATA_BYTES = 16 << 10

SERVER_OPTIONS: list[tuple[str, Any]] = [
    # Two processes that share a port steal each other's traffic; a taken port must be an error (ECOSYSTEM §2).
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    # A peer's keep-alive must never end its streams by "too many pings".
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
]
CLIENT_DOOR_OPTIONS = [
    (name, MAX_REQUEST_BYTES if name == "grpc.max_receive_message_length" else value) for name, value in SERVER_OPTIONS
]
"""For a server whose callers are clients."""
WORKER_OPTIONS: list[tuple[str, Any]] = [
    *SERVER_OPTIONS,
    # A gateway that vanished without a word (no FIN, no RST) leaves a connection that the kernel keeps for as long as it takes what is sent, and
    # 20 s more. So a gateway from which nothing came for a moment is asked, and its requests end with the link when it does not answer.
    # gRPC's own threads answer: a gateway whose event loop is busy is spared. It asks a second after the last word at the
    # earliest, whatever is said here (`drill hosts`).
    ("grpc.keepalive_time_ms", 300),
    ("grpc.keepalive_timeout_ms", 1200),
]
"""For a worker: requests of a gateway that is lost are let go, after 2 s by DESIGN §3, and after 2.5 as measured."""
CHANNEL_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A restarted peer should be found again in a moment; the default first back-off is a second.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Despite its name: what one attempt to connect gets, TLS handshake included. A busy server takes longer than a moment.
    ("grpc.min_reconnect_backoff_ms", 2000),
    ("grpc.max_reconnect_backoff_ms", 2000),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5000),
    # Channels to one address must not share a connection's fate.
    ("grpc.use_local_subchannel_pool", 1),
]

log = structlog.get_logger(__name__)


_of_process: list[Tls | None] = []
"""What `use_tls` said, once it did."""


def use_tls(tls: Tls | None) -> None:
    """How this process calls others from now on; without a word the environment says (`tls.from_environment`)."""
    _of_process[:] = [tls]


def uses_tls() -> bool:
    """Whether channels of this process are TLS."""
    return _using() is not None


def _using() -> Tls | None:
    return _of_process[0] if _of_process else from_environment()


def channel(address: str, kind: str, *, tls: Tls | None = None) -> grpc.aio.Channel:
    """To a server of this kind: control, worker or gateway. With TLS its name is checked. CertificateError where certificates can't be read."""
    using = tls or _using()
    if using is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", using.name_of(kind))]
    return grpc.aio.secure_channel(address, channel_credentials(using), options=options)


def generation(tls: Tls | None = None) -> int:
    """Of the files that `channel` opens with now: another number than before means that a channel opened then shows an old certificate. 0 for
    plain text, which never changes. CertificateError where the files were never good.
    """
    using = tls or _using()
    return certificates.generation(using) if using is not None else 0


async def renewal(since: int, *, tls: Tls | None = None) -> None:
    """Until `generation` is another than this one; for ever with plain text."""
    using = tls or _using()
    if using is None:
        await asyncio.Event().wait()
    else:
        await certificates.renewal(using, since)


def tls_fault(said: str, kind: str, *, tls: Tls | None = None) -> str:
    """What went wrong in a handshake, and what to do next, from gRPC's words on a failed connection; "" where TLS has no part in it."""
    using = tls or _using()
    closed = "Socket closed" in said or "reset by peer" in said
    if using is None:
        # One that ends in the middle of a call closes the socket too; with TLS 1.3 a client's certificate is turned away only then.
        if closed and "failed to connect" in said:
            return (
                "it may speak TLS: set TRIMTAB_TLS_CA, TRIMTAB_TLS_CERT and TRIMTAB_TLS_KEY (trimtab certs issue makes the files), or tls_ca, "
                "tls_cert and tls_key of a process"
            )
        return ""
    if "WRONG_VERSION_NUMBER" in said or "WRONG_VERSION" in said:
        return "it speaks plain text, and this side TLS: unset TRIMTAB_TLS_CA, TRIMTAB_TLS_CERT and TRIMTAB_TLS_KEY, or start it with TLS"
    if "certificate has expired" in said:
        return "its certificate has run out: issue it again (trimtab certs issue); it needs no restart"
    if "not yet valid" in said:
        return "its certificate does not hold yet: do the clocks of both machines agree?"
    if "Hostname Verification" in said:
        return f"its certificate is not that of a {kind} of mesh {using.mesh!r}: is it the right address, and the right TRIMTAB_TLS_MESH?"
    if "CERTIFICATE_VERIFY_FAILED" in said:
        return f"its certificate is not of the authority in {using.ca}: compare by trimtab certs show {using.ca}"
    if closed or "CERTIFICATE" in said:
        if using.has_run_out():
            return f"{using.cert} has run out: trimtab certs issue renews it, and trimtab certs show {using.cert} says when it ended"
        return f"it turned {using.cert} away: is it of the same authority, and of this mesh? trimtab certs show {using.cert} says whose it is"
    return ""


def encode_status(error: TrimtabError) -> status_pb2.Status:
    """As google.rpc.Status: ErrorInfo always, BadRequest for violations, RetryInfo where retrying makes sense."""
    code: grpc.StatusCode = getattr(grpc.StatusCode, error.grpc_code)
    details: list[any_pb2.Any] = []

    def pack(message: Any) -> None:
        box = any_pb2.Any()
        box.Pack(message)
        details.append(box)

    pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))
    if error.violations:
        bad = error_details_pb2.BadRequest()
        for v in error.violations:
            bad.field_violations.add(field=v.field, description=v.description)
        pack(bad)
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code.value[0], message=error.message, details=details)


def code_name(number: int) -> str:
    """The gRPC code's name, such as "UNAVAILABLE"."""
    return next((c.name for c in grpc.StatusCode if c.value[0] == number), "UNKNOWN")


def decode_status(status: Any) -> TrimtabError:
    """The error that `encode_status` made, or the nearest one for a status from elsewhere. `status` is any google.rpc.Status-alike."""
    reason, metadata, violations, retry = "", {}, [], None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            violations = [Violation(v.field, v.description) for v in bad.field_violations]
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            info_retry = error_details_pb2.RetryInfo()
            detail.Unpack(info_retry)
            retry = info_retry.retry_delay.ToMilliseconds()
    code = code_name(status.code)
    if not reason and code in ("DEADLINE_EXCEEDED", "CANCELLED"):
        reason = code  # gRPC's own word for it, which carries no details
    kind = BY_REASON.get(reason)
    if kind is None or kind.__init__ is not TrimtabError.__init__:
        kind = _stand_in(code, reason)
    return kind(status.message, violations=tuple(violations), metadata=metadata, retry_after_ms=retry)


_STAND_INS: dict[tuple[str, str], type[TrimtabError]] = {}


def _stand_in(code: str, reason: str) -> type[TrimtabError]:
    """A class for a status that the tree does not hold: it keeps code and reason, and the outcome that they imply."""
    if (code, reason) not in _STAND_INS:
        outcome = outcome_of(code, reason)
        base = EngineFault if outcome is Outcome.ENGINE_FAULT else TrimtabError
        http = {
            "UNAVAILABLE": 503,
            "RESOURCE_EXHAUSTED": 429,
            "UNIMPLEMENTED": 501,
            "CANCELLED": 499,
            "DEADLINE_EXCEEDED": 504,
        }
        facts = {
            "grpc_code": code,
            "reason": reason or code,
            "outcome": outcome,
            "http_status": http.get(code, 400 if outcome is Outcome.CLIENT_FAULT else 500),
            "default_retry_after_ms": None,
        }
        # Built without registering a subclass by name anywhere: BY_REASON is made once, at import.
        _STAND_INS[code, reason] = type("RemoteError", (base,), facts)
    return _STAND_INS[code, reason]


def from_call(error: grpc.aio.AioRpcError) -> TrimtabError:
    """The domain error behind a failed call."""
    for name, value in error.trailing_metadata() or ():
        if name == "grpc-status-details-bin":
            status = status_pb2.Status()
            status.ParseFromString(value if isinstance(value, bytes) else value.encode("latin-1"))
            return decode_status(status)
    return decode_status(status_pb2.Status(code=error.code().value[0], message=error.details() or error.code().name))


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TrimtabError) -> NoReturn:
    """End the call with the error's status and details."""
    if error.retry_after_ms is not None:
        context.set_trailing_metadata((("grpc-retry-pushback-ms", str(error.retry_after_ms)),))
    await context.abort_with_status(rpc_status.to_status(encode_status(error)))
    raise AssertionError("abort returns never")


@contextlib.asynccontextmanager
async def guarded(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Turns what a handler raises into a status. An unforeseen exception is logged here and says nothing of itself to the caller."""
    try:
        yield
    except TrimtabError as e:
        await abort(context, e)
    except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
        raise
    except grpc.aio.AioRpcError as e:
        await abort(context, from_call(e))
    except Exception:
        log.exception("handler failed")
        await abort(context, Internal("an internal error; the server's log has it"))


class PortTaken(Exception):
    """The address can't be bound; the message names who holds it."""


def sharing(options: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """A server's options where its port is shared with others of its kind on purpose."""
    return [(name, 1 if name == "grpc.so_reuseport" else value) for name, value in options]


def bind(server: grpc.aio.Server, address: str, tls: Tls | None = None, *, clients_need_one: bool = True) -> int:
    """Bind; the port (chosen when it was 0). With TLS callers need a certificate of the mesh, unless told otherwise. PortTaken names the
    holder."""
    try:
        port: int
        if tls is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, server_credentials(tls, clients_need_one=clients_need_one))
    except RuntimeError as e:
        raise PortTaken(port_taken(address)) from e
    if port == 0:
        raise PortTaken(port_taken(address))
    return port


def cannot_listen(address: str, error: OSError) -> str:
    """One sentence on why a socket could not be bound there."""
    if error.errno == errno.EADDRINUSE:
        return port_taken(address)
    return f"can't listen on {address}: {error.strerror or error}"


def port_taken(address: str) -> str:
    """One sentence on who holds the port, as far as this user may see it."""
    port = int(address.rsplit(":", 1)[1])
    holder = "another process"
    with contextlib.suppress(psutil.Error, OSError):
        for c in psutil.net_connections("tcp"):
            if c.status == psutil.CONN_LISTEN and c.laddr and c.laddr.port == port and c.pid:
                holder = f"{psutil.Process(c.pid).name()} (pid {c.pid})"
                break
    return f"can't listen on {address}: {holder} holds the port; stop it, or choose another port"


CANCEL_AGAIN_S = 3.0


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Cancel and wait for the end; whatever it raises is over with it.

    Cancelled again when it goes on: up to Python 3.11 `asyncio.wait_for` swallows a cancellation that comes as its work is just done, and
    libraries use it.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=CANCEL_AGAIN_S)
    if not task.cancelled():
        task.exception()
