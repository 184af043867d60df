"""OpenAI bodies → requests. A parameter that is not implemented is refused by name, never ignored; null counts as absent.

Accepted beyond OpenAI's own: vLLM's sampling extras, and its `priority`. Accepted without effect, because nothing in an answer could depend on
them here: `user` and `metadata` (labels of the caller's own), and a few parameters at the one value that means "not used" (`UNUSED`).
`prompt_cache_key` names the session: requests that share one go where its KV is.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from services.gateway.openai_body import UINT32, Body, integer, number, shown
from services.gateway.openai_errors import refused
from trimtab.messages import ChatMessage, Prompt, Request, Sampling, Structure, StructureKind, Workload
from trimtab.validation import MAX_PROMPT_TOKENS

UNUSED: dict[str, Any] = {"n": 1, "best_of": 1, "echo": False, "store": False}
TIERS = {"auto": None, "default": Workload.REALTIME, "priority": Workload.REALTIME, "flex": Workload.BATCH}
"""`auto` leaves the choice to this gateway's own default."""
COMPLETION_MAX_TOKENS = 16
"""OpenAI's default of /v1/completions; chat has none, and goes on to the end of the window."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A parsed body. `request` has no id yet."""

    request: Request
    chat: bool
    stream: bool
    include_usage: bool

    @property
    def logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None


def parse_chat(members: dict[str, Any]) -> Ask:
    body = Body(members)
    model = body.required_text("model")
    messages = _messages(body.required("messages"))
    max_tokens = body.integer("max_tokens")
    newer = body.integer("max_completion_tokens")
    if max_tokens is not None and newer is not None and max_tokens != newer:
        raise refused("max_tokens", f"is {max_tokens}, but max_completion_tokens is {newer}; send one of them")
    wanted, top = body.flag("logprobs"), body.integer("top_logprobs")
    if top is not None and not wanted:
        raise refused("top_logprobs", "needs logprobs to be true")
    return _ask(
        body, model, messages, newer if newer is not None else max_tokens, (top or 0) if wanted else None, chat=True
    )


def parse_completion(members: dict[str, Any]) -> Ask:
    body = Body(members)
    model = body.required_text("model")
    prompt = _prompt(body.required("prompt"))
    max_tokens = body.integer("max_tokens")
    if max_tokens is None:
        max_tokens = COMPLETION_MAX_TOKENS
    return _ask(body, model, prompt, max_tokens, body.integer("logprobs"), chat=False)


def _ask(body: Body, model: str, prompt: Prompt, max_tokens: int | None, logprobs: int | None, *, chat: bool) -> Ask:
    top_k = body.integer("top_k", low=-1)
    stream, options = bool(body.flag("stream")), body.object("stream_options")
    sampling = Sampling(
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens"),
        temperature=body.number("temperature"),
        top_p=body.number("top_p"),
        top_k=0 if top_k == -1 else top_k,
        min_p=body.number("min_p"),
        seed=body.integer("seed", high=(1 << 63) - 1),
        presence_penalty=body.number("presence_penalty"),
        frequency_penalty=body.number("frequency_penalty"),
        repetition_penalty=body.number("repetition_penalty"),
        stop=_stop(body.take("stop")),
        stop_token_ids=body.integers("stop_token_ids"),
        include_stop=body.flag("include_stop_str_in_output"),
        ignore_eos=body.flag("ignore_eos"),
        skip_special_tokens=body.flag("skip_special_tokens"),
        logprobs=logprobs,
        structure=_structure(body.object("response_format")),
        logit_bias=_logit_bias(body.object("logit_bias") or {}),
    )
    workload = _workload(body)
    session = body.text("prompt_cache_key") or ""
    body.text("user")
    body.object("metadata")
    for key, unused in UNUSED.items():
        value = body.take(key)
        if value is not None and (value != unused or type(value) is not type(unused)):
            raise refused(key, f"must be {json.dumps(unused)}, not {shown(value)}", code="unsupported_value")
    body.done()
    request = Request("", model, prompt, sampling, workload, session_id=session)
    return Ask(request, chat, stream, _include_usage(options, stream=stream))


def _messages(value: Any) -> tuple[ChatMessage, ...]:
    if not isinstance(value, list) or not value:
        raise refused("messages", f"must be a list of at least one message, not {shown(value)}", code="invalid_type")
    return tuple(_message(item, f"messages[{i}]") for i, item in enumerate(value))


def _message(value: Any, path: str) -> ChatMessage:
    if not isinstance(value, dict):
        raise refused(path, f"must be an object, not {shown(value)}", code="invalid_type")
    # An answer sent back as the client library gives it has empty lists where nothing was.
    body = Body({k: v for k, v in value.items() if v != []}, path)
    role = body.required_text("role")
    content = _content(body.required("content"), f"{path}.content")
    name = body.text("name") or ""
    body.done()
    return ChatMessage("system" if role == "developer" else role, content, name)


def _content(value: Any, path: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise refused(path, f"must be a string or a list of parts, not {shown(value)}", code="invalid_type")
    texts = []
    for i, part in enumerate(value):
        if not isinstance(part, dict):
            raise refused(f"{path}[{i}]", f"must be an object, not {shown(part)}", code="invalid_type")
        body = Body(part, f"{path}[{i}]")
        kind = body.required_text("type")
        if kind != "text":
            raise refused(
                f"{path}[{i}].type", f"{kind!r} is not supported: only text parts are", code="unsupported_value"
            )
        text = body.text("text")
        if text is None:
            raise refused(f"{path}[{i}].text", "is required", code="missing_required_parameter")
        body.done()
        texts.append(text)
    return "".join(texts)


def _prompt(value: Any) -> Prompt:
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise refused("prompt", f"must be one prompt, not {len(value)}: send one request for each")
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if len(value) > MAX_PROMPT_TOKENS:
            raise refused("prompt", f"holds {len(value)} token ids, {MAX_PROMPT_TOKENS} at most")
        return tuple(integer("prompt", token, 0, UINT32) for token in value)
    raise refused("prompt", f"must be a string or a list of token ids, not {shown(value)}", code="invalid_type")


def _stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(s, str) for s in stops):
        raise refused("stop", f"must be a string or a list of strings, not {shown(value)}", code="invalid_type")
    return tuple(stops)


def _structure(value: dict[str, Any] | None) -> Structure | None:
    if value is None:
        return None
    body = Body(value, "response_format")
    match body.required_text("type"):
        case "text":
            body.done()
            return None
        case "json_object":
            body.done()
            return Structure(StructureKind.JSON_OBJECT)
        case "json_schema":
            inner = Body(body.object("json_schema") or {}, "response_format.json_schema")
            body.done()
            schema = inner.object("schema")
            if schema is None:
                raise refused("response_format.json_schema.schema", "is required", code="missing_required_parameter")
            # Decoding always follows the schema, so `strict` asks for nothing more; the other two are for people.
            inner.text("name")
            inner.text("description")
            inner.flag("strict")
            inner.done()
            return Structure(StructureKind.JSON_SCHEMA, json.dumps(schema))
        case other:
            raise refused(
                "response_format.type",
                f"must be text, json_object or json_schema, not {other!r}",
                code="unsupported_value",
            )


def _logit_bias(value: dict[str, Any]) -> dict[int, float]:
    biases = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdigit()) or int(token) > UINT32:
            raise refused("logit_bias", f"must have token ids as keys, not {token!r}")
        biases[int(token)] = number(f"logit_bias[{token}]", bias)
    return biases


def _workload(body: Body) -> Workload | None:
    """`service_tier`, else the sign of vLLM's `priority`, where a higher number waits longer; the header goes before both."""
    tier, priority = body.text("service_tier"), body.integer("priority", low=-(1 << 31), high=(1 << 31) - 1)
    if tier is not None and tier not in TIERS:
        raise refused("service_tier", f"must be one of {', '.join(TIERS)}, not {tier!r}", code="unsupported_value")
    by_tier = TIERS[tier] if tier is not None else None
    if by_tier is not None or priority is None:
        return by_tier
    return Workload.BATCH if priority > 0 else Workload.REALTIME


def _include_usage(options: dict[str, Any] | None, *, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        raise refused("stream_options", "needs stream to be true")
    body = Body(options, "stream_options")
    wanted = bool(body.flag("include_usage"))
    body.done()
    return wanted
