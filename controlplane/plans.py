"""What pools' KV block sizes are to be, by the leader's last look: kept in the store as marks, so that anybody can ask, and the next leader
goes on from it. Belongs to one event loop.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace

import structlog

from controlplane.controllers.decision import BlockPlan
from controlplane.seen import PlanSeen
from controlplane.store import Mark, PolicyStore
from trimtab.errors import StoreUnavailable

log = structlog.get_logger(__name__)

PREFIX = "plan/"
REFRESH_MS = 60_000
"""Figures that change and decide nothing are written anew no sooner: each mark wakes every replica."""
SAME_MS = 1000
"""Two readings of one moment on two clocks differ by less."""


@dataclass(frozen=True, slots=True)
class Kept:
    """`changed_unix_ms` is 0 where the size was never changed, `written_unix_ms` while the store has not taken it; `stamp` is of what the
    store was last known to have.
    """

    plan: BlockPlan
    changed_unix_ms: int
    written_unix_ms: int = 0
    stamp: int = 0


class Plans:
    def __init__(self, store: PolicyStore) -> None:
        self._store = store
        self._kept: dict[str, Kept] = {}

    def recall(self, marks: Iterable[Mark]) -> None:
        """As the leader before left them."""
        self._kept = {kept.plan.pool: kept for mark in marks if (kept := _decoded(mark)) is not None}

    def seen(self, now: float, now_unix_ms: int) -> dict[str, PlanSeen]:
        """By pool; `now` is of the clock of `Seen`."""
        return {
            pool: PlanSeen(
                k.plan.phase, k.plan.planned, k.plan.reason, k.plan.evidence,
                now - (now_unix_ms - k.changed_unix_ms) / 1000.0 if k.changed_unix_ms else None,
            )
            for pool, k in self._kept.items()
        }  # fmt: skip

    async def keep(self, plans: Iterable[BlockPlan], now: float, now_unix_ms: int) -> list[BlockPlan]:
        """They hold from now on. Those that name another size than before, or than what there is where nothing was planned before."""
        changed = []
        for plan in plans:
            before = self._kept.get(plan.pool)
            at = 0 if plan.changed_at is None else now_unix_ms - round(1000.0 * (now - plan.changed_at))
            if plan.planned != (plan.present if before is None else before.plan.planned):
                changed.append(plan)
            written = 0 if before is None or _differs(before, plan, at, now_unix_ms) else before.written_unix_ms
            if before is None or not written:
                self._kept[plan.pool] = Kept(plan, at, stamp=0 if before is None else before.stamp)
        # One that the store did not take is offered again with the next tick; it holds all the same.
        try:
            for pool, kept in self._kept.items():
                if not kept.written_unix_ms:
                    self._kept[pool] = await self._marked(kept, now_unix_ms)
        except StoreUnavailable as e:
            log.warning("what is planned for a pool is not stored", because=e.message)
        return changed

    async def _marked(self, kept: Kept, now_unix_ms: int) -> Kept:
        """As it is known to be stored, or what there is to be above next time: by then this replica may know that it leads no more."""
        mark = _encoded(kept, above(kept.stamp, now_unix_ms))
        if await self._store.mark(mark):
            return replace(kept, written_unix_ms=now_unix_ms, stamp=mark.stamp)
        return replace(kept, stamp=await stamp_of(self._store, mark.key))

    async def forget(self) -> None:
        """Nobody plans any more."""
        if not self._kept:
            return
        try:
            await unmark_all(self._store, PREFIX)
        except StoreUnavailable as e:
            log.warning("what was planned for pools is still stored", because=e.message)
            return
        self._kept = {}


def above(stamp: int, now_unix_ms: int) -> int:
    """The time, and above what is there where another clock is ahead."""
    return max(now_unix_ms, stamp + 1)


async def stamp_of(store: PolicyStore, key: str) -> int:
    """Of the mark that the store has under this key; 0 for none."""
    return next((m.stamp for m in await store.marks() if m.key == key), 0)


async def unmark_all(store: PolicyStore, prefix: str) -> None:
    for mark in await store.marks():
        if mark.key.startswith(prefix):
            await store.unmark(mark)


def _differs(before: Kept, plan: BlockPlan, changed_unix_ms: int, now_unix_ms: int) -> bool:
    old = before.plan
    if (old.phase, old.named, old.planned) != (plan.phase, plan.named, plan.planned):
        return True
    if abs(before.changed_unix_ms - changed_unix_ms) > SAME_MS:
        return True
    said = (old.reason, old.evidence, old.gain) != (plan.reason, plan.evidence, plan.gain)
    # Written in the future it was by another clock.
    return said and not 0 <= now_unix_ms - before.written_unix_ms < REFRESH_MS


def _encoded(kept: Kept, stamp: int) -> Mark:
    plan = kept.plan
    said = {
        "kind": "plan", "pool": plan.pool, "phase": plan.phase, "named": plan.named, "planned": plan.planned,
        "reason": plan.reason, "evidence": plan.evidence, "gain": plan.gain, "present": plan.present,
        "changed_unix_ms": kept.changed_unix_ms,
    }  # fmt: skip
    return Mark(PREFIX + plan.pool, stamp, json.dumps(said, ensure_ascii=False).encode())


def _decoded(mark: Mark) -> Kept | None:
    """None for what is something else, or of a build that says it otherwise."""
    if not mark.key.startswith(PREFIX):
        return None
    try:
        said = json.loads(mark.data)
        plan = BlockPlan(
            str(said["pool"]), str(said["phase"]), int(said["named"]), int(said["planned"]), str(said["reason"]),
            str(said["evidence"]), {int(size): float(x) for size, x in said["gain"].items()}, int(said["present"]),
        )  # fmt: skip
        return Kept(plan, int(said["changed_unix_ms"]), mark.stamp, mark.stamp)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
