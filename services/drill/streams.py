"""`trimtab drill streams`: workers are killed, stopped, cut off and drained under many streams, and no client may notice more than a pause.

Three arms on one mesh of simulated engines: each case asked once undisturbed, which gives the right answers; then strikes at random, under
streams of these cases; then kills with `resume.attempts` = 1, where streams must be lost, or the drill would prove nothing. With --real the
first two on vLLM in float32, with a kill and a hung engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.bench.checkpoint import new_directory
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.drill import figures
from services.drill.blows import Blows
from services.drill.cases import Case, cases
from services.drill.crowd import Crowd
from services.drill.figures import GOAL_REAL_STREAMS, GOAL_STREAMS, OFF, STRIKES, UNDISTURBED, Arm
from services.drill.mesh import Mesh, Shape, mesh
from services.drill.options import DrillOptions
from services.drill.strikes import Kind, Strike, plan
from services.drill.witness import Seen
from trimtab.kit.cli import ExitCode

COUNTED = {
    "resumes": ("trimtab_gateway_resumes", "cause"),
    "retries": ("trimtab_gateway_retries", ""),
    "breaker_trips": ("trimtab_gateway_breaker_trips", "dimension"),
    "dropped_pieces": ("trimtab_gateway_dropped_pieces", ""),
    "shed": ("trimtab_gateway_shed", "why"),
}
STEP_MS, TOKEN_US = 20.0, 5.0
"""A token of a simulated engine is a byte, of which four make one of a model's: 20 microseconds for these."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`streams` at least, `open` at a time, of `different` cases; each kind of strike `rounds` times. `off` kills while moving is off."""

    streams: int = GOAL_STREAMS
    different: int = 200
    open: int = 150
    rounds: int = 8
    off: int = 4
    expected_s: float = 180.0


FULL = Plan()
QUICK = replace(FULL, rounds=3, off=2, expected_s=75.0)
REAL_OPEN, REAL_EXPECTED_S = 8, 160.0


@dataclass(slots=True)
class Found:
    arms: list[Arm] = field(default_factory=list)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    if 0 < options.real < GOAL_REAL_STREAMS:
        raise BenchError(f"--real {options.real}: fewer than {GOAL_REAL_STREAMS} streams prove little", ExitCode.USAGE)
    engine = await _engine(options) if options.real else None
    wanted = QUICK if options.quick else FULL
    found, facts, whole = Found(), machine(), True
    with progress(wanted.expected_s + (REAL_EXPECTED_S if engine else 0.0)) as show:
        try:
            await _simulated(wanted, options.seed, found, show)
            if engine is not None:
                await _real(engine, options, found, show)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    return _report(found, wanted, options, facts=facts, whole=whole)


async def _engine(options: DrillOptions) -> Engine:
    model = await asyncio.to_thread(model_path, options.model)
    return Engine(model, dtype="float32", max_num_seqs=16, kv_cache_gib=1)


def simulated(concurrency: int) -> Shape:
    """A mesh of which one worker alone can hold all streams: what is asked is whether they survive, not how they queue."""
    room = str(2 * concurrency)
    flags = ["--step-ms", str(STEP_MS), "--token-us", str(TOKEN_US), "--max-num-seqs", room]
    policy = {
        "batch.active": room,
        "batch.hard_cap": room,
        "paths.realtime_max_running": room,
        # Whoever takes over the streams of others is slow for a moment, and so are all while processes start on two cores.
    }
    return Shape(workers=3, gateways=2, flags=["--engine", "simulated", *flags], policy=policy)


async def _simulated(wanted: Plan, seed: int, found: Found, show: Progress) -> None:
    asked = cases(seed, wanted.different)
    show.stage("starting a mesh of simulated engines")
    async with mesh(new_directory("drill-streams"), simulated(wanted.open)) as running:
        right = await _undisturbed(running, asked, wanted.open, "simulated", found, show)
        show.done(0.1 * wanted.expected_s)
        strikes = plan(seed, wanted.rounds)
        show.stage(f"{len(strikes)} strikes under {wanted.open} open streams")
        await _disturbed(running, asked, right, wanted, strikes, Arm(STRIKES, "simulated"), found)
        show.done(0.7 * wanted.expected_s)
        show.stage("moving streams is off: kills must lose some")
        await running.steering.steer({"resume.attempts": "1"})
        kills = plan(seed, wanted.off, (Kind.KILL,))
        fewer = replace(wanted, streams=wanted.open)
        await _disturbed(running, asked, right, fewer, kills, Arm(OFF, "simulated"), found)
        running.check()
        show.done(0.2 * wanted.expected_s)


async def _real(engine: Engine, options: DrillOptions, found: Found, show: Progress) -> None:
    shape = Shape(workers=2, gateways=1, flags=engine.worker_flags(), environment=engine.environment())
    asked = cases(options.seed, options.real)
    show.stage("starting two workers with vLLM")
    async with mesh(new_directory("drill-streams-real"), shape) as running:
        show.done(0.2 * REAL_EXPECTED_S)
        right = await _undisturbed(running, asked, REAL_OPEN, "vllm", found, show)
        show.done(0.4 * REAL_EXPECTED_S)
        show.stage("a kill and a hung engine")
        strikes = [replace(strike, pause_s=5.0) for strike in plan(options.seed, 1, (Kind.KILL, Kind.HANG))]
        wanted = Plan(streams=options.real, different=options.real, open=REAL_OPEN)
        await _disturbed(running, asked, right, wanted, strikes, Arm(STRIKES, "vllm"), found)
        running.check()
        show.done(0.4 * REAL_EXPECTED_S)


async def _undisturbed(
    running: Mesh, asked: Sequence[Case], concurrency: int, engine: str, found: Found, show: Progress
) -> list[Seen]:
    """The right answer of each case. BenchError when one is not to be had."""
    show.stage(f"{len(asked)} streams undisturbed")
    arm = Arm(UNDISTURBED, engine)
    found.arms.append(arm)
    crowd = Crowd(running.gateways, asked)
    arm.outcomes = crowd.outcomes
    begun = time.monotonic()
    await crowd.ask(concurrency, lambda number: number < len(asked))
    arm.wall_s = time.monotonic() - begun
    if bad := next((o for o in crowd.outcomes if o.lost or o.faults), None):
        said = "; ".join([*([f"{bad.lost}: {bad.message}"] if bad.lost else []), *bad.faults])
        raise BenchError(f"case {bad.case} failed undisturbed: {said}")
    return [crowd.seen[i] for i in range(len(asked))]


async def _disturbed(
    running: Mesh,
    asked: Sequence[Case],
    right: Sequence[Seen],
    wanted: Plan,
    strikes: Sequence[Strike],
    arm: Arm,
    found: Found,
) -> None:
    """Streams until there were enough of them and all strikes are over; cut short, the arm has what there was."""
    found.arms.append(arm)
    crowd, blows = Crowd(running.gateways, asked, right), Blows(running)
    arm.outcomes, arm.struck = crowd.outcomes, blows.struck
    before = await _counts(running)
    begun = time.monotonic()
    try:
        async with asyncio.TaskGroup() as group:
            dealing = group.create_task(blows.deal(strikes))
            group.create_task(crowd.ask(wanted.open, lambda number: number < wanted.streams or not dealing.done()))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    finally:
        arm.wall_s = time.monotonic() - begun
    after = await _counts(running)
    arm.counts = {
        name: {label: count - before[name].get(label, 0.0) for label, count in counts.items()}
        for name, counts in after.items()
    }


async def _counts(running: Mesh) -> dict[str, dict[str, float]]:
    return {name: await running.counted(metric, label) for name, (metric, label) in COUNTED.items()}


def _report(found: Found, wanted: Plan, options: DrillOptions, *, facts: dict[str, object], whole: bool) -> Report:
    said = [
        f"simulated engines take {STEP_MS:g} ms for a step; {wanted.open} streams are open at a time, of {wanted.different} different cases",
        "a gap lies between a stream's last token before it moved and its first one after it",
        "noticed: from the blow to the first stream that had gone on elsewhere; back: from the blow's end until all gateways called it serving",
        "two at once: another blow fell within the gap, or so shortly before that the stream may have been sent there",
        "their policy: " + ", ".join(f"{name}={value}" for name, value in simulated(wanted.open).policy.items()),
        "gateways, workers, control plane and clients share the machine's cores",
    ]
    if options.quick:
        said.append(f"--quick: each kind of strike {wanted.rounds} times instead of {FULL.rounds}")
    return Report(
        "streams",
        [figures.as_json(arm) for arm in found.arms],
        figures.goals(found.arms),
        figures.sections(found.arms),
        [*said, *figures.notes(found.arms)],
        whole,
        facts,
        command(),
        kind="drill",
    )
