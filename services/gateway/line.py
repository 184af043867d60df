"""Those who wait in this gateway for a worker: BATCH requests for credit, and streams whose worker is gone for another one.

In order of arrival, whatever they wait for; a worker that has room wakes as many as it has room for, of the kinds that it may take. Who is woken
looks again, and takes his old place when somebody was faster. Waiters are kept by kind, so that those who may not be served, however many,
cost those behind them one look.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Hashable

Entry = tuple[int, int, "asyncio.Future[bool]"]
"""Place, entry number, who is told (True: it is his turn)."""

EVERYBODY = 1 << 30


class Line:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._heaps: dict[Hashable, list[Entry]] = {}
        self._waiting_of: Counter[Hashable] = Counter()
        self._numbers = itertools.count()
        self._kept = 0
        """Entries, of which some may have left."""
        self._waiting = 0

    def __len__(self) -> int:
        return self._waiting

    def before(self, place: int) -> bool:
        """Whether somebody waits who was here before."""
        heads = [self._head(kind) for kind in list(self._heaps)]
        return any(head is not None and head[0] < place for head in heads)

    async def wait(self, place: int, kind: Hashable, woken: asyncio.Future[bool], within_s: float | None) -> bool:
        """Until it is the turn of `place` (True), or `woken` is set by somebody else, or the time is over (False)."""
        timer = None if within_s is None else asyncio.get_running_loop().call_later(within_s, wake, woken)
        heapq.heappush(self._heaps.setdefault(kind, []), (place, next(self._numbers), woken))
        self._kept += 1
        self._waiting += 1
        self._waiting_of[kind] += 1
        try:
            return await woken
        finally:
            if timer is not None:
                timer.cancel()
            self._waiting -= 1
            self._waiting_of[kind] -= 1
            if not self._waiting_of[kind]:
                del self._waiting_of[kind]
            if self._kept > 2 * self._waiting + 16:
                self._tidy()

    def serve(self, room: int, quota: Callable[[Hashable], int] = lambda _: EVERYBODY) -> None:
        """Wake the first `room` of those who may be served: so many of each kind as its `quota` says."""
        heads: list[tuple[int, int, int, Hashable]] = []
        for kind in list(self._heaps):
            head = self._head(kind)
            if head is not None and (left := quota(kind)) > 0:
                heads.append((head[0], head[1], left, kind))
        heapq.heapify(heads)
        while room > 0 and heads:
            _, _, left, kind = heads[0]
            heapq.heappop(self._heaps[kind])[2].set_result(True)
            self._kept -= 1
            room -= 1
            head = self._head(kind)
            if head is not None and left > 1:
                heapq.heapreplace(heads, (head[0], head[1], left - 1, kind))
            else:
                heapq.heappop(heads)

    def able(self, quota: Callable[[Hashable], int]) -> int:
        """How many of those who wait could be served, if so many of each kind may be as its `quota` says."""
        return sum(min(n, max(0, quota(kind))) for kind, n in self._waiting_of.items())

    def _head(self, kind: Hashable) -> Entry | None:
        """The first of this kind who still waits; a kind of which nobody does is forgotten."""
        heap = self._heaps[kind]
        while heap and heap[0][2].done():
            heapq.heappop(heap)
            self._kept -= 1
        if not heap:
            del self._heaps[kind]
            return None
        return heap[0]

    def _tidy(self) -> None:
        """Forget those who have left."""
        left = {kind: [e for e in heap if not e[2].done()] for kind, heap in self._heaps.items()}
        self._heaps = {kind: heap for kind, heap in left.items() if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._kept = sum(map(len, self._heaps.values()))


def wake(woken: asyncio.Future[bool]) -> None:
    """It is not his turn, but there is something to look at. Safe to call again."""
    if not woken.done():
        woken.set_result(False)
