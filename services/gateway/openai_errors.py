"""Errors in OpenAI's shape: {"error": {message, type, param, code}}, with the status and headers that clients of theirs act on."""

from __future__ import annotations

import json
import math
from typing import Any

from trimtab.errors import InvalidRequest, TrimtabError, Violation

PARAM_OF = {"json_schema": "response_format", "json_object": "response_format", "prompt": "messages"}
"""Where a field of ours is called otherwise in a chat body."""


class HttpFault(Exception):
    """What is wrong with the HTTP call itself, before there is a request to judge."""

    def __init__(self, status: int, message: str, *, code: str, allow: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.allow = allow


def refused(param: str, description: str, *, code: str = "invalid_value") -> InvalidRequest:
    """A parameter that can't be taken; the message names it."""
    return InvalidRequest(
        f"{param} {description}", violations=(Violation(param, description),), metadata={"code": code}
    )


def render(error: HttpFault | TrimtabError, *, chat: bool = True) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers."""
    if isinstance(error, HttpFault):
        headers = {"Allow": error.allow} if error.allow else {}
        return error.status, _body(error.status, error.message, None, error.code), headers
    param, message = None, error.message
    if error.violations:
        named = [(_param(v.field, chat=chat), v.description) for v in error.violations]
        param = named[0][0]
        message = "; ".join(f"{name} {description}" for name, description in named)
    elif error.reason == "MODEL_NOT_FOUND":
        param = "model"
    headers = {}
    if error.retry_after_ms is not None:
        headers["Retry-After"] = str(math.ceil(error.retry_after_ms / 1000.0))
    code = error.metadata.get("code") or error.reason.lower()
    return error.http_status, _body(error.http_status, message, param, code), headers


def event(error: TrimtabError, *, chat: bool) -> bytes:
    """As the last event of a stream that had begun; no [DONE] comes after it."""
    return b"data: " + json.dumps(render(error, chat=chat)[1]).encode() + b"\n\n"


def _param(field: str, *, chat: bool) -> str:
    name = field.removeprefix("sampling.").removeprefix("chat.")
    return PARAM_OF.get(name, name) if chat else name


def _body(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
