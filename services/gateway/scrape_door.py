"""A gateway's `/metrics` at an address of its own, for scrapers that are no clients: then clients see none of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from services.gateway import openai_errors as errors
from services.gateway.http_server import json_response

PATH = "/metrics"


class ScrapeDoor:
    """`text` gives the samples, in the Prometheus text format."""

    def __init__(self, text: Callable[[], Awaitable[bytes]]) -> None:
        self._text = text

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Any request; raises nothing but cancellation."""
        if request.path.rstrip("/") != PATH:
            fault = errors.HttpFault(404, f"there is nothing at {request.path}; there is {PATH}", code="unknown_url")
        elif request.method not in ("GET", "HEAD"):
            fault = errors.HttpFault(
                405, f"{request.method} is not allowed at {PATH}; use GET", code="method_not_allowed", allow="GET"
            )
        else:
            return web.Response(body=await self._text(), content_type="text/plain", charset="utf-8")
        return json_response(*errors.render(fault))
