"""HTTP/1.1 for one handler: body and header limits that are stated when they are broken, and a caller that leaves cancels its handler.

aiohttp answers a head that it can't parse by itself, in plain text; here that answer has the handler's error shape too.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import http_exceptions, web

from services.gateway import openai_errors as errors
from services.gateway.denials import Denials
from services.gateway.metrics import GatewayMetrics
from services.gateway.tenants import Certificate
from trimtab.kit import rpc
from trimtab.kit.tls import HttpCertificate, Tls

MAX_LINE_BYTES = 8190
"""The request line at most."""
MAX_HEADER_BYTES = 8190
"""One header field at most."""
MAX_HEADERS = 128
OPEN_PATHS = ("/health", "/metrics")
"""For probes and scrapers, which have no certificate."""

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


def json_response(
    status: int, body: dict[str, Any], headers: dict[str, str] | None = None, *, close: bool = False
) -> web.Response:
    response = web.json_response(body, status=status, headers=headers)
    if close:
        response.force_close()
    return response


class _Connection(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """A head that broke HTTP or our limits. The handler itself raises nothing."""
        if isinstance(exc, http_exceptions.LineTooLong):
            status = 431
            message = (
                f"the request's head is too large: its line may have {MAX_LINE_BYTES} bytes and each header field "
                f"{MAX_HEADER_BYTES}, with at most {MAX_HEADERS} fields"
            )
        fault = errors.HttpFault(
            status, message or "the request is not valid HTTP", code="header_too_large" if status == 431 else "bad_http"
        )
        return json_response(*errors.render(fault), close=True)


class _Server(web.Server):
    """aiohttp's server with our connection."""

    def __call__(self) -> web.RequestHandler:
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
        )


def certificate_of(request: web.BaseRequest) -> Certificate:
    """What the connection says of its caller, as gRPC's `auth_context()` has it. The handshake has checked it against the authority."""
    transport = request.transport
    if transport is None or transport.get_extra_info("sslcontext") is None:
        return {}
    shown: Mapping[str, Any] = transport.get_extra_info("peercert") or {}
    uris = [value.encode() for kind, value in shown.get("subjectAltName", ()) if kind == "URI"]
    names = [value.encode() for part in shown.get("subject", ()) for kind, value in part if kind == "commonName"]
    return {"transport_security_type": [b"ssl"], "peer_uri": uris, "x509_common_name": names}


def _for_known(handler: Handler, denials: Denials) -> Handler:
    """The handler for whoever has shown a certificate in the handshake; probes and scrapers need none."""

    async def judged(request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        known = transport is not None and bool(transport.get_extra_info("peercert"))
        if known or request.path in OPEN_PATHS:
            return await handler(request)
        denials.count("http", method=request.path, peer=request.remote or "", because="no certificate")
        message = "this gateway wants a client certificate of the mesh's authority; ask its operator for one"
        return json_response(*errors.render(errors.HttpFault(401, message, code="no_certificate")), close=True)

    return judged


class HttpServer:
    """Listens from `start` to `stop`. PortTaken names the holder of a taken port. With `clients_need_one` and TLS the handler sees those alone
    who have a certificate of the mesh's authority."""

    def __init__(
        self,
        handler: Handler,
        address: str,
        *,
        max_body_bytes: int,
        tls: Tls | None = None,
        clients_need_one: bool = False,
        denials: Denials | None = None,
        shares: bool = False,
    ) -> None:
        """`shares`: other processes of this gateway listen there too."""
        self._shares = shares
        self._certificate = HttpCertificate(tls, asks_clients=clients_need_one) if tls is not None else None
        self._renewing: asyncio.Task[None] | None = None
        if tls is not None and clients_need_one:
            handler = _for_known(handler, denials or Denials(GatewayMetrics()))
        self._handler = handler
        self._address = address
        self._max_body_bytes = max_body_bytes
        self._runner: web.ServerRunner | None = None
        self.port = 0

    async def start(self) -> None:
        loop = asyncio.get_running_loop()

        def make(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
            return web.BaseRequest(message, payload, protocol, writer, task, loop, client_max_size=self._max_body_bytes)

        # handler_cancellation: a closed connection cancels the handler, and with it the request at its worker.
        self._runner = web.ServerRunner(
            _Server(self._handler, request_factory=make, handler_cancellation=True),
            shutdown_timeout=1.0,
        )
        await self._runner.setup()
        host, port = self._address.rsplit(":", 1)
        try:
            secured = self._certificate.context if self._certificate is not None else None
            reuse = True if self._shares else None
            site = web.TCPSite(self._runner, host, int(port), backlog=1024, ssl_context=secured, reuse_port=reuse)
            await site.start()
        except OSError as e:
            await self._runner.cleanup()
            if e.errno == errno.EADDRINUSE:
                raise rpc.PortTaken(rpc.port_taken(self._address)) from e
            raise
        self.port = self._runner.addresses[0][1]
        if self._certificate is not None:
            self._renewing = asyncio.create_task(self._certificate.renew())

    async def stop(self) -> None:
        if self._renewing is not None:
            await rpc.cancel_and_wait(self._renewing)
        if self._runner is not None:
            await self._runner.cleanup()
