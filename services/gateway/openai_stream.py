"""Events → OpenAI's answers: whole bodies, and the chunks of a stream.

A stream's chunks differ only in text and logprobs, so the rest of the JSON is rendered once for each stream. All of it is ASCII: a line reader
that knows Unicode's line separators never cuts a chunk.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

from services.gateway.openai_schema import Ask
from trimtab.messages import Delta, Finish, TokenLogprobs, Usage

DONE = b"data: [DONE]\n\n"


def usage(u: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": u.prompt_tokens,
        "completion_tokens": u.completion_tokens,
        "total_tokens": u.prompt_tokens + u.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": u.cached_prompt_tokens},
    }


def _token(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _chat_logprobs(tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
    def entry(token: bytes, logprob: float) -> dict[str, Any]:
        return {"token": _token(token), "logprob": logprob, "bytes": list(token)}

    content = [
        entry(t.token, t.logprob) | {"top_logprobs": [entry(alt.token, alt.logprob) for alt in t.top]} for t in tokens
    ]
    return {"content": content, "refusal": None}


def _completion_logprobs(tokens: Iterable[TokenLogprobs], offset: int) -> tuple[dict[str, Any], int]:
    """The four parallel lists, and the offset after them; offsets count characters of the tokens' own text."""
    names, values, tops, offsets = [], [], [], []
    for t in tokens:
        names.append(_token(t.token))
        values.append(t.logprob)
        tops.append({_token(alt.token): alt.logprob for alt in t.top})
        offsets.append(offset)
        offset += len(names[-1])
    lists = {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
    return lists, offset


class Answer:
    """One request's answer in OpenAI's words. `model` is the name that the worker serves."""

    def __init__(self, ask: Ask, request_id: str, model: str) -> None:
        self._ask = ask
        self._offset = 0
        kind = "chat.completion" if ask.chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if ask.chat else 'cmpl'}-{request_id}",
            "object": f"{kind}.chunk" if ask.chat and ask.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        prefix = json.dumps(self._head)[:-1]
        self._prefix = f'data: {prefix}, "choices": [{{"index": 0, '.encode()
        self._bare = f"data: {prefix}".encode()
        nothing = b'"usage": null' if ask.include_usage else b""
        self._suffix = b"}]" + (b", " + nothing if nothing else b"") + b"}\n\n"

    def opening(self) -> bytes:
        """The first chunk of a chat; a completion has none."""
        return self._chunk(self._said({"role": "assistant", "content": ""}, (), None)) if self._ask.chat else b""

    def delta(self, d: Delta) -> bytes:
        """Nothing where a delta holds nothing that a client could see."""
        if not d.text and not (self._ask.logprobs and d.logprobs):
            return b""
        return self._chunk(self._said({"content": d.text} if self._ask.chat else d.text, d.logprobs, None))

    def closing(self, finish: Finish) -> bytes:
        """The last chunks, and [DONE]."""
        last = self._chunk(self._said({} if self._ask.chat else "", (), finish.reason.value))
        if self._ask.include_usage:
            last += self._bare + f', "choices": [], "usage": {json.dumps(usage(finish.usage))}}}\n\n'.encode()
        return last + DONE

    def whole(self, text: str, logprobs: list[TokenLogprobs], finish: Finish) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choice: dict[str, Any] = {"index": 0}
        if self._ask.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        choice["logprobs"] = self._logprobs(logprobs) if self._ask.logprobs else None
        choice["finish_reason"] = finish.reason.value
        return {**self._head, "choices": [choice], "usage": usage(finish.usage)}

    def _said(self, content: Any, logprobs: Iterable[TokenLogprobs], reason: str | None) -> str:
        """A choice's members after its index."""
        key = "delta" if self._ask.chat else "text"
        shown = json.dumps(self._logprobs(logprobs)) if self._ask.logprobs and logprobs else "null"
        return f'"{key}": {json.dumps(content)}, "logprobs": {shown}, "finish_reason": {json.dumps(reason)}'

    def _logprobs(self, tokens: Iterable[TokenLogprobs]) -> dict[str, Any]:
        if self._ask.chat:
            return _chat_logprobs(tokens)
        lists, self._offset = _completion_logprobs(tokens, self._offset)
        return lists

    def _chunk(self, members: str) -> bytes:
        return self._prefix + members.encode() + self._suffix
