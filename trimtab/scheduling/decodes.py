"""Requests that decode, in the order in which they take turns; counted, not visited, while all of them run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trimtab.kv_shape import KvShape
from trimtab.scheduling.item import Item


class Decodes(Mapping[str, Item]):
    """Those of one kind, protected or not; iterates in the order of turns.

    Who is part of a step computes a token, so what one has is his `kv_base` and the steps since; who sits out is put back by one.
    """

    def __init__(self) -> None:
        self._items: dict[str, Item] = {}
        self._ids: list[str] = []
        self._turns: list[Item] = []
        """Those of `_ids`, in the same order, so that many at once are not looked up one by one."""
        self._steps = 0
        self._bases = 0
        """Sum of `kv_base`."""

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._items

    def __getitem__(self, request_id: str) -> Item:
        return self._items[request_id]

    @property
    def kv_tokens(self) -> int:
        """Tokens that all of them together read in a step."""
        return self._bases + self._steps * len(self._ids)

    def computed(self, item: Item) -> int:
        """Tokens of one of them whose KV is there."""
        return item.kv_base + self._steps

    def growing(self, kv: KvShape) -> int:
        """KV blocks that they take for their next tokens."""
        steps = self._steps
        return kv.begins(i.kv_base + steps for i in self._turns)

    def add(self, item: Item, computed: int) -> None:
        """Behind all others."""
        item.kv_base = computed - self._steps
        self._bases += item.kv_base
        self._items[item.request_id] = item
        self._ids.append(item.request_id)
        self._turns.append(item)

    def remove(self, request_id: str) -> Item | None:
        item = self._items.pop(request_id, None)
        if item is not None:
            self._bases -= item.kv_base
            self._ids.remove(request_id)
            self._turns.remove(item)
        return item

    def after(self, count: int) -> list[str]:
        """All but the first `count`."""
        return self._ids[count:]

    def end_with(self, request_ids: list[str]) -> bool:
        """Whether these are the last ones, in this order."""
        return self._ids[len(self._ids) - len(request_ids) :] == request_ids

    def step(self) -> None:
        """Each computes a token."""
        self._steps += 1

    def sit_out(self, request_ids: list[str], *, go_first: bool) -> tuple[list[Item], int]:
        """These, who stand in this order, computed none in the step that was just counted; who they are, and what they would have read.

        `go_first`: all others go behind them.
        """
        at = len(self._ids) - len(request_ids)
        if self.end_with(request_ids):
            items = self._turns[at:]
            if go_first:
                self._ids = request_ids + self._ids[:at]
                self._turns = items + self._turns[:at]
        else:
            items = [self._items[i] for i in request_ids]
            if go_first:
                first = set(request_ids)
                self._ids = request_ids + [i for i in self._ids if i not in first]
                self._turns = [self._items[i] for i in self._ids]
        kv_tokens = self._steps * len(items)
        for item in items:
            item.kv_base = base = item.kv_base - 1
            kv_tokens += base
        self._bases -= len(items)
        return items, kv_tokens
