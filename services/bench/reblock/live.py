"""The parts of `reblock` on a live engine: streams with changes under them, many changes in a row, and refusals. They run in the host's process.

Each takes the engine and plain arguments, and answers plain values, so that the host hands them on as JSON.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from services.bench.reblock import figures
from services.bench.reblock.streams import FCFS, Broken, Streams, a_job, leaked_blocks, steer
from services.worker.engines import Engine, Job
from services.worker.resident import resident_bytes
from trimtab.blocks import When
from trimtab.errors import ReblockRefused

SETTLED_TOKENS = 4
"""What each stream has given before a change, and again after it before the next."""
JITTER_TOKENS = 3
"""A change comes at most so many tokens later, so that changes meet engine steps at any phase."""
STRETCH, SHORT_STREAMS, SHORT_PROMPT, SHORT_OUTPUT = 10, 2, 40, 64
"""Of the many changes: a stretch is half idle ones, half beside short streams."""
RECOMPUTED = "recomputed_tokens"


def _jobs(engine: Engine, args: Mapping[str, Any], name: str) -> list[Job]:
    """The streams' names decide their prompts, so every bout has the same."""
    seed, output = args["seed"], args["output"]
    found = [a_job(engine, f"{seed}/stream/{i}", n, output) for i, n in enumerate(args["prompts"])]
    return [Job(f"{name}/{i}", j.token_ids, j.max_tokens, j.sampling, j.workload, arrival_ms=j.arrival_ms)
            for i, j in enumerate(found)]  # fmt: skip


async def bout(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """All streams from their beginning to their end, with a change to each of `sizes` in turn; no size makes it a reference.

    By FCFS, which computes everybody's KV anew before anybody goes far ahead; `as_served` leaves the engine its default policy. `carry`: KV
    is carried over where the engine can.
    """
    await steer(engine, {} if args.get("as_served") else FCFS)
    rng, short = random.Random(f"{args['seed']}/{args['name']}"), ""
    changes: list[dict[str, Any]] = []
    async with Streams(engine, _jobs(engine, args, args["name"])) as streams:
        try:
            for size in args["sizes"]:
                await streams.more(SETTLED_TOKENS + rng.randint(0, JITTER_TOKENS))
                if not streams.running:
                    short = f"a stream came to its last token before change {len(changes) + 1}"
                    break
                changes.append(await _change(engine, streams, size, carry=args.get("carry", False)))
        except (Broken, ReblockRefused) as e:
            short = str(e)
        await streams.ended()
        found = [s.as_json() for s in streams.all]
        gaps = [figures.median_gap_ms(s.times) for s in streams.all]
    return {
        "streams": found,
        "output": args["output"],
        "median_gaps_ms": gaps,
        "changes": changes,
        "cut_short": short,
        "leaked": await leaked_blocks(engine),
    }


async def _change(engine: Engine, streams: Streams, size: int, *, carry: bool) -> dict[str, Any]:
    """One change under all streams, watched until each of them has gone on."""
    counted = engine.stats()[RECOMPUTED]
    would = await engine.reblock(size, when=When.NOW, carry=carry, dry_run=True)
    put = time.monotonic()
    did = await engine.reblock(size, when=When.NOW, carry=carry)
    call_ms = (time.monotonic() - put) * 1000.0
    await streams.more(SETTLED_TOKENS)
    until = time.monotonic()
    return {
        "before": did.before.block_size,
        "after": did.after.block_size,
        "change_ms": did.change_ms,
        "call_ms": call_ms,
        "requests": did.requests,
        "carried_tokens": did.carried_tokens,
        "predicted_tokens": would.recompute_tokens,
        "measured_tokens": round(engine.stats()[RECOMPUTED] - counted),
        "pauses_ms": [figures.pause_ms(s.times, put, until) for s in streams.all],
    }


async def soak(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """So many changes in a row, by turns idle and beside short streams that are dropped afterwards, where every second carries KV over. Blocks
    and memory after each stretch."""
    sizes: Sequence[int] = args["sizes"]
    await steer(engine, FCFS)
    change_ms: dict[str, list[float]] = {"idle": [], "busy": [], "carried": []}
    leaked, resident_kb, errors = [], [], []
    for first in range(0, len(sizes), STRETCH):
        stretch = sizes[first : first + STRETCH]
        idle, busy = stretch[: len(stretch) // 2], stretch[len(stretch) // 2 :]
        for size in idle:
            change_ms["idle"].append((await engine.reblock(size, when=When.IDLE)).change_ms)
        names = [f"soak/{args['seed']}/{first}/{i}" for i in range(SHORT_STREAMS)]
        async with Streams(engine, [a_job(engine, n, SHORT_PROMPT, SHORT_OUTPUT) for n in names]) as streams:
            for i, size in enumerate(busy):
                await streams.more(1)
                done = await engine.reblock(size, when=When.NOW, carry=i % 2 == 1)
                change_ms["carried" if done.carried_tokens else "busy"].append(done.change_ms)
            await streams.more(1)
            errors += [s.error for s in streams.all if s.error]
        leaked.append(await leaked_blocks(engine))
        resident_kb.append(resident_bytes(os.getpid()) / 1024)
    return {"change_ms": change_ms, "leaked": leaked, "resident_kb": resident_kb, "errors": errors}


async def refusals(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """Each of `sizes` asked for under all streams: what the engine said, and whether it is as it was."""
    await steer(engine, FCFS)
    tried = []
    async with Streams(engine, _jobs(engine, args, "refusals")) as streams:
        for size in args["sizes"]:
            await streams.more(1)
            before, asked = engine.limits, time.monotonic()
            try:
                await engine.reblock(size, when=When.NOW)
                cause = ""
            except ReblockRefused as e:
                cause = e.cause
            ms = (time.monotonic() - asked) * 1000.0
            tried.append({"size": size, "cause": cause, "ms": ms, "unchanged": engine.limits == before})
        await streams.ended()
        found = [s.as_json() for s in streams.all]
    return {"streams": found, "output": args["output"], "tried": tried, "leaked": await leaked_blocks(engine)}
