"""`trimtab bench gateway`: what a token costs a gateway, through one stream per worker and through one stream per request.

Streams of a simulated engine that takes 20 ms for each step, so 50 tokens a second each, one in each step. Arms: `mux` (our gateway),
`coalesced` (with coalesce_ms), `unmuxed` (our gateway with a Generate at the worker for each request), `plain` (a proxy that only hands on
bytes, likewise), `direct` (no gateway), and with --smg `http` and `smg` (our HTTP door, and SMG before the same worker). They take turns, and
their order turns round from round to round.

Load generator, worker and gateway share this machine's cores, so times tell little where they are few; CPU seconds of the gateway's process
tell more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.bench.checkpoint import Checkpoint, new_directory, now
from services.bench.gateway import figures, smg
from services.bench.gateway.arms import Arm
from services.bench.gateway.figures import Block, Cell
from services.bench.gateway.load import Crowd, seen
from services.bench.gateway.stand import Stand, stand
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.progress import Progress, progress
from services.bench.report import Report, command, machine
from services.bench.stats import quantiles
from services.bench.turns import busy_s, settle
from trimtab.kit.cli import ExitCode

ARMS = ("mux", "plain", "coalesced", "unmuxed", "direct")
WITH_SMG = (*ARMS, "http", "smg")
ROUNDS, QUICK_ROUNDS = 6, 2
WINDOW_S = 4.0
TURN_S, START_S = WINDOW_S + 3.0, 15.0
"""Expected, for the forecast only."""
NOISY_CORES = 0.1


@dataclass(slots=True)
class Found:
    """Raw results so far, and what of the run there is to say."""

    blocks: list[Block] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = True


async def run(options: Options) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    names = _arms(options)
    streams: tuple[int, ...] = figures.STREAMS
    rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    if options.quick:
        streams = streams[:1]
    setup = {"bench": "gateway", "arms": names, "streams": streams, "window_s": WINDOW_S}
    checkpoint = Checkpoint(options.resume or new_directory("gateway"), setup)
    facts, found = machine(), Found([Block.from_json(part) for part in checkpoint.parts])
    if options.smg is None:
        found.notes.append("no arm smg: it is measured where it is installed, by --smg PATH")
    if options.quick:
        found.notes.append(f"--quick: {streams[0]} streams alone, and {rounds} rounds, which decide nothing")
    with progress(START_S + rounds * len(streams) * len(names) * TURN_S) as show:
        show.line(f"results are kept as they come; after an interruption, add: --resume {checkpoint.directory}")
        try:
            await _measure(options, names, streams, rounds, checkpoint, found, show)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            found.whole = False
            found.notes.append(f"interrupted; the same command with --resume {checkpoint.directory} goes on from here")
    return _report(found, options.seed, facts)


def _arms(options: Options) -> tuple[str, ...]:
    """Those asked for, else all that there can be. BenchError for one that there is not."""
    if options.smg is not None:
        smg.check(options.smg)
    can = WITH_SMG if options.smg is not None else ARMS
    if strange := [a for a in options.arms if a not in can]:
        raise BenchError(f"bench gateway has no arm {strange[0]!r} here; it has {', '.join(can)}", ExitCode.USAGE)
    return options.arms or can


async def _measure(
    options: Options,
    names: Sequence[str],
    streams: Sequence[int],
    rounds: int,
    checkpoint: Checkpoint,
    found: Found,
    show: Progress,
) -> None:
    """Everything that the checkpoint does not have yet."""
    done = {(b.round, b.streams) for b in found.blocks}
    todo = [(r, n) for r in range(rounds) for n in streams if (r, n) not in done]
    for _ in range(rounds * len(streams) - len(todo)):
        show.skip(len(names) * TURN_S)
    if not todo:
        return
    show.stage("starting")
    async with stand(checkpoint.directory, names, options.smg) as its:
        show.done(START_S)
        for round_, count in todo:
            cells = {}
            for name in names if round_ % 2 == 0 else names[::-1]:
                show.stage(f"round {round_ + 1} of {rounds}, {count} streams, {name}")
                cells[name] = await turn(its, its.arms[name], f"{name}-{round_}-{count}", count)
                show.done(TURN_S)
            block = Block(round_, count, cells)
            found.blocks.append(block)
            checkpoint.add({**now(), **block.as_json()})


async def turn(its: Stand, arm: Arm, key: str, streams: int) -> Cell:
    """So many streams through one arm, once all run at their pace."""
    await settle(its.processes)
    crowd = Crowd(arm.open, [f"{key}-{i}" for i in range(streams)])
    async with crowd:
        since, before, busy = time.monotonic(), its.processes.cpu_s(), busy_s()
        await asyncio.sleep(WINDOW_S)
        until, after, busy = time.monotonic(), its.processes.cpu_s(), busy_s() - busy
        crowd.check()
    its.processes.check()
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    for stream in crowd.received:
        stream.request_id = arm.engine_id(stream.request_id, stream.data[0])
    found = seen(crowd.received, arm.count, its.emissions.read(), since, until)
    p50, p99 = quantiles(found.late_ms, (0.5, 0.99))
    return Cell(
        wall_s=until - since,
        messages=found.messages,
        tokens=found.tokens,
        p50_late_ms=p50,
        p99_late_ms=p99,
        gateway_cpu_s=spent.get(arm.process, 0.0) + spent.get(f"{arm.process}/engine", 0.0),
        worker_cpu_s=spent["worker"],
        client_cpu_s=spent["client"],
        foreign_cpu_s=max(0.0, busy - sum(spent.values())),
    )


def _report(found: Found, seed: int, facts: dict[str, Any]) -> Report:
    arms = figures.arms(found.blocks, seed)
    said = ["load generator, worker and gateways share the machine's cores"]
    if arms:
        foreign = max(a["foreign_cores"] for a in arms)
        noisy = "; this machine was not quiet" if foreign > NOISY_CORES else ""
        said.append(f"of {facts['cores']} cores, other programs used {foreign:.2f} at most in a turn{noisy}")
    goals = figures.goals(found.blocks, seed)
    return Report("gateway", arms, goals, figures.sections(arms), [*said, *found.notes], found.whole, facts, command())
