"""`trimtab drill silence`: a worker that serves, and that the control plane does not hear.

The link between them is stalled while gateways reach the worker as ever. Nobody knows then whether it is dead or only out of hearing, so
nothing may be done to it or because of it: no restart, no move, no other number of workers wanted. Streams go on, on that worker too. When
the link is healed it is heard again, as the same process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from services.bench.checkpoint import new_directory
from services.bench.progress import Progress
from services.bench.report import Report
from services.drill.admin import Telemetry
from services.drill.loop_figures import Trial, counted, policy_words, present
from services.drill.loops import CALM, MUCH, Demand, Stand, conducted, simulated, stand
from services.drill.options import DrillOptions
from services.drill.proxy import Proxy

SILENT, POOL = "w1", "default"
TOKENS = "trimtab_worker_output_tokens_total"
ACTIVE = "24"
"""Slots of an engine: half of them are used, which calls for no other number of workers, whether one is counted or both."""
LOOPS = ("heal", "scale", "batch", "priority", "overload", "memory", "clusters", "isolation", "safe_batch")
POLICY = {
    **CALM, **{f"loops.{name}": "on" for name in LOOPS}, "batch.active": ACTIVE,
    "heal.leak_s": "3", "heal.no_progress_s": "3", "heal.inversion_s": "5",
    "scale.max_workers": "4", "scale.out_dwell_s": "5", "scale.in_dwell_s": "5",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Plan:
    """`load_s` before the silence and after it; `silent_s` of it. `scaled`: it begins only once it is said how many workers are wanted."""

    demand: Demand = MUCH
    load_s: float = 4.0
    silent_s: float = 25.0
    scaled: bool = True
    expected_s: float = 75.0


FULL = Plan()
QUICK = replace(FULL, demand=Demand(12, 12), load_s=1.5, silent_s=8.0, scaled=False, expected_s=25.0)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh of simulated engines")
        async with overheard(new_directory("drill-silence")) as (s, proxy):
            await s.undisturbed(wanted.demand, options.seed)
            show.done(wanted.expected_s / 3)
            show.stage(f"{SILENT} is not heard for {wanted.silent_s:g} s")
            await drilled(s, proxy, wanted, trials)
            show.done(2 * wanted.expected_s / 3)

    said = [policy_words(POLICY)]
    if options.quick:
        said.append(
            f"--quick: {wanted.silent_s:g} s of silence instead of {FULL.silent_s:g}, before `scale` has said a first word"
        )
    return await conducted("silence", wanted.expected_s, course, said)


@asynccontextmanager
async def overheard(directory: Path) -> AsyncIterator[tuple[Stand, Proxy]]:
    """A mesh in which one worker reaches the control plane through a proxy of its own."""
    proxy = Proxy()
    await proxy.start()
    try:
        shape = simulated(POLICY, own={SILENT: {"grpc_proxy": proxy.url}})
        async with stand(directory, shape) as s:
            yield s, proxy
    finally:
        await proxy.close()


async def drilled(s: Stand, proxy: Proxy, wanted: Plan, trials: list[Trial]) -> None:
    trial = Trial("silence", "simulated", None)
    trials.append(trial)
    async with s.load(trial):
        if wanted.scaled:
            await s.surely("a first word of how many workers are wanted", _scaled)
        await asyncio.sleep(wanted.load_s)
        before = await s.admin.telemetry()
        begun = time.time()
        proxy.stall(s.mesh.control)
        try:
            await s.surely(f"{SILENT} is not heard", _unheard)
            trial.figures["s until it was said to be silent"] = time.time() - begun
            tokens = await _tokens(s)
            during = await _while(s, trial, wanted.silent_s)
            served = await _tokens(s) - tokens
        finally:
            proxy.heal(s.mesh.control)
        healed = time.time()
        await s.surely(f"{SILENT} is heard again", lambda t: True if t.nodes[SILENT].serves else None)
        trial.figures["s until it was heard again"] = time.time() - healed
        await asyncio.sleep(wanted.load_s)
    after = await s.admin.telemetry()
    trial.figures["tokens that it served meanwhile"] = served
    await s.settle(trial, begun)
    trial.more += [
        counted(trial, "decisions", len(trial.others)),
        counted(trial, "policy_writes_by_controllers", await _written(s, begun)),
        counted(
            trial, "workers_wanted_more_or_less", abs(during.wanted[POOL] - before.wanted[POOL]) if wanted.scaled else 0
        ),
        counted(trial, "processes_ended", len(s.supervisor.ends)),
        counted(
            trial, "it_is_another_process", float(after.nodes[SILENT].incarnation != before.nodes[SILENT].incarnation)
        ),
        present(trial, "it_served_meanwhile", served > 0),
    ]


async def _while(s: Stand, trial: Trial, silent_s: float) -> Telemetry:
    """What is said at the end of the silence; what controllers held back on the way goes into the trial."""
    deadline = time.monotonic() + silent_s
    held: dict[str, str] = {}
    while True:
        said = await s.admin.telemetry()
        held |= {name: "; ".join(words) for name, words in said.holds.items()}
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(0.5)
    trial.held = [f"{name}: {words}" for name, words in sorted(held.items())]
    return said


def _unheard(t: Telemetry) -> bool | None:
    n = t.nodes[SILENT]
    return True if n.stale or not n.connected else None


def _scaled(t: Telemetry) -> bool | None:
    return None if "scale" in t.holds or not t.wanted else True


async def _tokens(s: Stand) -> float:
    return (await s.mesh.gauges(s.mesh.workers[SILENT].metrics))[TOKENS, ""]


async def _written(s: Stand, since: float) -> int:
    return sum(w.at_unix_ms / 1000.0 >= since for w in await s.admin.written())
