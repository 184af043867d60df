"""Whether FCFS by live switch is stock FCFS: the same requests to our worker in that mode and to plain vLLM, with the same order and tokens.

In float32, where greedy tokens do not depend on who shares a step. There are four slots and 64 tokens a step, and no prompt is shorter: so
requests queue, and no two get their first token in one step, which makes their order one that can be compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.bench.arms import MODEL
from services.bench.mixed.arms import FCFS, fields
from services.bench.mixed.block import first_of
from services.bench.mixed.engine import start_worker
from services.bench.mixed.sources import Send, grpc_send
from services.bench.mixed.workload import prompt
from services.bench.processes import BenchError, Processes
from services.bench.start import LINE_BYTES, START_S, Shape
from trimtab.client import Client
from trimtab.errors import TrimtabError
from trimtab.kit.cli import ExitCode
from trimtab.messages import Accepted, Delta, Workload

REQUESTS = 20
SLOTS, STEP_TOKENS = 4, 64
PROMPT, OUTPUT = (STEP_TOKENS + 1, 220), (4, 24)


@dataclass(frozen=True, slots=True)
class Job:
    workload: Workload
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Answers:
    """`order` names the requests in the order of their first tokens."""

    order: Sequence[int]
    tokens: Sequence[Sequence[int]]


def jobs(seed: int) -> list[Job]:
    """Both workloads in turn: FCFS must not see the difference."""
    rng = random.Random(f"{seed}/check")
    workloads = [Workload.BATCH, Workload.REALTIME] * (REQUESTS // 2)
    lengths = [(rng.randint(*PROMPT), rng.randint(*OUTPUT)) for _ in workloads]
    return [
        Job(w, prompt(f"{seed}/check/{i}", p), o) for i, (w, (p, o)) in enumerate(zip(workloads, lengths, strict=True))
    ]


def differing(ours: Answers, stock: Answers) -> list[int]:
    """Requests that come in another place or with other tokens than stock vLLM's."""
    moved = {a for a, b in zip(ours.order, stock.order, strict=True) if a != b}
    other = {i for i, (a, b) in enumerate(zip(ours.tokens, stock.tokens, strict=True)) if list(a) != list(b)}
    return sorted(moved | other)


async def check(directory: Path, shape: Shape, seed: int) -> dict[str, Any]:
    """How many of how many requests are as stock FCFS has them. BenchError when not all are: nothing could be compared then."""
    small = replace(shape, dtype="float32", max_num_seqs=SLOTS, max_step_tokens=STEP_TOKENS, kv_cache_gib=1)
    asked = jobs(seed)
    async with Processes(directory) as processes:
        try:
            async with asyncio.TaskGroup() as group:
                ours = group.create_task(_ours(processes, small, asked))
                stock = group.create_task(_stock(processes, small, asked))
        except ExceptionGroup as failures:
            e = first_of(failures)
            raise (
                BenchError(f"the check of FCFS failed: {e}") if isinstance(e, TrimtabError | OSError) else e
            ) from None
    wrong = differing(ours.result(), stock.result())
    if wrong:
        text = f"FCFS by live switch is not stock FCFS: of {REQUESTS} requests, {wrong} differ in place or tokens"
        raise BenchError(text, ExitCode.GOAL_FAILED)
    return {"same": REQUESTS - len(wrong), "of": REQUESTS}


async def through(send: Send, asked: Sequence[Job]) -> Answers:
    """All of them at once, arriving in order: each is sent when the one before it has been accepted."""
    order: list[int] = []
    tokens: list[list[int]] = [[] for _ in asked]

    async def one(i: int, job: Job, accepted: asyncio.Event) -> None:
        async with aclosing(send(job.workload, job.prompt, job.max_tokens)) as events:
            async for event in events:
                if isinstance(event, Accepted):
                    accepted.set()
                elif isinstance(event, Delta) and event.token_ids:
                    if not tokens[i]:
                        order.append(i)
                    tokens[i] += event.token_ids

    async with asyncio.TaskGroup() as group:
        for i, job in enumerate(asked):
            accepted = asyncio.Event()
            group.create_task(one(i, job, accepted))
            await accepted.wait()
    return Answers(order, tokens)


async def _ours(processes: Processes, shape: Shape, asked: Sequence[Job]) -> Answers:
    address, steering, _ = await start_worker(processes, shape)
    await steering.steer(fields(FCFS))
    async with Client(address) as client:
        return await through(grpc_send(client, MODEL), asked)


async def _stock(processes: Processes, shape: Shape, asked: Sequence[Job]) -> Answers:
    argv = [
        "-m", "services.bench.mixed.stock", "--model", shape.model, "--dtype", shape.dtype,
        "--max-num-seqs", str(shape.max_num_seqs), "--max-num-batched-tokens", str(shape.max_step_tokens),
        "--parent-pid", str(os.getpid()),
    ]  # fmt: skip
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": LINE_BYTES}
    child = await processes.start("stock", argv, shape.environment(), **pipes)
    stdin, stdout = child.process.stdin, child.process.stdout
    assert stdin is not None and stdout is not None
    stdin.write(json.dumps([{"prompt": job.prompt, "max_tokens": job.max_tokens} for job in asked]).encode() + b"\n")
    try:
        async with asyncio.timeout(START_S):
            line = await stdout.readline()
    except TimeoutError:
        line = b""
    if not line:
        raise BenchError(f"stock vLLM gave no answer; its last lines ({child.log}):\n{child.tail()}")
    answer: Mapping[str, Any] = json.loads(line)
    return Answers(answer["order"], answer["tokens"])
