"""Plain vLLM with its stock scheduler class, in a process of its own: what our FCFS is held against.

It reads [{"prompt": [ids], "max_tokens": n}, …] as one line on stdin, sends them in that order, and answers with one line on stdout:
{"order": [which gave its first token when], "tokens": [[ids], …]}. Greedy, ends ignored. No class, plug-in or setting of ours.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from typing import Any

import uvloop

from trimtab.kit.process import die_with_parent

APART_S = 0.02
"""Between two requests, so that they arrive in order; less than a step takes."""


async def answer(llm: Any, requests: list[dict[str, Any]]) -> dict[str, Any]:
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    order: list[int] = []
    tokens: list[list[int]] = [[] for _ in requests]

    async def one(i: int, request: dict[str, Any]) -> None:
        params = SamplingParams(
            temperature=0.0, max_tokens=request["max_tokens"], ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        async for out in llm.generate(tokens_input(request["prompt"]), params, str(i)):
            if not tokens[i]:
                order.append(i)
            tokens[i] += out.outputs[0].token_ids

    async with asyncio.TaskGroup() as group:
        for i, request in enumerate(requests):
            group.create_task(one(i, request))
            await asyncio.sleep(APART_S)
    return {"order": order, "tokens": tokens}


async def run(args: argparse.Namespace, answers: Any) -> None:
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    requests = json.loads(sys.stdin.readline())
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=args.model,
            dtype=args.dtype,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            enforce_eager=not torch.cuda.is_available(),  # as our worker has it
            disable_log_stats=True,
            enable_log_requests=False,
        )
    )
    try:
        answers.write(json.dumps(await answer(llm, requests)) + "\n")
        answers.flush()
    finally:
        llm.shutdown(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plain vLLM's own order and tokens; for `trimtab bench mixed`.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--max-num-seqs", type=int, required=True)
    parser.add_argument("--max-num-batched-tokens", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    args = parser.parse_args()
    die_with_parent(args.parent_pid, signal.SIGTERM)
    # Whatever else writes to stdout, vLLM and its children included, must not end up before the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    uvloop.run(run(args, answers))


if __name__ == "__main__":
    main()
