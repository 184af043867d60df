"""An engine in a process of its own, as a worker embeds it, and the parts of `reblock` and `blocks` that are measured on it.

It says {"ready": {…}} on stdout once the engine serves, reads parts as JSON lines on stdin ({"part", "args"}), and answers each with
{"done": {…}} or {"error": "…"}. The end of stdin is its end. Times are taken here, so that no pipe is in them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import uvloop

from services.bench.blocks import rounds
from services.bench.reblock import live
from services.bench.start import LINE_BYTES
from services.worker.engines import Engine
from trimtab.errors import TrimtabError
from trimtab.kit.process import die_with_parent

Part = Callable[[Engine, Mapping[str, Any]], Awaitable[dict[str, Any]]]
PARTS: Mapping[str, Part] = {
    "bout": live.bout,
    "soak": live.soak,
    "refusals": live.refusals,
    "settle": rounds.settle,
    "size": rounds.size,
    "refused": rounds.refused,
    "speed": rounds.speed,
    "prefixes": rounds.prefixes,
}
Say = Callable[[dict[str, Any]], None]


def facts(engine: Engine) -> dict[str, Any]:
    """What the bench must know of the engine before it asks anything of it."""
    limits = engine.limits
    return {
        "block_size": limits.block_size,
        "total_blocks": limits.total_blocks,
        "block_sizes": list(limits.block_sizes),
        "live_blocks": limits.live_blocks,
        "max_model_len": limits.max_model_len,
        "engine": limits.engine,
        "kv_bytes_per_token": engine.kv_bytes_per_token,
        "vocabulary": engine.tokenizer.vocab_size,
    }


async def answer(engine: Engine, line: str | bytes) -> dict[str, Any]:
    """One part, done or failed; a failure is the asker's to judge."""
    asked = json.loads(line)
    try:
        return {"done": await PARTS[asked["part"]](engine, asked["args"])}
    except Exception as e:
        return {"error": f"{asked['part']}: {type(e).__name__}: {e}"}


async def serve(engine: Engine, say: Say) -> None:
    """Until stdin ends."""
    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say({"ready": facts(engine)})
    while line := await reader.readline():
        say(await answer(engine, line))


def vllm_engine(args: argparse.Namespace) -> Engine:
    from services.worker.engines.vllm import VllmEngine

    return VllmEngine(
        model_path=args.model,
        model="bench",
        max_num_seqs=args.max_num_seqs,
        max_step_tokens=args.max_num_batched_tokens,
        max_model_len=None,
        dtype=args.dtype,
        kv_cache_gib=args.kv_cache_gib,
    )


async def run(engine: Engine, say: Say) -> None:
    try:
        await engine.start()
        serving = asyncio.create_task(serve(engine, say))
        for sig in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(sig, serving.cancel)
        with suppress(asyncio.CancelledError):
            await serving
    except TrimtabError as e:
        say({"error": str(e)})
    finally:
        await engine.stop()


def main(make: Callable[[argparse.Namespace], Engine]) -> None:
    """`make` gives the engine, which is not started yet."""
    parser = argparse.ArgumentParser(
        description="An engine whose block size changes; for `trimtab bench reblock` and `blocks`."
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    for name in ("max-num-seqs", "max-num-batched-tokens", "kv-cache-gib", "parent-pid"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent_pid, signal.SIGTERM)
    # Whatever else writes to stdout, vLLM and its children included, must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    uvloop.run(run(make(args), say))


# vLLM starts its processes by importing this module anew.
if __name__ == "__main__":
    main(vllm_engine)
