"""`trimtab up` follows how many workers its pool wants: it starts more of its own, and drains those of its own that are too many.

Without an answer nothing changes. Workers that others started are counted and left alone. One that can't be started is tried again, later
each time; the mesh goes on without it.
"""

from __future__ import annotations

import asyncio
import time

from controlplane import desired
from controlplane.admin.client import AdminClient
from trimtab.errors import PermissionDenied, TrimtabError, Unauthenticated
from trimtab.kit.config import ConfigError
from trimtab.kit.tls import check_own, tls_of
from trimtab_cli import doors
from trimtab_cli.plan import Plan, Sections, Spec, another_worker, worker_name
from trimtab_cli.progress import Screen
from trimtab_cli.supervisor import StartFailed, Supervisor

AUTHOR = "trimtab up"
LOOK_S = 1.0
DRAIN_S = 30.0
"""What a worker that is too many gets to finish; then what runs there goes on at another one."""
ENDS_S = 20.0
"""On top of that, until it is killed."""
AGAIN_S = (2.0, 60.0)
"""After a worker that could not be started or drained, doubling."""


class Following:
    """Belongs to the supervisor's event loop."""

    def __init__(self, show: Screen, sections: Sections, plan: Plan, supervisor: Supervisor) -> None:
        self._show = show
        self._sections = sections
        self._plan = plan
        self._supervisor = supervisor
        self._pool = sections.worker.pool
        self._starting: set[asyncio.Task[None]] = set()
        self._not_before = 0.0
        self._wait_s = AGAIN_S[0]
        self._said = ""

    async def run(self) -> None:
        """Until cancelled; then no worker is left half started."""
        try:
            async with doors.control(self._plan.control) as admin:
                while True:
                    await self._look(admin)
                    await asyncio.sleep(LOOK_S)
        finally:
            for task in self._starting:
                task.cancel()
            await asyncio.gather(*self._starting, return_exceptions=True)

    async def _look(self, admin: AdminClient) -> None:
        """Never raises: the mesh serves on with the workers that it has."""
        try:
            if time.monotonic() >= self._not_before:
                await self._follow(admin)
        except (PermissionDenied, Unauthenticated) as e:
            self._say("scale_denied", f"warning: what the pool wants is not followed: {e.message}")
        except TrimtabError:
            # No control plane, or one of an older build: that it is away is told elsewhere.
            return
        except Exception as e:
            self._say("scale_failed", f"warning: what the pool wants is not followed: {e!r}")

    async def _follow(self, admin: AdminClient) -> None:
        goal = desired.goal_of(await admin.scale(), self._pool)
        if goal is None or desired.settled(goal):
            return
        fleet = await admin.fleet()
        all_ours = {spec.name for spec in self._supervisor.specs}
        others = desired.there(fleet, self._pool) - all_ours
        most = self._sections.up.workers_limit
        change = desired.change(goal, self._supervisor.workers, others, most=most)
        why = f"pool {self._pool} wants {goal.wanted} workers" + (f" ({goal.why})" if goal.why else "")
        if change.short:
            wants = f"pool {self._pool} wants {goal.wanted} workers"
            self._say(
                "scale_limited", f"warning: {wants}, and {most} are the most that are started here (--workers-limit)"
            )
        if change.more:
            self._start(change.more, all_ours | desired.named(fleet), why, goal.wanted)
        for name in change.fewer:
            await self._drain(admin, name, why, goal.wanted)

    def _start(self, count: int, taken: set[str], why: str, wanted: int) -> None:
        beside = self._supervisor.specs
        for _ in range(count):
            number = desired.free_number(worker_name, taken)
            try:
                check_own("worker", worker_name(number), tls_of(self._sections.worker, self._sections.up.mesh))
                spec, notes = another_worker(self._sections, self._plan, number, beside)
            except ConfigError as e:
                self._failed(worker_name(number), "\n".join(e.faults))
                return
            beside.append(spec)
            taken.add(spec.name)
            for note in notes:
                self._show.event("port_moved", note)
            self._show.event("scaling", f"{why}: {spec.name} is started", name=spec.name, to=wanted, start=True)
            task = asyncio.create_task(self._add(spec))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _add(self, spec: Spec) -> None:
        try:
            await self._supervisor.add(spec)
        except StartFailed as e:
            self._failed(spec.name, "\n    ".join([f"{e}; its last lines ({e.log}):", *e.tail]))
        except OSError as e:
            self._failed(spec.name, str(e))
        else:
            self._wait_s = AGAIN_S[0]

    async def _drain(self, admin: AdminClient, name: str, why: str, wanted: int) -> None:
        answer = await admin.drain(name, int(DRAIN_S * 1000), author=AUTHOR, reason=why)
        if not answer.done:
            self._failed(name, f"it is not drained: {answer.reason}: {answer.message}")
            return
        self._supervisor.dismiss(name, DRAIN_S + ENDS_S)
        self._show.event("scaling", f"{why}: {name} is drained", name=name, to=wanted, start=False)

    def _failed(self, name: str, why: str) -> None:
        """Later again."""
        self._not_before = time.monotonic() + self._wait_s
        text = f"{name}: {why}\n  tried again in {self._wait_s:g} s, if it is wanted still"
        self._show.event("scale_failed", text, name=name, why=why, again_in_s=self._wait_s)
        self._wait_s = min(2 * self._wait_s, AGAIN_S[1])

    def _say(self, kind: str, text: str) -> None:
        """Once, until it is something else."""
        if text != self._said:
            self._said = text
            self._show.event(kind, text)
