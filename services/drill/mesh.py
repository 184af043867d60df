"""A mesh of processes to strike at: a control plane, gateways, and workers that gateways reach through a proxy.

Workers join by the control plane, as in any mesh, so that a restarted one is a new incarnation on the same address.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families

from services.bench.arms import MODEL
from services.bench.processes import BenchError, Child, Processes, grpc_serving
from services.bench.start import START_S
from services.bench.steering import Steering
from services.drill.proxy import Proxy
from services.drill.strikes import DRAIN_S
from services.drill.valkey import start_valkey
from trimtab.kit.process import free_port

READY_S, LEAVE_S, POLL_S, ASK_S = 60.0, 30.0, 0.1, 5.0
SERVING = "serving"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is started. `flags` and `environment` are the workers', `own` is one worker's beside it; `policy` is set before anything is asked.

    With `valkey` the control plane has a store of its own process, else one in its memory.
    """

    workers: int
    gateways: int
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    valkey: bool = False


class Worker:
    """One worker on its address, through all its lives."""

    def __init__(self, name: str, processes: Processes, common: Sequence[str], shape: Shape) -> None:
        self.name = name
        self.address, self.metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
        self._processes = processes
        self._common = common
        self._shape = shape
        self._lives = 0
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        assert self._child is not None, "it is started first"
        return self._child

    async def start(self) -> None:
        """A new life, serving when this returns. Each has a log of its own."""
        here = ["--node-id", self.name, "--listen", self.address, "--metrics", self.metrics]
        what = ["--served-model-name", MODEL, "--drain-s", str(DRAIN_S), *self._shape.flags]
        argv = ["-m", "services.worker", *self._common, *here, *what]
        if self._child is not None:
            self._processes.children.pop(self._child.name, None)
        self._lives += 1
        environment = {**self._shape.environment, **self._shape.own.get(self.name, {})}
        self._child = await self._processes.start(f"{self.name}.{self._lives}", argv, environment)
        await self._child.ready(lambda: grpc_serving(self.address), START_S)
        self._child.cpu_s()  # so that its descendants are known, whatever becomes of it

    async def kill(self) -> None:
        """Gone when this returns, and all that it had started with it."""
        below = self._below()
        self.child.process.kill()
        await self.child.process.wait()
        await asyncio.to_thread(psutil.wait_procs, below, timeout=LEAVE_S)

    async def leave(self) -> None:
        """SIGTERM, and its own end. BenchError when it does not come, or is no clean one."""
        self.child.process.terminate()
        try:
            code = await asyncio.wait_for(self.child.process.wait(), LEAVE_S)
        except TimeoutError:
            raise BenchError(f"{self.child.name} did not end within {LEAVE_S:g} s of SIGTERM") from None
        if code != 0:
            raise BenchError(
                f"{self.child.name} ended with code {code} on SIGTERM; its last lines:\n{self.child.tail()}"
            )

    def engine_pid(self) -> int:
        """Of the largest process below it, which is the one that computes. BenchError where there is none."""
        sizes = [(p.memory_info().rss, p.pid) for p in self._below() if p.is_running()]
        if not sizes:
            raise BenchError(f"{self.child.name} has no engine of its own")
        return max(sizes)[1]

    def _below(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.child.process.pid).children(recursive=True)
        return []


@asynccontextmanager
async def frozen(pid: int) -> AsyncIterator[None]:
    """Stopped within the block. Should this process die in it, the other one is thawed all the same, and can end with its parent."""
    guard = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", f"read _; kill -CONT {pid} 2>/dev/null", stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    try:
        os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        assert guard.stdin is not None
        guard.stdin.close()
        await guard.wait()


class Mesh:
    """What runs. `gateways` are gRPC addresses, `doors` those of the same gateways' HTTP."""

    def __init__(self, processes: Processes, proxy: Proxy, session: aiohttp.ClientSession) -> None:
        self.processes = processes
        self.proxy = proxy
        self.workers: dict[str, Worker] = {}
        self.gateways: list[str] = []
        self.control = ""
        self.steering: Steering
        self.doors: list[str] = []
        self._session = session

    async def start(self, shape: Shape) -> None:
        """All serving, and the policy in force."""
        control, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
        common = ["--mesh", "drill", "--parent-pid", str(os.getpid()), "--log-level", "info"]
        store = await start_valkey(self.processes) if shape.valkey else "memory://"
        argv = ["-m", "controlplane", *common, "--listen", control, "--metrics", metrics, "--redis", store]
        self.control = control
        child = await self.processes.start("control", argv)
        await child.ready(lambda: grpc_serving(control), READY_S)
        common += ["--control", control]
        for i in range(shape.workers):
            self.workers[f"w{i}"] = Worker(f"w{i}", self.processes, common, shape)
        fronts = [await self._gateway(f"g{i}", common) for i in range(shape.gateways)]
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self.workers.values():
                    group.create_task(worker.start())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        for front, address in zip(fronts, self.gateways, strict=True):
            await front.ready(_serves(address), READY_S)
        for name in self.workers:
            if await self.back(name, READY_S) is None:
                raise BenchError(f"gateways did not find worker {name} within {READY_S:g} s")
        self.steering = Steering(self.processes, control)
        await self.steering.connected()
        await self.steering.steer(shape.policy)

    async def _gateway(self, name: str, common: Sequence[str]) -> Child:
        address, door = (f"127.0.0.1:{free_port()}" for _ in range(2))
        argv = ["-m", "services.gateway", *common, "--node-id", name, "--listen", address, "--http", door]
        # gRPC's own word for a proxy; the control plane is reached through it too.
        child = await self.processes.start(name, argv, {"grpc_proxy": self.proxy.url})
        self.gateways.append(address)
        self.doors.append(door)
        return child

    async def states(self) -> list[Mapping[str, str]]:
        """Of the workers, as each gateway has them."""
        return [await self._states(door) for door in self.doors]

    async def well(self) -> list[str]:
        """Workers that every gateway counts as serving."""
        states = await self.states()
        return [name for name in self.workers if all(s.get(name) == SERVING for s in states)]

    async def back(self, name: str, within_s: float) -> float | None:
        """When every gateway counted it as serving, in seconds of the monotonic clock; None where that took longer."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            if name in await self.well():
                return time.monotonic()
            await asyncio.sleep(POLL_S)
        return None

    async def counted(self, metric: str, label: str) -> dict[str, float]:
        """A counter of the gateways', by one of its labels."""
        found: dict[str, float] = {}
        for door in self.doors:
            for family in text_string_to_metric_families(await self._get(f"http://{door}/metrics")):
                for sample in family.samples:
                    if sample.name == f"{metric}_total":
                        key = sample.labels.get(label, "")
                        found[key] = found.get(key, 0.0) + sample.value
        return found

    async def gauges(self, address: str) -> dict[tuple[str, str], float]:
        """What a process's /metrics says now, by name and by the value of its first label."""
        found = {}
        for family in text_string_to_metric_families(await self._get(f"http://{address}/metrics")):
            for sample in family.samples:
                found[sample.name, next(iter(sample.labels.values()), "")] = sample.value
        return found

    async def _states(self, door: str) -> Mapping[str, str]:
        async with self._session.get(f"http://{door}/health") as answer:
            workers: Mapping[str, str] = (await answer.json())["workers"]
        return workers

    async def _get(self, url: str) -> str:
        async with self._session.get(url) as answer:
            return await answer.text()

    def check(self) -> None:
        """BenchError when a process has ended that nobody struck."""
        self.processes.check()


def _serves(address: str) -> Callable[[], Awaitable[bool]]:
    return lambda: grpc_serving(address)


@asynccontextmanager
async def mesh(directory: Path, shape: Shape) -> AsyncIterator[Mesh]:
    """Everything is ended on leaving."""
    proxy = Proxy()
    await proxy.start()
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    try:
        async with Processes(directory) as processes, aiohttp.ClientSession(timeout=timeout) as session:
            running = Mesh(processes, proxy, session)
            await running.start(shape)
            yield running
    finally:
        await proxy.close()
