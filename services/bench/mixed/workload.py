"""Two independent sources, seeded: realtime arrivals as a Poisson process, and an endless backlog of batch. Pure.

Invariant: arrivals and lengths of a round are the same in every arm; token ids are not, so that no arm finds another's prompts in the prefix
cache of the engine that they share.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OUTSTANDING = 16
BUSY_SHARE = 0.2
REALTIME_PROMPT, REALTIME_OUTPUT = (20, 120), (8, 24)
BATCH_PROMPT, BATCH_OUTPUT = (500, 4000), (32, 128)
OPENING_PROMPT = (20, 120)
LOWEST_TOKEN, TOKENS = 256, 32_000


@dataclass(frozen=True, slots=True)
class Lengths:
    """In tokens."""

    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s` from the beginning of the block."""

    at_s: float
    lengths: Lengths


def rate_for(busy_share: float, mean_e2e_s: float) -> float:
    """Arrivals a second at which somebody is there this share of the time, if nobody slows anybody down (M/G/∞)."""
    return -math.log(1.0 - busy_share) / mean_e2e_s


def realtime_lengths(rng: random.Random) -> Lengths:
    return Lengths(rng.randint(*REALTIME_PROMPT), rng.randint(*REALTIME_OUTPUT))


def arrivals(seed: str, rate_per_s: float, until_s: float) -> list[Arrival]:
    """A Poisson process. Another rate stretches the same sequence."""
    rng, at = random.Random(f"{seed}/realtime"), 0.0
    found: list[Arrival] = []
    while True:
        at += rng.expovariate(1.0) / rate_per_s
        lengths = realtime_lengths(rng)
        if at >= until_s:
            return found
        found.append(Arrival(at, lengths))


def backlog(seed: str) -> Iterator[Lengths]:
    """Endless. The first OUTSTANDING are short and have a uniform rest of an output before them.

    A closed loop in a steady state has one prompt in prefill and the others somewhere in their outputs. Sixteen whole prompts at once would
    instead be a minute and more of nothing but prefill, in which FCFS fares far worse than it does in the long run.
    """
    rng = random.Random(f"{seed}/batch")
    for _ in range(OUTSTANDING):
        yield Lengths(rng.randint(*OPENING_PROMPT), rng.randint(1, rng.randint(*BATCH_OUTPUT)))
    while True:
        yield Lengths(rng.randint(*BATCH_PROMPT), rng.randint(*BATCH_OUTPUT))


def prompt(seed: str, tokens: int, vocabulary: int = TOKENS) -> tuple[int, ...]:
    """Random ids, different for each seed. Special tokens have low ids in most vocabularies and are left out where there is room."""
    rng = random.Random(seed)
    low = LOWEST_TOKEN if vocabulary > 2 * LOWEST_TOKEN else 0
    return tuple(rng.choices(range(low, min(vocabulary, TOKENS)), k=tokens))


def counted(found: Iterable[Arrival], begin_s: float, end_s: float) -> int:
    """Arrivals within the measured window."""
    return sum(begin_s <= a.at_s < end_s for a in found)


def busy_share(intervals: Iterable[tuple[float, float]], begin_s: float, end_s: float) -> float:
    """The share of the window in which at least one of the intervals runs."""
    busy, reached = 0.0, begin_s
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, end_s)
        if end > start:
            busy += end - start
            reached = end
    return busy / (end_s - begin_s)
