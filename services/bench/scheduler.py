"""`trimtab bench scheduler`: what scheduling costs per engine step, without a model.

Ours inside vLLM next to the stock class (`scheduler_cost`), the two in turns; and the worker's queue and the planner alone with up to 2,000
that wait (`queue_cost`). A figure is the median over rounds, of a round's median; its interval resamples rounds.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from services.bench.goals import Goal
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.progress import progress
from services.bench.queue_cost import SIZES, GateCost, PlannerCost
from services.bench.report import Report, command, machine
from services.bench.scheduler_cost import RUNNING, SCENARIOS, WAITING, Pair, virtual_time
from services.bench.stats import Bound, Estimate, bootstrap, median
from trimtab.kit.cli import ExitCode, table

GOAL_US = 100.0
GOAL_SIZE = 1000
"""So many wait where the queues are judged."""
GOAL_GROWTH = 1.1
"""The exponent of cost over number, from the smallest to the largest size: 1 is linear; the rest allows for what a cache can't hold."""
QUEUES = (GateCost, PlannerCost)


@dataclass(frozen=True, slots=True)
class Plan:
    rounds: int
    steps: int
    """Of each pair in a round."""
    queue_steps: int

    def expected_s(self) -> float:
        return 15.0 + self.rounds * (
            0.004 * self.steps * len(SCENARIOS) + 0.004 * self.queue_steps * len(SIZES) * len(QUEUES)
        )


FULL = Plan(rounds=20, steps=60, queue_steps=30)
QUICK = Plan(rounds=8, steps=30, queue_steps=15)


@dataclass(slots=True)
class Found:
    """Microseconds, one list for each round. `pairs` by scenario: (ours, stock); `queues` by name and size."""

    pairs: dict[str, list[list[tuple[float, float]]]] = field(default_factory=dict)
    tokens: dict[str, tuple[int, int]] = field(default_factory=dict)
    queues: dict[tuple[str, int], list[list[float]]] = field(default_factory=dict)


async def run(options: Options) -> Report:
    """The whole bench. Cancelled, it reports what it has."""
    if options.resume:
        raise BenchError("bench scheduler takes a minute and keeps nothing that could be resumed", ExitCode.USAGE)
    plan = QUICK if options.quick else FULL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    found, facts, whole = Found(), machine(), True
    try:
        await _measure(plan, options.seed, found)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()
        whole = False
    arms = [*_pair_rows(found, options.seed), *_queue_rows(found, options.seed)]
    notes = ["CPU time of the thread; what else runs on the machine stretches it through the caches that it shares"]
    if options.quick:
        notes.append(f"--quick: {plan.rounds} shorter rounds instead of {FULL.rounds}")
    return Report("scheduler", arms, _goals(found, options.seed), _sections(arms), notes, whole, facts, command())


async def _measure(plan: Plan, seed: int, found: Found) -> None:
    with progress(plan.expected_s()) as show, ExitStack() as stack:
        show.stage("loading vLLM")
        await asyncio.to_thread(_load)
        show.done(10.0)
        show.stage(f"{RUNNING} running and {WAITING} waiting in {len(SCENARIOS)} scenarios, twice")
        clock = stack.enter_context(virtual_time())
        pairs = []
        for scenario in SCENARIOS:
            pairs.append(Pair(scenario, clock, seed))
            stack.callback(pairs[-1].close)
            await asyncio.sleep(0)
        queues = [(size, kind(size, seed)) for size in SIZES for kind in QUEUES]
        show.done(5.0)
        for number in range(plan.rounds):
            show.stage(f"round {number + 1} of {plan.rounds}")
            for pair in pairs:
                found.pairs.setdefault(pair.scenario.name, []).append(pair.rounds(plan.steps))
                found.tokens[pair.scenario.name] = pair.tokens()
                # A moment for Ctrl-C.
                await asyncio.sleep(0)
            for size, queue in queues:
                found.queues.setdefault((queue.name, size), []).append([queue.step() for _ in range(plan.queue_steps)])
                await asyncio.sleep(0)
            show.done((plan.expected_s() - 15.0) / plan.rounds)


def _load() -> None:
    # It has much to say of a machine on which nothing is to run.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    try:
        import vllm.v1.engine.core  # noqa: F401
    except ImportError as e:
        raise BenchError(f"bench scheduler needs vLLM (make setup): {e}", ExitCode.USAGE) from e
    logging.getLogger("vllm").setLevel(logging.ERROR)


def _of_rounds(values: Sequence[float], seed: int) -> Estimate:
    return bootstrap(values, median, seed=seed)


def added(found: Found, scenario: str, seed: int) -> Estimate | None:
    """Microseconds per step that ours takes more than the stock class."""
    rounds = found.pairs.get(scenario)
    return _of_rounds([median([ours - stock for ours, stock in pairs]) for pairs in rounds], seed) if rounds else None


def waiting_cost(found: Found, queue: str, size: int, seed: int) -> Estimate | None:
    rounds = found.queues.get((queue, size))
    return _of_rounds([median(values) for values in rounds], seed) if rounds else None


def growth(found: Found, queue: str, seed: int) -> Estimate | None:
    """The exponent e of cost ~ number^e between the smallest and the largest size."""
    least, most = (found.queues.get((queue, size)) for size in (SIZES[0], SIZES[-1]))
    if not least or not most:
        return None
    ratios = [median(b) / max(1e-3, median(a)) for a, b in zip(least, most, strict=False)]
    return _of_rounds([math.log(max(1e-3, r)) / math.log(SIZES[-1] / SIZES[0]) for r in ratios], seed)


def _goals(found: Found, seed: int) -> list[Goal]:
    most = Bound.AT_MOST
    goals = [Goal.judged(f"added_us_per_step_{s.name}", GOAL_US, most, added(found, s.name, seed)) for s in SCENARIOS]
    for kind in QUEUES:
        cost = waiting_cost(found, kind.name, GOAL_SIZE, seed)
        goals.append(Goal.judged(f"{kind.name}_us_per_step_at_{GOAL_SIZE}", GOAL_US, most, cost))
        goals.append(Goal.judged(f"{kind.name}_growth_exponent", GOAL_GROWTH, most, growth(found, kind.name, seed)))
    return goals


def _pair_rows(found: Found, seed: int) -> list[dict[str, Any]]:
    rows = []
    for scenario in SCENARIOS:
        rounds = found.pairs.get(scenario.name, [])
        more = added(found, scenario.name, seed)
        for place, arm in enumerate(("ours", "stock")):
            if more is None:
                continue
            cost = _of_rounds([median([pair[place] for pair in pairs]) for pairs in rounds], seed)
            rows.append(
                {
                    "arm": arm, "scenario": scenario.name, "words": scenario.words, "running": RUNNING, "waiting": WAITING,
                    "tokens": found.tokens[scenario.name][place], "us_per_step": cost.value, "interval": [cost.low, cost.high],
                    "rounds": cost.n, "steps": sum(map(len, rounds)),
                    **({"added_us": more.value, "added_interval": [more.low, more.high]} if arm == "ours" else {}),
                }
            )  # fmt: skip
    return rows


def _queue_rows(found: Found, seed: int) -> list[dict[str, Any]]:
    rows = []
    for (queue, size), rounds in sorted(found.queues.items()):
        cost = _of_rounds([median(values) for values in rounds], seed)
        rows.append(
            {
                "arm": queue, "waiting": size, "us_per_step": cost.value, "interval": [cost.low, cost.high], "rounds": cost.n,
                "steps": sum(map(len, rounds)),
            }
        )  # fmt: skip
    return rows


def _sections(arms: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    inside = [a for a in arms if a["arm"] == "ours"]
    stock = {a["scenario"]: a for a in arms if a["arm"] == "stock"}
    rows = [
        (a["scenario"], _us(a["us_per_step"]), _us(stock[a["scenario"]]["us_per_step"]), _us(a["added_us"]),
         f"[{_us(a['added_interval'][0])}, {_us(a['added_interval'][1])}]", a["words"])
        for a in inside
    ]  # fmt: skip
    head = ("SCENARIO", "OURS", "STOCK", "ADDED", "95 %", "")
    title = f"vLLM's scheduler, {RUNNING} running and {WAITING} waiting: CPU microseconds per step"
    sections = [(title, table(head, rows, right=(1, 2, 3)))] if rows else []
    queues = [
        (a["arm"], f"{a['waiting']:,}", _us(a["us_per_step"]), f"[{_us(a['interval'][0])}, {_us(a['interval'][1])}]")
        for a in arms
        if a["arm"] in {kind.name for kind in QUEUES}
    ]
    if queues:
        titles = ("QUEUE", "WAITING", "COST", "95 %")
        sections.append(
            (
                "The worker's queue, and the planner alone: CPU microseconds per step",
                table(titles, queues, right=(1, 2)),
            )
        )
    return sections


def _us(value: float) -> str:
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"
