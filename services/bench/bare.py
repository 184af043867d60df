"""AsyncLLM with nothing around it, in a process of its own: the arm that every other one is compared with.

It reads bursts as JSON lines on stdin ({"prompts", "concurrency", "max_tokens"}), drives the engine from within its own event loop by
`load.closed_loop`, and answers each on stdout with {"wall_s", "samples": [[ttft_ms, total_ms, tokens], …]}. The end of stdin is its end.
vLLM detokenizes as it normally does; its statistics are off, which is the leanest form in which it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from typing import Any

import uvloop

from services.bench.load import closed_loop
from trimtab.kit.process import die_with_parent

LINE_BYTES = 16 << 20


async def serve(llm: Any, answers: Any) -> None:
    """Until stdin ends."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    numbers = itertools.count()

    def asking(max_tokens: int) -> Any:
        params = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )

        async def ask(prompt: str) -> AsyncGenerator[int, None]:
            async for out in llm.generate(prompt, params, str(next(numbers))):
                yield len(out.outputs[0].token_ids)

        return ask

    reader = asyncio.StreamReader(limit=LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    say(answers, {"ready": True})
    while line := await reader.readline():
        job = json.loads(line)
        burst = await closed_loop(asking(job["max_tokens"]), job["prompts"], job["concurrency"])
        say(answers, {"wall_s": burst.wall_s, "samples": [dataclasses.astuple(s) for s in burst.samples]})


def say(answers: Any, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


async def run(args: argparse.Namespace, answers: Any) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args.model,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            enforce_eager=True,
            disable_log_stats=True,
            enable_log_requests=False,
        )
    )
    serving = asyncio.create_task(serve(llm, answers))
    for sig in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(sig, serving.cancel)
    try:
        await asyncio.wait([serving])
        if not serving.cancelled():
            serving.result()
    finally:
        llm.shutdown(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="AsyncLLM alone, driven over stdin and stdout; for `trimtab bench`.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent_pid, signal.SIGTERM)
    # Whatever else writes to stdout, vLLM and its children included, must not end up between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    uvloop.run(run(args, answers))


if __name__ == "__main__":
    main()
