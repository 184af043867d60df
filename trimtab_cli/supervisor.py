"""Starts a mesh's processes, brings back those that die, and ends them in order.

Invariants: nothing that it started outlives it (each child also watches its parent, should this process be killed); a
process that dies again and again ends the whole mesh rather than flapping for ever; a worker that joined later ends itself alone. A worker
that ends with exit code 0 was told to, by `trimtab drain` or a SIGTERM, and stays away; with EXIT_RESTART it was told to come back, and does
so at once: that is no death.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

from trimtab.kit.process import EXIT_RESTART
from trimtab_cli.child import Child, ended_how, keep_old
from trimtab_cli.plan import Spec, Tier
from trimtab_cli.probe import until_healthy
from trimtab_cli.progress import Screen, State

RESTARTS = 5
RESTARTS_WITHIN_S = 60.0
FIRST_BACKOFF_S = 0.2
TICK_S = 0.25
ROTATE_EVERY_S = 30.0
STORE_S = 20.0
"""A control plane that says for so long that its store does not answer is not waited for any longer."""
NO_STORE = ("warning store away", "warning policy not loaded yet")
"""What a control plane's log says where its store does not answer."""
WARNS = ("warning ", "error ", "critical ")
STORE_WORDS = (
    "its store does not answer: is the address right (--redis), does the store run there, and does it take the password? "
    "Without --redis `trimtab up` brings one of its own"
)
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
        self._logs = logs
        self._screen = screen
        self._ready_s = ready_s
        self._on_change = on_change
        self._children: list[Child] = []
        self._joined: set[str] = set()
        """Those that `add` started."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[None] | None = None
        """Fails with what ends the mesh, while it is watched."""
        for spec in specs:
            self._new(spec)

    @property
    def specs(self) -> list[Spec]:
        """Of all that there are, those included that start or are being brought back; those that have left are not."""
        return [child.spec for child in self._children]

    @property
    def pids(self) -> dict[str, int]:
        """Of all but those that have left."""
        return {child.spec.name: child.pid for child in self._children if child.pid}

    @property
    def workers(self) -> list[str]:
        """Their names, without those that were told to end."""
        return [c.spec.name for c in self._children if c.spec.tier is Tier.WORKER and not c.leaving]

    async def start(self) -> None:
        """All of them healthy, or StartFailed. The store comes first; the rest find each other in any order."""
        ticker = asyncio.create_task(self._tick())
        try:
            for _, group in groupby(self._children, key=lambda c: c.spec.tier is Tier.STORE):
                await _all(self._bring_up(child) for child in group)
        finally:
            ticker.cancel()

    async def watch(self) -> None:
        """Tends the children until GaveUp, those too that join meanwhile."""
        self._over = asyncio.get_running_loop().create_future()
        try:
            for child in self._children:
                self._do(self._tend(child))
            self._do(self._rotate())
            await self._over
        finally:
            self._over = None
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def add(self, spec: Spec) -> None:
        """One more, while the others are watched: healthy on return. StartFailed leaves nothing of it."""
        child = self._new(spec)
        self._joined.add(spec.name)
        try:
            await self._bring_up(child)
        except BaseException:
            child.kill()
            self._forget(child)
            raise
        self._on_change()
        self._do(self._tend(child))

    def dismiss(self, name: str, within_s: float) -> None:
        """It was told to end: it is not brought back, however it ends, and is killed where it is there for longer than that."""
        for child in self._children:
            if child.spec.name == name and not child.leaving:
                child.leaving = True
                self._do(self._see_off(child, within_s))

    async def drain(self, *, patience_s: float | None = None) -> None:
        """End everything: gateways first, the store last. A process that overstays its drain time is killed."""
        try:
            last_first = sorted(self._children, key=lambda c: c.spec.tier, reverse=True)
            for _, group in groupby(last_first, key=lambda c: c.spec.tier):
                await asyncio.gather(*(self._end(child, patience_s) for child in group))
        finally:
            self.kill()

    def kill(self) -> None:
        """End everything now, with whatever the children started themselves."""
        for child in self._children:
            child.kill()

    def _new(self, spec: Spec) -> Child:
        child = Child(spec, self._logs)
        self._children.append(child)
        keep_old(child.log, move=True)
        self._screen.add(spec.name, lambda: last_words(child)[:200])
        return child

    def _forget(self, child: Child) -> None:
        self._children.remove(child)
        self._joined.discard(child.spec.name)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Beside everything else, for as long as the children are watched; what it raises ends that."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or (failed := task.exception()) is None:
            return
        if self._over is not None and not self._over.done():
            self._over.set_exception(failed)

    async def _bring_up(self, child: Child) -> None:
        self._screen.state(child.spec.name, State.STARTING)
        await child.start()
        ended = asyncio.create_task(child.wait())
        healthy = asyncio.create_task(until_healthy(child.spec))
        try:
            waits_for_store = await self._patiently(child, ended, healthy)
            if waits_for_store:
                why = f"was not healthy after {STORE_S:g} s: {STORE_WORDS}"
            elif ended.done():
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

    async def _patiently(self, child: Child, ended: asyncio.Task[int], healthy: asyncio.Task[None]) -> bool:
        """Until it has ended, is healthy, or has had its time. True where it is given up earlier: what it waits for, waiting does not bring."""
        tasks, left_s = {ended, healthy}, self._ready_s
        if child.spec.tier is Tier.CONTROL and left_s > STORE_S:
            done, _ = await asyncio.wait(tasks, timeout=STORE_S, return_when=asyncio.FIRST_COMPLETED)
            if not done and last_words(child).startswith(NO_STORE):
                return True
            left_s -= STORE_S
        await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        return False

    async def _tend(self, child: Child) -> None:
        deaths: deque[float] = deque()
        served = True
        while True:
            code = await child.wait()
            how, now = ended_how(code), time.monotonic()
            child.kill()
            name, lived_s = child.spec.name, now - child.started_at
            if child.spec.tier is Tier.WORKER and (code == 0 or child.leaving):
                self._part_with(child)
                return
            if child.spec.tier is Tier.WORKER and code == EXIT_RESTART and served:
                text = f"{name} was told to restart after {lived_s:.1f} s, and is started anew"
                self._screen.event("restarting", text, name=name, in_s=0, commanded=True)
                served = await self._again(child)
                continue
            deaths.append(now)
            while now - deaths[0] > RESTARTS_WITHIN_S:
                deaths.popleft()
            tail = child.tail()
            text = f"{name} ended after {lived_s:.1f} s: {how}; its last lines ({child.log}):\n" + _indent(tail)
            self._screen.event("died", text, name=name, how=how, lived_s=round(lived_s, 1), tail=tail)
            if len(deaths) > RESTARTS and name in self._joined:
                self._forget(child)
                self._screen.state(name, State.FAILED)
                text = f"{name} died {len(deaths)} times within {RESTARTS_WITHIN_S:g} s, and is not brought back"
                self._screen.event("worker_given_up", text, name=name)
                self._on_change()
                return
            if len(deaths) > RESTARTS:
                raise GaveUp(f"{name} died {len(deaths)} times within {RESTARTS_WITHIN_S:g} s; giving up")
            wait_s = FIRST_BACKOFF_S * 2 ** (len(deaths) - 1)
            self._screen.event("restarting", f"{name} is restarted in {wait_s:g} s", name=name, in_s=wait_s)
            await asyncio.sleep(wait_s)
            served = await self._again(child)

    async def _again(self, child: Child) -> bool:
        """Its next incarnation. False where it did not become healthy: its end is the next that is waited for, and counts as a death."""
        try:
            await self._bring_up(child)
        except StartFailed as e:
            self._screen.event("restart_failed", str(e), name=child.spec.name)
            child.kill()
            return False
        self._on_change()
        return True

    def _part_with(self, child: Child) -> None:
        """It was told to end: it is not brought back, and the rest goes on."""
        name = child.spec.name
        self._forget(child)
        self._screen.state(name, State.STOPPED)
        self._screen.event("left", f"{name} was drained and has ended; it is not started again", name=name)
        if not any(c.spec.tier is Tier.WORKER for c in self._children):
            text = "no worker is left: requests get NO_WORKER until one joins; start `trimtab up` again for new ones"
            self._screen.event("no_worker_left", text)
        self._on_change()

    async def _end(self, child: Child, patience_s: float | None) -> None:
        if not child.alive:
            return
        self._screen.state(child.spec.name, State.STOPPING)
        child.terminate()
        await self._see_off(child, child.spec.drain_s + KILL_AFTER_S if patience_s is None else patience_s)
        self._screen.state(child.spec.name, State.STOPPED)

    async def _see_off(self, child: Child, limit_s: float) -> None:
        """Until it has ended, by itself or killed."""
        try:
            await asyncio.wait_for(child.wait(), limit_s)
        except TimeoutError:
            self._screen.event(
                "killed", f"{child.spec.name} did not end within {limit_s:g} s and is killed", name=child.spec.name
            )
            child.kill()
            await child.wait()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._screen.tick()

    async def _rotate(self) -> None:
        while True:
            await asyncio.sleep(ROTATE_EVERY_S)
            for child in list(self._children):
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


def last_words(child: Child) -> str:
    """The newest line of its log. Of ours that load nothing, the newest that warns: what comes after it is about something else."""
    lines = child.tail()
    if child.spec.tier in (Tier.CONTROL, Tier.GATEWAY):
        warns = [line for line in lines if line.startswith(WARNS)]
        lines = warns or lines
    return lines[-1] if lines else ""


def _indent(lines: list[str]) -> str:
    return "\n".join(f"    {line}" for line in lines) if lines else "    (it wrote nothing)"
