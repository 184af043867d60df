"""How soon this machine gives a first token to one stream alone, and how often the next, measured as a client sees it: through the gateway.

Streams run one after another until the fastest two agree (`presets.steady`). Other clients may already be at work: what they take makes a
stream slower, never faster, so the fastest one counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from trimtab.client import Client
from trimtab.messages import ChatMessage, Delta, Request, Sampling, Workload
from trimtab.presets import steady

PROMPT = "Tell me about the sea."
TOKENS = 40
LIMIT_S = 20.0
"""DESIGN §4. A machine too slow for two streams in this time is judged by what it gave."""
FEWEST_GAPS = 8
"""A stream that was cut short of this says nothing."""


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds from token to token, and from sending to the first. Not `steady`: no two streams agreed in time; the fastest is taken."""

    token_ms: float
    ttft_ms: float
    steady: bool


@dataclass(slots=True)
class _Stream:
    """Milliseconds that it took so far."""

    gaps: list[float] = field(default_factory=list)
    ttft_ms: float = math.inf


class NotMeasured(Exception):
    """The streams gave too few tokens to tell."""


async def measure(
    client: Client, model: str, *, limit_s: float = LIMIT_S, clock: Callable[[], float] = time.perf_counter
) -> Measured:
    """NotMeasured, or the error tree where a stream fails. `clock` counts seconds."""
    streams: list[_Stream] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not steady(_medians(streams)):
                streams.append(_Stream())
                await _stream(client, model, streams[-1], clock)
                if len(streams[-1].gaps) < FEWEST_GAPS:
                    break
    medians = _medians(streams)
    if not medians:
        raise NotMeasured(f"a stream of {TOKENS} tokens gave too few to tell how fast they come")
    return Measured(min(medians), min(s.ttft_ms for s in streams), steady(medians))


def _medians(streams: list[_Stream]) -> list[float]:
    return [statistics.median(s.gaps) for s in streams if len(s.gaps) >= FEWEST_GAPS]


async def _stream(client: Client, model: str, found: _Stream, clock: Callable[[], float]) -> None:
    """Note the milliseconds between tokens as they come; tokens that come together share the time that they took."""
    request = Request(
        request_id="",
        model=model,
        prompt=(ChatMessage("user", PROMPT),),
        sampling=Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True),
        workload=Workload.REALTIME,
    )
    begun, last = clock(), math.nan
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            if isinstance(event, Delta) and (count := len(event.token_ids)):
                now = clock()
                if math.isinf(found.ttft_ms):
                    found.ttft_ms = (now - begun) * 1000.0
                else:
                    found.gaps += [(now - last) * 1000.0 / count] * count
                last = now
