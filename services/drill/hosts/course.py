"""`trimtab drill hosts`: a mesh over three hosts with mTLS; a link is cut under load, without a word to anybody, and healed.

Control plane, Valkey, gateway and clients are on one host, workers on two others. First the link of one of the workers' hosts: its streams go on
at the worker on the other host, exactly. Then the link of the gateway's own host: nothing can go on, so the workers let its requests go, and the
streams go on where they were once the link is back. In both cuts the policy is changed; afterwards everybody holds it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from services.bench.checkpoint import new_directory
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.drill.cases import Case, cases
from services.drill.crowd import Crowd
from services.drill.hosts import figures
from services.drill.hosts.figures import AGREED, BACK, FREED, MISSED, NOTICED, Cut
from services.drill.hosts.mesh import GATEWAY, POLL_S, SERVING, Mesh, Shape, mesh
from services.drill.hosts.namespaces import enter
from services.drill.options import DrillOptions
from services.drill.witness import Seen
from trimtab.kit.rpc import cancel_and_wait
from trimtab.messages import Workload

STEP_MS, TOKEN_US = 20.0, 5.0
PATIENCE_S = 60.0
"""For what is to come in any case."""
HELD_S = 15.0
"""So long a link stays cut at most until the workers behind it have let go."""
LONG_TOKENS = 400
"""Of the streams that the gateway's cut falls on: eight seconds, so that none ends by itself before it is let go."""
FIELD = "objectives.ttft_p99_ms"
"""What is changed meanwhile: nobody acts on it while the loops are off."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`open` streams at a time, of `different` cases; workers are cut off once each has `each` of them; a link is cut for `cut_s` at least;
    `load_s` of load after all are back. `long` streams run when the gateway is cut off.
    """

    open: int = 60
    different: int = 80
    each: int = 10
    long: int = 40
    cut_s: float = 8.0
    load_s: float = 5.0
    expected_s: float = 50.0


FULL = Plan()
QUICK = Plan(open=16, different=16, each=2, long=8, cut_s=3.0, load_s=0.5, expected_s=35.0)
REAL = Plan(open=12, different=12, each=4, long=0, cut_s=8.0, load_s=5.0, expected_s=240.0)


@dataclass(slots=True)
class Found:
    cuts: list[Cut] = field(default_factory=list)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    # Nothing has been started yet, and gRPC has no thread: they would stay outside.
    enter(["-m", "trimtab_cli", *sys.argv[1:]])
    wanted = QUICK if options.quick else FULL
    engine = await _engine(options) if options.vllm else None
    found, facts, whole = Found(), machine(), True
    with progress(wanted.expected_s + (REAL.expected_s if engine else 0.0)) as show:
        try:
            await _simulated(wanted, options.seed, found, show)
            if engine is not None:
                await _real(engine, options.seed, found, show)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    said = [
        "hosts are network namespaces of one machine, on one switch; a link that is cut drops everything and tells nobody",
        "on the first host: control plane, Valkey, gateway g0, clients; on the others: workers; every connection has mTLS",
        f"simulated engines take {STEP_MS:g} ms for a step; {wanted.open} streams are open at a time, of both workloads",
        "a gap lies between a stream's last token before it moved and its first one after it; others are moves that the cut did not cause",
        *([f"--quick: {wanted.open} streams instead of {FULL.open}"] if options.quick else []),
        *figures.notes(found.cuts),
    ]
    arms, tables = [figures.as_json(c) for c in found.cuts], figures.sections(found.cuts)
    return Report("hosts", arms, figures.goals(found.cuts), tables, said, whole, facts, command(), kind="drill")


async def _engine(options: DrillOptions) -> Engine:
    model = await asyncio.to_thread(model_path, options.model)
    return Engine(model, dtype="float32", max_num_seqs=16, kv_cache_gib=1)


def simulated(wanted: Plan) -> Shape:
    """Three workers on two hosts, of which one alone can hold all streams."""
    room = str(2 * max(wanted.open, wanted.long))
    flags = ["--engine", "simulated", "--step-ms", str(STEP_MS), "--token-us", str(TOKEN_US), "--max-num-seqs", room]
    policy = {"batch.active": room, "batch.hard_cap": room, "paths.realtime_max_running": room}
    return Shape({"b": ("w0", "w1"), "c": ("w2",)}, flags, policy=policy)


async def _simulated(wanted: Plan, seed: int, found: Found, show: Progress) -> None:
    show.stage("starting a mesh of simulated engines on three hosts")
    async with mesh(new_directory("drill-hosts"), simulated(wanted)) as running:
        show.done(0.3 * wanted.expected_s)
        drill = Drill(running, wanted, seed, "simulated", found)
        await drill.undisturbed()
        show.done(0.2 * wanted.expected_s)
        show.stage("the link of the host of w0 and w1 is cut under load")
        await drill.workers_cut("b", ("w0", "w1"))
        show.done(0.25 * wanted.expected_s)
        show.stage("the link of the gateway's host is cut under load")
        await drill.gateway_cut()
        show.done(0.25 * wanted.expected_s)
        running.check()


async def _real(engine: Engine, seed: int, found: Found, show: Progress) -> None:
    show.stage("starting two workers with vLLM, on two hosts")
    shape = Shape({"b": ("w0",), "c": ("w1",)}, engine.worker_flags(), engine.environment())
    async with mesh(new_directory("drill-hosts-real"), shape) as running:
        show.done(0.3 * REAL.expected_s)
        drill = Drill(running, REAL, seed, "vllm", found)
        await drill.undisturbed()
        show.stage("the link of a host with a vLLM worker is cut under load")
        await drill.workers_cut("b", ("w0",))
        show.done(0.7 * REAL.expected_s)
        running.check()


class Drill:
    """One mesh, and what is asked of it."""

    def __init__(self, running: Mesh, wanted: Plan, seed: int, engine: str, found: Found) -> None:
        self._mesh = running
        self._wanted = wanted
        self._engine = engine
        self._found = found
        self._cases = cases(seed, wanted.different)
        self._long = lasting(seed, wanted.long)
        self._right: list[Seen] = []
        self._right_long: list[Seen] = []
        self._sets = 60_000

    async def undisturbed(self) -> None:
        """The right answer of each case. BenchError when one is not to be had."""
        self._right, self._right_long = await asyncio.gather(
            self._answers(self._cases, self._wanted.open), self._answers(self._long, self._wanted.long)
        )

    async def _answers(self, asked: Sequence[Case], concurrency: int) -> list[Seen]:
        crowd = Crowd([self._mesh.gateway], asked)
        await crowd.ask(concurrency, len(asked).__gt__)
        if bad := next((o for o in crowd.outcomes if o.lost or o.faults), None):
            raise BenchError(f"case {bad.case} failed undisturbed: {bad.lost} {bad.message} {'; '.join(bad.faults)}")
        return [crowd.seen[i] for i in range(len(asked))]

    async def workers_cut(self, host: str, behind: Sequence[str]) -> None:
        """Everything that runs there has another worker to go to."""
        cut = Cut(f"link of {' and '.join(behind)}", self._engine)
        self._found.cuts.append(cut)
        async with self._load(cut):
            await self._surely("requests on each worker behind the link", lambda: self._each_holds(behind))
            async with self._cut(cut, host, behind):
                pass
            await asyncio.sleep(self._wanted.load_s)
        cut.whole = True

    async def gateway_cut(self) -> None:
        """Nobody is left to send to: what runs is let go there, and goes on here once the link is healed."""
        cut = Cut("link of the gateway", self._engine)
        self._found.cuts.append(cut)
        crowd = Crowd([self._mesh.gateway], self._long, self._right_long)
        count, everywhere = len(self._long), tuple(self._mesh.workers)
        asking = asyncio.create_task(crowd.ask(count, count.__gt__))
        try:
            await self._surely("all long streams under way", lambda: self._hold(everywhere, count))
            ended = await self._mesh.ended(everywhere, "ok")
            async with self._cut(cut, "front", everywhere):
                cut.ran_on = round(await self._mesh.ended(everywhere, "ok") - ended)
            await asking
        finally:
            await cancel_and_wait(asking)
            cut.outcomes += crowd.outcomes
        cut.whole = True

    @asynccontextmanager
    async def _load(self, cut: Cut) -> AsyncIterator[None]:
        """Streams within the block, without a pause; on leaving it all of them have ended, and are the cut's."""
        going = True
        crowd = Crowd([self._mesh.gateway], self._cases, self._right)
        asking = asyncio.create_task(crowd.ask(self._wanted.open, lambda number: going))
        try:
            yield
            going = False
            await asking
        finally:
            await cancel_and_wait(asking)
            cut.outcomes += crowd.outcomes

    @asynccontextmanager
    async def _cut(self, cut: Cut, host: str, behind: Sequence[str]) -> AsyncIterator[None]:
        """Cut until everybody has noticed; then the block; then healed, until all are one again. The policy is changed meanwhile."""
        network, admin = self._mesh.network, self._mesh.admin
        before = (await admin.fleet()).desired
        cut.begun_there = round(await self._mesh.held(behind))
        cut.behind = frozenset(behind)
        cut.begun = cut.ended = time.monotonic()
        await network.cut(host)
        try:
            await _together(
                self._clock(cut, NOTICED, lambda: self._unheard(behind)),
                self._clock(cut, MISSED, lambda: self._away(behind)),
                self._clock(cut, FREED, lambda: self._hold(behind, 0), HELD_S),
                self._change(),
                asyncio.sleep(self._wanted.cut_s),
            )
            yield
        finally:
            await network.heal(host)
            cut.ended = time.monotonic()
        everybody = frozenset((*self._mesh.workers, GATEWAY))

        async def agreed() -> bool:
            fleet = await admin.fleet()
            return fleet.desired > before and not fleet.behind(everybody)

        await _together(self._clock(cut, BACK, self._mesh.well), self._clock(cut, AGREED, agreed))

    async def _clock(
        self, cut: Cut, what: str, probe: Callable[[], Awaitable[bool]], within_s: float = PATIENCE_S
    ) -> None:
        cut.seconds[what] = await _until(probe, within_s)

    async def _surely(self, what: str, probe: Callable[[], Awaitable[bool]]) -> None:
        if await _until(probe, PATIENCE_S) is None:
            raise BenchError(f"{what}: not within {PATIENCE_S:g} s")

    async def _change(self) -> None:
        self._sets += 1
        await self._mesh.admin.set(FIELD, str(self._sets))

    async def _unheard(self, names: Sequence[str]) -> bool:
        states = await self._mesh.states()
        return not any(states.get(name) == SERVING for name in names)

    async def _away(self, names: Sequence[str]) -> bool:
        return (await self._mesh.admin.fleet()).holds.keys().isdisjoint(names)

    async def _each_holds(self, names: Sequence[str]) -> bool:
        return all([await self._mesh.held([name]) >= self._wanted.each for name in names])

    async def _hold(self, names: Sequence[str], count: int) -> bool:
        return await self._mesh.held(names) == count


def lasting(seed: int, count: int) -> tuple[Case, ...]:
    """Cases of LONG_TOKENS each, of both workloads in turn."""
    return tuple(
        replace(
            case,
            sampling=replace(case.sampling, max_tokens=LONG_TOKENS, stop=()),
            workload=Workload.BATCH if number % 2 else Workload.REALTIME,
        )
        for number, case in enumerate(cases(seed, count))
    )


async def _until(probe: Callable[[], Awaitable[bool]], within_s: float) -> float | None:
    """Seconds until it says yes; None where it does not in time."""
    begun = time.monotonic()
    while time.monotonic() - begun < within_s:
        if await probe():
            return time.monotonic() - begun
        await asyncio.sleep(POLL_S)
    return None


async def _together(*work: Awaitable[object]) -> None:
    """All of it; the first failure ends the others and is raised."""

    async def one(each: Awaitable[object]) -> None:
        await each

    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(one(each))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
