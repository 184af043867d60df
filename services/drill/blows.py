"""Carries out strikes on a mesh, as they are planned: each on a worker that is well, while another one stays so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from services.bench.processes import BenchError
from services.drill.mesh import Mesh, frozen
from services.drill.strikes import CUT_S, HANG_S, STALL_S, STOPPED_S, Kind, Strike, Struck, victim

POLL_S = 0.1
BACK_S, WELL_S = 60.0, 120.0
"""What a struck worker gets until all gateways count it as serving (a breaker may stay shut for 30 s by itself), and what a mesh gets until
two are well.
"""


class Blows:
    """`struck` fills as they are over; cancelled, it thaws and heals what is still struck. Belongs to one event loop."""

    def __init__(self, mesh: Mesh) -> None:
        self.struck: list[Struck] = []
        self._mesh = mesh
        self._under_way: dict[asyncio.Task[None], str] = {}

    async def deal(self, strikes: Sequence[Strike]) -> None:
        """All of them, until the last one is over. What fails in one is raised at once."""
        try:
            async with asyncio.TaskGroup() as group:
                for strike in strikes:
                    await asyncio.sleep(strike.pause_s)
                    name = await self._next(strike)
                    task = group.create_task(self._strike(strike.kind, name), name=f"{strike.kind} {name}")
                    self._under_way[task] = name
                    task.add_done_callback(lambda done: self._under_way.pop(done, None))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _next(self, strike: Strike) -> str:
        """Who is next. BenchError when nobody may be struck for long: the mesh has not recovered from what it had."""
        deadline = time.monotonic() + WELL_S
        while time.monotonic() < deadline:
            busy = self._under_way.values()
            name = victim(strike, [w for w in await self._mesh.well() if w not in busy])
            if name is not None:
                return name
            await asyncio.sleep(POLL_S)
        raise BenchError(f"no two workers were well for {WELL_S:g} s: {await self._mesh.states()}")

    async def _strike(self, kind: Kind, name: str) -> None:
        begun = time.monotonic()
        await _hit(self._mesh, kind, name)
        ended = time.monotonic()
        self.struck.append(Struck(kind, name, begun, ended, await self._mesh.back(name, BACK_S)))


async def _hit(mesh: Mesh, kind: Kind, name: str) -> None:
    """The whole of it, to the moment from which the worker may serve again."""
    worker, proxy = mesh.workers[name], mesh.proxy
    match kind:
        case Kind.KILL:
            await worker.kill()
            await worker.start()
        case Kind.DRAIN:
            await worker.leave()
            await worker.start()
        case Kind.STOP:
            async with frozen(worker.child.process.pid):
                await asyncio.sleep(STOPPED_S)
        case Kind.HANG:
            async with frozen(worker.engine_pid()):
                await asyncio.sleep(HANG_S)
        case Kind.CUT | Kind.STALL:
            strike, lasts_s = (proxy.cut, CUT_S) if kind is Kind.CUT else (proxy.stall, STALL_S)
            strike(worker.address)
            try:
                await asyncio.sleep(lasts_s)
            finally:
                proxy.heal(worker.address)
