"""KV block sizes: which there are, what a change of them costs, and what one wastes. Pure."""

from __future__ import annotations

import enum
import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

LADDER = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Sizes in tokens that engines are asked about, and that are measured: the field guides', vLLM's, and those between."""


Speeds = Mapping[int, Mapping[int, float]]
"""By tokens of context, then by block size: how fast decodes are next to those with one size that is the same for all."""
SPEED: Speeds = {
    256: {32: 1.0, 64: 1.0, 96: 1.0, 128: 1.0, 192: 1.0, 256: 1.013, 384: 1.0, 512: 0.991, 768: 1.0, 1024: 0.966, 1536: 0.964, 2048: 0.966},
    7500: {32: 1.018, 64: 1.0, 96: 1.0, 128: 1.0, 192: 1.0, 256: 1.031, 384: 1.0, 512: 1.0, 768: 1.0, 1024: 0.964, 1536: 1.008, 2048: 0.932},
    32000: {32: 1.0, 64: 0.983, 96: 1.0, 128: 1.0, 192: 1.0, 256: 1.0, 384: 1.0, 512: 1.0, 768: 1.0, 1024: 0.913, 1536: 0.913, 2048: 1.0},
}  # fmt: skip
"""As far as the three rounds of `make bench-blocks` agree (docs/benchmarks.md): vLLM on two CPU cores; on a GPU nobody measured it. From blocks
of less than 1,024 tokens no size is so much faster that it would be chosen for that."""


CARRIED_AS_ONE = 16
"""Tokens whose KV is carried over cost no more than one that is computed anew: on two CPU cores a hundred do not (docs/benchmarks.md)."""


class When(enum.StrEnum):
    """When an engine changes its block size: once few enough tokens are to be computed anew (idle), or whatever it costs (now)."""

    IDLE = "idle"
    NOW = "now"


@dataclass(frozen=True, slots=True)
class Geometry:
    """How a KV cache is cut: tokens a block, and blocks."""

    block_size: int
    total_blocks: int


@dataclass(frozen=True, slots=True)
class Reblock:
    """What a change of the block size did, or would do where `dry_run`.

    `recompute_tokens` are tokens of `requests` requests whose KV is computed anew; `cached_tokens` are those of prefixes that nobody runs on
    and that are lost as well. `carried_tokens` were moved into the new blocks, and nobody computes them. `change_ms` is the engine's time from
    the first thing touched to the end. `recompute_context` is how many tokens are before each of those that are computed anew, summed over
    them.
    """

    before: Geometry
    after: Geometry
    recompute_tokens: int = 0
    requests: int = 0
    cached_tokens: int = 0
    change_ms: float = 0.0
    carried_tokens: int = 0
    recompute_context: int = 0
    dry_run: bool = False

    @property
    def carried(self) -> bool:
        """All KV of who runs was carried over: nothing is computed anew."""
        return self.carried_tokens > 0 and not self.recompute_tokens


def context_of(tokens: int, known: int = 0) -> int:
    """How many tokens are before each token of a request, summed over those after its first `known` ones; as the step-time model counts a
    chunk's."""
    return (tokens * tokens - known * known) // 2


def recompute_s(tokens: int, context: float, tokens_per_s: float, ms_per_1000_context: float = 0.0) -> float:
    """Seconds that an engine takes to compute so many tokens: at its rate, and for each so much more for every 1,000 tokens before it;
    `context` sums those (`context_of`)."""
    return tokens / tokens_per_s + context / 1000.0 * ms_per_1000_context / 1000.0


def waste(lengths: Iterable[int], block_size: int) -> float:
    """Of the slots in blocks of that size that hold requests of these lengths in tokens, the share that holds nothing; 0 for none.

    The last block of each request is all there is to it: blocks of prefixes that requests share are full.
    """
    empty = slots = 0
    for n in lengths:
        held = -(-n // block_size) * block_size
        empty += held - n
        slots += held
    return empty / slots if slots else 0.0


def kept(hits: Iterable[int], block_size: int) -> float:
    """Of `hits`, tokens of prompts that were found in the prefix cache, the share that is still found with blocks of that size: only whole
    blocks are. 1 for none."""
    found = whole = 0
    for c in hits:
        found += c
        whole += c // block_size * block_size
    return whole / found if found else 1.0


def nearest(named: int, accepted: Collection[int]) -> int | None:
    """Of `accepted`, the size nearest to `named` by ratio, the smaller of two; None where nothing is accepted."""
    # Whole numbers: a ratio in floating point can tell two equal ones apart.
    best: int | None = None
    for size in sorted(accepted):
        if best is None or max(named, size) * min(named, best) < max(named, best) * min(named, size):
            best = size
    return best


def speed(before: int, after: int, context: int, speeds: Speeds = SPEED) -> float:
    """How fast decodes of about `context` tokens are with blocks of `after` tokens, next to `before`; 1 where nothing was measured."""
    at = nearest(context, speeds)
    if at is None:
        return 1.0
    return _between(after, speeds[at]) / _between(before, speeds[at])


def _between(size: int, speeds: Mapping[int, float]) -> float:
    """By the ratio between the two sizes next to it that were measured; beyond them what the last one has. 1 where there are none."""
    sizes = sorted(speeds)
    if not sizes:
        return 1.0
    place = bisect_left(sizes, size)
    if place == 0 or place == len(sizes):
        return speeds[sizes[min(place, len(sizes) - 1)]]
    low, high = sizes[place - 1], sizes[place]
    part = math.log(size / low) / math.log(high / low)
    return speeds[low] + part * (speeds[high] - speeds[low])


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured where a block size is to be chosen. `waste` and `kept` are by size, as the functions of these names have them.

    `hits` is the share of prompt tokens that the prefix cache gives now; `prefill` the share of the engine's work that prompts are; `context`
    the usual length of a request in tokens. `binds`: requests wait for KV or lose theirs, so that capacity is work.
    """

    waste: Mapping[int, float] = field(default_factory=dict)
    kept: Mapping[int, float] = field(default_factory=dict)
    hits: float = 0.0
    prefill: float = 0.0
    context: int = 0
    binds: bool = False


MOST_HITS = 0.99


def gain(before: int, after: int, f: Figures, speeds: Speeds = SPEED) -> float | None:
    """Of the work, the share that blocks of `after` tokens save next to `before`; below 0 where they cost. None where it can't be known.

    KV slots that hold no token count where memory binds, and nowhere else. What is lost of prefix hits is computed anew, as a part of what
    prompts cost now; that smaller blocks hit more is not counted, since nobody has seen how much. Speed is that of decodes.
    """
    if after == before:
        return 0.0
    total = (1.0 - f.prefill) * (1.0 - 1.0 / speed(before, after, f.context, speeds))
    if f.binds:
        if before not in f.waste or after not in f.waste:
            return None
        total += 1.0 - (1.0 - f.waste[before]) / (1.0 - f.waste[after])
    if f.hits > 0.0:
        if before not in f.kept or after not in f.kept:
            return None
        lost = 1.0 - min(1.0, f.kept[after] / f.kept[before]) if f.kept[before] > 0.0 else 0.0
        hits = min(f.hits, MOST_HITS)
        total -= f.prefill * lost * hits / (1.0 - hits)
    return total
