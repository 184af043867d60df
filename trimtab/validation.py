"""What makes a request unfit, before any engine work; the gateway asks early, the worker is the judge."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

from trimtab.errors import DeadlineExceeded, InvalidRequest, Violation, WrongPool
from trimtab.messages import ChatMessage, Prompt, Request, Sampling, StructureKind
from trimtab.policy import Isolation, Policy

ROLES = ("system", "user", "assistant")
MAX_STOP_STRINGS = 16
MAX_LOGPROBS = 20
MAX_REQUEST_ID = 128
MAX_PROMPT_TOKENS = 1 << 18
"""Twice the 128K window that this is built for. More ids than that are refused by their count, before anybody walks through them."""


def check_prompt_length(ids: int) -> None:
    """InvalidRequest for a prompt of so many token ids that no window holds it."""
    if ids > MAX_PROMPT_TOKENS:
        raise_if([Violation("prompt", f"holds {ids} token ids, {MAX_PROMPT_TOKENS} at most")])


def _range(name: str, value: float | None, low: float, high: float, *, open_low: bool = False) -> Iterator[Violation]:
    if value is None:
        return
    if not math.isfinite(value):
        yield Violation(f"sampling.{name}", f"must be a finite number, not {value}")
    elif value > high or value < low or (open_low and value == low):
        bounds = f"above {low:g}" if open_low else f"at least {low:g}"
        yield Violation(f"sampling.{name}", f"must be {bounds} and at most {high:g}, not {value:g}")


def _sampling(s: Sampling) -> Iterator[Violation]:
    if s.max_tokens is not None and s.max_tokens < 1:
        yield Violation("sampling.max_tokens", f"must be at least 1, not {s.max_tokens}")
    if s.min_tokens is not None and s.max_tokens is not None and s.min_tokens > s.max_tokens:
        yield Violation("sampling.min_tokens", f"must not exceed max_tokens ({s.max_tokens}), not {s.min_tokens}")
    yield from _range("temperature", s.temperature, 0, 2)
    yield from _range("top_p", s.top_p, 0, 1, open_low=True)
    yield from _range("min_p", s.min_p, 0, 1)
    yield from _range("presence_penalty", s.presence_penalty, -2, 2)
    yield from _range("frequency_penalty", s.frequency_penalty, -2, 2)
    yield from _range("repetition_penalty", s.repetition_penalty, 0, 10, open_low=True)
    if s.logprobs is not None and s.logprobs > MAX_LOGPROBS:
        yield Violation("sampling.logprobs", f"must be at most {MAX_LOGPROBS}, not {s.logprobs}")
    if s.seed is not None and not 0 <= s.seed < 1 << 63:
        yield Violation("sampling.seed", f"must be between 0 and 2^63 - 1, not {s.seed}")
    if len(s.stop) > MAX_STOP_STRINGS:
        yield Violation("sampling.stop", f"must hold at most {MAX_STOP_STRINGS} strings, not {len(s.stop)}")
    if any(not text for text in s.stop):
        yield Violation("sampling.stop", "must not hold an empty string")
    for token, bias in s.logit_bias.items():
        if not -100 <= bias <= 100:
            yield Violation("sampling.logit_bias", f"must be between -100 and 100, not {bias:g} for token {token}")
    if s.structure is None:
        return
    if s.structure.kind is StructureKind.CHOICES:
        if not s.structure.choices or any(not c for c in s.structure.choices):
            yield Violation("sampling.choices", "must hold at least one string, none of them empty")
    elif s.structure.kind is StructureKind.JSON_SCHEMA:
        try:
            if not isinstance(json.loads(s.structure.value), dict):
                yield Violation("sampling.json_schema", "must be a JSON object")
        except ValueError as e:
            yield Violation("sampling.json_schema", f"is not JSON: {e}")
    elif s.structure.kind is not StructureKind.JSON_OBJECT and not s.structure.value:
        yield Violation(f"sampling.{s.structure.kind.value}", "must not be empty")


def _prompt(prompt: Prompt) -> Iterator[Violation]:
    if isinstance(prompt, str):
        if not prompt:
            yield Violation("prompt", "must not be empty")
        return
    if not prompt:
        yield Violation("prompt", "must not be empty: give text, at least one chat message, or at least one token id")
        return
    messages = [x for x in prompt if isinstance(x, ChatMessage)]
    for i, message in enumerate(messages):
        if message.role not in ROLES:
            yield Violation(f"chat.messages[{i}].role", f"must be one of {', '.join(ROLES)}, not {message.role!r}")
    if messages and not any(message.content for message in messages):
        yield Violation("chat.messages", "must not all be empty")


def check(request: Request) -> None:
    """Raise InvalidRequest with every violation, or return."""
    found = [*_prompt(request.prompt), *_sampling(request.sampling)]
    if len(request.request_id) > MAX_REQUEST_ID or not request.request_id.isprintable():
        found.append(Violation("request_id", f"must be printable and at most {MAX_REQUEST_ID} characters"))
    raise_if(found)


def check_tokens(token_ids: tuple[int, ...], sampling: Sampling, *, max_model_len: int, vocab_size: int) -> int:
    """Judge a tokenised prompt against the engine's window; the output budget in tokens, or InvalidRequest."""
    found: list[Violation] = []
    room = max_model_len - len(token_ids)
    if not token_ids:
        found.append(Violation("prompt", "has no tokens"))
    elif max(token_ids) >= vocab_size:
        found.append(
            Violation("prompt", f"holds token id {max(token_ids)}, the model's vocabulary ends at {vocab_size - 1}")
        )
    if room < 1:
        found.append(
            Violation(
                "prompt",
                f"is {len(token_ids)} tokens long; the model's window of {max_model_len} tokens must also hold the output: "
                f"shorten it by {1 - room} tokens or more",
            )
        )
    elif sampling.max_tokens is not None and sampling.max_tokens > room:
        found.append(
            Violation(
                "sampling.max_tokens",
                f"is {sampling.max_tokens}, but a prompt of {len(token_ids)} tokens leaves room for {room} "
                f"in the window of {max_model_len}",
            )
        )
    found.extend(
        Violation("sampling", f"names token id {token}, the vocabulary ends at {vocab_size - 1}")
        for token in (*sampling.stop_token_ids, *sampling.logit_bias)
        if token >= vocab_size
    )
    raise_if(found)
    return sampling.max_tokens if sampling.max_tokens is not None else room


def check_isolation(policy: Policy, prompt_tokens: int, tenant: str) -> None:
    """Raise InvalidRequest or WrongPool where the policy has isolated requests refused or sent to another pool, or return."""
    isolate = policy.isolate
    if isolate.action == Isolation.ALONE:
        # It runs here; the scheduler sees to it that it runs by itself.
        return
    if prompt_tokens >= isolate.from_tokens:
        name, why = "prompt", f"is {prompt_tokens} tokens long; from {isolate.from_tokens} on"
    elif tenant in isolate.tenants:
        name, why = "tenant", f"is {tenant!r}, whose requests are isolated:"
    else:
        return
    if isolate.action == Isolation.POOL:
        raise WrongPool(f"{name} {why} another pool must take it (isolate.action = pool)")
    raise_if([Violation(name, f"{why} it is refused (isolate.action = refuse)")])


def check_time(left_s: float | None, step_ms: float) -> None:
    """Raise DeadlineExceeded where not even one step of the engine (`step_ms` at least, as fitted; 0 where unknown) ends in time."""
    if left_s is not None and left_s * 1000.0 < step_ms:
        raise DeadlineExceeded(
            f"{left_s * 1000.0:.0f} ms are left, and a step of this engine takes {step_ms:.0f}: it can't be answered in time"
        )


def raise_if(found: list[Violation]) -> None:
    if found:
        raise InvalidRequest("; ".join(f"{v.field} {v.description}" for v in found), violations=tuple(found))
