"""`trimtab bench loops --scenario hang`: one of two engines stops in the middle of a step and stays so; the scheduler alone can't help.

The load is more REALTIME than one worker can do, and less than two can. With the loops off the other worker has all of it until the load ends;
with them on `heal` has the first one started anew, and whoever keeps the processes brings it back. Both arms lose the same until the hang is
found. Engines are vLLM, whose engine process gets a SIGSTOP, or with --model simulated ours, which reads of its fault in a file.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace

from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.loops import figures
from services.bench.loops.block import Block, of_json
from services.bench.loops.course import DRAIN_S, HISTORY, Found, alone, calm, chosen, flood, written
from services.bench.loops.load import send
from services.bench.loops.plan import FOUR, Arm, Arrival, Course, arrivals
from services.bench.mixed.workload import TOKENS
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.drill.loops import Stand, simulated, stand
from services.drill.mesh import Shape, frozen
from trimtab.client import Client
from trimtab.messages import Workload

SIMULATED = "simulated"
ROUNDS, QUICK_ROUNDS = 3, 1
CALLERS = 48
NO_PROGRESS_S = 5
POLICY = {"heal.no_progress_s": str(NO_PROGRESS_S), "heal.restarts_per_h": "1000"}
"""Rounds follow one another faster than one worker may be restarted in a mesh that people use."""
COSTS = ("--step-ms", "20", "--token-us", "1000", "--max-num-seqs", "64")
"""Of simulated engines: prompts are what takes their time, so that two get twice as much done as one."""
BYTES = 256
"""The simulated engines' vocabulary."""
BACK_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`course`'s step is the first while of the hang, which lasts until the load ends. `flood_s`: how long it is tried what can be done."""

    course: Course
    flood_s: float
    rounds: int = ROUNDS


# REALTIME alone (0.8 × 0.7 of two workers) is more than one can do, and all of it less than both can.
_MIX = Course(low=0.7, high=0.7, realtime_share=0.8, realtime_prompt=(40, 160), batch_prompt=(100, 300))
REAL = Plan(replace(_MIX, before_s=30.0, step_s=60.0, after_s=90.0), 40.0)
FAST = Plan(replace(_MIX, before_s=10.0, step_s=20.0, after_s=30.0), 15.0)
QUICK = Plan(replace(_MIX, before_s=5.0, step_s=15.0, after_s=15.0), 8.0, QUICK_ROUNDS)


async def run(options: Options) -> Report:
    """Cancelled, it reports the turns that are whole."""
    arms = chosen(options.arms, FOUR[2:])
    fast = options.model == SIMULATED
    vocabulary = BYTES if fast else TOKENS
    plan = QUICK if options.quick else FAST if fast else REAL
    rounds = options.rounds or plan.rounds
    directory = options.resume or new_directory("loops-hang")
    setup = {"scenario": "hang", "model": options.model, "course": asdict(plan.course), "arms": [a.name for a in arms],
             "seed": options.seed}  # fmt: skip
    kept = Checkpoint(directory, setup)
    blocks = [of_json(p["block"]) for p in kept.parts if "block" in p]
    found = next((Found(**p["found"]) for p in kept.parts if "found" in p), None)
    facts, whole, expected_s = machine(), True, plan.course.whole_s + DRAIN_S
    try:
        with progress(rounds * len(arms) * expected_s + 2 * plan.flood_s) as show:
            show.stage("starting a control plane, two workers and a gateway")
            async with stand(directory / "mesh", await _shape(options)) as s, Client(s.mesh.gateways[0]) as client:
                found = found or await _calibrate(s, client, plan, kept, show, vocabulary)
                show.done(plan.flood_s)
                await s.mesh.steering.steer(found.policy)
                for number in range(rounds):
                    # Each arm comes first, second … in turn: what drifts with time falls on all of them.
                    for arm in (*arms[number % len(arms) :], *arms[: number % len(arms)]):
                        if not any((b.arm, b.round) == (arm.name, number) for b in blocks):
                            show.stage(f"round {number + 1}: {arm.name}")
                            block = await _turn(s, client, arm, number, plan.course, found, options.seed, real=not fast)
                            blocks.append(block)
                            kept.add({"block": block.as_json(), **now()})
                        show.done(expected_s)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        whole = False
    return figures.report(
        arms, blocks, found, plan.course, facts, command(), directory, whole, _said(plan.course, fast)
    )


def _said(course: Course, fast: bool) -> list[str]:
    how = "reads of its fault in a file" if fast else "gets a SIGSTOP"
    said = [
        f"two workers; {course.before_s:g} s after a turn begins the engine of one stops ({how}) until the load ends, or it is restarted",
        f"{course.realtime_share:.0%} of the tokens are realtime; heal.no_progress_s={NO_PROGRESS_S}; step and after: the hang's two parts",
    ]
    return [*said, "SIMULATED engines: times between arms compare, milliseconds mean nothing"] if fast else said


async def _shape(options: Options) -> Shape:
    if options.model == SIMULATED:
        return simulated(POLICY, flags=COSTS)
    model = await asyncio.to_thread(model_path, options.model)
    engine = Engine(model, max_num_seqs=32)
    return Shape(2, 1, engine.worker_flags(), engine.environment(), POLICY, valkey=True)


async def _calibrate(s: Stand, client: Client, plan: Plan, kept: Checkpoint, show: Progress, vocabulary: int) -> Found:
    """What a request takes alone, and what both workers get done under the policy that follows from it."""
    await s.mesh.steering.steer(FOUR[2].policy)
    ttft_ms, itl_ms = await alone(client, show, vocabulary)
    lone = Found(0.0, ttft_ms, itl_ms)
    await s.mesh.steering.steer(lone.policy)
    mix = arrivals(replace(plan.course, low=1.0, high=1.0), 20_000.0, "flood")
    found = replace(lone, capacity=await flood(client, mix, CALLERS, plan.flood_s, show, vocabulary))
    kept.add({"found": asdict(found), **now()})
    return found


async def _turn(
    s: Stand, client: Client, arm: Arm, number: int, course: Course, found: Found, seed: int, *, real: bool
) -> Block:
    """The worker that hangs is another one each round."""
    await calm(s.mesh.steering, arm)
    await s.mesh.steering.steer(arm.policy)
    worker = f"w{number % len(s.mesh.workers)}"
    ends, begun, begun_unix_ms = len(s.supervisor.ends), time.monotonic(), time.time() * 1000.0
    mine = arrivals(course, found.capacity, f"{seed}/{number}")
    sending = asyncio.create_task(
        send(client, mine, f"{seed}/{number}/{arm.name}", lambda _: None, TOKENS if real else BYTES)
    )
    try:
        await asyncio.sleep(course.before_s)
        async with _stopped(s, worker, real=real):
            await asyncio.sleep(max(0.0, begun + course.whole_s - time.monotonic()))
        load = await sending
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    drained_s = time.monotonic() - begun
    await _all_back(s, client, arm, TOKENS if real else BYTES)
    entries = await s.mesh.steering.history(HISTORY)
    return Block(
        arm.name,
        number,
        tuple(sorted(load.realtime, key=lambda r: r.at_s)),
        tuple(load.batch_tokens),
        load.batch_failed,
        tuple(written(entries, begun_unix_ms)),
        drained_s,
        tuple(end.back - begun for end in s.supervisor.ends[ends:]),
    )


async def _all_back(s: Stand, client: Client, arm: Arm, vocabulary: int) -> None:
    """Until gateways count every worker as serving, for the next turn. A breaker closes by requests that go well, so there have to be some."""
    deadline = time.monotonic() + BACK_S
    while len(await s.mesh.well()) < len(s.mesh.workers):
        if time.monotonic() > deadline:
            raise BenchError(f"not every worker was back within {BACK_S:g} s of the end of {arm.name!r}")
        few = [Arrival(0.0, Workload.REALTIME, 20, 4)] * (2 * len(s.mesh.workers))
        await send(client, few, f"back/{deadline}", lambda _: None, vocabulary)


@asynccontextmanager
async def _stopped(s: Stand, worker: str, *, real: bool) -> AsyncIterator[None]:
    """Its engine stands still within the block, or until its process is another one."""
    if real:
        async with frozen(s.mesh.workers[worker].engine_pid()):
            yield
        return
    s.faults.set(worker, stuck=True)
    try:
        yield
    finally:
        s.faults.clear(worker)
