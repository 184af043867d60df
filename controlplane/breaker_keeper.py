"""Breakers as this replica knows them: trips from its gateways and from other replicas', operators' words, and who is told.

A trip is told to this replica's gateways at once, and to the other replicas through the store; without the store it stays within this
replica until the store is back. An operator's word counts only once the store has it, so that it survives whoever took it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import structlog

from controlplane.breakers import DEFAULT_FORCE_MS, KEYS, Ledger, Notice, Side, Trip, Word, decode, encode
from controlplane.replica import unix_ms
from controlplane.store import Mark, PolicyStore
from trimtab.errors import Conflict, StoreUnavailable

log = structlog.get_logger(__name__)

SETTLE_S = 0.02
"""Trips that come together are told together."""
RETRY_S = 0.5
PRUNE_S = 300.0
ATTEMPTS = 8
"""Times that a word is made anew because another came between."""


class BreakerKeeper:
    """Belongs to one event loop; `run` must be running. `on_change` is called when gateways are to be told something else."""

    def __init__(
        self, store: PolicyStore, on_change: Callable[[], None], *, now_unix_ms: Callable[[], int] = unix_ms
    ) -> None:
        self.ledger = Ledger()
        self._store = store
        self._on_change = on_change
        self._now = now_unix_ms
        self._due = asyncio.Event()
        self._unsaved: dict[str, Trip | Word] = {}
        self._to_save = asyncio.Event()

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tell())
            tasks.create_task(self._follow())
            tasks.create_task(self._save())
            tasks.create_task(self._prune())

    def tripped(
        self, gateway_id: str, node_id: str, incarnation: str, dimension: str, open_ms: int, because: str
    ) -> None:
        """A gateway of this replica has opened its breaker on that process."""
        trip = self.ledger.tripped(gateway_id, node_id, incarnation, dimension, open_ms, because, self._now())
        log.warning(
            "breaker tripped",
            worker=node_id,
            gateway=gateway_id,
            on=trip.dimension,
            because=trip.because,
            open_ms=trip.open_ms,
            trips=trip.trips,
        )
        self._due.set()
        self._put_off(trip)

    async def force(
        self, node_id: str, side: Side | None, *, author: str, reason: str, for_ms: int = DEFAULT_FORCE_MS
    ) -> Word | None:
        """An operator's word, in the store and told to gateways; None where nothing was there to be taken back. StoreUnavailable when it is
        not known to be in the store."""
        for _ in range(ATTEMPTS):
            self._take(await self._store.marks(), live=True)
            now = self._now()
            if side is None and self.ledger.word(node_id, now) is None:
                return None
            word = self.ledger.decided(node_id, side, for_ms, author, reason, now)
            if await self._store.mark(_mark(word)):
                self.ledger.take(word, now)
                self._due.set()
                return word
        raise Conflict("others kept changing what is forced in between; look at it again (trimtab breaker)")

    def notice(self, node_id: str, incarnation: str) -> Notice | None:
        """What gateways are to know of this process now."""
        return self.ledger.notice(node_id, incarnation, self._now())

    async def _tell(self) -> None:
        """Whenever something was heard, and whenever something is over."""
        told = self._now()
        while True:
            end = self.ledger.next_end(told)
            left_s = None if end is None else max(0.0, (end - self._now()) / 1000)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._due.wait()
                await asyncio.sleep(SETTLE_S)
            self._due.clear()
            told = self._now()
            self._on_change()

    async def _follow(self) -> None:
        live = False
        async with contextlib.aclosing(self._store.watch_marks()) as states:
            async for marks in states:
                self._take(marks, live=live)
                live = True
                held = {mark.key: mark.stamp for mark in marks}
                for record in self.ledger.lasting(self._now()):
                    if held.get(record.key, 0) < record.stamp:
                        # The store was emptied, or fell back to an older copy.
                        self._put_off(record)

    def _take(self, marks: list[Mark], *, live: bool) -> None:
        now = self._now()
        for mark in marks:
            if not mark.key.startswith(KEYS):
                continue  # of others, who may have many large ones
            record = decode(mark.data)
            if record is not None and self.ledger.take(record, now, live=live):
                self._due.set()

    def _put_off(self, record: Trip | Word) -> None:
        self._unsaved[record.key] = record
        self._to_save.set()

    async def _save(self) -> None:
        while True:
            await self._to_save.wait()
            self._to_save.clear()
            for key, record in list(self._unsaved.items()):
                try:
                    await self._store.mark(_mark(record))
                except StoreUnavailable:
                    await asyncio.sleep(RETRY_S)
                    self._to_save.set()
                    break
                if self._unsaved.get(key) is record:
                    del self._unsaved[key]

    async def _prune(self) -> None:
        while True:
            await asyncio.sleep(PRUNE_S)
            for record in self.ledger.forget(self._now()):
                self._unsaved.pop(record.key, None)
                with contextlib.suppress(StoreUnavailable):
                    await self._store.unmark(_mark(record))


def _mark(record: Trip | Word) -> Mark:
    return Mark(record.key, record.stamp, encode(record))
