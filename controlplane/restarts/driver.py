"""Drives the rolling restart that lives, where this replica leads; every replica knows all that are kept.

Each is a mark in the store. It is written before anybody is told, upon the mark that it was made from: of two replicas that both think that
they lead one goes on, and the other reads anew. Without the store nobody goes: what nobody could go on from is not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import accumulate

import structlog

from controlplane.leader import Leader
from controlplane.replica import unix_ms
from controlplane.restarts import steps
from controlplane.restarts.state import Order, Restart, Stage, Turn, decode, encode
from controlplane.restarts.steps import Answer, Ask, Sights
from controlplane.store import Mark, PolicyStore
from trimtab.errors import Conflict, StoreUnavailable

log = structlog.get_logger(__name__)

LOOK_S = 0.5
KEPT = 20
"""Restarts that are over are kept, the newest."""
KEPT_TURNS = 2000
"""Of workers, in all that are kept: every replica reads all marks of the store again and again."""
ATTEMPTS = 8
PREFIX = "restart/"

Tell = Callable[[Restart, Ask], Awaitable[Answer]]
Look = Callable[[frozenset[str]], Awaitable[Sights]]
"""What is seen of all workers now; of those that are named, also how they do."""


@dataclass(frozen=True, slots=True)
class Held:
    """A restart, and the stamp under which the store has it."""

    restart: Restart
    stamp: int


class Driver:
    """Belongs to one event loop; `run` must be running."""

    def __init__(
        self,
        store: PolicyStore,
        leader: Leader,
        look: Look,
        tell: Tell,
        *,
        now_unix_ms: Callable[[], int] = unix_ms,
    ) -> None:
        self._store = store
        self._leader = leader
        self._look = look
        self._tell = tell
        self._now = now_unix_ms
        self._held: dict[str, Held] = {}
        self._away = False

    async def run(self) -> None:
        """For ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._drive())

    @property
    def all(self) -> list[Restart]:
        """Newest first."""
        return sorted((h.restart for h in self._held.values()), key=_age, reverse=True)

    @property
    def under_way(self) -> frozenset[str]:
        """Workers that are away for a restart, or watched after it."""
        held = self._live()
        return held.restart.under_way if held is not None else frozenset()

    async def begin(self, order: Order, turns: tuple[Turn, ...]) -> Restart:
        """Conflict while another lives; StoreUnavailable where the store did not take it."""
        await self._read()
        if (other := self._live()) is not None:
            raise Conflict(in_the_way(other.restart))
        now = self._now()
        restart = Restart(new_id(), order, turns, now)
        restart = restart.said(now, f"begun by {order.author}, for {len(turns)} workers", order.reason)
        if not await self._save(Held(restart, 0), restart):
            raise Conflict("another restart took its name; try again")
        # Of two that began at once at two replicas the earlier one lives.
        await self._read()
        first = self._live()
        if first is not None and first.restart.restart_id != restart.restart_id:
            await self.end(restart.restart_id, Stage.ABORTED, in_the_way(first.restart))
            raise Conflict(in_the_way(first.restart))
        return restart

    async def end(self, restart_id: str, stage: Stage, verdict: str) -> Restart | None:
        """It goes no further: who is under way comes back by himself. None where nobody knows it; one that is over stays as it is."""
        for _ in range(ATTEMPTS):
            await self._read()
            held = self._held.get(PREFIX + restart_id)
            if held is None or not held.restart.live:
                return held.restart if held is not None else None
            over = held.restart.ended(stage, verdict, self._now())
            if await self._save(held, over):
                return over
        raise Conflict("it kept going on in between; try again")

    async def _follow(self) -> None:
        async with contextlib.aclosing(self._store.watch_marks()) as states:
            async for marks in states:
                self._take(marks)

    async def _read(self) -> None:
        self._take(await self._store.marks())

    def _take(self, marks: list[Mark]) -> None:
        """What the store has lost is kept here, and goes back in as it goes on."""
        for mark in marks:
            held = self._held.get(mark.key)
            if not mark.key.startswith(PREFIX) or (held is not None and held.stamp >= mark.stamp):
                continue
            restart = decode(mark.data)
            if restart is not None:
                self._held[mark.key] = Held(restart, mark.stamp)
        there = {mark.key for mark in marks}
        for held in self._too_old():
            # Another replica has dropped it, or is about to.
            if (key := PREFIX + held.restart.restart_id) not in there:
                del self._held[key]

    def _live(self) -> Held | None:
        """The one that goes on: the earliest."""
        live = (h for h in self._held.values() if h.restart.live)
        return min(live, key=lambda h: _age(h.restart), default=None)

    async def _drive(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            held = self._live()
            if held is None or self._leader.leads is None:
                continue
            try:
                await self._go_on(held)
                self._away = False
            except StoreUnavailable as e:
                if not self._away:
                    log.warning("a restart waits for the store", restart=held.restart.restart_id, because=e.message)
                self._away = True
            except Exception:
                # Whoever is under way comes back by himself; the next look may do better.
                log.exception("a restart could not go on", restart=held.restart.restart_id)

    async def _go_on(self, held: Held) -> None:
        after, asks = steps.step(held.restart, await self._look(steps.looked_at(held.restart)), self._now())
        if after != held.restart and not await self._save(held, after):
            return
        if asks:
            answers = await asyncio.gather(*(self._tell(after, ask) for ask in asks))
            for ask, answer in zip(asks, answers, strict=True):
                await self._answered(after.restart_id, ask.node_id, answer)

    async def _answered(self, restart_id: str, node_id: str, answer: Answer) -> None:
        for _ in range(ATTEMPTS):
            held = self._held[PREFIX + restart_id]
            after = steps.answered(held.restart, node_id, answer, self._now())
            if after == held.restart or await self._save(held, after):
                return

    async def _save(self, held: Held, after: Restart) -> bool:
        """False where somebody was faster: then what he wrote is known here."""
        key = PREFIX + after.restart_id
        mark = Mark(key, held.stamp + 1, encode(after))
        if not await self._store.mark(mark):
            await self._read()
            return False
        for line in after.lines[_common(held.restart, after) :]:
            log.info("restart", restart=after.restart_id, what=line.text, evidence=line.evidence)
        self._held[key] = Held(after, mark.stamp)
        if not after.live:
            await self._prune()
        return True

    def _too_old(self) -> list[Held]:
        """The newest of those that are over stays, and of the others as many as there is room for."""
        over = sorted(
            (h for h in self._held.values() if not h.restart.live), key=lambda h: _age(h.restart), reverse=True
        )
        turns = list(accumulate(len(h.restart.turns) for h in over))
        return [h for i, h in enumerate(over) if i >= KEPT or (i and turns[i] > KEPT_TURNS)]

    async def _prune(self) -> None:
        for held in self._too_old():
            key = PREFIX + held.restart.restart_id
            with contextlib.suppress(StoreUnavailable):
                await self._store.unmark(Mark(key, held.stamp, b""))
                self._held.pop(key, None)  # `_take` may have heard of it meanwhile


def new_id() -> str:
    return f"rs-{uuid.uuid4().hex[:8]}"


def in_the_way(restart: Restart) -> str:
    return (
        f"a restart is on its way: {restart.restart_id}, by {restart.order.author}; "
        f"wait for it, or abort it (trimtab rollout abort {restart.restart_id})"
    )


def _age(restart: Restart) -> tuple[int, str]:
    return restart.started_ms, restart.restart_id


def _common(before: Restart, after: Restart) -> int:
    """How many of the lines after were there before; where old ones were dropped, all but the newest."""
    if before is after:
        return 0
    same = len(before.lines)
    return same if after.lines[:same] == before.lines else max(0, len(after.lines) - 1)
