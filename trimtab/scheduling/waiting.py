"""Who waits in the planner: one line for each class that a step looks at in turn, so that no step has to look at everybody."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import heappop, heappush, merge
from itertools import islice

from trimtab.messages import Workload
from trimtab.scheduling.item import Item
from trimtab.scheduling.lengths import LengthClass
from trimtab.scheduling.line import Line

LOOK = 16
"""Of each class a step considers so many more than it could admit."""


class Waiting:
    def __init__(self) -> None:
        self.express: Line[Item] = Line()
        self.hot: Line[Item] = Line()
        self.cold_protected: Line[Item] = Line()
        self.cold: Line[Item] = Line()
        self.by_length = dict.fromkeys(LengthClass, 0)
        """How many of each class wait."""
        self.by_workload = dict.fromkeys(Workload, 0)
        self.cold_batch = 0
        """BATCH requests with cold prompts among them."""
        self._number = 0
        self._lines = (self.express, self.hot, self.cold_protected, self.cold)
        self._unstarted: list[tuple[float, str]] = []
        """BATCH, by arrival; those who are gone or have started leave when they come to the top."""

    def __len__(self) -> int:
        return len(self.express) + len(self.hot) + len(self.cold_protected) + len(self.cold)

    def __iter__(self) -> Iterator[Item]:
        """In order, whatever the class."""
        return (row[3] for row in merge(*(line.rows() for line in self._lines)))

    def __contains__(self, request_id: str) -> bool:
        return any(request_id in line for line in self._lines)

    def get(self, request_id: str) -> Item | None:
        hot = self.express.get(request_id) or self.hot.get(request_id)
        return hot or self.cold_protected.get(request_id) or self.cold.get(request_id)

    def add(self, item: Item) -> None:
        self._number += 1
        self._count(item, 1)
        if item.hot:
            (self.express if item.express else self.hot).add(item, self._number)
        else:
            (self.cold_protected if item.protected else self.cold).add(item, self._number)
        if item.workload is Workload.BATCH and not item.started:
            heappush(self._unstarted, (item.arrival_ms, item.request_id))
            # Behind one who waits for long, many come and go.
            if len(self._unstarted) > 2 * len(self) + LOOK:
                self._unstarted = sorted(filter(self._stands, self._unstarted))

    def remove(self, request_id: str) -> Item | None:
        item = self.express.remove(request_id) or self.hot.remove(request_id)
        item = item or self.cold_protected.remove(request_id) or self.cold.remove(request_id)
        if item is not None:
            self._count(item, -1)
        return item

    def _count(self, item: Item, one: int) -> None:
        self.by_length[item.length] += one
        self.by_workload[item.workload] += one
        if not item.hot and item.workload is Workload.BATCH:
            self.cold_batch += one

    def resort(self) -> None:
        """After orders or classes have changed."""
        items = list(self)
        self.__init__()  # type: ignore[misc]
        for item in items:
            self.add(item)

    @property
    def cold_count(self) -> int:
        """Requests with cold prompts, whoever sends them."""
        return len(self.cold_protected) + len(self.cold)

    def foremost(self, places: int, able: Callable[[Item], bool]) -> list[Item]:
        """Of those who are `able`, the first of each class, in order: enough to fill `places` and to have a choice."""
        found: list[tuple[float, float, int, Item]] = []
        for line in self._lines:
            found += islice((row for row in line.rows() if able(row[3])), LOOK + places)
        return [row[3] for row in sorted(found)]

    def oldest_unstarted_ms(self) -> float | None:
        """Arrival of the oldest BATCH request that was never scheduled."""
        heap = self._unstarted
        while heap:
            if self._stands(heap[0]):
                return heap[0][0]
            heappop(heap)
        return None

    def _stands(self, row: tuple[float, str]) -> bool:
        item = self.get(row[1])
        return item is not None and not item.started and item.arrival_ms == row[0]
