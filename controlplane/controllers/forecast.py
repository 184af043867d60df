"""The use of a pool's KV cache some minutes ahead, from what it was of late.

The baseline is the mean of the last five minutes, which beats persistence and which an autoregression did not beat (RESEARCH §5.6: 20.2 %
error against 26.5 % and 20.0 % on Azure conversations). A linear rise is put in its place only where chance hardly made it, is carried on
for no longer than it has been seen, and ends where the requests that are here would all be at their full length. A fall is not carried on:
to be late with good news costs little. Load is counted in workers' worth of cache, so that a worker that joins spreads it and changes
nothing else.

What it misses: bursts (they can't be foretold, there is no better forecast than the mean), what arrives only later beyond those that are
here, the time of day, and shared prefixes, which make the bound on growth too high. An average over a pool hides one worker that is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from controlplane.controllers.decision import PolicyOf
from controlplane.seen import NodeSeen, Seen
from trimtab.measures import KV_USED
from trimtab.messages import NodeState
from trimtab.sketch import Sketch

SAMPLE_S = 5.0
SPAN_S = 300.0
ENOUGH_S = 60.0
"""Of less nothing is foretold."""
GAP_S = 15.0
"""Without a sample for so long, what came before is of another time."""
SURE = 3.0
"""Standard errors that a slope must be away from none."""
Sample = tuple[float, float]
"""(when, load in workers' worth of KV cache)"""


@dataclass(frozen=True, slots=True)
class Course:
    """How a pool's load goes, in workers' worth: its mean, where its rise is now (`level`), and how fast (`slope`, a second).

    The slope is 0 where the load falls, or may rise by chance. `grows_to` is what `growth` says; while it is None no rise is carried on.
    """

    mean: float
    level: float
    slope: float
    span_s: float
    grows_to: float | None = None

    def ahead(self, ahead_s: float, workers: int) -> float:
        """The share of the cache of so many workers that is used then."""
        most = float(workers)
        if self.slope and self.grows_to is not None:
            then = self.level + self.slope * min(ahead_s, self.span_s)
            most = min(most, max(self.level, self.grows_to))
        else:
            then = self.mean
        return min(most, max(0.0, then)) / max(1, workers)


@dataclass(frozen=True, slots=True)
class Book:
    """Samples of every pool, and their courses where there are enough of them."""

    at: float = -math.inf
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    courses: Mapping[str, Course] = field(default_factory=dict)

    def noted(self, seen: Seen, policy: PolicyOf, now: float) -> Book:
        """With a sample of now, if one is due; else this one."""
        if now - self.at < SAMPLE_S:
            return self
        loads = _loads(seen, now)
        samples = {}
        for pool in self.samples.keys() | loads.keys():
            kept = self.samples.get(pool, ())
            if kept and now - kept[-1][0] > GAP_S:
                kept = ()
            if pool in loads:
                kept = (*(s for s in kept if now - s[0] <= SPAN_S), (now, loads[pool]))
            if kept:
                samples[pool] = kept
        courses = {pool: course(kept) for pool, kept in samples.items() if kept[-1][0] - kept[0][0] >= ENOUGH_S}
        for pool, found in courses.items():
            if found.slope:
                courses[pool] = replace(found, grows_to=growth(serving(seen.workers(pool)), seen, policy))
        return Book(now, samples, courses)


def serving(workers: Iterable[NodeSeen]) -> list[NodeSeen]:
    """Those whose cache counts."""
    return [n for n in workers if n.state is not NodeState.STARTING]


def _loads(seen: Seen, now: float) -> dict[str, float]:
    """Of each pool of which more than half say it; a silent worker counts as the mean of the others."""
    uses: dict[str, list[float | None]] = {}
    for n in serving(seen.workers()):
        uses.setdefault(n.node.pool, []).append(n.gauge(KV_USED, now))
    loads = {}
    for pool, all_of in uses.items():
        known = [use for use in all_of if use is not None]
        if 2 * len(known) > len(all_of):
            loads[pool] = sum(known) / len(known) * len(all_of)
    return loads


def course(samples: tuple[Sample, ...]) -> Course:
    """Least squares, and whether its slope may be chance: residuals that go on from one to the next say less than as many that don't."""
    n = len(samples)
    mean_t, mean = sum(t for t, _ in samples) / n, sum(x for _, x in samples) / n
    spread = sum((t - mean_t) ** 2 for t, _ in samples)
    slope = sum((t - mean_t) * (x - mean) for t, x in samples) / spread
    rest = [x - mean - slope * (t - mean_t) for t, x in samples]
    squares = sum(r * r for r in rest)
    lag = sum(a * b for a, b in pairwise(rest)) / squares if squares > 0 else 0.0
    lag = min(0.95, max(0.0, lag))
    error = math.sqrt(squares / max(1, n - 2) / spread * (1 + lag) / (1 - lag))
    sure = slope > SURE * error and slope * SPAN_S > 1e-6
    span_s = samples[-1][0] - samples[0][0]
    level = mean + slope * (samples[-1][0] - mean_t)
    return Course(mean, level if sure else mean, slope if sure else 0.0, span_s)


def growth(workers: Iterable[NodeSeen], seen: Seen, policy: PolicyOf) -> float | None:
    """Workers' worth of cache that the requests of these workers fill at their full length; None where lengths or caches are unknown."""
    whole = 0.0
    typical: dict[str, float | None] = {}
    for n in workers:
        limits = n.node.limits
        if n.model not in typical:
            lengths = seen.lengths.get(n.model)
            typical[n.model] = weighed(lengths.recent_totals) if lengths else None
        tokens = typical[n.model]
        if not limits.total_blocks or not limits.block_size or tokens is None:
            return None
        requests = min(policy(n.node).batch.active, n.load.running + n.load.waiting)
        # In whole blocks only where bytes are no measure: a part of a block is as likely as any other.
        of_one = limits.kv.most(math.ceil(tokens)) if limits.kv_groups else tokens / limits.block_size
        whole += min(1.0, requests * of_one / limits.total_blocks)
    return whole


PARTS = 32


def weighed(totals: Sketch) -> float | None:
    """The mean length of a request that is met while it runs: long ones are met more often. None of an empty sketch."""
    if not totals.count:
        return None
    lengths = [max(0.0, totals.quantile((i + 0.5) / PARTS)) for i in range(PARTS)]
    return sum(x * x for x in lengths) / sum(lengths) if any(lengths) else None


def described(c: Course, foretold: float, ahead_s: float) -> str:
    """The figures, for evidence."""
    trend = f"{60 * c.slope:+.2f} workers' worth a minute" if c.slope else "no sure trend"
    return (
        f"KV load of {c.span_s:.0f} s: mean {c.mean:.2f} workers' worth, {trend}; "
        f"foretold use in {ahead_s:.0f} s: {foretold:.0%}"
    )
