"""`trimtab drill inversion`: an engine that runs by no policy, and serves BATCH first.

One worker's engine acknowledges every policy and obeys none, as one that has missed it: REALTIME waits behind a backlog of BATCH. The mesh
has to find that by how long both wait there, and `heal` tells that worker its policy again, within `heal.inversion_s` and the windows of five
seconds that it looks at. Then the same with `loops.heal=off`, where REALTIME goes on waiting.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from services.bench.checkpoint import new_directory
from services.bench.progress import Progress
from services.bench.report import Report
from services.drill.loop_figures import Trial, policy_words, present
from services.drill.loops import CALM, LOOP_S, MUCH, TOKEN_US, Demand, Stand, conducted, simulated, stand
from services.drill.options import DrillOptions
from trimtab import measures

INVERSION_S, WINDOW_S = 5, 5.0
ACTIVE = "4"
"""Requests that an engine runs: few, so that others wait."""
POLICY = {
    **CALM,
    "loops.heal": "on",
    "heal.inversion_s": str(INVERSION_S),
    "batch.active": ACTIVE,
    "batch.hard_cap": ACTIVE,
    "admission.engine_queue": "32",
}
FLAGS = ("--step-ms", "5", "--token-us", str(TOKEN_US), "--max-num-seqs", "16")
WITHIN_S = INVERSION_S + 3 * WINDOW_S + LOOP_S
"""The window in which it begins says little of it, and what is looked at spans `heal.inversion_s` in whole windows."""
LEAST = 10
"""Requests of each workload that say how long both wait."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Plan:
    """`load_s` before a fault and after it; `off_s` is watched while the loop is off, 0 leaves that out."""

    demand: Demand = MUCH
    load_s: float = 6.0
    off_s: float = 24.0
    expected_s: float = 75.0


FULL = Plan()
QUICK = replace(FULL, demand=Demand(20, 20), load_s=1.0, off_s=0.0, expected_s=28.0)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh of simulated engines")
        async with stand(new_directory("drill-inversion"), simulated(POLICY, flags=FLAGS)) as s:
            await s.undisturbed(wanted.demand, options.seed)
            show.done(wanted.expected_s / 3)
            await drilled(s, wanted, trials, show)

    said = [policy_words(POLICY), "times count from the moment at which the engine loses its policy"]
    if options.quick:
        said.append("--quick: without the loop switched off")
    return await conducted("inversion", wanted.expected_s, course, said)


async def drilled(s: Stand, wanted: Plan, trials: list[Trial], show: Progress) -> None:
    show.stage("w0 loses its policy")
    trial = Trial("inversion", "simulated", "heal", WITHIN_S)
    trials.append(trial)
    async with s.load(trial):
        await asyncio.sleep(wanted.load_s)
        begun, told = time.time(), await _told(s, "w0")
        s.faults.set("w0", ignores_policy=True)
        if await s.detected(trial, "heal", "reload w0", begun, s.patience_s):
            _note(trial, "with the fault", (await _told(s, "w0")).since(told))
            await _healed(s, trial, begun)
    trial.told = await s.tells_of("w0", "controller/heal", "policy told anew")
    await s.settle(trial, begun, moves_too=False)
    s.faults.clear("w0")
    show.done(wanted.expected_s / 3)
    if wanted.off_s:
        show.stage("w1 loses its policy, with loops.heal=off")
        await s.mesh.steering.steer({"loops.heal": "off"})
        await _left_alone(s, wanted, trials)
    show.done(wanted.expected_s / 3)


async def _left_alone(s: Stand, wanted: Plan, trials: list[Trial]) -> None:
    trial = Trial("inversion, loop off", "simulated", None)
    trials.append(trial)
    async with s.load(trial):
        await asyncio.sleep(wanted.load_s)
        s.faults.set("w1", ignores_policy=True)
        await asyncio.sleep(wanted.off_s / 2)
        told = await _told(s, "w1")
        await asyncio.sleep(wanted.off_s / 2)
        waits = (await _told(s, "w1")).since(told)
        s.faults.clear("w1")
    _note(trial, "after all that time", waits)
    trial.more.append(present(trial, "realtime_still_waits_longer", waits.inverted))


@dataclass(frozen=True, slots=True)
class Waits:
    """Requests that were first scheduled, and how long they had waited in all, by workload."""

    count: tuple[int, int]
    sum_ms: tuple[int, int]

    def since(self, before: Waits) -> Waits:
        def less(mine: tuple[int, int], theirs: tuple[int, int]) -> tuple[int, int]:
            return mine[0] - theirs[0], mine[1] - theirs[1]

        return Waits(less(self.count, before.count), less(self.sum_ms, before.sum_ms))

    @property
    def enough(self) -> bool:
        return min(self.count) >= LEAST

    @property
    def mean_ms(self) -> tuple[float, float]:
        """Of realtime and of batch."""
        return self.sum_ms[0] / max(1, self.count[0]), self.sum_ms[1] / max(1, self.count[1])

    @property
    def inverted(self) -> bool:
        return self.mean_ms[0] > self.mean_ms[1]


async def _told(s: Stand, worker: str) -> Waits:
    """Since the mesh first heard of the worker."""
    totals = (await s.admin.telemetry()).nodes[worker].totals
    count = (totals.get(measures.REALTIME_WAITS, 0), totals.get(measures.BATCH_WAITS, 0))
    return Waits(count, (totals.get(measures.REALTIME_WAIT_MS, 0), totals.get(measures.BATCH_WAIT_MS, 0)))


async def _healed(s: Stand, trial: Trial, begun: float) -> None:
    """Until REALTIME waits shorter again, of LEAST requests of each at least that had not begun to wait before."""
    deadline = time.monotonic() + s.patience_s
    before = await _told(s, "w0")
    while time.monotonic() < deadline:
        await asyncio.sleep(POLL_S)
        waits = (await _told(s, "w0")).since(before)
        if not waits.enough:
            continue
        if not waits.inverted:
            trial.healed_s = time.time() - begun
            _note(trial, "once it was told its policy", waits)
            return
        before = await _told(s, "w0")


def _note(trial: Trial, when: str, waits: Waits) -> None:
    realtime, batch = waits.mean_ms
    trial.figures[f"ms that realtime waited at it {when}"] = realtime
    trial.figures[f"ms that batch waited at it {when}"] = batch
