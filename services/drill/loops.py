"""What drills of the loops share: a mesh whose control plane runs its controllers, mixed load, a fault, and what became of it.

Workers that end are brought back. A fault is healed when the right controller has decided so, which the control plane itself says, and the
worker serves again as another process, or as it should.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.drill import loop_figures as figures
from services.drill.admin import Admin, Decided, Telemetry
from services.drill.cases import Case, cases
from services.drill.crowd import Crowd
from services.drill.loop_figures import Trial
from services.drill.mesh import Mesh, Shape, mesh
from services.drill.supervisor import Supervisor
from services.drill.witness import Seen
from services.worker.engines.faults import FAULTS_ENV
from trimtab.kit.process import write_atomically
from trimtab.kit.rpc import cancel_and_wait
from trimtab.messages import Workload

T = TypeVar("T")

REALTIME = 0.3
"""Of streams; the others are BATCH."""
STEP_MS, TOKEN_US = 20.0, 5.0
"""Of simulated engines: a token is a byte there, of which four make one of a model's."""
CALM = {"objectives.ttft_p99_ms": "60000", "objectives.itl_p99_ms": "60000"}
"""Where latency is not what is drilled, no loop is to be troubled by a slow machine."""
LOOP_S = 4.0
"""What a loop may take beside the time that its policy gives it: a report (0.8 s), a tick (1 s), an answer, and a slow machine."""
ASKED = 3
"""Times that a case is asked at most for its right answer."""
HARD = ("restart", "release")
"""Commands that cost something; a policy that is told again costs nothing."""
POLL_S, CLI_S = 0.2, 60.0
PATIENCE_S = 90.0
"""For what is to come in any case; whoever has waited so long waits in vain."""

COMMON = (
    f"two workers, a gateway, a control plane with a Valkey of its own; {REALTIME:.0%} of the streams are realtime; "
    "clients and mesh share the machine's cores"
)


@dataclass(frozen=True, slots=True)
class Demand:
    """`open` streams at a time, of `different` cases."""

    open: int
    different: int


MUCH = Demand(24, 40)


class FaultFile:
    """What the workers' simulated engines read (services.worker.engines.faults)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._faults: dict[str, Mapping[str, int | bool]] = {}

    def set(self, worker: str, **faults: int | bool) -> None:
        self._faults[worker] = faults
        self._write()

    def clear(self, worker: str) -> None:
        if self._faults.pop(worker, None) is not None:
            self._write()

    def _write(self) -> None:
        write_atomically(self.path, json.dumps(self._faults).encode())


class Stand:
    """A mesh under a drill. Belongs to one event loop."""

    def __init__(self, running: Mesh, admin: Admin, faults: FaultFile, supervisor: Supervisor) -> None:
        self.mesh = running
        self.admin = admin
        self.faults = faults
        self.supervisor = supervisor
        self.patience_s = PATIENCE_S
        self._asked: tuple[Case, ...] = ()
        self._right: list[Seen] = []
        self._open = 0

    async def undisturbed(self, demand: Demand, seed: int) -> None:
        """Each case asked once: the right answers. BenchError when one is not to be had."""
        self._asked, self._open = mixed(seed, demand.different), demand.open
        right: dict[int, Seen] = {}
        for _ in range(ASKED):
            # On a machine that real engines fill, a worker may seem dead for a moment.
            missing = [i for i in range(len(self._asked)) if i not in right]
            crowd = Crowd(self.mesh.gateways, [self._asked[i] for i in missing])
            await crowd.ask(demand.open, len(missing).__gt__)
            bad = {o.case: o for o in crowd.outcomes if o.lost or o.faults}
            right |= {missing[i]: seen for i, seen in crowd.seen.items() if i not in bad}
            if not bad:
                break
        else:
            one = next(iter(bad.values()))
            raise BenchError(f"a case failed undisturbed: {one.lost or '; '.join(one.faults)} {one.message}")
        self._right = [right[i] for i in range(len(self._asked))]

    @asynccontextmanager
    async def load(self, trial: Trial) -> AsyncIterator[Crowd]:
        """Streams within the block, without a pause; on leaving it, all of them have ended and are among the trial's.

        Each workload has its own callers, so that one that waits keeps the other from nothing. What the block gets are the realtime ones.
        """
        crowds = {w: self._crowd(w) for w in Workload}
        realtime = max(1, round(REALTIME * self._open))
        callers = {Workload.REALTIME: realtime, Workload.BATCH: max(1, self._open - realtime)}
        going = True
        asking = [asyncio.create_task(crowds[w].ask(callers[w], lambda number: going)) for w in Workload]
        try:
            yield crowds[Workload.REALTIME]
            going = False
            await asyncio.gather(*asking)
        finally:
            for task in asking:
                await cancel_and_wait(task)
            trial.outcomes += [o for crowd in crowds.values() for o in crowd.outcomes]

    def _crowd(self, workload: Workload) -> Crowd:
        mine = [i for i, case in enumerate(self._asked) if case.workload is workload]
        return Crowd(self.mesh.gateways, [self._asked[i] for i in mine], [self._right[i] for i in mine])

    async def until(self, probe: Callable[[Telemetry], T | None], within_s: float) -> T | None:
        """What the probe finds first in what the control plane says; None where it finds nothing in time."""
        deadline = time.monotonic() + within_s
        while True:
            found = probe(await self.admin.telemetry())
            if found is not None or time.monotonic() >= deadline:
                return found
            await asyncio.sleep(POLL_S)

    async def surely(self, what: str, probe: Callable[[Telemetry], T | None]) -> T:
        """The same of something that the drill itself brings about. BenchError without it."""
        found = await self.until(probe, self.patience_s)
        if found is None:
            raise BenchError(f"{what}: not within {self.patience_s:g} s")
        return found

    async def led(self) -> None:
        """Until controllers run and know all workers."""
        await self.surely(
            "a leader that has heard of all workers",
            lambda t: True if t.leads and t.modes and all(self._heard(t, w) for w in self.mesh.workers) else None,
        )

    async def incarnation(self, worker: str) -> str:
        return (await self.admin.telemetry()).nodes[worker].incarnation

    async def detected(self, trial: Trial, controller: str, text: str, since: float, within_s: float) -> bool:
        """Waits for that decision; `since` is a moment of `time.time()`. The trial has it then."""
        found = await self.until(lambda t: decided(t, controller, text, since), within_s)
        if found is not None:
            trial.detected(found.controller, found.at_unix_ms / 1000.0 - since, found.reason, found.evidence)
            trial.did = found.text
        return found is not None

    async def healed(self, trial: Trial, worker: str, before: str, since: float) -> bool:
        """Waits until the worker serves as another process than `before`, for the control plane and for every gateway."""

        def anew(t: Telemetry) -> bool | None:
            return True if t.nodes[worker].serves and t.nodes[worker].incarnation != before else None

        if await self.until(anew, self.patience_s) is None:
            return False
        if await self.mesh.back(worker, self.patience_s) is None:
            return False
        trial.healed_s = time.time() - since
        return True

    async def settle(self, trial: Trial, since: float, *, moves_too: bool = True, also: Sequence[str] = ()) -> None:
        """What controllers did meanwhile beside what the trial has of them, and `also` may have. Without `moves_too` only the HARD count
        against it: where something is the matter, moves of the policy may well be an answer too.
        """
        t = await self.admin.telemetry()
        for d in reversed(t.decisions):
            if d.at_unix_ms / 1000.0 < since or d.text in (trial.did, *also):
                continue
            counts = moves_too or d.text.split()[0] in HARD
            (trial.others if counts else trial.beside).append(f"{d.controller}: {d.text} ({d.reason})")

    async def why(self, *args: str) -> str:
        """What `trimtab why` says, as JSON. BenchError where it fails."""
        argv = ["-m", "trimtab_cli", "why", *args, "--control", self.mesh.control, "--json"]
        code, out, err = await self.mesh.processes.ask(argv, CLI_S)
        if code != 0:
            raise BenchError(f"trimtab why {' '.join(args)} ended with code {code}: {err.strip() or out.strip()}")
        return out

    async def tells_of(self, worker: str, author: str, what: str) -> bool:
        """Whether `trimtab why WORKER` tells that this was done, and by whom."""
        actions = json.loads(await self.why(worker))["actions"]
        return any(a["author"] == author and what in a["what"] for a in actions)

    def _heard(self, t: Telemetry, worker: str) -> bool:
        return worker in t.nodes and t.nodes[worker].serves


def mixed(seed: int, count: int) -> tuple[Case, ...]:
    """Cases of which REALTIME are realtime, spread evenly."""
    rng = random.Random(f"{seed}/mixed")
    kinds = [Workload.REALTIME] * round(REALTIME * count) + [Workload.BATCH] * (count - round(REALTIME * count))
    rng.shuffle(kinds)
    return tuple(replace(case, workload=kind) for case, kind in zip(cases(seed, count), kinds, strict=True))


def decided(t: Telemetry, controller: str, text: str, since: float) -> Decided | None:
    """The first decision of that controller since then whose words begin so, if it was done."""
    found = [
        d
        for d in t.decisions
        if d.controller == controller and d.text.startswith(text) and not d.failed and d.at_unix_ms / 1000.0 >= since
    ]
    return found[-1] if found else None


def simulated(
    policy: Mapping[str, str],
    *,
    flags: Sequence[str] = ("--step-ms", str(STEP_MS), "--token-us", str(TOKEN_US), "--max-num-seqs", "64"),
    own: Mapping[str, Mapping[str, str]] | None = None,
) -> Shape:
    """Two workers and a gateway, and a store of its own."""
    return Shape(2, 1, ["--engine", "simulated", *flags], policy=policy, own=own or {}, valkey=True)


@asynccontextmanager
async def stand(directory: Path, shape: Shape) -> AsyncIterator[Stand]:
    """Led when this begins; everything is ended on leaving."""
    faults = FaultFile(directory / "faults.json")
    shape = replace(shape, environment={**shape.environment, FAULTS_ENV: str(faults.path)})
    async with mesh(directory, shape) as running:
        admin = Admin(running.control)
        supervisor = Supervisor(running.workers.values(), faults.clear)
        tending = asyncio.create_task(supervisor.run())
        try:
            made = Stand(running, admin, faults, supervisor)
            await made.led()
            yield made
            if tending.done():
                tending.result()
        finally:
            await cancel_and_wait(tending)
            await admin.close()


async def conducted(
    name: str,
    expected_s: float,
    course: Callable[[list[Trial], Progress], Awaitable[None]],
    said: Sequence[str],
    common: str = COMMON,
) -> Report:
    """The drill's report. `course` appends each trial as it begins; cancelled, what there is of them is reported."""
    trials: list[Trial] = []
    facts, whole = machine(), True
    with progress(expected_s) as show:
        try:
            await course(trials, show)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    return Report(
        name,
        [figures.as_json(t) for t in trials],
        figures.goals(trials),
        figures.sections(trials),
        [*said, common, *figures.notes(trials)],
        whole,
        facts,
        command(),
        kind="drill",
    )
