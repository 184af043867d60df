"""What nodes made of each push, on its way to the store: so that anybody can say later which node applied what, and when.

Kept for a moment and written in one go; while the store is away the newest stay, as many as a large mesh gives for a few pushes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable

import structlog

from controlplane.store import Answer, PolicyStore
from trimtab.errors import StoreUnavailable

log = structlog.get_logger(__name__)

FLUSH_S = 1.0
LAST_S = 0.5
"""What the store gets for the last of them."""
MAX_PENDING = 4096
"""Answers that wait for the store."""


class Answers:
    """Belongs to one event loop; `run` must be running."""

    def __init__(self, store: PolicyStore) -> None:
        self._store = store
        self._pending: dict[tuple[str, str, int, int], Answer] = {}
        self._due = asyncio.Event()
        self.dropped = 0

    def add(self, answer: Answer) -> None:
        """A node's second answer to the same snapshot takes the place of its first."""
        x = answer
        key = (x.node_id, x.incarnation, x.identity.epoch, x.identity.revision)
        self._pending.pop(key, None)
        if len(self._pending) >= MAX_PENDING:
            self._pending.pop(next(iter(self._pending)))
            self.dropped += 1
        self._pending[key] = answer
        self._due.set()

    @property
    def pending(self) -> list[Answer]:
        """Newest first."""
        return list(self._pending.values())[::-1]

    async def run(self) -> None:
        """For ever. What waits when it is cancelled still goes to the store, when that is there."""
        try:
            while True:
                await self._due.wait()
                await asyncio.sleep(FLUSH_S)
                self._due.clear()
                await self.flush()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_S):
                    await self.flush()

    async def flush(self) -> None:
        rows = dict(self._pending)
        if not rows:
            return
        try:
            await self._store.record_answers(list(rows.values()))
        except StoreUnavailable:
            self._due.set()
            return
        for key, answer in rows.items():
            if self._pending.get(key) is answer:
                del self._pending[key]
        if self.dropped:
            log.warning("answers of nodes not recorded", count=self.dropped)
            self.dropped = 0


def chosen(answers: Iterable[Answer], *, node_id: str, epoch: int, revision: int, limit: int) -> list[Answer]:
    """Those of one node and one snapshot where they are named; 0 and empty name none."""
    found = []
    for a in answers:
        if node_id and a.node_id != node_id:
            continue
        if epoch and (a.identity.epoch, a.identity.revision) != (epoch, revision):
            continue
        found.append(a)
        if len(found) >= limit:
            break
    return found
