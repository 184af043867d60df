"""What is measured: four ways to the same engine, each started once and kept; only the one whose turn it is gets load.

Invariant: an arm differs from the others in what stands around vLLM alone. Model, data type, batch limits, KV cache, eager mode, environment,
prompts and sampling come from one `Shape` and one `environment`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from services.bench.figures import OUTSIDE
from services.bench.load import Ask, Burst, Sample, closed_loop
from services.bench.processes import BenchError, Child, Processes, grpc_serving
from services.worker.engines.vllm import environment
from services.worker.engines.vllm_plugin import OWNER_ENV
from trimtab.client import Client
from trimtab.kit.process import free_port
from trimtab.messages import Delta, Request, Sampling

MODEL = "bench"
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

    def environment(self) -> dict[str, str]:
        """As a worker sets it, less the mark of ownership that wakes our plug-in inside vLLM."""
        found = {k: v for k, v in environment(self.kv_cache_gib).items() if k != OWNER_ENV}
        return found | {"HF_HUB_OFFLINE": "1"} if os.path.isdir(self.model) else found


class Arm(Protocol):
    """One way. `roles` says by which name each of its processes goes in a report, and in `Processes.cpu_s`."""

    name: str
    roles: Mapping[str, str]

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst: ...


@dataclass(frozen=True, slots=True)
class Mesh:
    """A control plane, one worker and one gateway, as processes."""

    gateway: str
    worker: str


def grpc_ask(client: Client, max_tokens: int) -> Ask:
    """Generate, at a gateway or at a worker."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def ask(prompt: str) -> AsyncGenerator[int, None]:
        async for event in client.generate(Request("", MODEL, prompt, sampling)):
            if isinstance(event, Delta) and event.token_ids:
                yield len(event.token_ids)

    return ask


class GrpcArm:
    """Our own wire: the whole mesh, or the worker alone."""

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.roles = {**{role: role for role in OUTSIDE[name]}, "engine": "worker/engine"}
        self._client = client

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        return await closed_loop(grpc_ask(self._client, max_tokens), texts, concurrency)


class HttpArm:
    """vLLM's own server, by its streaming /v1/completions."""

    name = "http"
    roles: Mapping[str, str] = {"front": "http", "engine": "http/engine"}

    def __init__(self, session: aiohttp.ClientSession, address: str) -> None:
        self._session = session
        self._url = f"http://{address}/v1/completions"

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        return await closed_loop(self._asking(max_tokens), texts, concurrency)

    def _asking(self, max_tokens: int) -> Ask:
        fixed = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        fixed["stream_options"] = {"include_usage": True}

        async def ask(prompt: str) -> AsyncGenerator[int, None]:
            async with self._session.post(self._url, json={**fixed, "prompt": prompt}) as answer:
                if answer.status != 200:
                    raise BenchError(f"vLLM's server answered {answer.status}: {(await answer.text())[:300]}")
                last = b""
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if not last:
                        yield 1
                    last = line
                # How many tokens a chunk carries is told by no chunk, but all of them by the usage at the end.
                yield json.loads(last[len(b"data: ") :])["usage"]["completion_tokens"] - 1

        return ask


class BareArm:
    """AsyncLLM in its own process, driven there (`bare.py`)."""

    name = "bare"
    roles: Mapping[str, str] = {"front": "bare", "engine": "bare/engine"}

    def __init__(self, child: Child) -> None:
        self._child = child

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        stdin, stdout = self._child.process.stdin, self._child.process.stdout
        assert stdin is not None and stdout is not None
        job = {"prompts": list(texts), "concurrency": concurrency, "max_tokens": max_tokens}
        stdin.write(json.dumps(job).encode() + b"\n")
        line = await stdout.readline()
        if not line:
            raise BenchError(f"bare ended in the middle of a burst; its last lines:\n{self._child.tail()}")
        answer = json.loads(line)
        return Burst(tuple(Sample(*s) for s in answer["samples"]), answer["wall_s"])


async def start_mesh(processes: Processes, flags: Sequence[str], environment: Mapping[str, str]) -> Mesh:
    """Control plane, worker and gateway, all serving. `flags` go to the worker. Nothing is stored beyond the run."""
    here = {name: f"127.0.0.1:{free_port()}" for name in ("control", "metrics", "worker", "worker-metrics", "gateway", "http")}
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
    return Mesh(here["gateway"], here["worker"])


async def start_vllm_mesh(processes: Processes, shape: Shape) -> Mesh:
    sizes = ["--max-num-seqs", str(shape.max_num_seqs), "--max-step-tokens", str(shape.max_step_tokens)]
    what = ["--model", shape.model, "--dtype", shape.dtype, "--kv-cache-gib", str(shape.kv_cache_gib)]
    return await start_mesh(processes, [*what, *sizes], shape.environment())


async def start_http(processes: Processes, shape: Shape, session: aiohttp.ClientSession) -> HttpArm:
    """vLLM's server in its leanest form: no statistics, no access log."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    what = ["--model", shape.model, "--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port)]
    quiet = ["--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"]
    # Their module has no option that ends it with its parent; our tether gives it one.
    tether = ["-m", "trimtab_cli.tether", str(os.getpid()), "--", sys.executable]
    argv = [*tether, "-m", "vllm.entrypoints.openai.api_server", *what, *_engine_flags(shape), "--enforce-eager", *quiet]
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
    argv = ["-m", "services.bench.bare", "--model", shape.model, *_engine_flags(shape), "--parent-pid", str(os.getpid())]
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
