"""The door of the control plane's gRPC server: who calls, whether he may, and a line for everyone who may not.

It wraps every method of the admin, control and scaler services, so that a method that somebody adds is closed until `access.NEEDS` names it.
Health and reflection are open to whoever gets through the handshake.
"""

from __future__ import annotations

import contextvars
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import structlog

from controlplane.access import NEEDS, SCALER_NEEDS, Access, AccessFault, Grant, Role, read_access
from controlplane.metrics import ControlMetrics
from trimtab.errors import PermissionDenied, Unauthenticated
from trimtab.kit.rpc import abort
from trimtab.kit.tls import NODES, PLAIN, Caller, caller_of

log = structlog.get_logger(__name__)

ADMIN, CONTROL = "/trimtab.v1.AdminService/", "/trimtab.v1.ControlService/"
SCALER = "/externalscaler.ExternalScaler/"
REPLICA = "trimtab-replica"
"""Metadata of a replica that asks by itself: its name and its word (`Peers`)."""
SHOWN = 80
"""Characters of a stranger's name in the log."""
_granted: contextvars.ContextVar[Grant] = contextvars.ContextVar("granted")
_said: contextvars.ContextVar[str] = contextvars.ContextVar("said", default="")


def granted() -> Grant:
    """Who makes the call that is being answered. Without a gatekeeper, as in a test, it is whoever started the process."""
    return _granted.get(Grant(PLAIN, Role.ADMIN))


def credentials() -> tuple[tuple[str, str], ...]:
    """What the caller of the call that is being answered said for himself, to ask other replicas in his name."""
    return (("authorization", _said.get()),) if _said.get() else ()


class AccessFile:
    """The file as it is now; the last good one while it is wrong, and said so. None: no file, plain text may do everything."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._stamp = (0, 0)
        if path is not None and path.is_file():
            self._stamp = self._stat(path)
        self._access = Access() if path is None else read_access(path)

    @staticmethod
    def _stat(path: Path) -> tuple[int, int]:
        found = path.stat()
        return (found.st_mtime_ns, found.st_ino)

    @property
    def now(self) -> Access:
        if self._path is not None:
            try:
                stamp = self._stat(self._path)
                if stamp != self._stamp:
                    self._stamp = stamp
                    self._access = read_access(self._path)
                    log.info("access file read", path=str(self._path), users=len(self._access.users))
            except (AccessFault, OSError) as e:
                log.error("access file not read; the last good one holds", path=str(self._path), because=str(e))
        return self._access


class Gatekeeper(grpc.aio.ServerInterceptor):
    """`on_denied` is told (method, grant, words, request) of every admin call that was turned away. `replica` says which replica a word is of,
    or nothing.
    """

    def __init__(
        self,
        access: AccessFile,
        metrics: ControlMetrics,
        mesh: str,
        on_denied: Callable[[str, Grant, str, Any], Awaitable[None]],
        replica: Callable[[str], str] = lambda said: "",
    ) -> None:
        self._access = access
        self._metrics = metrics
        self._mesh = mesh
        self._on_denied = on_denied
        self._replica = replica

    async def intercept_service(self, continuation: Any, details: Any) -> Any:
        handler = await continuation(details)
        method: str = details.method
        if handler is None:
            return None
        if method.startswith(ADMIN) and handler.unary_unary is not None:
            name = method.removeprefix(ADMIN)
            return self._unary(handler, name, NEEDS.get(name, Role.ADMIN))
        if method.startswith(SCALER) and handler.unary_unary is not None:
            return self._unary(handler, method.removeprefix(SCALER), SCALER_NEEDS)
        if method.startswith(SCALER) and handler.unary_stream is not None:
            return self._streaming(handler, method.removeprefix(SCALER), SCALER_NEEDS)
        if method.startswith(CONTROL) and handler.stream_stream is not None:
            return self._node(handler)
        # A call of a shape that nothing here can judge is not let through unjudged.
        return None if method.startswith((ADMIN, CONTROL, SCALER)) else handler

    def _unary(self, handler: Any, method: str, needed: Role) -> Any:
        async def asked(request: Any, context: Any) -> Any:
            await self._let_in(method, needed, request, context)
            return await handler.unary_unary(request, context)

        return grpc.unary_unary_rpc_method_handler(asked, handler.request_deserializer, handler.response_serializer)

    def _streaming(self, handler: Any, method: str, needed: Role) -> Any:
        async def asked(request: Any, context: Any) -> AsyncIterator[Any]:
            await self._let_in(method, needed, request, context)
            async for response in handler.unary_stream(request, context):
                yield response

        return grpc.unary_stream_rpc_method_handler(asked, handler.request_deserializer, handler.response_serializer)

    async def _let_in(self, method: str, needed: Role, request: Any, context: Any) -> None:
        """For the rest of the call; whoever may not is told so, and his call is ended."""
        grant = self._grant(context)
        if grant.role < needed:
            words = f"{method} needs the role {needed.name.lower()}; you are {grant.words}"
            await self._turn_away(method, grant, words, request, context)
        _granted.set(grant)
        _said.set(str(dict(context.invocation_metadata() or ()).get("authorization", "")))

    def _node(self, handler: Any) -> Any:
        async def connected(requests: Any, context: Any) -> Any:
            caller = caller_of(context.auth_context(), self._mesh)
            if caller != PLAIN and caller.kind not in NODES:
                words = f"a control stream needs the certificate of a worker or a gateway; you are {caller.name!r}"
                await self._turn_away("Connect", Grant(caller, Role.NONE), words, None, context)
            _granted.set(Grant(caller, Role.NONE))
            async for response in handler.stream_stream(requests, context):
                yield response

        return grpc.stream_stream_rpc_method_handler(
            connected, handler.request_deserializer, handler.response_serializer
        )

    def _grant(self, context: Any) -> Grant:
        metadata = dict(context.invocation_metadata() or ())
        said = str(metadata.get("authorization", ""))
        scheme, _, token = said.partition(" ")
        caller: Caller = caller_of(context.auth_context(), self._mesh)
        if not said and caller == PLAIN and (name := self._replica(str(metadata.get(REPLICA, "")))):
            caller = Caller("control", name, "its word in the store")
        if said and scheme.lower() != "bearer":
            # Not a word of it: what has no scheme may be the token itself.
            return Grant(Caller("", "unknown", "an authorization that is no bearer token"), Role.NONE)
        return self._access.now.grant(caller, token.strip())

    async def _turn_away(self, method: str, grant: Grant, words: str, request: Any, context: Any) -> None:
        self._metrics.denied.labels(method if method in NEEDS or method == "Connect" else "other").inc()
        log.warning(
            "denied",
            method=method,
            identity=grant.caller.name[:SHOWN],
            kind=grant.caller.kind,
            by=grant.caller.by,
            role=grant.role.name.lower(),
            peer=context.peer(),
        )
        await self._on_denied(method, grant, words, request)
        nobody = grant.role is Role.NONE and not grant.caller.known and grant.caller.by != "token"
        await abort(context, Unauthenticated(words) if nobody else PermissionDenied(words))
