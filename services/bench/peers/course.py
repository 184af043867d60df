"""`trimtab bench peers`: our HTTP door and SMG, one after the other, before the same worker with vLLM.

SMG comes to the worker by the vLLM-compatible door, our gateway by the mesh's own; the client speaks /v1/completions to both. They take
turns, and who goes first alternates. Both tokenise; ours counts, resumes and admits besides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import aiohttp

from services.bench.arms import Arm, HttpArm
from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.figures import Block
from services.bench.gateway import smg
from services.bench.options import Options
from services.bench.peers import figures
from services.bench.peers.figures import ARMS, OURS, PEER
from services.bench.processes import BenchError, Processes
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.start import Shape, model_path, start_vllm_mesh
from services.bench.steering import Steering
from services.bench.turns import Machinery, cell
from trimtab.kit.cli import ExitCode

MAX_TOKENS = 32
REQUESTS: Mapping[int, int] = {1: 6, 8: 24, 32: 64}
FIRSTS: Mapping[int, int] = {1: 16}
"""Short ones besides, which count for TTFT alone."""
ROUNDS, QUICK_ROUNDS = 10, 2
START_S = 45.0
TURN_S: Mapping[int, float] = {1: 15.0, 8: 9.0, 32: 10.0}
"""Expected, for the forecast only."""
NOISY_CORES = 0.1


@dataclass(frozen=True, slots=True)
class Parts:
    """What needs processes; tests put others in their place."""

    stand: Callable[[Path, Shape, Path], AbstractAsyncContextManager[tuple[Machinery, Mapping[str, Arm]]]]


async def run(options: Options, parts: Parts | None = None) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    if options.smg is None:
        raise BenchError(
            "bench peers needs --smg PATH (uv venv DIR; uv pip install -p DIR smg; DIR/bin/smg)", ExitCode.USAGE
        )
    smg.check(options.smg)
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    wanted = tuple(REQUESTS)[1:2] if options.quick else tuple(REQUESTS)
    shape = Shape(await asyncio.to_thread(model_path, options.model))
    checkpoint = Checkpoint(options.resume or new_directory("peers"), _setup(shape, options.seed))
    facts, notes, whole = machine(), [], True
    if options.quick:
        notes.append(f"--quick: {wanted[0]} streams alone, and {rounds} rounds, which decide nothing")
    if checkpoint.resumed:
        notes.append(f"resumed: {len(checkpoint.parts)} finished parts are of an earlier session")
    with progress(START_S + rounds * sum(len(ARMS) * TURN_S[c] for c in wanted)) as show:
        show.line(f"results are kept as they come; after an interruption, add: --resume {checkpoint.directory}")
        try:
            await _measure(checkpoint, shape, options, rounds, wanted, show, (parts or Parts(stand)))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
            notes.append(f"interrupted; the same command with --resume {checkpoint.directory} goes on from here")
    blocks = [Block.from_json(part) for part in checkpoint.parts]
    arms = figures.arms(blocks, options.seed)
    goals = figures.goals(blocks, tuple(REQUESTS), options.seed)
    setup = {"shape": asdict(shape), "smg": str(options.smg)}
    return Report("peers", arms, goals, figures.sections(arms), [*_quietness(arms, facts["cores"]), *notes], whole, facts,
                  command(), setup=setup)  # fmt: skip


async def _measure(
    checkpoint: Checkpoint,
    shape: Shape,
    options: Options,
    rounds: int,
    wanted: tuple[int, ...],
    show: Progress,
    parts: Parts,
) -> None:
    """Everything that the checkpoint does not have yet."""
    done = {(p["round"], p["concurrency"]) for p in checkpoint.parts}
    todo = [(r, c) for r in range(rounds) for c in wanted if (r, c) not in done]
    show.skip(sum(len(ARMS) * TURN_S[c] for r, c in done if c in wanted and r < rounds))
    if not todo:
        return
    show.stage("starting the mesh with vLLM, and SMG")
    assert options.smg is not None
    async with parts.stand(checkpoint.directory, shape, options.smg) as (machinery, arms):
        show.done(START_S)
        for round_, concurrency in todo:
            cells = {}
            for name in ARMS if round_ % 2 == 0 else ARMS[::-1]:
                show.stage(f"round {round_ + 1} of {rounds}, {concurrency} streams, {name}")
                cells[name] = await cell(
                    arms[name], machinery, f"{options.seed}/{round_}/{concurrency}", REQUESTS[concurrency], concurrency,
                    MAX_TOKENS, firsts=FIRSTS.get(concurrency, 0),
                )  # fmt: skip
                show.done(TURN_S[concurrency])
            checkpoint.add({**now(), **Block(round_, concurrency, cells).as_json()})


@asynccontextmanager
async def stand(directory: Path, shape: Shape, path: Path) -> AsyncIterator[tuple[Processes, Mapping[str, Arm]]]:
    """A mesh with one worker, and SMG before the same one; all ended on leaving."""
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes(directory))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        mesh = await start_vllm_mesh(processes, shape)
        steering = Steering(processes, mesh.control)
        await steering.connected()
        # What a gateway costs is asked, and SMG's requests come by another door: no policy is to tell them apart.
        await steering.steer({"prefill.itl_budget_ms": "0", "paths.realtime_max_running": str(shape.max_num_seqs)})
        other = await smg.start(processes, session, path, mesh.worker, tokenizer=Path(shape.model))
        roles = {"worker": "worker", "engine": "worker/engine"}
        yield (
            processes,
            {
                OURS: HttpArm(session, mesh.http, name=OURS, roles={"gateway": "gateway", **roles}),
                PEER: HttpArm(session, other, name=PEER, roles={"gateway": "smg", **roles}),
            },
        )


def _quietness(arms: list[dict[str, Any]], cores: int) -> list[str]:
    if not arms:
        return []
    foreign = max(a["foreign_cores"] for a in arms)
    noisy = "; this machine was not quiet" if foreign > NOISY_CORES else ""
    return [f"of {cores} cores, other programs used {foreign:.2f} at most{noisy}"]


def _setup(shape: Shape, seed: int) -> dict[str, Any]:
    """What must be the same for rounds to belong together; how many there are need not."""
    return {"bench": "peers", "requests": {str(c): n for c, n in REQUESTS.items()}, "max_tokens": MAX_TOKENS, "seed": seed,
            "shape": asdict(shape), "trimtab": metadata.version("trimtab")}  # fmt: skip
