"""Starts what the arms stand on: a mesh with vLLM inside, vLLM's own server, and AsyncLLM alone; or a mesh with a simulated engine.

Invariant: engines differ in what stands around vLLM alone. Model, data type, batch limits, KV cache, eager mode and environment come from one
`Shape`; on a CPU each computes with all cores but one, ours in the engine's process, the others in one of their own as vLLM ships it. All
engines are kept up for the whole run; only the one whose turn it is gets load.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from services.bench.arms import MODEL, Arm, BareArm, GrpcArm, HttpArm
from services.bench.processes import BenchError, Processes, grpc_serving
from services.bench.steering import Steering
from services.worker.engines.vllm import environment
from services.worker.engines.vllm_plugin import OWNER_ENV
from trimtab.client import Client
from trimtab.kit.cli import ExitCode
from trimtab.kit.process import free_port

START_S = 300.0
LINE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class Shape:
    """The engine that every arm has. Its batch limits lie within the default policy, which therefore changes nothing of them."""

    model: str
    dtype: str = "bfloat16"
    max_num_seqs: int = 32
    max_step_tokens: int = 2048
    kv_cache_gib: int = 1
    compiled: bool = False

    def environment(self) -> dict[str, str]:
        """As a worker sets it, less the mark of ownership that wakes our plug-in inside vLLM."""
        found = {k: v for k, v in environment(self.kv_cache_gib).items() if k != OWNER_ENV}
        if Path(self.model).is_dir():
            found["HF_HUB_OFFLINE"] = "1"
        return found

    def worker_flags(self) -> list[str]:
        sizes = ["--max-num-seqs", str(self.max_num_seqs), "--max-step-tokens", str(self.max_step_tokens)]
        what = ["--model", self.model, "--dtype", self.dtype, "--kv-cache-gib", str(self.kv_cache_gib)]
        return [*what, *sizes, *(["--compiled"] if self.compiled else [])]


def model_path(name: str) -> str:
    """Where the model lies; fetched where it has to be. BenchError says why it can't be had."""
    from services.worker import model

    try:
        return str(model.resolve(name))
    except model.ModelError as e:
        raise BenchError(str(e), ExitCode.USAGE) from e


@dataclass(frozen=True, slots=True)
class Mesh:
    """A control plane, one worker and one gateway, as processes."""

    gateway: str
    worker: str
    control: str
    http: str
    """Of the gateway."""


async def start_mesh(processes: Processes, flags: Sequence[str], environment: Mapping[str, str]) -> Mesh:
    """Control plane, worker and gateway, all serving. `flags` go to the worker. Nothing is stored beyond the run."""
    here = {
        name: f"127.0.0.1:{free_port()}"
        for name in ("control", "metrics", "worker", "worker-metrics", "gateway", "http")
    }
    common = ["--mesh", "bench", "--parent-pid", str(os.getpid())]
    control = ["--listen", here["control"], "--metrics", here["metrics"], "--redis", "memory://"]
    worker = ["--listen", here["worker"], "--metrics", here["worker-metrics"], "--served-model-name", MODEL]
    gateway = ["--listen", here["gateway"], "--http", here["http"]]
    to_control = ["--control", here["control"]]
    await processes.start("control", ["-m", "controlplane", *common, *control])
    started = await processes.start(
        "worker", ["-m", "services.worker", *common, *worker, *to_control, *flags], environment
    )
    front = await processes.start("gateway", ["-m", "services.gateway", *common, *gateway, *to_control])
    await started.ready(lambda: grpc_serving(here["worker"]), START_S)
    await front.ready(lambda: grpc_serving(here["gateway"]), 30.0)
    return Mesh(here["gateway"], here["worker"], here["control"], here["http"])


async def start_vllm_mesh(processes: Processes, shape: Shape) -> Mesh:
    return await start_mesh(processes, shape.worker_flags(), shape.environment())


async def start_http(processes: Processes, shape: Shape, session: aiohttp.ClientSession) -> HttpArm:
    """vLLM's server in its leanest form: no statistics, no access log."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    what = ["--model", shape.model, "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    quiet = ["--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    # Their module has no option that ends it with its parent; our tether gives it one.
    tether = ["-m", "trimtab_cli.tether", str(os.getpid()), "--", sys.executable]
    argv = [
        *tether,
        "-m",
        "vllm.entrypoints.openai.api_server",
        *what,
        *_engine_flags(shape),
        "--enforce-eager",
        *quiet,
    ]
    child = await processes.start("http", argv, shape.environment())

    async def healthy() -> bool:
        try:
            async with session.get(f"http://{address}/health") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    await child.ready(healthy, START_S)
    return HttpArm(session, address)


async def start_bare(processes: Processes, shape: Shape) -> BareArm:
    argv = [
        "-m",
        "services.bench.bare",
        "--model",
        shape.model,
        *_engine_flags(shape),
        "--parent-pid",
        str(os.getpid()),
    ]
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": LINE_BYTES}
    child = await processes.start("bare", argv, shape.environment(), **pipes)
    stdout = child.process.stdout
    assert stdout is not None
    said = asyncio.create_task(stdout.readline())

    async def ready() -> bool:
        return said.done() and bool(said.result())

    try:
        await child.ready(ready, START_S)
    finally:
        said.cancel()
    return BareArm(child)


def _engine_flags(shape: Shape) -> list[str]:
    return [
        "--dtype", shape.dtype,
        "--max-num-seqs", str(shape.max_num_seqs),
        "--max-num-batched-tokens", str(shape.max_step_tokens),
    ]  # fmt: skip


@asynccontextmanager
async def real_arms(
    directory: Path, shape: Shape, names: Sequence[str]
) -> AsyncIterator[tuple[Processes, dict[str, Arm]]]:
    """Those named, up, with their processes; all ended on leaving. The mesh and its worker alone share an engine."""
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes(directory))
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def ours() -> dict[str, Arm]:
            mesh = await start_vllm_mesh(processes, shape)
            steering = Steering(processes, mesh.control)
            await steering.connected()
            # What the way costs is asked here, not what a budget for steps is worth: plain vLLM has none.
            await steering.steer({"prefill.itl_budget_ms": "0"})
            gateway = await stack.enter_async_context(Client(mesh.gateway))
            worker = await stack.enter_async_context(Client(mesh.worker))
            return {"mesh": GrpcArm("mesh", gateway), "worker": GrpcArm("worker", worker)}

        async def http() -> dict[str, Arm]:
            return {"http": await start_http(processes, shape, session)}

        async def bare() -> dict[str, Arm]:
            return {"bare": await start_bare(processes, shape)}

        wanted = {"mesh": ours, "worker": ours, "http": http, "bare": bare}
        try:
            async with asyncio.TaskGroup() as group:
                # Together: each start is mostly one core's work.
                tasks = [group.create_task(start()) for start in {wanted[name] for name in names}]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        yield processes, {name: arm for task in tasks for name, arm in task.result().items() if name in names}


@asynccontextmanager
async def simulated_mesh(directory: Path, step_ms: float) -> AsyncIterator[Mesh]:
    """A mesh whose engine takes `step_ms` for each step, whatever is in it."""
    async with Processes(directory) as processes:
        yield await start_mesh(processes, ["--engine", "simulated", "--step-ms", str(step_ms), "--token-us", "0"], {})
