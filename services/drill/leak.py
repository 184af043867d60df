"""`trimtab drill leak`: KV blocks that nobody gives back, on a worker that has nothing to do.

Under load blocks are lost; when the load pauses they are held by nobody. `heal` has to find that within `heal.leak_s`, drain the worker and
have it started anew, while new streams begin. Then the same with `loops.heal=off`, where nothing may happen, until it is on again.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from services.bench.checkpoint import new_directory
from services.bench.progress import Progress
from services.bench.report import Report
from services.drill.admin import Telemetry
from services.drill.loop_figures import Trial, counted, policy_words
from services.drill.loops import CALM, LOOP_S, MUCH, Demand, Stand, conducted, simulated, stand
from services.drill.options import DrillOptions

LEAK_S = 3
BLOCKS = 50
HEAL = "controller/heal"
POLICY = {**CALM, "loops.heal": "on", "heal.leak_s": str(LEAK_S), "heal.grace_s": "10"}


@dataclass(frozen=True, slots=True)
class Plan:
    """`load_s` before a fault and after it; `off_s` is watched while the loop is off, 0 leaves that out."""

    demand: Demand = MUCH
    load_s: float = 6.0
    off_s: float = 12.0
    expected_s: float = 60.0


FULL = Plan()
QUICK = replace(FULL, demand=Demand(12, 12), load_s=2.0, off_s=LEAK_S + 2.0, expected_s=28.0)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh of simulated engines")
        async with stand(new_directory("drill-leak"), simulated(POLICY)) as s:
            await s.undisturbed(wanted.demand, options.seed)
            show.done(wanted.expected_s / 3)
            await drilled(s, wanted, trials, show)

    said = [
        policy_words(POLICY),
        f"{BLOCKS} KV blocks leak at one worker while it works; times count from its last stream's end",
    ]
    if options.quick:
        said.append(f"--quick: fewer streams, and the loop is off for {wanted.off_s:g} s instead of {FULL.off_s:g}")
    return await conducted("leak", wanted.expected_s, course, said)


async def drilled(s: Stand, wanted: Plan, trials: list[Trial], show: Progress) -> None:
    show.stage("a leak at w0")
    await _healed(s, wanted, trials)
    show.done(wanted.expected_s / 3)
    if wanted.off_s:
        show.stage("a leak at w1, with loops.heal=off")
        await s.mesh.steering.steer({"loops.heal": "off"})
        await _left_alone(s, wanted, trials)
    show.done(wanted.expected_s / 3)


async def _healed(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    trial = Trial("leak", "simulated", "heal", LEAK_S + LOOP_S)
    trials.append(trial)
    before = await s.incarnation("w0")
    begun = time.time()
    idle = await _leak(s, "w0", wanted, trial)
    if await s.detected(trial, "heal", "restart w0", idle, s.patience_s):
        async with s.load(trial):
            await s.healed(trial, "w0", before, idle)
            await asyncio.sleep(wanted.load_s)
    trial.told = await s.tells_of("w0", HEAL, "drain and restart")
    await s.settle(trial, begun)


async def _left_alone(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    trial = Trial("leak, loop off", "simulated", None)
    trials.append(trial)
    before = await s.incarnation("w1")
    await _leak(s, "w1", wanted, trial)
    await asyncio.sleep(wanted.off_s)
    now = (await s.admin.telemetry()).nodes["w1"]
    trial.figures["blocks held after all that time"] = now.held_blocks
    changed = now.incarnation != before or now.held_blocks < BLOCKS
    trial.more.append(counted(trial, "healed_all_the_same", float(changed)))


async def _leak(s: Stand, worker: str, wanted: Plan, trial: Trial) -> float:
    """Under load, which then pauses. When the worker had nothing to do any more, by `time.time()`."""
    async with s.load(trial):
        await asyncio.sleep(wanted.load_s / 2)
        s.faults.set(worker, leak_blocks=BLOCKS)
        await asyncio.sleep(wanted.load_s / 2)
    idle = time.time()

    def leaked(t: Telemetry) -> bool | None:
        n = t.nodes[worker]
        return True if not n.running and not n.waiting and n.held_blocks >= BLOCKS else None

    await s.surely(f"blocks leak at {worker}", leaked)
    # What has leaked stays so; who comes after this process is to be sound.
    s.faults.clear(worker)
    return idle
