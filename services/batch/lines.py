"""One line of a batch, as OpenAI has it: a request in, its answer or its error out; pure.

In: {"custom_id", "method": "POST", "url", "body"}. Out: {"id", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}. Of a
request that failed the error is told in both places; of one that was never sent, `response` is null.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from services.gateway.openai_body import shown
from services.gateway.openai_errors import render
from services.gateway.openai_schema import Ask, parse_chat, parse_completion
from trimtab import codec, validation
from trimtab.errors import TrimtabError
from trimtab.kit.rpc import MAX_REQUEST_BYTES
from trimtab.messages import Workload

PARSERS = {"/v1/chat/completions": parse_chat, "/v1/completions": parse_completion}
MEMBERS = ("custom_id", "method", "url", "body")
ID_PREFIX = "batch_req_"


@dataclass(frozen=True, slots=True)
class Task:
    """A request to be sent. `line` is its line in the file, counted from 1."""

    line: int
    custom_id: str
    ask: Ask


class BadLine(Exception):
    """A line that can't be sent, and why. `custom_id` where the line has one."""

    def __init__(self, line: int, why: str, custom_id: str = "", *, code: str = "invalid_line") -> None:
        super().__init__(f"line {line}: {why}")
        self.line = line
        self.why = why
        self.custom_id = custom_id
        self.code = code


def parse(line: int, raw: bytes) -> Task:
    """BadLine for whatever a gateway would refuse by the request alone."""
    try:
        members = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise BadLine(line, f"is not JSON: {e}") from None
    if not isinstance(members, dict):
        raise BadLine(line, "must be a JSON object")
    custom_id = members.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BadLine(line, "custom_id must be a string that is not empty")
    if unknown := [name for name in members if name not in MEMBERS]:
        raise BadLine(line, f"{', '.join(unknown)}: not known here; a line has {', '.join(MEMBERS)}", custom_id)
    if members.get("method") != "POST":
        raise BadLine(line, f'method must be "POST", not {shown(members.get("method"))}', custom_id)
    url, body = members.get("url"), members.get("body")
    if not isinstance(url, str) or url not in PARSERS:
        raise BadLine(line, f"url must be one of {', '.join(PARSERS)}, not {shown(url)}", custom_id)
    if not isinstance(body, dict):
        raise BadLine(line, "body must be a JSON object", custom_id)
    return Task(line, custom_id, _ask(line, custom_id, url, body))


def _ask(line: int, custom_id: str, url: str, body: dict[str, Any]) -> Ask:
    chat = PARSERS[url] is parse_chat
    try:
        ask = PARSERS[url](body)
        validation.check(ask.request)
        size = codec.encode_request(ask.request).ByteSize()
    except TrimtabError as e:
        raise BadLine(line, f"body: {render(e, chat=chat)[1]['error']['message']}", custom_id) from None
    except UnicodeError:
        raise BadLine(line, "body: holds text that is not valid Unicode", custom_id) from None
    if ask.stream:
        raise BadLine(line, "body: stream must be false: a batch has whole answers", custom_id)
    if size > MAX_REQUEST_BYTES:
        raise BadLine(line, f"body: {size} bytes as a request, {MAX_REQUEST_BYTES} at most", custom_id)
    return replace(ask, request=replace(ask.request, workload=Workload.BATCH))


def answered(task: Task, request_id: str, body: dict[str, Any]) -> bytes:
    response = {"status_code": 200, "request_id": request_id, "body": body}
    return _line(request_id, task.custom_id, response, None)


def failed(task: Task, request_id: str, error: TrimtabError) -> bytes:
    """A gateway's answer to it is an error."""
    status, body, _ = render(error, chat=task.ask.chat)
    said = body["error"]
    response = {"status_code": status, "request_id": request_id, "body": body}
    return _line(request_id, task.custom_id, response, {"code": said["code"], "message": said["message"]})


def never_sent(bad: BadLine) -> bytes:
    """Of a line that shares its custom_id with another one, only its number says which it is."""
    custom_id = bad.custom_id if bad.code != "duplicate_custom_id" else ""
    error = {"code": bad.code, "message": str(bad), "line": bad.line}
    return _line(f"line_{bad.line}", custom_id or None, None, error)


def _line(name: str, custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    members = {"id": f"{ID_PREFIX}{name}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(members).encode() + b"\n"
