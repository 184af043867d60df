"""`trimtab bench reports`: what measuring and reporting cost a worker, as a share of one core.

The real classes over an engine that does not run: requests come, give tokens and end in made-up time, and a report is built and encoded
as often as the control stream asks for one. A figure is the median over rounds; its interval resamples rounds.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from services.bench.goals import Goal
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.progress import progress
from services.bench.report import Report, command, machine
from services.bench.stats import Bound, bootstrap, median
from services.control import PolicyKeeper
from services.worker.commands import Commands
from services.worker.engines import Stamps
from services.worker.engines.simulated import SimulatedEngine
from services.worker.gate import Gate
from services.worker.health import Health
from services.worker.measuring import End, Measuring
from services.worker.membership import Membership, node_of
from services.worker.metrics import WorkerMetrics
from services.worker.resident import INTERVAL_S, Resident, resident_bytes
from services.worker.serving import Serving
from services.worker.settings import WorkerSettings
from services.worker.standing import Standing
from services.worker.steering import Steering
from trimtab.kit.cli import ExitCode, table
from trimtab.messages import Request, Timings, Workload
from trimtab.policy import Policy

GOAL = 0.01
REQUESTS_PER_S = 100
TOKENS = 50
REPORT_INTERVAL_S = 0.8
PROMPTS = (40, 300, 900, 3000, 6000, 20_000)
PARTS = ("measuring", "reports", "memory in use")


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    seconds: int
    """Of load in a round."""

    def expected_s(self) -> float:
        return self.rounds * self.seconds * 0.03


FULL = Plan(rounds=30, seconds=8)
QUICK = Plan(rounds=10, seconds=4)


@dataclass(slots=True)
class Found:
    """CPU seconds for each second of load, one figure for each round, by part; and how large reports were, in bytes."""

    parts: dict[str, list[float]] = field(default_factory=lambda: {part: [] for part in PARTS})
    sizes: list[int] = field(default_factory=list)


class Load:
    """A worker without an engine that runs, and its requests. Belongs to a running event loop."""

    def __init__(self, directory: Path, seed: int) -> None:
        self._rng = random.Random(seed)
        settings = WorkerSettings(engine="simulated")
        engine = SimulatedEngine(
            model="m", max_num_seqs=64, max_step_tokens=2048, max_model_len=131_072, step_ms=10.0, token_us=20.0
        )
        gate = Gate(Policy())
        keeper = PolicyKeeper(node_of(settings, engine), _obey, directory / "policy.json")
        self.now = time.monotonic()
        self._measuring = measuring = Measuring(lambda: keeper.resolved.policy, lambda: (48, 6000), self.now)
        steering = Steering(engine, gate)
        serving = Serving("w0", engine, gate, keeper, WorkerMetrics("m"), measuring, steering)
        health = Health(engine, lambda: False, lambda: None)
        resident = Resident(os.getpid())
        standing = Standing(engine, gate, health, lambda: keeper.resolved.policy, resident)
        self._membership = Membership(
            settings, "127.0.0.1:0", engine, keeper, serving, health, measuring, standing, Commands(steering)
        )
        self._number = 0

    def second(self) -> float:
        """A second of load; the CPU seconds that measuring it took."""
        spent = 0
        for i in range(REQUESTS_PER_S):
            self._number += 1
            workload = Workload.BATCH if self._rng.random() < 0.7 else Workload.REALTIME
            request = Request(f"r{self._number}", "m", "", workload=workload)
            prompt = self._rng.choice(PROMPTS)
            arrival = self.now + i / REQUESTS_PER_S
            stamps = self._stamps(arrival)
            begun = time.thread_time_ns()
            one = self._measuring.accepted(request, prompt, arrival, 0.0)
            for each in stamps:
                self._measuring.output(one, each, each.last_token)
            last = stamps[-1]
            t = Timings(1.0, 1.0, (last.first_token - arrival) * 1e3, (last.last_token - arrival) * 1e3)
            self._measuring.ended(End(workload, "ok", prompt, TOKENS, 0, t, last.last_token), one)
            spent += time.thread_time_ns() - begun
        self.now += 1.0
        return spent / 1e9

    def report(self) -> tuple[float, int]:
        """One report, as it is sent: its CPU seconds, and its bytes."""
        begun = time.thread_time_ns()
        data = self._membership.report().SerializeToString()
        return (time.thread_time_ns() - begun) / 1e9, len(data)

    def _stamps(self, arrival: float) -> list[Stamps]:
        first = arrival + self._rng.lognormvariate(-2.0, 0.8)
        at, found = first, []
        for _ in range(TOKENS):
            found.append(Stamps(arrival, first, at, 0))
            at += self._rng.lognormvariate(-3.5, 0.5)
        return found


async def _obey(_: Policy) -> int:
    return 0


async def run(options: Options) -> Report:
    """The whole bench. Cancelled, it reports what it has."""
    if options.resume:
        raise BenchError("bench reports takes seconds and keeps nothing that could be resumed", ExitCode.USAGE)
    plan = QUICK if options.quick else FULL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    found, facts, whole = Found(), machine(), True
    try:
        with tempfile.TemporaryDirectory(prefix="trimtab-bench-") as directory:
            await _measure(plan, Load(Path(directory), options.seed), found)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        whole = False
    arms = _rows(found, options.seed)
    notes = [f"{REQUESTS_PER_S} requests a second of {TOKENS} tokens each; a report each {REPORT_INTERVAL_S:g} s"]
    if options.quick:
        notes.append(f"--quick: {plan.rounds} shorter rounds instead of {FULL.rounds}")
    return Report("reports", arms, _goals(found, options.seed), _sections(arms), notes, whole, facts, command())


async def _measure(plan: Plan, load: Load, found: Found) -> None:
    with progress(plan.expected_s()) as show:
        for number in range(plan.rounds):
            show.stage(f"round {number + 1} of {plan.rounds}")
            measuring = reports = due = 0.0
            for _ in range(plan.seconds):
                measuring += load.second()
                due += 1.0
                while due >= REPORT_INTERVAL_S:
                    due -= REPORT_INTERVAL_S
                    spent, size = load.report()
                    reports += spent
                    found.sizes.append(size)
                # A moment for Ctrl-C.
                await asyncio.sleep(0)
            begun = time.thread_time_ns()
            resident_bytes(os.getpid())
            look = (time.thread_time_ns() - begun) / 1e9
            for part, cost in zip(
                PARTS, (measuring / plan.seconds, reports / plan.seconds, look / INTERVAL_S), strict=True
            ):
                found.parts[part].append(cost)
            show.done(plan.expected_s() / plan.rounds)


def _totals(found: Found) -> list[float]:
    return [sum(costs) for costs in zip(*found.parts.values(), strict=False)]


def _goals(found: Found, seed: int) -> list[Goal]:
    totals = _totals(found)
    estimate = bootstrap(totals, median, seed=seed) if totals else None
    return [Goal.judged("share_of_a_core", GOAL, Bound.AT_MOST, estimate)]


def _rows(found: Found, seed: int) -> list[dict[str, Any]]:
    rows = []
    for part, costs in (*found.parts.items(), ("all", _totals(found))):
        if costs:
            cost = bootstrap(costs, median, seed=seed)
            rows.append({"arm": part, "share": cost.value, "interval": [cost.low, cost.high], "rounds": cost.n})
    if found.sizes:
        rows.append({"arm": "size", "bytes": median(found.sizes), "most_bytes": max(found.sizes)})
    return rows


def _sections(arms: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    rows = [
        (a["arm"], _percent(a["share"]), f"[{_percent(a['interval'][0])}, {_percent(a['interval'][1])}]")
        for a in arms
        if "share" in a
    ]
    if not rows:
        return []
    sections = [("CPU of the worker's front process, of one core", table(("PART", "SHARE", "95 %"), rows, right=(1,)))]
    sections += [
        ("A report", f"{a['bytes']:,.0f} bytes (median), {a['most_bytes']:,} at most") for a in arms if "bytes" in a
    ]
    return sections


def _percent(share: float) -> str:
    return f"{100.0 * share:.3f} %"
