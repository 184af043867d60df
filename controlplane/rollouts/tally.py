"""What one worker has done since it was first looked at: whole numbers that only rise, from its folded reports. Pure.

A look reads closed windows and what the open one has so far, so it sees a first token within a report's interval. Who still waits counts
too: of those that waited a whole objective ago, at least as many as there were no first tokens since are late by now, and a worker that
answers nobody is seen by that alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.seen import NodeSeen
from trimtab import measures
from trimtab.measures import BATCH_WAITING, COLD, HOT, REALTIME_WAITING
from trimtab.messages import Workload
from trimtab.sketch import Sketch

REALTIME_TTFT = tuple(measures.ttft(Workload.REALTIME, path) for path in (HOT, COLD))
BATCH_TTFT = tuple(measures.ttft(Workload.BATCH, path) for path in (HOT, COLD))
REALTIME_ITL = (measures.itl(Workload.REALTIME),)
WAITS = 64
"""Reports whose waiting requests are remembered."""


@dataclass(frozen=True, slots=True)
class Counts:
    """REALTIME: `firsts` first tokens, or requests that are late without one, `late` of them above the objective; `ends` requests that ended,
    `over` of them having missed an objective. Of all: `samples` first tokens, `requests`, and `errors` of them by an engine's fault.
    `computed` tokens, `again` of them computed before. `full_tokens` are of `full_s` seconds in which work waited all the time,
    of `seen_s` that were reported.
    """

    firsts: int = 0
    late: int = 0
    ends: int = 0
    over: int = 0
    samples: int = 0
    requests: int = 0
    errors: int = 0
    computed: int = 0
    again: int = 0
    full_tokens: int = 0
    full_s: float = 0.0
    seen_s: float = 0.0

    def plus(self, other: Counts, times: int = 1) -> Counts:
        return Counts(*(getattr(self, n) + times * getattr(other, n) for n in Counts.__slots__))


def added(counts: Iterable[Counts]) -> Counts:
    found = Counts()
    for c in counts:
        found = found.plus(c)
    return found


@dataclass(slots=True)
class Tally:
    """Of one node. The objectives are REALTIME's: for first tokens, and for gaps between tokens."""

    objective_ms: float
    itl_ms: float
    since: int | None = None
    """The newest window that had been closed when it was first looked at."""
    counts: Counts = field(default_factory=Counts)
    overdue: int = 0
    _start: dict[str, int] = field(default_factory=dict)
    _closed: int = 0
    _firsts: tuple[int, int, int] = (0, 0, 0)
    """(REALTIME, late, all) of windows that are closed, and of processes that ended."""
    _before: tuple[int, int, int] = (0, 0, 0)
    _waits: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=WAITS))
    """(when, first tokens until then, REALTIME waiting)"""
    _reported_at: float = 0.0
    _waited: bool = False
    _done: int = 0
    _incarnation: str = ""

    def look(self, n: NodeSeen, now: float) -> None:
        if self.since is None:
            self._begin(n)
        elif n.incarnation != self._incarnation:
            self._go_on(n)
        for w in n.windows:
            if w.number > self._closed:
                self._closed = w.number
                self._firsts = _sum(self._firsts, self._of([w.sketches]))
        # What is open now: closed, it counts the same but for a rounding, and nothing is taken back for that.
        firsts, late, samples = _less(_sum(self._firsts, self._of(_each(n))), self._before)
        new_report = n.reported_at is not None and n.reported_at > self._reported_at
        waiting = int(n.gauges.get(REALTIME_WAITING, 0.0)) if n.connected else 0
        self.overdue = self._overdue(now, firsts, waiting, new_report)
        had, total = self.counts, self._total(n)
        full_tokens, full_s, seen_s = had.full_tokens, had.full_s, had.seen_s
        if new_report and n.reported_at is not None:
            waited = waiting + n.gauges.get(BATCH_WAITING, 0.0) > 0.0
            done = total[measures.COMPUTED_TOKENS] - total[measures.RECOMPUTED_TOKENS]
            if waited and self._waited and done >= self._done:
                full_tokens, full_s = full_tokens + done - self._done, full_s + n.reported_at - self._reported_at
            seen_s += n.reported_at - self._reported_at
            self._reported_at, self._waited, self._done = n.reported_at, waited, done
        self.counts = Counts(
            max(had.firsts, firsts + self.overdue),
            max(had.late, late + self.overdue),
            total[measures.requests_of(Workload.REALTIME)],
            total[measures.over(Workload.REALTIME)],
            max(had.samples, samples),
            total[measures.REQUESTS],
            total[measures.ERRORS],
            total[measures.COMPUTED_TOKENS],
            total[measures.RECOMPUTED_TOKENS],
            full_tokens,
            full_s,
            seen_s,
        )

    def _begin(self, n: NodeSeen) -> None:
        self.since = self._closed = n.windows[-1].number if n.windows else 0
        self._before = self._of(_each(n))
        self._incarnation = n.incarnation
        self._start = {name: n.totals.get(name, 0) for name in TOTALS}
        self._reported_at = n.joined_at if n.reported_at is None else n.reported_at

    def _go_on(self, n: NodeSeen) -> None:
        """Another process under its name has windows of its own, and nobody waits there for the last one. What was counted stays."""
        self._incarnation = n.incarnation
        self.since = self._closed = 0
        self._firsts, self._before = (self.counts.firsts, self.counts.late, self.counts.samples), (0, 0, 0)
        self._waits.clear()
        self._reported_at, self._waited = n.joined_at, False

    def _total(self, n: NodeSeen) -> dict[str, int]:
        return {name: max(0, n.totals.get(name, 0) - self._start[name]) for name in TOTALS}

    def _of(self, parts: Iterable[dict[str, Sketch]]) -> tuple[int, int, int]:
        realtime = late = everybody = 0
        for sketches in parts:
            for name in REALTIME_TTFT:
                if (s := sketches.get(name)) is not None and s.count:
                    realtime += s.count
                    late += round(s.count * s.share_above(self.objective_ms))
            everybody += sum(sketches[name].count for name in BATCH_TTFT if name in sketches)
        return realtime, late, realtime + everybody

    def _overdue(self, now: float, firsts: int, waiting: int, new_report: bool) -> int:
        if new_report:
            self._waits.append((now, firsts, waiting))
        # The newest look that is old enough: of longer ago, more of those that waited may have left.
        old = next((x for x in reversed(self._waits) if now - x[0] >= self.objective_ms / 1000.0), None)
        return 0 if old is None else max(0, min(waiting, old[2] - (firsts - old[1])))


TOTALS = (
    measures.requests_of(Workload.REALTIME), measures.over(Workload.REALTIME), measures.REQUESTS, measures.ERRORS,
    measures.COMPUTED_TOKENS, measures.RECOMPUTED_TOKENS,
)  # fmt: skip


def _each(n: NodeSeen) -> list[dict[str, Sketch]]:
    return [{name: s} for name, sketches in n.open.items() for s in sketches]


def _sum(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return (a[0] + b[0], a[1] + b[1], a[2] + b[2])


def _less(a: tuple[int, int, int], b: tuple[int, int, int]) -> tuple[int, int, int]:
    return (max(0, a[0] - b[0]), max(0, a[1] - b[1]), max(0, a[2] - b[2]))


def sketch_of(n: NodeSeen, names: Iterable[str], since: int) -> list[Sketch]:
    """All that it has under these names, of windows after `since` as far as they are kept, and of the open one."""
    wanted = tuple(names)
    found = [w.sketches[name] for w in n.windows if w.number > since for name in wanted if name in w.sketches]
    return found + [s for name in wanted for s in n.open.get(name, ())]
