"""The load generator: a closed loop at fixed concurrency, and alternating pairs for small differences.

It knows nothing of what answers: an `Ask` sends one prompt and yields the number of new tokens whenever some arrive. The same loop runs in
the bench's process before a server and in `bare.py`'s before an engine, so that no arm has a better driver than another.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

Ask = Callable[[str], AsyncGenerator[int, None]]

VOCABULARY = (
    "river stone window garden letter market winter candle bridge harbour meadow engine captain mirror silver copper "
    "forest ladder kitchen thunder pocket island velvet summer marble anchor basket feather lantern compass orchard village"
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: time to its first token and to its end, in milliseconds, and its tokens."""

    ttft_ms: float
    total_ms: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Burst:
    """All requests of one closed loop, and the seconds from the first one's start to the last one's end."""

    samples: tuple[Sample, ...]
    wall_s: float


def prompts(seed: str, count: int, *, words: tuple[int, int] = (16, 32)) -> list[str]:
    """`count` different short prompts; the same seed gives the same ones. `words` are the fewest and the most of each."""
    rng, vocabulary = random.Random(seed), VOCABULARY.split()
    return [
        f"Story {rng.randrange(10_000):04d}, told with these words: {' '.join(rng.choices(vocabulary, k=rng.randint(*words)))}."
        for _ in range(count)
    ]


async def timed(ask: Ask, prompt: str) -> Sample:
    """One request from its sending to its end."""
    begun = time.perf_counter()
    first, tokens = 0.0, 0
    async with aclosing(ask(prompt)) as arrivals:
        async for new in arrivals:
            if not tokens:
                first = time.perf_counter()
            tokens += new
    ended = time.perf_counter()
    if not tokens:
        raise ValueError("a request ended without a token")
    return Sample((first - begun) * 1000.0, (ended - begun) * 1000.0, tokens)


async def closed_loop(ask: Ask, texts: Sequence[str], concurrency: int) -> Burst:
    """Every prompt once, in order; each of `concurrency` callers sends its next when its last one has ended."""
    waiting = iter(texts)
    samples: list[Sample] = []

    async def caller() -> None:
        samples.extend([await timed(ask, text) for text in waiting])

    begun = time.perf_counter()
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(caller())
    except ExceptionGroup as failures:
        # One failed request spoils the measurement; what the others say as they are cancelled adds nothing.
        raise failures.exceptions[0] from None
    return Burst(tuple(samples), time.perf_counter() - begun)


async def pairs(one: Ask, other: Ask, texts: Sequence[str]) -> list[tuple[float, float]]:
    """TTFT in milliseconds of (one, other) for each prompt, one request at a time; who goes first alternates."""
    found: list[tuple[float, float]] = []
    for i, text in enumerate(texts):
        if i % 2 == 0:
            mine = (await timed(one, text)).ttft_ms
            theirs = (await timed(other, text)).ttft_ms
        else:
            theirs = (await timed(other, text)).ttft_ms
            mine = (await timed(one, text)).ttft_ms
        found.append((mine, theirs))
    return found
