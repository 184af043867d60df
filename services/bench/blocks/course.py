"""The course of `blocks`: each size's turn in each round on one engine that never restarts, then the small model with the long window.

Kept as it comes, and taken up again from there. All sizes are visited in every round, so that what else this machine does weighs on all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from services.bench.blocks import figures, mixes, picture, tables
from services.bench.blocks.figures import DECODE, PREFILL, Verdict, Visit, Work
from services.bench.blocks.plan import LONG, SERVED, START_S, Plan
from services.bench.blocks.prefixes import computed
from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.mixed.picture import check as check_picture
from services.bench.options import Options
from services.bench.processes import BenchError, Processes
from services.bench.progress import Progress, progress
from services.bench.reblock.course import accepted, loads, vllm_version
from services.bench.reblock.hosted import Hosted, hosted
from services.bench.report import Report, command, machine
from services.bench.start import Shape, model_path
from trimtab.blocks import LADDER, waste

MAKING_S = 300.0


async def make_long_model(directory: Path, like: str) -> str:
    """Where the small model lies; written there where it is not yet."""
    out = directory / "long-model"
    async with Processes(directory) as processes:
        argv = ["-m", "services.bench.blocks.long_model", "--like", like, "--out", str(out)]
        code, _, err = await processes.ask(argv, MAKING_S)
    if code:
        raise BenchError(f"the model with a long window can't be made:\n{err[-2000:]}")
    return str(out)


@dataclass(frozen=True, slots=True)
class Parts:
    """What needs processes; tests put others in their place."""

    engine: Callable[[Path, Shape], AbstractAsyncContextManager[Hosted]] = hosted
    long_model: Callable[[Path, str], Awaitable[str]] = make_long_model


@dataclass(slots=True)
class Found:
    """Raw results so far. `facts` by model, as `host.facts` has them."""

    facts: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    visits: dict[str, list[Visit]] = field(default_factory=dict)
    prefixes: list[Mapping[str, Any]] = field(default_factory=list)

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> Found:
        found = Found()
        for part in parts:
            match part["kind"]:
                case "engine":
                    found.facts[part["model"]] = part["facts"]
                    if part["model"] == SERVED:
                        found.refused = {s["size"]: f"{s['cause']}: {s['why']}" for s in part["said"]}
                case "visit":
                    found.visits.setdefault(part["model"], []).append(Visit.from_json(part))
                case _:
                    found.prefixes.append(part)
        return found

    @property
    def all_visits(self) -> list[Visit]:
        """Models differ in their context lengths, by which visits are told apart."""
        return [v for visits in self.visits.values() for v in visits]


@dataclass(frozen=True, slots=True)
class Run:
    """What the steps of a run share."""

    plan: Plan
    seed: int
    checkpoint: Checkpoint
    show: Progress


async def run(options: Options, parts: Parts | None = None) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    check_picture(options.png)
    plan = Plan.of(options)
    shape = Shape(await asyncio.to_thread(model_path, options.model))
    checkpoint = Checkpoint(options.resume or new_directory("blocks"), _setup(plan, shape, options.seed))
    facts, notes, whole = machine(), [plan.left_out] if plan.left_out else [], True
    if checkpoint.resumed:
        notes.append(f"resumed: {len(checkpoint.parts)} finished parts are of an earlier session")
    with progress(plan.expected_s()) as show:
        show.line(f"results are kept as they come; after an interruption, add: --resume {checkpoint.directory}")
        try:
            async with asyncio.timeout(plan.budget_s) as budget:
                for model in plan.models():
                    await _measure(Run(plan, options.seed, checkpoint, show), model, shape, parts or Parts())
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
    notes += loads(checkpoint.parts)
    traces = options.trace or default_traces()
    report = await asyncio.to_thread(
        _report, Found.of(checkpoint.parts), plan, shape, options.seed, traces, facts, notes, whole
    )
    if options.png is not None:
        where = f"trimtab bench blocks, {report.date[:10]}, {facts['cores']} cores, {facts['cpu']}"
        picture.draw(options.png, report.arms, where)
    return report


def default_traces() -> Path:
    from services.bench.cli import TRACES

    return TRACES


async def _measure(run: Run, model: str, shape: Shape, parts: Parts) -> None:
    """Everything of this model that the checkpoint does not have yet."""
    show, found = run.show, Found.of(run.checkpoint.parts)
    if model in found.facts and not _todo(run, model, found):
        show.skip(START_S + run.plan.visit_s(model) * len(found.visits.get(model, [])))
        return
    if model == LONG:
        shape = replace(shape, model=await parts.long_model(run.checkpoint.directory, shape.model))
    show.stage(f"starting the engine with the {model} model")
    async with parts.engine(run.checkpoint.directory, shape) as engine:
        show.done(START_S)
        if model not in found.facts:
            sizes = accepted(engine)
            said = (await engine.ask("refused", sizes=[s for s in LADDER if s not in sizes]))["said"]
            run.checkpoint.add({"kind": "engine", "model": model, **now(), "facts": dict(engine.facts), "said": said})
            found = Found.of(run.checkpoint.parts)
        await _warm_up(run, model, engine)
        for round_, size in _todo(run, model, found):
            show.stage(f"{model} model, round {round_ + 1} of {run.plan.rounds}, blocks of {size}")
            await _visit(run, model, engine, round_, size, found)


def _todo(run: Run, model: str, found: Found) -> list[tuple[int, int]]:
    """(round, size) of the turns that are left; a size whose prefixes are missing has its first turn anew."""
    f = found.facts[model]
    sizes = run.plan.chosen(f["block_sizes"], f["block_size"])
    done = {(v.round, v.size) for v in found.visits.get(model, [])}
    talked = {p["size"] for p in found.prefixes}
    return [
        (round_, size)
        for round_ in range(run.plan.rounds)
        for size in run.plan.order(sizes, round_, run.seed)
        if (round_, size) not in done or (model == SERVED and round_ == 0 and size not in talked)
    ]


async def _warm_up(run: Run, model: str, engine: Hosted) -> None:
    """The shortest cell once, which does not count: a fresh engine computes its first steps more slowly."""
    run.show.stage(f"{model} model: warm-up")
    cell = run.plan.cells(model)[0].within(engine.facts["max_model_len"])
    await engine.ask("size", size=engine.facts["block_size"])
    await engine.ask("speed", name=f"{run.seed}/warm-up", context=min(256, cell.context), streams=2, output=16)


async def _visit(run: Run, model: str, engine: Hosted, round_: int, size: int, found: Found) -> None:
    taken = await engine.ask("size", size=size)
    done = any((v.round, v.size) == (round_, size) for v in found.visits.get(model, []))
    if not done:
        by_context = {}
        for cell in run.plan.cells(model):
            c = cell.within(engine.facts["max_model_len"])
            name = f"{run.seed}/{round_}/{size}/{c.context}"
            by_context[c.context] = await engine.ask(
                "speed", name=name, context=c.context, streams=c.streams, output=c.output
            )
        run.checkpoint.add(
            {"kind": "visit", "model": model, "round": round_, "size": size, **now(), **taken, "speeds": by_context}
        )
        run.show.done(run.plan.visit_s(model))
    if model == SERVED and round_ == 0:
        hits = await engine.ask("prefixes", seed=f"{run.seed}/talk/{size}", **asdict(run.plan.talk))
        run.checkpoint.add({"kind": "prefixes", "size": size, **now(), **hits})
        run.show.done(run.plan.talk_s)


# The report.


def _report(
    found: Found,
    plan: Plan,
    shape: Shape,
    seed: int,
    traces: Path,
    facts: Mapping[str, Any],
    notes: list[str],
    whole: bool,
) -> Report:
    default = int(found.facts.get(SERVED, {}).get("block_size", 0))
    all_mixes = [*mixes.drawn(seed), *mixes.traced(traces)]
    notes = [*notes, *(m.absent for m in all_mixes if m.absent)]
    present = [m for m in all_mixes if m.requests]
    arms = [_arm(size, found, default, present, plan, seed) for size in LADDER]
    verdicts = _verdicts(found, default, present, plan) if default and not plan.quick else []
    accepted_sizes = len(found.facts.get(SERVED, {}).get("block_sizes", ()))
    goals = figures.goals(found.all_visits, found.prefixes, accepted_sizes, verdicts, quick=plan.quick)
    setup = {
        "shape": asdict(shape),
        "plan": asdict(plan),
        "default": default,
        "engines": {m: dict(f) for m, f in found.facts.items()},
        "mixes": {m.name: m.says for m in present},
        "calibration": figures.calibration(found.all_visits, default) if default else {},
        "verdicts": [asdict(v) for v in verdicts],
    }
    said = [_cells(plan), *_drifts(found, default)]
    sections = tables.sections(arms, setup)
    return Report("blocks", arms, goals, sections, [*said, *notes], whole, facts, command(), setup=setup)


def _arm(size: int, found: Found, default: int, present: Sequence[mixes.Mix], plan: Plan, seed: int) -> dict[str, Any]:
    """One size of the ladder."""
    visits, speeds = found.all_visits, {}
    for context in figures.contexts(visits):
        if not any(v.size == size and context in v.speeds for v in visits):
            continue
        speeds[str(context)] = {
            DECODE: figures.speed(visits, context, DECODE, size),
            PREFILL: figures.speed(visits, context, PREFILL, size),
            "decode_ratio": _ratio(visits, context, DECODE, size, default),
            "prefill_ratio": _ratio(visits, context, PREFILL, size, default),
        }
    talked = next((p for p in found.prefixes if p["size"] == size), None)
    prefixes = None
    if talked is not None:
        of = max(1, talked["prompt_tokens"])
        prefixes = {"measured": talked["cached_tokens"] / of, "computed": talked["computed_cached_tokens"] / of}
    return {
        "arm": f"block {size}",
        "size": size,
        "refused": found.refused.get(size, ""),
        "speeds": speeds,
        "table_bytes": {str(n): figures.table_bytes(n, size) for n in tables.TABLE_AT},
        "waste": {m.name: waste(m.lengths, size) for m in present},
        "prefixes": prefixes,
        "hits_computed": computed(plan.talk, size, f"{seed}/talk").rate,
    }


def _ratio(visits: Sequence[Visit], context: int, what: str, size: int, default: int) -> dict[str, Any] | None:
    found = figures.ratio(visits, context, what, size, default)
    return asdict(found) if found else None


def _verdicts(found: Found, default: int, present: Sequence[mixes.Mix], plan: Plan) -> list[Verdict]:
    visits = found.all_visits
    measured, sizes = figures.contexts(visits), figures.sizes(visits)
    if not measured:
        return []
    works = [Work.of(m.name, m.requests, measured, sizes) for m in present]
    if found.prefixes:
        works.append(_talking(found.prefixes, measured, sizes))
    each = [figures.verdict(visits, w, default, binds=binds) for w in works for binds in (False, True)]
    return [v for v in each if v is not None]


def _talking(parts: Sequence[Mapping[str, Any]], measured: Sequence[int], sizes: Sequence[int]) -> Work:
    """The sessions as a workload, with the hits that each size was measured to have."""
    hits = {p["size"]: p["cached_tokens"] / max(1, p["prompt_tokens"]) for p in parts}
    return replace(Work.of("sessions", [(p, o) for p, o in parts[0]["requests"]], measured, sizes), hits=hits)


def _cells(plan: Plan) -> str:
    cells = [f"{c.streams} streams of {c.context:,}" for m in plan.models() for c in plan.cells(m)]
    return f"decoding is timed with {', '.join(cells)} tokens; a size's speed is held against the default's in the same round"


def _drifts(found: Found, default: int) -> list[str]:
    """How much the default differs from itself: no smaller difference is a size's."""
    visits = found.all_visits
    return [
        f"blocks of {default} differ from themselves by {d:.1%} between rounds, decoding at {context:,}"
        for context in figures.contexts(visits)
        if (d := figures.drift(visits, context, DECODE, default)) is not None
    ]


def _setup(plan: Plan, shape: Shape, seed: int) -> dict[str, Any]:
    """What must be the same for visits to belong together; how many rounds there are need not."""
    same = {k: v for k, v in asdict(plan).items() if k in ("served", "long", "talk", "quick")}
    return {"bench": "blocks", **same, "seed": seed, "shape": asdict(shape), "vllm": vllm_version("blocks"),
            "trimtab": metadata.version("trimtab")}  # fmt: skip
