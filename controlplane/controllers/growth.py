"""Does a worker's memory grow beside no more work? Sparse points of one process, and the slowest quarter of the time that they span.

Memory that a KV cache touches for the first time is no leak: on a CPU it becomes resident as blocks are first written, so what the tokens
computed since the process began can have touched is taken off, up to the whole cache. On a GPU that hides a leak until as many tokens have
been computed as the cache holds. Growth that comes in steps with quiet quarters between them is missed, and so is any beside growing work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from controlplane.seen import NodeSeen
from trimtab.measures import COMPUTED_TOKENS, KV_BYTES_PER_TOKEN, RSS_BYTES, STORED_TOKENS
from trimtab.snapshot import Limits

POINTS = 20
"""Intervals in the whole time."""
QUARTER = POINTS // 4
GAP_S = 10.0
"""Between two points at most, however close they are meant to be."""
MORE = 1.1
"""Work that is so much more in the second half than in the first is more work."""
MB = 1_000_000


@dataclass(frozen=True, slots=True)
class Point:
    """`bytes` without what the KV cache accounts for; `work` is tokens stored, `running` requests."""

    at: float
    bytes: float
    work: float
    running: int


@dataclass(frozen=True, slots=True)
class Growth:
    """Of one incarnation. `before` are the tokens that earlier ones computed; points are oldest first.

    `per_min` is in MB, of the slowest quarter; None before there is all of it, and where the work grew too.
    """

    incarnation: str
    before: int
    points: tuple[Point, ...] = ()
    per_min: float | None = None

    def due(self, now: float, growth_s: float) -> bool:
        return not self.points or now - self.points[-1].at >= growth_s / POINTS

    def noted(self, n: NodeSeen, now: float, growth_s: float) -> Growth:
        """With a point of now; without any where a worker can't tell what one needs."""
        rss, stored, per_token = (n.gauges.get(name) for name in (RSS_BYTES, STORED_TOKENS, KV_BYTES_PER_TOKEN))
        if rss is None or stored is None or per_token is None:
            return Growth(self.incarnation, self.before)
        computed = max(0, n.totals.get(COMPUTED_TOKENS, 0) - self.before)
        touched = _touched(n.node.limits, per_token, computed)
        kept = self.points[-POINTS:]
        if kept and now - kept[-1].at > max(GAP_S, 2 * growth_s / POINTS):
            # It was silent meanwhile: what grew then is not known to have gone on growing.
            kept = ()
        points = (*kept, Point(now, rss - touched, stored, n.load.running))
        return Growth(self.incarnation, self.before, points, _per_min(points))


def _touched(limits: Limits, bytes_per_token: float, computed: int) -> float:
    """Bytes of the KV cache that so many computed tokens may have been the first to write. Blocks that a layer forgets go to the end of the
    line, so that every block has its turn."""
    if not limits.kv_groups:
        return min(bytes_per_token * limits.total_blocks * limits.block_size, bytes_per_token * computed)
    # What a token costs counts layers that keep all tokens, where there are any.
    counted = limits.kv.per_token(lasting=True) or limits.kv.per_token()
    of_a_block = bytes_per_token / counted if counted else 0.0
    return of_a_block * min(float(limits.total_blocks), limits.kv.per_token() * computed)


def _per_min(points: Sequence[Point]) -> float | None:
    if len(points) <= POINTS:
        return None
    first, second = points[: POINTS // 2], points[-(POINTS // 2) :]
    if sum(p.work for p in second) > MORE * sum(p.work for p in first):
        return None
    if sum(p.running for p in second) > MORE * sum(p.running for p in first):
        return None
    ends = points[::QUARTER]
    return min(60 * (b.bytes - a.bytes) / (b.at - a.at) for a, b in pairwise(ends)) / MB


def begun(n: NodeSeen, known: Growth | None) -> Growth:
    """For the process that runs now. Totals go on across restarts: those of a node's first process are all its own."""
    if known is None:
        return Growth(n.incarnation, 0)
    return known if known.incarnation == n.incarnation else Growth(n.incarnation, n.totals.get(COMPUTED_TOKENS, 0))
