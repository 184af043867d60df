"""The parts of `blocks` on a live engine: a size taken, speed at a context length, and prefixes found again. They run in the host's process.

Each takes the engine and plain arguments, and answers plain values, so that the host hands them on as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from services.bench.blocks import figures
from services.bench.blocks.prefixes import Cached, Hits, Script, Talk, note
from services.bench.reblock.streams import FCFS, Streams, a_job, leaked_blocks, steer
from services.worker.engines import Engine
from trimtab.blocks import When
from trimtab.errors import ReblockRefused
from trimtab.messages import Workload

LOWEST_TOKEN = 256


class Failed(Exception):
    """A request that was to be measured came to a bad end."""


async def settle(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """Wait until nobody runs; what the engine's cache is like then."""
    held = await leaked_blocks(engine)
    return {"block_size": engine.limits.block_size, "total_blocks": engine.limits.total_blocks, "held": held}


async def size(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """Take this block size; nobody runs."""
    await steer(engine, FCFS)
    did = await engine.reblock(args["size"], when=When.NOW)
    return {"block_size": did.after.block_size, "total_blocks": did.after.total_blocks, "change_ms": did.change_ms}


async def refused(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """What the engine says to each of `sizes`, which it does not take; nothing is changed."""
    said = []
    for wanted in args["sizes"]:
        try:
            await engine.reblock(wanted, when=When.NOW, dry_run=True)
            said.append({"size": wanted, "cause": "", "why": "it would take it"})
        except ReblockRefused as e:
            said.append({"size": wanted, "cause": e.cause, "why": e.message})
    return {"said": said}


async def speed(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """Streams of one context length, whose prompts nobody had before: tokens/s of their prefill and of their decoding beside each other."""
    names = [f"{args['name']}/{i}" for i in range(args["streams"])]
    jobs = [a_job(engine, n, args["context"], args["output"], Workload.BATCH) for n in names]
    begun = time.monotonic()
    async with Streams(engine, jobs) as streams:
        await streams.ended()
    if errors := [s.error for s in streams.all if s.error]:
        raise Failed(errors[0])
    cached = sum(s.cached for s in streams.all)
    return {**figures.speeds([s.times for s in streams.all], begun, args["context"]), "cached_tokens": cached}


async def prefixes(engine: Engine, args: Mapping[str, Any]) -> dict[str, Any]:
    """Sessions served one request at a time: what the engine says it found in its cache, and what was computed beforehand."""
    talk = Talk(args["sessions"], args["turns"], args["system"], tuple(args["user"]), args["output"])
    known = engine.tokenizer.vocab_size
    script = Script(talk, args["seed"], range(LOWEST_TOKEN if known > 2 * LOWEST_TOKEN else 0, known))
    cache, wanted, cached, requests = Cached(engine.limits.block_size), Hits(), 0, []
    for number, session in enumerate(script.order()):
        prompt = script.prompt(session)
        async with Streams(engine, [a_job(engine, f"{args['seed']}/{number}", prompt, talk.output)]) as streams:
            await streams.ended()
        one = streams.all[0]
        if one.error:
            raise Failed(one.error)
        cached += one.cached
        requests.append((len(prompt), len(one.tokens)))
        note(cache, wanted, prompt, one.tokens)
        script.answered(session, one.tokens)
    return {
        "prompt_tokens": wanted.prompt,
        "cached_tokens": cached,
        "computed_cached_tokens": wanted.cached,
        "requests": requests,
    }
