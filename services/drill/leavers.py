"""`trimtab drill leavers`: clients that leave in every phase of a request, and what is left of them: nothing.

Each comes to a gateway over gRPC or HTTP, goes so far, and is gone: in a queue, in prefill, at its first token, in mid-stream, or after having
read nothing for a while. At rest, after each lot of them, every counter of places must stand at zero, and memory must not have grown.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass

import aiohttp
import grpc
import psutil

from services.bench.arms import MODEL
from services.bench.checkpoint import new_directory
from services.bench.goals import Goal
from services.bench.load import prompts
from services.bench.processes import BenchError
from services.bench.progress import progress
from services.bench.report import Report, command, machine
from services.bench.stats import Bound
from services.drill.endpoint import Door
from services.drill.mesh import Mesh, Shape, mesh
from services.drill.options import DrillOptions
from trimtab.kit.cli import table
from trimtab.messages import Request, Sampling, Workload

PHASES = ("at once", "accepted", "prefill", "first token", "mid-stream", "reads nothing")
HTTP_SHARE = 0.25
OPEN = 150
LOTS = 8
REST_S, POLL_S = 60.0, 0.25
LONG = (200, 400)
"""Words of a prompt whose prefill takes several steps."""
SILENT_S = (0.2, 1.0)
GROWN_MB = 8.0
"""What a process may have grown from the second lot to the last: allocators keep some of what they had."""


@dataclass(frozen=True, slots=True)
class Lot:
    """What was there after a lot of leavers had left. Memory in MB, by process."""

    left: int
    at_rest_s: float
    remaining: dict[str, float]
    memory_mb: dict[str, float]


async def run(options: DrillOptions) -> Report:
    """The whole drill. Cancelled, it reports what it has."""
    clients = 1_200 if options.quick else 10_000
    lots: list[Lot] = []
    seen: Counter[str] = Counter()
    facts, whole = machine(), True
    # Few slots, so that some wait in the workers' queues and BATCH in the gateway's.
    flags = [
        "--engine",
        "simulated",
        "--step-ms",
        "10",
        "--token-us",
        "50",
        "--max-num-seqs",
        "16",
        "--max-step-tokens",
        "256",
    ]
    policy = {"batch.active": "16", "batch.hard_cap": "12", "prefill.step_tokens": "256"}
    with progress(25.0 if options.quick else 200.0) as show:
        show.stage("starting a mesh of simulated engines")
        try:
            async with mesh(new_directory("drill-leavers"), Shape(2, 1, flags, policy=policy)) as running:
                for number in range(LOTS):
                    show.stage(f"lot {number + 1} of {LOTS}: {clients // LOTS} clients")
                    await _lot(running, f"{options.seed}/{number}", clients // LOTS, seen)
                    lots.append(await _rest(running, clients // LOTS))
                    show.done((25.0 if options.quick else 200.0) / LOTS)
                running.check()
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    notes = [
        f"left in phase: {', '.join(f'{phase} {seen[phase]}' for phase in PHASES)}; ended before that: {seen['ended']}"
    ]
    return Report(
        "leavers",
        [asdict(lot) for lot in lots],
        goals(lots),
        [("After each lot", _table(lots))],
        notes,
        whole,
        facts,
        command(),
        kind="drill",
    )


def goals(lots: list[Lot]) -> list[Goal]:
    """Nothing is left, and nothing has grown."""
    if len(lots) < LOTS:
        return [Goal("places_left", 0.0, Bound.AT_MOST), Goal("grown_mb_at_most", GROWN_MB, Bound.AT_MOST)]
    left = max(sum(lot.remaining.values()) for lot in lots)
    grown = max(lots[-1].memory_mb[name] - mb for name, mb in lots[1].memory_mb.items())
    return [
        Goal("places_left", 0.0, Bound.AT_MOST, left, left == 0),
        Goal("grown_mb_at_most", GROWN_MB, Bound.AT_MOST, grown, grown <= GROWN_MB),
    ]


async def _lot(running: Mesh, seed: str, count: int, seen: Counter[str]) -> None:
    """`count` clients, `OPEN` at a time."""
    rng = random.Random(seed)
    texts = itertools.cycle([*prompts(seed, 40), *prompts(f"{seed}/long", 20, words=LONG)])
    waiting = iter(
        [(PHASES[i % len(PHASES)], rng.random() < HTTP_SHARE, rng.random(), next(texts)) for i in range(count)]
    )
    async with AsyncExitStack() as stack:
        door = Door(running.gateways[0])
        stack.push_async_callback(door.close)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def caller() -> None:
            for phase, http, chance, text in waiting:
                workload = Workload.BATCH if chance < 0.5 else Workload.REALTIME
                if http:
                    reached = await _by_http(session, running.doors[0], text, workload, phase, chance)
                else:
                    reached = await _by_grpc(door, text, workload, phase, chance)
                seen[phase if reached else "ended"] += 1

        async with asyncio.TaskGroup() as group:
            for _ in range(OPEN):
                group.create_task(caller())


async def _by_grpc(door: Door, text: str, workload: Workload, phase: str, chance: float) -> bool:
    """One client, gone by cancelling its call; whether it got so far."""
    sampling = Sampling(max_tokens=400, temperature=0.0, ignore_eos=True)
    call = door.call(Request("", MODEL, text, sampling, workload), 60.0)
    deltas = 0
    try:
        if phase == "at once":
            await asyncio.sleep(chance * 0.02)
            return True
        if phase == "reads nothing":
            await asyncio.sleep(SILENT_S[0] + chance * (SILENT_S[1] - SILENT_S[0]))
            return True
        async for message in call:
            if phase == "accepted":
                return True
            if phase == "prefill":
                await asyncio.sleep(chance * 0.05)
                return True
            deltas += message.WhichOneof("event") == "delta"
            if deltas >= (1 if phase == "first token" else 2 + int(chance * 20)):
                return True
        return False
    except grpc.aio.AioRpcError:
        return False
    finally:
        call.cancel()


async def _by_http(
    session: aiohttp.ClientSession, door: str, text: str, workload: Workload, phase: str, chance: float
) -> bool:
    """The same over HTTP: it closes its connection."""
    body = {"model": MODEL, "prompt": text, "max_tokens": 400, "temperature": 0, "stream": True}
    headers = {"x-workload": workload.value}
    if phase == "at once":
        with contextlib.suppress(TimeoutError, aiohttp.ClientError):
            async with (
                asyncio.timeout(chance * 0.02),
                session.post(f"http://{door}/v1/completions", json=body, headers=headers) as answer,
            ):
                answer.close()
        return True
    lines = 0
    try:
        async with session.post(f"http://{door}/v1/completions", json=body, headers=headers) as answer:
            try:
                if answer.status != 200:
                    return False
                if phase in ("accepted", "prefill"):
                    await asyncio.sleep(chance * 0.05)
                    return True
                if phase == "reads nothing":
                    await asyncio.sleep(SILENT_S[0] + chance * (SILENT_S[1] - SILENT_S[0]))
                    return True
                async for line in answer.content:
                    lines += line.startswith(b"data: {")
                    if lines >= (1 if phase == "first token" else 2 + int(chance * 20)):
                        return True
            finally:
                answer.close()
    except aiohttp.ClientError:
        pass
    return False


async def _rest(running: Mesh, left: int) -> Lot:
    """Once nothing is left, or after `REST_S` with what is."""
    begun = time.monotonic()
    while True:
        remaining = await _remaining(running)
        if not any(remaining.values()) or time.monotonic() - begun > REST_S:
            break
        await asyncio.sleep(POLL_S)
    memory = {
        name: _memory_mb(child.process.pid) for name, child in running.processes.children.items() if name != "control"
    }
    return Lot(left, time.monotonic() - begun, remaining, memory)


async def _remaining(running: Mesh) -> dict[str, float]:
    """Places that somebody still has: at the gateway, in queues, in engines, in KV caches."""
    gateway = await running.gauges(running.doors[0])
    found = {"in the gateway": sum(v for (name, _), v in gateway.items() if name == "trimtab_gateway_in_flight")}
    for worker in running.workers.values():
        told = await running.gauges(worker.metrics)
        for name, what in (
            ("vllm:num_requests_running", "running"),
            ("vllm:num_requests_waiting", "waiting"),
            ("vllm:kv_cache_usage_perc", "KV"),
        ):
            values = [v for (metric, _), v in told.items() if metric == name]
            if not values:
                raise BenchError(f"worker {worker.name} has no metric {name}")
            found[f"{worker.name} {what}"] = sum(values)
    return found


def _memory_mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 2**20


def _table(lots: list[Lot]) -> str:
    names = sorted({name for lot in lots for name in lot.memory_mb})
    rows = [
        (
            str(number),
            str(lot.left),
            f"{lot.at_rest_s:.1f}",
            f"{sum(lot.remaining.values()):g}",
            *(f"{lot.memory_mb.get(n, 0.0):.1f}" for n in names),
        )
        for number, lot in enumerate(lots, 1)
    ]
    return table(
        ("LOT", "LEFT", "AT REST AFTER S", "PLACES LEFT", *(f"{n} MB" for n in names)),
        rows,
        right=tuple(range(4 + len(names))),
    )
