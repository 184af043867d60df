"""Waiting requests, always in order."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar


class Waiter(Protocol):
    """What can stand in a line; `order` is `order_ms` of it."""

    @property
    def request_id(self) -> str: ...
    @property
    def order(self) -> float: ...
    @property
    def arrival_ms(self) -> float: ...


T = TypeVar("T", bound=Waiter)


class Line(Generic[T]):
    """Sorted by (order, arrival, number); insertion and removal cost a binary search and a move."""

    def __init__(self) -> None:
        self._rows: list[tuple[float, float, int, T]] = []
        self._row_of: dict[str, tuple[float, float, int, T]] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[T]:
        """In order; do not change the line meanwhile."""
        return (row[3] for row in self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._row_of

    def get(self, request_id: str) -> T | None:
        row = self._row_of.get(request_id)
        return row[3] if row else None

    def add(self, item: T, number: int | None = None) -> None:
        """`number` settles ties; lines that are merged share theirs."""
        self._number = self._number + 1 if number is None else number
        row = (item.order, item.arrival_ms, self._number, item)
        bisect.insort(self._rows, row)
        self._row_of[item.request_id] = row

    def remove(self, request_id: str) -> T | None:
        row = self._row_of.pop(request_id, None)
        if row is None:
            return None
        # The number is unique, so a comparison never reaches the items.
        del self._rows[bisect.bisect_left(self._rows, row)]
        return row[3]

    def resort(self) -> None:
        """After orders have changed."""
        items = list(self)
        self._rows.clear()
        self._row_of.clear()
        for item in items:
            self.add(item)

    def rows(self) -> Iterator[tuple[float, float, int, T]]:
        """In order, with what they are ordered by."""
        return iter(self._rows)

    def first(self) -> T | None:
        return self._rows[0][3] if self._rows else None

    def ahead(self, order: float, arrival_ms: float) -> int:
        """How many stand before one of this order and arrival that joined now."""
        return bisect.bisect_left(self._rows, (order, arrival_ms, self._number + 1))
