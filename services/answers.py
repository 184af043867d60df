"""One answer as a person or a script sees it: streamed, measured at the client, shown as text or as one JSON object."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from trimtab.client import Client
from trimtab.errors import InvalidRequest, NoWorker
from trimtab.messages import Accepted, Delta, Finish, Notice, Request


@dataclass(slots=True)
class Answer:
    """What has come so far. `ttft_ms` and `total_ms` are measured here, from sending on; None until known."""

    trace_id: str = field(default_factory=lambda: secrets.token_hex(16))
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    accepted: Accepted | None = None
    finish: Finish | None = None
    ttft_ms: float | None = None
    total_ms: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Decode speed: tokens after the first, over the time after the first."""
        if self.ttft_ms is None or self.total_ms is None or len(self.token_ids) < 2:
            return None
        return (len(self.token_ids) - 1) / max(1e-6, (self.total_ms - self.ttft_ms) / 1000.0)

    def summary(self) -> str:
        """One line for people."""
        parts = [f"TTFT {self.ttft_ms:.0f} ms"] if self.ttft_ms is not None else []
        parts.append(f"{len(self.token_ids)} tokens")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.0f} tokens/s")
        if self.finish is not None and self.finish.reason.value == "length":
            parts.append("cut at max tokens")
        if self.accepted is not None:
            parts.append(f"{self.accepted.worker_id}, policy {self.accepted.policy}")
        parts.append(f"trace {self.trace_id[:8]}")
        return " · ".join(parts)

    def as_json(self) -> dict[str, Any]:
        """One object with everything that is known; of a whole answer all of it is."""
        out: dict[str, Any] = {"text": self.text, "token_ids": self.token_ids, "trace_id": self.trace_id}
        out["ttft_ms"], out["total_ms"] = _rounded(self.ttft_ms), _rounded(self.total_ms)
        if (a := self.accepted) is not None:
            out |= {"request_id": a.request_id, "model": a.model, "worker": a.worker_id, "resumable": a.resumable}
            identity = {"epoch": a.policy.epoch, "revision": a.policy.revision, "sha256": a.policy.sha256.hex()}
            out["policy"] = identity
        if (f := self.finish) is not None:
            out |= {"finish_reason": f.reason.value, "stop": f.stop or None}
            out["usage"] = {
                "prompt_tokens": f.usage.prompt_tokens,
                "completion_tokens": f.usage.completion_tokens,
                "cached_prompt_tokens": f.usage.cached_prompt_tokens,
            }
            out["timings"] = {
                "queued_ms": _rounded(f.timings.queued_ms),
                "prefill_ms": _rounded(f.timings.prefill_ms),
                "first_token_ms": _rounded(f.timings.first_token_ms),
                "total_ms": _rounded(f.timings.total_ms),
                "preemptions": f.timings.preemptions,
            }
        out["notices"] = [{"kind": n.kind.value, "detail": n.detail} for n in self.notices]
        return out


async def ask(
    client: Client, request: Request, answer: Answer, on_text: Callable[[str], None], *, timeout_s: float | None = None
) -> None:
    """Fill `answer` as it comes; `on_text` sees each piece.

    What has come stays in `answer` when this is cancelled or fails.
    """
    traceparent = f"00-{answer.trace_id}-{secrets.token_hex(8)}-01"
    begun = time.perf_counter()
    stream = client.generate(request, timeout_s=timeout_s, traceparent=traceparent)
    async with aclosing(stream) as events:
        async for event in events:
            answer.total_ms = (time.perf_counter() - begun) * 1000.0
            match event:
                case Delta():
                    if answer.ttft_ms is None and event.token_ids:
                        answer.ttft_ms = answer.total_ms
                    answer.token_ids += event.token_ids
                    answer.text += event.text
                    on_text(event.text)
                case Accepted():
                    answer.accepted = event
                case Notice():
                    answer.notices.append(event)
                case Finish():
                    answer.finish = event


async def model_or_only(client: Client, name: str | None) -> str:
    """`name`, or the one model that is served when none is named."""
    if name:
        return name
    names = [m.name for m in await client.models()]
    if not names:
        raise NoWorker("no worker serves a model now; `trimtab fleet` shows why")
    if len(names) > 1:
        raise InvalidRequest(f"several models are served; choose one with --model: {', '.join(names)}")
    return names[0]


def _rounded(ms: float | None) -> float | None:
    return None if ms is None else round(ms, 3)
