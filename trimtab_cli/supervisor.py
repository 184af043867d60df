"""Starts a mesh's processes, brings back those that die, and ends them in order.

Invariants: nothing that it started outlives it (each child also watches its parent, should this process be killed); a
process that dies again and again ends the whole mesh rather than flapping for ever. A worker that ends with exit code 0 was told to, by
`trimtab drain` or a SIGTERM, and stays away.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable
from itertools import groupby
from pathlib import Path

from trimtab_cli.child import Child, ended_how, keep_old
from trimtab_cli.plan import Spec, Tier
from trimtab_cli.probe import until_healthy
from trimtab_cli.progress import Screen, State

RESTARTS = 5
RESTARTS_WITHIN_S = 60.0
FIRST_BACKOFF_S = 0.2
TICK_S = 0.25
ROTATE_EVERY_S = 30.0
KILL_AFTER_S = 5.0
"""On top of a process's own drain time."""


class StartFailed(Exception):
    """A process did not become healthy; `tail` holds its last lines."""

    def __init__(self, child: Child, why: str) -> None:
        super().__init__(f"{child.spec.name} {why}")
        self.name = child.spec.name
        self.log = child.log
        self.tail = child.tail()


class GaveUp(Exception):
    """A process died too often."""


class Supervisor:
    """Belongs to one event loop on the main thread. `on_change` is called when a process has got a new pid."""

    def __init__(
        self, specs: Iterable[Spec], logs: Path, screen: Screen, *, ready_s: float, on_change: Callable[[], None]
    ) -> None:
        logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._children = [Child(spec, logs) for spec in specs]
        self._screen = screen
        self._ready_s = ready_s
        self._on_change = on_change
        self._left: set[str] = set()
        for child in self._children:
            keep_old(child.log, move=True)
            screen.add(child.spec.name, lambda c=child: "".join(c.tail(1))[:200])  # type: ignore[misc]

    @property
    def pids(self) -> dict[str, int]:
        """Of all but those that have left."""
        return {child.spec.name: child.pid for child in self._children if child.spec.name not in self._left}

    async def start(self) -> None:
        """All of them healthy, or StartFailed. The store comes first; the rest find each other in any order."""
        ticker = asyncio.create_task(self._tick())
        try:
            for _, group in groupby(self._children, key=lambda c: c.spec.tier is Tier.STORE):
                await _all(self._bring_up(child) for child in group)
        finally:
            ticker.cancel()

    async def watch(self) -> None:
        """Tends the children until GaveUp."""
        await _all([*(self._tend(child) for child in self._children), self._rotate()])

    async def drain(self, *, patience_s: float | None = None) -> None:
        """End everything: gateways first, the store last. A process that overstays its drain time is killed."""
        try:
            for _, group in groupby(reversed(self._children), key=lambda c: c.spec.tier):
                await asyncio.gather(*(self._end(child, patience_s) for child in group))
        finally:
            self.kill()

    def kill(self) -> None:
        """End everything now, with whatever the children started themselves."""
        for child in self._children:
            child.kill()

    async def _bring_up(self, child: Child) -> None:
        self._screen.state(child.spec.name, State.STARTING)
        await child.start()
        ended = asyncio.create_task(child.wait())
        healthy = asyncio.create_task(until_healthy(child.spec))
        try:
            await asyncio.wait({ended, healthy}, timeout=self._ready_s, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                why = f"ended before it was ready ({ended_how(ended.result())})"
            elif not healthy.done():
                why = f"was not healthy after {self._ready_s:g} s"
            else:
                healthy.result()
                self._screen.state(child.spec.name, State.READY)
                return
        finally:
            ended.cancel()
            healthy.cancel()
        self._screen.state(child.spec.name, State.FAILED)
        raise StartFailed(child, why)

    async def _tend(self, child: Child) -> None:
        deaths: deque[float] = deque()
        while True:
            code = await child.wait()
            how, now = ended_how(code), time.monotonic()
            child.kill()
            if code == 0 and child.spec.tier is Tier.WORKER:
                self._part_with(child)
                return
            deaths.append(now)
            while now - deaths[0] > RESTARTS_WITHIN_S:
                deaths.popleft()
            tail = child.tail()
            name, lived_s = child.spec.name, now - child.started_at
            text = f"{name} ended after {lived_s:.1f} s: {how}; its last lines ({child.log}):\n" + _indent(tail)
            self._screen.event("died", text, name=name, how=how, lived_s=round(lived_s, 1), tail=tail)
            if len(deaths) > RESTARTS:
                raise GaveUp(f"{name} died {len(deaths)} times within {RESTARTS_WITHIN_S:g} s; giving up")
            wait_s = FIRST_BACKOFF_S * 2 ** (len(deaths) - 1)
            self._screen.event("restarting", f"{name} is restarted in {wait_s:g} s", name=name, in_s=wait_s)
            await asyncio.sleep(wait_s)
            try:
                await self._bring_up(child)
            except StartFailed as e:
                # The next turn of the loop reports the end and counts it.
                self._screen.event("restart_failed", str(e), name=name)
                child.kill()
            else:
                self._on_change()

    def _part_with(self, child: Child) -> None:
        """It was told to end: it is not brought back, and the rest goes on."""
        name = child.spec.name
        self._left.add(name)
        self._screen.state(name, State.STOPPED)
        self._screen.event("left", f"{name} was drained and has ended; it is not started again", name=name)
        if not any(c.spec.tier is Tier.WORKER and c.spec.name not in self._left for c in self._children):
            text = "no worker is left: requests get NO_WORKER until one joins; start `trimtab up` again for new ones"
            self._screen.event("no_worker_left", text)
        self._on_change()

    async def _end(self, child: Child, patience_s: float | None) -> None:
        if not child.alive:
            return
        self._screen.state(child.spec.name, State.STOPPING)
        child.terminate()
        limit_s = child.spec.drain_s + KILL_AFTER_S if patience_s is None else patience_s
        try:
            await asyncio.wait_for(child.wait(), limit_s)
        except TimeoutError:
            self._screen.event(
                "killed", f"{child.spec.name} did not end within {limit_s:g} s and is killed", name=child.spec.name
            )
            child.kill()
            await child.wait()
        self._screen.state(child.spec.name, State.STOPPED)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._screen.tick()

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            for child in self._children:
                child.rotate()


async def _all(work: Iterable[object]) -> None:
    """Run together; the first failure cancels the others and is raised as it is."""
    tasks = [asyncio.ensure_future(w) for w in work]  # type: ignore[call-overload]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _indent(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) if lines else "    (it wrote nothing)"
