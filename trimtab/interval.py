"""What a node has measured since its last report: sketches by name, and the worst of the requests that missed their objective.

Each value goes into one report. A report that never left gives back what was in it, and the next one covers both intervals.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from trimtab.messages import Outlier
from trimtab.sketch import Sketch

WORST = 8
"""Outliers that a report has at most."""
MAX_INTERVAL_MS = (1 << 32) - 1
"""The wire has 32 bits for it."""


@dataclass(frozen=True, slots=True)
class Taken:
    """For one report. `sketches` are serialised, those with something in them; `outliers` the worst first."""

    sketches: dict[str, bytes]
    outliers: tuple[Outlier, ...]
    interval_ms: int


@dataclass(slots=True)
class _Interval:
    since: float
    sketches: dict[str, Sketch] = field(default_factory=dict)
    worst: list[tuple[float, int, Outlier]] = field(default_factory=list)
    """A heap: the mildest of them is on top."""


class Intervals:
    """The interval that runs, and the one before it until it is known to have left. Times are seconds of one clock."""

    def __init__(self, now: float) -> None:
        self._now = _Interval(now)
        self._before: _Interval | None = None
        self._numbers = 0

    def add(self, name: str, value: float) -> None:
        sketch = self._now.sketches.get(name)
        if sketch is None:
            sketch = self._now.sketches[name] = Sketch()
        sketch.add(value)

    def keeps(self, badness: float) -> bool:
        """Whether a request that is so bad would be among the worst."""
        worst = self._now.worst
        return len(worst) < WORST or badness > worst[0][0]

    def keep(self, badness: float, outlier: Outlier) -> None:
        """`badness` says by how much it missed; of those with the same, the first to come stay."""
        if not self.keeps(badness):
            return
        self._numbers += 1
        heapq.heappush(self._now.worst, (badness, -self._numbers, outlier))
        if len(self._now.worst) > WORST:
            heapq.heappop(self._now.worst)

    def take(self, now: float) -> Taken:
        """What there is, and a new interval begins."""
        done, self._now = self._now, _Interval(now)
        self._before = done
        sketches = {name: sketch.to_bytes() for name, sketch in done.sketches.items()}
        outliers = tuple(row[2] for row in sorted(done.worst, key=lambda row: (-row[0], -row[1])))
        return Taken(sketches, outliers, max(0, min(MAX_INTERVAL_MS, round((now - done.since) * 1000.0))))

    def give_back(self) -> None:
        """What was taken last has not left: it is part of the interval that runs. Safe to repeat."""
        before, self._before = self._before, None
        if before is None:
            return
        now = self._now
        now.since = before.since
        for name, sketch in before.sketches.items():
            newer = now.sketches.get(name)
            now.sketches[name] = sketch if newer is None else Sketch.merged((sketch, newer))
        now.worst = heapq.nlargest(WORST, (*before.worst, *now.worst))
        heapq.heapify(now.worst)
