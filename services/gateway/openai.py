"""The gateway's HTTP door: OpenAI's API for chat, completions and models, beside /health and /metrics.

Every error has OpenAI's shape and the status of the error tree. A stream's headers go out with Accepted, before any prefill, or after a wait
(`opening.py`), so an error after that is its last event, without [DONE]. A caller that leaves cancels its request. Who calls is judged before
anything is read of him but the head.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import structlog
from aiohttp import web

from services.gateway import openai_errors as errors
from services.gateway.call import Call
from services.gateway.coalesce import Coalescer
from services.gateway.dispatch import Dispatch
from services.gateway.http_server import OPEN_PATHS, certificate_of, json_response
from services.gateway.openai_errors import HttpFault, refused
from services.gateway.openai_schema import Ask, parse_chat, parse_completion
from services.gateway.openai_stream import Answer
from services.gateway.opening import Opening
from services.gateway.tenants import Tenants
from trimtab import codec
from trimtab.errors import Internal, ModelNotFound, TrimtabError, Unauthenticated
from trimtab.kit import telemetry
from trimtab.messages import Accepted, Delta, Finish, TokenLogprobs, Workload
from trimtab.tenant import DEFAULT, Tenant

log = structlog.get_logger(__name__)

MODELS = "/v1/models"
KEEP_ALIVE_S = 15.0
"""A stream says something at least this often, so that no proxy takes a long prefill for a dead connection."""
SEND_BUFFER_BYTES = 64 << 10
"""Of a stream's socket. By itself the kernel takes megabytes for a reader that takes nothing, and he is found out that much later."""
LAST_WORD_S = 5.0
"""What a reader gets to take the end of a stream that failed; he may be the one who takes nothing."""

Handler = Callable[[web.BaseRequest, Tenant], Awaitable[web.StreamResponse]]


class OpenAiDoor:
    def __init__(
        self,
        dispatch: Dispatch,
        tenants: Tenants,
        coalescer: Coalescer,
        *,
        max_body_bytes: int,
        shows_metrics: bool = True,
    ) -> None:
        self._coalescer = coalescer
        self._dispatch = dispatch
        self._tenants = tenants
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            MODELS: ("GET", self._models),
            "/health": ("GET", self._health),
        }
        if shows_metrics:
            self._routes["/metrics"] = ("GET", self._metrics)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request; raises nothing but cancellation."""
        try:
            tenant = self._tenant(request)
            return await self._route(request)(request, tenant)
        except (HttpFault, TrimtabError) as e:
            status, body, headers = errors.render(e)
        except Exception:
            log.exception("handler failed", path=request.path)
            status, body, headers = errors.render(Internal("an internal error; the gateway's log has it"))
        if status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return json_response(status, body, headers, close=status == 413)

    def _tenant(self, request: web.BaseRequest) -> Tenant:
        """Whose request it is; HttpFault where nobody knows who calls."""
        if _path(request) in OPEN_PATHS:
            return DEFAULT
        said = request.headers.getall("authorization", [])
        facts = {"method": request.path, "peer": request.remote or ""}
        try:
            return self._tenants.of(said, certificate_of(request), door="http", **facts)
        except Unauthenticated as e:
            raise HttpFault(401, e.message, code="invalid_api_key") from None

    def _route(self, request: web.BaseRequest) -> Handler:
        path = _path(request)
        method, handler = self._routes.get(path, ("", None))
        if path.startswith(MODELS + "/"):
            method, handler = "GET", self._model
        if handler is None:
            known = ", ".join([*self._routes, MODELS + "/{id}"])
            raise HttpFault(404, f"there is nothing at {path}; there is {known}", code="unknown_url")
        if request.method != method and not (method == "GET" and request.method == "HEAD"):
            raise HttpFault(
                405, f"{request.method} is not allowed at {path}; use {method}", code="method_not_allowed", allow=method
            )
        return handler

    async def _chat(self, request: web.BaseRequest, tenant: Tenant) -> web.StreamResponse:
        return await self._answer(request, parse_chat(await self._body(request)), tenant)

    async def _completion(self, request: web.BaseRequest, tenant: Tenant) -> web.StreamResponse:
        body = await self._body(request)
        try:
            return await self._answer(request, parse_completion(body), tenant)
        except TrimtabError as e:
            return json_response(*errors.render(e, chat=False))

    async def _body(self, request: web.BaseRequest) -> dict[str, Any]:
        limit = self._max_body_bytes
        too_large = HttpFault(
            413, f"the body is larger than {limit} bytes, the most that is taken", code="body_too_large"
        )
        if (request.content_length or 0) > limit:
            raise too_large
        try:
            body = json.loads(await request.read())
        except web.HTTPRequestEntityTooLarge:
            raise too_large from None
        except (ValueError, RecursionError) as e:
            raise HttpFault(400, f"the body is not JSON: {e}", code="invalid_json") from None
        if not isinstance(body, dict):
            raise HttpFault(400, "the body must be a JSON object", code="invalid_json")
        return body

    async def _answer(self, request: web.BaseRequest, ask: Ask, tenant: Tenant) -> web.StreamResponse:
        workload = ask.request.workload
        if name := request.headers.get("x-workload"):
            if name not in ("realtime", "batch"):
                raise refused("x-workload", f"must be realtime or batch, not {name!r}")
            workload = Workload(name)
        request_id = self._dispatch.named(request.headers.get("x-request-id", ""))
        try:
            pb = codec.encode_request(replace(ask.request, request_id=request_id, workload=workload))
        except UnicodeError:
            raise HttpFault(400, "the body holds text that is not valid Unicode", code="invalid_json") from None
        parent = telemetry.parse_traceparent(request.headers.get("traceparent", ""))
        call = self._dispatch.generate(pb, tenant=tenant, parent=parent)
        headers = {"x-request-id": call.request_id, "x-trace-id": call.trace_id}
        try:
            return await (self._stream if ask.stream else self._whole)(request, ask, call, headers)
        except TrimtabError as e:
            status, body, more = errors.render(e, chat=ask.chat)
            return json_response(status, body, headers | more)

    async def _whole(self, _: web.BaseRequest, ask: Ask, call: Call, headers: dict[str, str]) -> web.StreamResponse:
        texts: list[str] = []
        logprobs: list[TokenLogprobs] = []
        model = ask.request.model
        async with call.responses() as responses:
            async for response in responses:
                match codec.decode_event(response):
                    case Accepted(model=served):
                        model = served
                    case Delta(text=text, logprobs=more):
                        texts.append(text)
                        logprobs.extend(more)
                    case Finish() as finish:
                        answer = Answer(ask, call.request_id, model)
                        return json_response(200, answer.whole("".join(texts), logprobs, finish), headers)
        raise Internal("the answer ended without a finish")

    async def _stream(
        self, request: web.BaseRequest, ask: Ask, call: Call, headers: dict[str, str]
    ) -> web.StreamResponse:
        out = web.StreamResponse(
            headers=headers | {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        )
        keeper: asyncio.Task[None] | None = None
        answer, last = Answer(ask, call.request_id, ask.request.model), b""

        async def begin() -> None:
            nonlocal keeper
            _bound(request)
            await out.prepare(request)
            keeper = asyncio.create_task(_keep_alive(out))

        try:
            async with call.responses() as responses, Opening(begin) as opening:
                async for response in responses:
                    if opening.pending:
                        await opening.over()
                        if keeper is None:
                            await begin()
                    match codec.decode_event(response):
                        case Delta() as delta:
                            data = answer.delta(delta)
                        case Accepted(model=model):
                            answer = Answer(ask, call.request_id, model)
                            data = answer.opening()
                        case Finish() as finish:
                            data = answer.closing(finish)
                        case _:
                            continue
                    if data:
                        await out.write(data)
                        if self._coalescer.holds:
                            await self._coalescer.pause()
        except TrimtabError as e:
            if not out.prepared:
                raise
            last = errors.event(e, chat=ask.chat)
        finally:
            if keeper is not None:
                keeper.cancel()
        try:
            async with asyncio.timeout(LAST_WORD_S):
                await out.write(last)
                await out.write_eof()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
        return out

    async def _models(self, _: web.BaseRequest, __: Tenant) -> web.StreamResponse:
        served = sorted(self._dispatch.endpoints.models().items())
        return json_response(200, {"object": "list", "data": [self._card(name, window) for name, window in served]})

    async def _model(self, request: web.BaseRequest, _: Tenant) -> web.StreamResponse:
        name, served = request.path.removeprefix(MODELS + "/"), self._dispatch.endpoints.models()
        if name not in served:
            raise ModelNotFound(f"model {name!r} is not served here; served: {', '.join(sorted(served)) or 'none'}")
        return json_response(200, self._card(name, served[name]))

    def _card(self, name: str, window: int) -> dict[str, Any]:
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "trimtab"}
        return card | ({"max_model_len": window} if window else {})

    async def _health(self, _: web.BaseRequest, __: Tenant) -> web.StreamResponse:
        workers = dict(self._dispatch.endpoints.states())
        if self._dispatch.admission.draining:
            reason = "this gateway is draining"
        elif self._dispatch.endpoints.can_serve:
            return json_response(200, {"status": "ok", "workers": workers})
        else:
            reason = "no worker can take requests" if workers else "there is no worker now"
        return json_response(503, {"status": "unavailable", "reason": reason, "workers": workers})

    async def _metrics(self, _: web.BaseRequest, __: Tenant) -> web.StreamResponse:
        return web.Response(body=await self._dispatch.metrics.scraped(), content_type="text/plain", charset="utf-8")


def _path(request: web.BaseRequest) -> str:
    return request.path.rstrip("/") or "/"


def _bound(request: web.BaseRequest) -> None:
    """What the kernel keeps for this connection's reader."""
    if request.transport is not None and (wire := request.transport.get_extra_info("socket")) is not None:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


async def _keep_alive(out: web.StreamResponse) -> None:
    """Comments, which readers of event streams pass over."""
    with contextlib.suppress(ConnectionError):
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            await out.write(b": keep-alive\n\n")
