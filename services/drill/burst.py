"""`trimtab drill burst`: four times as many realtime requests for a minute, beside a backlog of batch, and what they notice.

Realtime comes as it comes (open loop, Poisson), batch by a fixed number of callers. Before, in and after the burst are compared: how many
realtime requests were answered, how late their first tokens were, how long the queues grew, and how soon after the burst all was as before.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import psutil

from services.bench.arms import MODEL
from services.bench.checkpoint import new_directory
from services.bench.goals import Goal
from services.bench.load import prompts
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape as Engine
from services.bench.start import model_path
from services.bench.stats import Bound, quantile
from services.drill.endpoint import Door
from services.drill.mesh import Mesh, Shape, mesh
from services.drill.options import DrillOptions
from trimtab.kit.cli import table
from trimtab.messages import Request, Sampling, Workload

FACTOR = 4.0
AVAILABILITY, RECOVERY_S = 0.9995, 10.0
NORMAL = 1.5
"""As before: P95 of TTFT within this many times of what it was."""
WINDOW_S = 2.0
DEADLINE_S = 60.0
WATCH_S = 0.5
PHASES = ("before", "burst", "after")


@dataclass(frozen=True, slots=True)
class Plan:
    """`rate_per_s` of realtime outside the burst. Lengths are (fewest, most): words of a prompt, tokens of an output."""

    rate_per_s: float
    batch: int
    before_s: float = 30.0
    burst_s: float = 60.0
    after_s: float = 30.0
    realtime_words: tuple[int, int] = (8, 24)
    realtime_tokens: tuple[int, int] = (8, 24)
    batch_words: tuple[int, int] = (60, 200)
    batch_tokens: tuple[int, int] = (32, 128)
    window_s: float = WINDOW_S
    warm_up_s: float = 8.0
    """Of batch alone, whose beginning is a burst of its own."""

    @property
    def whole_s(self) -> float:
        return self.before_s + self.burst_s + self.after_s

    def phase(self, at_s: float) -> str:
        return PHASES[(at_s >= self.before_s) + (at_s >= self.before_s + self.burst_s)]


SIMULATED = Plan(rate_per_s=12.0, batch=48)
REAL = Plan(rate_per_s=0.25, batch=8, batch_words=(60, 120), before_s=60.0, after_s=60.0, window_s=10.0)


@dataclass(slots=True)
class Arm:
    """What was seen. Each realtime request is (when it came, seconds to its first token or None, reason of its failure or ""); seconds count
    from the start.
    """

    engine: str
    realtime: list[tuple[float, float | None, str]] = field(default_factory=list)
    batch_tokens: list[tuple[float, int]] = field(default_factory=list)
    batch_failed: dict[str, int] = field(default_factory=dict)
    queues: list[tuple[float, float, float]] = field(default_factory=list)
    """When, requests waiting at workers, requests in gateways."""
    memory_mb: dict[str, list[float]] = field(default_factory=dict)


async def run(options: DrillOptions) -> Report:
    """Simulated engines; real ones too with --real. Cancelled, it reports what it has."""
    simulated = replace(SIMULATED, before_s=15.0, burst_s=30.0, after_s=20.0) if options.quick else SIMULATED
    engine = None
    if options.real:
        model = await asyncio.to_thread(model_path, options.model)
        engine = Engine(model, max_num_seqs=16, kv_cache_gib=1)
    arms: list[tuple[Plan, Arm]] = []
    facts, whole = machine(), True
    with progress(simulated.whole_s + 20.0 + (REAL.whole_s + 60.0 if engine else 0.0)) as show:
        try:
            flags = ["--engine", "simulated", "--step-ms", "20", "--token-us", "20", "--max-num-seqs", "64"]
            await _arm("simulated", simulated, Shape(3, 1, flags), options.seed, arms, show)
            if engine is not None:
                shape = Shape(1, 1, engine.worker_flags(), engine.environment(), {"paths.hot_below": "1024"})
                await _arm("vllm", REAL, shape, options.seed, arms, show)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    notes = [f"{FACTOR:g} times as many realtime requests in the burst; clients and mesh share the machine's cores"]
    return Report(
        "burst",
        [asdict(arm) for _, arm in arms],
        [goal for plan, arm in arms for goal in goals(plan, arm)],
        [(f"{arm.engine} engines", _table(plan, arm)) for plan, arm in arms],
        notes,
        whole,
        facts,
        command(),
        kind="drill",
    )


def goals(plan: Plan, arm: Arm) -> list[Goal]:
    answered = [ttft is not None for _, ttft, _ in arm.realtime]
    share = sum(answered) / len(answered) if answered else None
    recovered = recovery_s(plan, arm)
    died = any(len(seen) != len(arm.queues) for seen in arm.memory_mb.values())
    return [
        Goal(
            f"{arm.engine}_realtime_availability",
            AVAILABILITY,
            Bound.AT_LEAST,
            share,
            None if share is None else share >= AVAILABILITY,
        ),
        Goal(
            f"{arm.engine}_recovery_s",
            RECOVERY_S,
            Bound.AT_MOST,
            recovered,
            None if recovered is None else recovered <= RECOVERY_S,
        ),
        Goal(f"{arm.engine}_processes_died", 0.0, Bound.AT_MOST, float(died), not died),
    ]


def recovery_s(plan: Plan, arm: Arm) -> float | None:
    """Seconds after the burst from which on every window's P95 of TTFT is as before; None where too little was seen."""
    before = [t for at, t, _ in arm.realtime if t is not None and plan.phase(at) == "before"]
    end = plan.before_s + plan.burst_s
    if len(before) < 5:
        return None
    bound, last_bad, at = NORMAL * quantile(before, 0.95), end, end
    while at < plan.whole_s:
        seen = [t if t is not None else DEADLINE_S for when, t, _ in arm.realtime if at <= when < at + plan.window_s]
        if seen and quantile(seen, 0.95) > bound:
            last_bad = at + plan.window_s
        at += plan.window_s
    return last_bad - end


async def _arm(name: str, plan: Plan, shape: Shape, seed: int, arms: list[tuple[Plan, Arm]], show: Progress) -> None:
    show.stage(f"starting a mesh of {name} engines")
    async with mesh(new_directory(f"drill-burst-{name}"), shape) as running:
        arm = Arm(name)
        arms.append((plan, arm))
        door = Door(running.gateways[0])
        begun = time.monotonic() + plan.warm_up_s
        try:
            async with asyncio.TaskGroup() as group:
                others = [
                    group.create_task(_backlog(door, plan, arm, begun, f"{seed}/batch/{i}")) for i in range(plan.batch)
                ]
                others.append(group.create_task(_watch(running, arm, begun)))
                await _realtime(door, plan, arm, begun, seed, show)
                for task in others:
                    task.cancel()
        finally:
            await door.close()
        running.check()


async def _realtime(door: Door, plan: Plan, arm: Arm, begun: float, seed: int, show: Progress) -> None:
    """Each at its time, whatever became of those before it; returns when all have ended."""
    rng = random.Random(f"{seed}/realtime")
    texts = prompts(f"{seed}/realtime", 500, words=plan.realtime_words)
    due, number, phase = 0.0, 0, ""
    async with asyncio.TaskGroup() as group:
        while True:
            rate = plan.rate_per_s * (FACTOR if plan.phase(due) == "burst" else 1.0)
            due += rng.expovariate(rate)
            if due >= plan.whole_s:
                break
            if plan.phase(due) != phase:
                phase = plan.phase(due)
                show.stage(f"{arm.engine}: {phase}")
            await asyncio.sleep(max(0.0, begun + due - time.monotonic()))
            sampling = Sampling(max_tokens=rng.randint(*plan.realtime_tokens), temperature=0.0, ignore_eos=True)
            # Each prompt is its own: a cached one would be no measure.
            request = Request("", MODEL, f"{number} {texts[number % len(texts)]}", sampling, Workload.REALTIME)
            group.create_task(_one(door, request, arm, begun))
            number += 1
    show.done(plan.whole_s)


async def _one(door: Door, request: Request, arm: Arm, begun: float) -> None:
    at = time.monotonic()
    seen = await door.ask(request, DEADLINE_S)
    ttft_s = None if seen.lost or seen.first is None else seen.first - at
    arm.realtime.append((at - begun, ttft_s, seen.lost))


async def _backlog(door: Door, plan: Plan, arm: Arm, begun: float, seed: str) -> None:
    """One caller that always has one more."""
    rng = random.Random(seed)
    while True:
        (text,) = prompts(f"{seed}/{rng.random()}", 1, words=plan.batch_words)
        sampling = Sampling(max_tokens=rng.randint(*plan.batch_tokens), temperature=0.0, ignore_eos=True)
        seen = await door.ask(Request("", MODEL, text, sampling, Workload.BATCH), 10 * DEADLINE_S)
        if seen.lost:
            arm.batch_failed[seen.lost] = arm.batch_failed.get(seen.lost, 0) + 1
            await asyncio.sleep(0.2)
        else:
            arm.batch_tokens.append((time.monotonic() - begun, len(seen.token_ids)))


async def _watch(running: Mesh, arm: Arm, begun: float) -> None:
    """Queues and memory, twice a second."""
    children = {n: psutil.Process(c.process.pid) for n, c in running.processes.children.items()}
    while True:
        waiting = 0.0
        for worker in running.workers.values():
            told = await running.gauges(worker.metrics)
            waiting += sum(v for (name, _), v in told.items() if name == "vllm:num_requests_waiting")
        gateway = await running.gauges(running.doors[0])
        inside = sum(v for (name, _), v in gateway.items() if name == "trimtab_gateway_in_flight")
        arm.queues.append((time.monotonic() - begun, waiting, inside))
        for name, process in children.items():
            if process.is_running():
                arm.memory_mb.setdefault(name, []).append(process.memory_info().rss / 2**20)
        await asyncio.sleep(WATCH_S)


def _table(plan: Plan, arm: Arm) -> str:
    rows: list[Sequence[Any]] = []
    for phase in PHASES:
        mine = [(t, why) for at, t, why in arm.realtime if plan.phase(at) == phase]
        ttfts = sorted(t * 1000.0 for t, _ in mine if t is not None)
        failed = sum(t is None for t, _ in mine)
        waiting = [w for at, w, _ in arm.queues if plan.phase(at) == phase]
        inside = [i for at, _, i in arm.queues if plan.phase(at) == phase]
        long_s = {"before": plan.before_s, "burst": plan.burst_s, "after": plan.after_s}[phase]
        batch = sum(n for at, n in arm.batch_tokens if at < plan.whole_s and plan.phase(at) == phase) / long_s
        shown = [f"{quantile(ttfts, q):.0f}" if ttfts else "-" for q in (0.5, 0.95, 0.99)]
        rows.append(
            (
                phase,
                str(len(mine)),
                str(failed),
                *shown,
                f"{batch:.0f}",
                f"{max(waiting, default=0):.0f}",
                f"{max(inside, default=0):.0f}",
            )
        )
    head = (
        "PHASE",
        "REALTIME",
        "FAILED",
        "TTFT P50 MS",
        "P95",
        "P99",
        "BATCH TOKENS/S",
        "WAITING AT MOST",
        "IN THE GATEWAY AT MOST",
    )
    return table(head, rows, right=tuple(range(1, len(head))))
