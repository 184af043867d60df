"""`trimtab drill giants`: realtime prompts of giant length among many short ones, on engines that read a giant in one step.

Each giant stops all streams of its engine for most of a second, and they come faster than one at a time. `isolation` has to see that these long
prompts are in the way of realtime requests and write a rule with an expiry that has them run one at a time; streams flow again, while giants
go on coming. When they stop, the rule goes by itself. Then the same with `loops.isolation=off`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from services.bench.arms import MODEL
from services.bench.checkpoint import new_directory
from services.bench.goals import Goal
from services.bench.load import prompts
from services.bench.progress import Progress
from services.bench.report import Report
from services.bench.stats import Bound, quantile
from services.drill.crowd import Crowd
from services.drill.endpoint import Door
from services.drill.figures import outcome
from services.drill.loop_figures import Trial, policy_words, present
from services.drill.loops import LOOP_S, MUCH, STEP_MS, Demand, Stand, conducted, simulated, stand
from services.drill.options import DrillOptions
from trimtab.kit.rpc import cancel_and_wait
from trimtab.messages import Request, Sampling, Workload
from trimtab.snapshot import Adjustment

EVERY_S = 2.0
WORDS, TOKENS = (1120, 1160), 3000
"""Of a giant's prompt, which is some 8,000 tokens, and tokens of its output: one at a time they come rarely."""
DEADLINE_S = 120.0
STREAM_S = 2.5
"""A short one is over by then."""
FIELD = "isolate.from_tokens"
FOR_S, WINDOW_S = 10, 5.0
OTHERS = ("batch", "priority", "overload", "degraded", "memory", "clusters", "safe_batch", "heal")
"""Loops that may do something about waiting too; what they do is not asked here."""
POLICY = {
    "objectives.ttft_p99_ms": "60000", "objectives.itl_p99_ms": "300", "loops.isolation": "on", "giants.for_s": str(FOR_S),
    "giants.times_median": "4", "paths.hot_below": "1024",
    "prefill.itl_budget_ms": "0", "prefill.step_tokens": "16384",
    **{f"loops.{name}": "off" for name in OTHERS},
}  # fmt: skip
TOKEN_US = 100.0
FLAGS = ("--step-ms", str(STEP_MS), "--token-us", str(TOKEN_US), "--max-num-seqs", "64", "--max-step-tokens", "16384")
WITHIN_S = 4 * WINDOW_S + LOOP_S
"""Two windows in which objectives are missed, of which the first began before the fault; and the look at them, which is each window too."""
BETTER = 0.5
"""Of the P95 of realtime streams' longest gap with giants; below that the rule has helped."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Seconds: without giants; of giants with the loop off; that are measured once the rule is there. `gone`: until it is gone too."""

    demand: Demand = MUCH
    before_s: float = 6.0
    off_s: float = 20.0
    after_s: float = 12.0
    gone: bool = True
    expected_s: float = 95.0


FULL = Plan()
QUICK = replace(FULL, demand=Demand(24, 24), before_s=3.0, off_s=0.0, after_s=5.0, gone=False, expected_s=30.0)


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it ends what it started and reports what it has."""
    wanted = QUICK if options.quick else FULL

    async def course(trials: list[Trial], show: Progress) -> None:
        show.stage("starting a mesh of simulated engines")
        async with stand(new_directory("drill-giants"), simulated(POLICY, flags=FLAGS)) as s:
            await s.undisturbed(wanted.demand, options.seed)
            show.done(wanted.expected_s / 4)
            await drilled(s, wanted, options.seed, trials, show)

    said = [
        policy_words(POLICY),
        f"a giant of some 8,000 prompt tokens each {EVERY_S:g} s, and {TOKEN_US:g} microseconds a token; times count from the first of them",
        "P95 is of short realtime streams alone: of each the longest time between two of its tokens",
    ]
    if options.quick:
        said.append("--quick: without the loop switched off, and without waiting for the rule's end")
    return await conducted("giants", wanted.expected_s, course, said)


async def drilled(s: Stand, wanted: Plan, seed: int, trials: list[Trial], show: Progress) -> None:
    show.stage("giants")
    trial = Trial("giants", "simulated", "isolation", WITHIN_S)
    trials.append(trial)
    async with s.load(trial) as crowd:
        # All callers begin at once, which is a jolt of its own.
        await asyncio.sleep(wanted.before_s / 2)
        calm = time.monotonic()
        await asyncio.sleep(wanted.before_s)
        begun, first = time.time(), time.monotonic()
        async with _giants(s, trial, seed):
            found = await s.detected(trial, "isolation", f"{FIELD} at pool/default -", begun, s.patience_s)
            ruled = time.monotonic()
            with_s = _noted(trial, "P95 ms of the longest gap with giants", crowd, first, ruled)
            trial.more.append(present(trial, "rule_has_an_expiry", found and bool(await _rules(s))))
            # Those that run already stay, and are soon through.
            await asyncio.sleep(wanted.after_s / 2)
            measured = time.monotonic()
            await asyncio.sleep(wanted.after_s)
            after_s = _noted(
                trial, "P95 ms of the longest gap with giants kept apart", crowd, measured, time.monotonic()
            )
        if found:
            trial.more.append(_better(trial, with_s, after_s))
        _noted(trial, "P95 ms of the longest gap without giants", crowd, calm, first - STREAM_S)
    if found and with_s is not None and after_s is not None and after_s <= BETTER * with_s:
        trial.healed_s = ruled - first
    trial.told = await _told(s)
    await s.settle(trial, begun)
    show.done(wanted.expected_s / 4)
    if found and wanted.gone:
        show.stage("the rule goes by itself")
        await _gone(s, trial)
    show.done(wanted.expected_s / 4)
    if wanted.off_s:
        show.stage("giants, with loops.isolation=off")
        await s.mesh.steering.steer({"loops.isolation": "off"})
        await _left_alone(s, wanted, seed, trials)
    show.done(wanted.expected_s / 4)


async def _left_alone(s: Stand, wanted: Plan, seed: int, trials: list[Trial]) -> None:
    trial = Trial("giants, loop off", "simulated", None)
    trials.append(trial)
    async with s.load(trial) as crowd:
        begun = time.time()
        async with _giants(s, trial, seed + 1):
            # The first half is what those windows have in which it begins.
            await asyncio.sleep(wanted.off_s / 2)
            measured = time.monotonic()
            await asyncio.sleep(wanted.off_s / 2)
            _noted(trial, "P95 ms of the longest gap with giants", crowd, measured, time.monotonic())
    await s.settle(trial, begun)
    trial.more.append(present(trial, "nothing_was_done", not trial.others))


async def _gone(s: Stand, trial: Trial) -> None:
    """What lives is taken back by the controller, or expires with nobody's doing."""
    stopped, deadline = time.time(), time.monotonic() + s.patience_s
    while await _rules(s) and time.monotonic() < deadline:
        await asyncio.sleep(0.5)
    trial.figures["s until the rule was gone, once giants stopped"] = time.time() - stopped
    trial.more.append(present(trial, "rule_goes_by_itself", not await _rules(s)))


@asynccontextmanager
async def _giants(s: Stand, trial: Trial, seed: int) -> AsyncIterator[None]:
    """One each EVERY_S within the block, whatever became of those before; all leave with it. Those that had their answers are the trial's."""
    door, texts = Door(s.mesh.gateways[0]), prompts(f"{seed}/giants", 20, words=WORDS)
    under_way: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        request = Request("", MODEL, f"{number} {texts[number % len(texts)]}", sampling, Workload.REALTIME)
        trial.outcomes.append(outcome(-1, await door.ask(request, DEADLINE_S), None))

    async def coming() -> None:
        for number in itertools.count():
            under_way.add(asyncio.create_task(one(number)))
            await asyncio.sleep(EVERY_S)

    come = asyncio.create_task(coming())
    try:
        yield
    finally:
        await cancel_and_wait(come)
        trial.figures["giants"] = len(under_way)
        for task in under_way:
            await cancel_and_wait(task)
        await door.close()


def _noted(trial: Trial, what: str, crowd: Crowd, since: float, until: float) -> float | None:
    """Of streams that were asked for in that time, in seconds; None of fewer than 5."""
    found = [gap for at, gap in crowd.gaps if since <= at < until]
    if len(found) < 5:
        return None
    p95 = quantile(found, 0.95)
    trial.figures[what] = 1000.0 * p95
    return p95


def _better(trial: Trial, with_s: float | None, after_s: float | None) -> Goal:
    share = after_s / with_s if with_s and after_s is not None else None
    met = None if share is None else share <= BETTER
    return Goal(f"{trial.name}: p95_of_what_it_was", BETTER, Bound.AT_MOST, share, met)


async def _rules(s: Stand) -> list[Adjustment]:
    """Isolation's that live and have an expiry to come."""
    now = time.time() * 1000.0
    return [a for a in await s.admin.adjustments() if a.controller == "isolation" and a.expires_unix_ms > now]


async def _told(s: Stand) -> bool:
    """Whether `trimtab why FIELD` tells of it."""
    return '"controller/isolation"' in await s.why(FIELD)
