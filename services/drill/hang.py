"""`trimtab drill hang`: an engine that stops in the middle of a step, while its worker goes on to answer.

Streams on it go on elsewhere, as gateways see to; `heal` has to find it within `heal.no_progress_s` after it was found hung, and have it
started anew without waiting for it. On simulated engines, and with --vllm on a real one, whose EngineCore process gets a SIGSTOP. Then with
`loops.heal=off`: streams go on all the same, and the worker stays as it is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from services.bench.checkpoint import new_directory
from services.bench.progress import Progress
from services.bench.report import Report
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.drill.loop_figures import Trial, counted, policy_words, present
from services.drill.loops import CALM, LOOP_S, MUCH, Demand, Stand, conducted, simulated, stand
from services.drill.mesh import Shape, frozen
from services.drill.options import DrillOptions
from trimtab.messages import NodeState

NO_PROGRESS_S = 3
HUNG_S = 3.0
"""Until a worker finds its engine hung: `trimtab.progress` waits two seconds, and health looks twice a second."""
REAL_HUNG_S = 12.0
"""Of a real one, whose steps are long at times: four times what the step in flight was expected to take."""
HEAL = "controller/heal"
POLICY = {**CALM, "loops.heal": "on", "heal.no_progress_s": str(NO_PROGRESS_S)}


@dataclass(frozen=True, slots=True)
class Plan:
    """`load_s` before a fault and after it; `off_s` is watched while the loop is off, 0 leaves that out."""

    demand: Demand = MUCH
    load_s: float = 5.0
    off_s: float = 15.0
    expected_s: float = 60.0


FULL = Plan()
QUICK = replace(FULL, demand=Demand(12, 12), load_s=1.5, off_s=HUNG_S + NO_PROGRESS_S + 1.0, expected_s=28.0)
REAL = replace(FULL, demand=Demand(6, 12), load_s=10.0, expected_s=150.0)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL
    engine = None
    if options.vllm:
        model = await asyncio.to_thread(model_path, options.model)
        engine = Engine(model, dtype="float32", max_num_seqs=16, kv_cache_gib=1)

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh of simulated engines")
        async with stand(new_directory("drill-hang"), simulated(POLICY)) as s:
            await s.undisturbed(wanted.demand, options.seed)
            show.done(wanted.expected_s / 3)
            await drilled(s, wanted, trials, show)
        if engine is not None:
            show.stage("starting two workers with vLLM")
            await _real(engine, options.seed, trials, show)

    said = [policy_words(POLICY), "times count from the moment at which the engine stops"]
    if options.quick:
        said.append(f"--quick: fewer streams, and the loop is off for {wanted.off_s:g} s instead of {FULL.off_s:g}")
    return await conducted("hang", wanted.expected_s + (REAL.expected_s if engine else 0.0), course, said)


async def drilled(s: Stand, wanted: Plan, trials: list[Trial], show: Progress) -> None:
    show.stage("w0 hangs")
    trial = Trial("hang", "simulated", "heal", HUNG_S + NO_PROGRESS_S + LOOP_S)
    trials.append(trial)
    async with s.load(trial):
        await asyncio.sleep(wanted.load_s)
        async with _stuck(s, "w0"):
            await healed(s, trial, "w0", wanted)
    show.done(wanted.expected_s / 3)
    if wanted.off_s:
        show.stage("w1 hangs, with loops.heal=off")
        await s.mesh.steering.steer({"loops.heal": "off"})
        await _left_alone(s, wanted, trials)
    show.done(wanted.expected_s / 3)


async def _real(engine: Engine, seed: int, trials: list[Trial], show: Progress) -> None:
    shape = Shape(2, 1, engine.worker_flags(), engine.environment(), POLICY, valkey=True)
    async with stand(new_directory("drill-hang-real"), shape) as s:
        show.done(REAL.expected_s / 3)
        show.stage("streams undisturbed on vLLM")
        await s.undisturbed(REAL.demand, seed)
        show.done(REAL.expected_s / 3)
        show.stage("the engine process of w0 is stopped")
        trial = Trial("hang, vllm", "vllm", "heal", REAL_HUNG_S + NO_PROGRESS_S + LOOP_S)
        trials.append(trial)
        async with s.load(trial):
            await asyncio.sleep(REAL.load_s)
            async with frozen(s.mesh.workers["w0"].engine_pid()):
                await healed(s, trial, "w0", REAL)
        show.done(REAL.expected_s / 3)


async def healed(s: Stand, trial: Trial, worker: str, wanted: Plan) -> None:
    """From the moment at which its engine stands still."""
    before, begun = await s.incarnation(worker), time.time()
    if await s.detected(trial, "heal", f"restart {worker}", begun, s.patience_s):
        await s.healed(trial, worker, before, begun)
        await asyncio.sleep(wanted.load_s)
    trial.told = await s.tells_of(worker, HEAL, "drain and restart")
    # All load is on one worker meanwhile, which is something to say of a real engine's waits.
    await s.settle(trial, begun, moves_too=trial.engine == "simulated")


async def _left_alone(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    trial = Trial("hang, loop off", "simulated", None)
    trials.append(trial)
    before = await s.incarnation("w1")
    async with s.load(trial):
        await asyncio.sleep(wanted.load_s)
        async with _stuck(s, "w1"):
            await s.surely("w1 is found hung", lambda t: True if t.nodes["w1"].state is NodeState.HUNG else None)
            await asyncio.sleep(wanted.off_s)
            now = (await s.admin.telemetry()).nodes["w1"]
        back = await s.mesh.back("w1", s.patience_s)
    changed = now.incarnation != before or now.state is not NodeState.HUNG
    trial.more += [
        counted(trial, "healed_all_the_same", float(changed)),
        present(trial, "serves_once_its_engine_goes_on", back is not None),
    ]


@asynccontextmanager
async def _stuck(s: Stand, worker: str) -> AsyncIterator[None]:
    s.faults.set(worker, stuck=True)
    try:
        yield
    finally:
        s.faults.clear(worker)
