"""Rollouts as the store's marks have them, at every replica: who lives, who was, and what gateways are to give canaries."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from controlplane.rollouts.state import PREFIX, Rollout, Stage, decode, encode
from controlplane.store import Mark, PolicyStore
from trimtab.errors import StoreUnavailable

KEPT = 20
"""That have ended, the newest."""
ATTEMPTS = 8
"""Times that one is undone anew because the leader came between."""


class Keeper:
    """Belongs to one event loop; `run` must be running. `on_change` is called when gateways are to be told something else."""

    def __init__(self, store: PolicyStore, on_change: Callable[[], None]) -> None:
        self._store = store
        self._on_change = on_change
        self._known: dict[str, Rollout] = {}
        self._weights: dict[str, float] = {}

    async def run(self) -> None:
        """For ever."""
        async with contextlib.aclosing(self._store.watch_marks()) as states:
            async for marks in states:
                self._take(marks)

    @property
    def live(self) -> Rollout | None:
        return next((r for r in self._known.values() if r.live), None)

    def all(self) -> list[Rollout]:
        """Newest first."""
        return sorted(self._known.values(), key=lambda r: (r.started_unix_ms, r.rollout_id), reverse=True)

    def weight(self, node_id: str) -> float:
        """What this worker gets of new work, next to what it would get by itself."""
        return self._weights.get(node_id, 1.0)

    def knows(self, rollout_id: str) -> bool:
        return rollout_id in self._known

    async def look(self) -> None:
        """As the store has them now. StoreUnavailable where it does not say."""
        self._take(await self._store.marks())

    async def save(self, r: Rollout) -> Rollout | None:
        """The rollout as it was kept, one version on; None where another change of it came first, which is known here then."""
        after = replace(r, version=r.version + 1)
        if not await self._store.mark(_mark(after)):
            await self.look()
            return None
        self._put(after)
        await self._forget()
        return after

    async def undo(self, r: Rollout, now_unix_ms: int) -> None:
        """It never was: its policy was not taken. A leader may have carried it on meanwhile, so it is ended first: all replicas hear of that."""
        for _ in range(ATTEMPTS):
            if not r.live:
                break
            over = await self.save(r.ended(Stage.ABORTED, now_unix_ms, "aborted: the policy did not take it"))
            found = over or self._known.get(r.rollout_id)
            if found is None:
                return
            r = found
        await self._remove(r)

    async def _remove(self, r: Rollout) -> None:
        self._known.pop(r.rollout_id, None)
        self._weigh()
        await self._store.unmark(_mark(r))

    def _put(self, r: Rollout) -> None:
        had = self._known.get(r.rollout_id)
        if had is None or r.version > had.version:
            self._known[r.rollout_id] = r
            self._weigh()

    def _take(self, marks: list[Mark]) -> None:
        found = {r.rollout_id: r for m in marks if (r := decode(m.key, m.data)) is not None}
        newer = {i: r for i, r in self._known.items() if i in found and r.version > found[i].version}
        self._known = {**found, **newer}
        self._weigh()

    def _weigh(self) -> None:
        live = [r for r in self._known.values() if r.live]
        weights = {name: r.share_of_work() for r in live for name in r.canaries if r.share_of_work() != 1.0}
        if weights != self._weights:
            self._weights = weights
            self._on_change()

    async def _forget(self) -> None:
        for old in [r for r in self.all() if not r.live][KEPT:]:
            with contextlib.suppress(StoreUnavailable):
                await self._remove(old)


def _mark(r: Rollout) -> Mark:
    return Mark(PREFIX + r.rollout_id, r.version, encode(r))
