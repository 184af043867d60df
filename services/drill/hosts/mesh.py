"""A mesh over several hosts, every connection with mTLS: control plane, Valkey and a gateway on the first host, workers on the others.

The clients are this process, and so are on the gateway's host too. Each process has a certificate of its own (decision 11).
"""

from __future__ import annotations

import asyncio
import datetime
import os
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from services.bench.arms import MODEL
from services.bench.processes import Processes, grpc_serving
from services.bench.start import START_S
from services.bench.steering import Steering
from services.drill.hosts.admin import Admin
from services.drill.hosts.namespaces import Host, Network
from services.drill.valkey import start_valkey
from trimtab.kit import certificates
from trimtab.kit.process import write_atomically
from trimtab.kit.rpc import use_tls
from trimtab.kit.tls import Tls

MESH, GATEWAY = "drill", "g0"
CONTROL_PORT, GATEWAY_PORT, DOOR_PORT, WORKER_PORT, METRICS_PORT = 7071, 7070, 7080, 7100, 7200
READY_S, ASK_S, POLL_S = 60.0, 5.0, 0.1
SERVING = "serving"
DAYS = 30
"""Of certificates: less, and every process would warn of it."""
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting")
ENDED = "trimtab_worker_requests_total"


@dataclass(frozen=True, slots=True)
class Shape:
    """`hosts` are the workers' hosts, each with the names of its workers; `flags` and `environment` are the workers'."""

    hosts: Mapping[str, Sequence[str]]
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, str] = field(default_factory=dict)


class Papers:
    """The authority of a drill and what it signs, as files."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._directory = directory
        self._now = datetime.datetime.now(datetime.UTC)
        self._authority = certificates.authority(MESH, days=DAYS, now=self._now)
        self._ca = directory / "ca.pem"
        write_atomically(self._ca, self._authority.cert)

    def issue(self, kind: str, name: str) -> Tls:
        pair = certificates.issue(self._authority, MESH, kind, name, hosts=(), days=DAYS, now=self._now)
        cert, key = (self._directory / f"{kind}-{name}{what}.pem" for what in ("", "-key"))
        write_atomically(cert, pair.cert)
        write_atomically(key, pair.key)
        return Tls(self._ca, cert, key, MESH)


class Secured(Processes):
    """Processes whose `ask` speaks as this person."""

    def __init__(self, directory: Path, person: Tls) -> None:
        super().__init__(directory)
        files = zip(("CA", "CERT", "KEY"), (person.ca, person.cert, person.key), strict=True)
        self._person = {f"TRIMTAB_TLS_{word}": str(path) for word, path in files} | {"TRIMTAB_TLS_MESH": MESH}

    def _environment(self) -> dict[str, str]:
        return super()._environment() | self._person


@dataclass(frozen=True, slots=True)
class Worker:
    name: str
    host: Host
    address: str
    metrics: int

    async def held(self) -> float:
        """Requests that it runs or has waiting, as it says itself."""
        return sum([value for name, _, value in await self._samples() if name in HELD])

    async def ended(self) -> dict[str, float]:
        """Requests that have ended there, by outcome."""
        found: dict[str, float] = {}
        for name, labels, value in await self._samples():
            if name == ENDED:
                found[labels["outcome"]] = found.get(labels["outcome"], 0.0) + value
        return found

    async def _samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Asked on its own host: whoever is cut off answers there all the same."""
        said = await self.host.get(self.metrics, "/metrics")
        return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(said) for s in family.samples]


class Mesh:
    """What runs. `gateway` is its gRPC address."""

    def __init__(self, processes: Processes, papers: Papers, person: Tls) -> None:
        self.network = Network()
        self.workers: dict[str, Worker] = {}
        self.gateway = ""
        self._admin: Admin | None = None
        self._processes = processes
        self._papers = papers
        self._door = ""
        self._session: aiohttp.ClientSession
        self._person = person

    @property
    def admin(self) -> Admin:
        assert self._admin is not None, "it is started first"
        return self._admin

    async def start(self, shape: Shape, session: aiohttp.ClientSession) -> None:
        """All serving, and the policy in force."""
        self._session = session
        await self.network.start(self._processes, ("front", *shape.hosts))
        front = self.network.hosts["front"]
        control = f"{front.ip}:{CONTROL_PORT}"
        self.gateway, self._door = f"{front.ip}:{GATEWAY_PORT}", f"https://{front.ip}:{DOOR_PORT}/health"
        store = await start_valkey(self._processes)
        argv = ["-m", "controlplane", *self._common("control", "c0"), "--listen", control, "--redis", store]
        child = await self._processes.start("control", argv)
        await child.ready(lambda: grpc_serving(control, "control"), READY_S)
        here = ["--listen", self.gateway, "--http", f"{front.ip}:{DOOR_PORT}", "--client-certs", "--control", control]
        argv = ["-m", "services.gateway", *self._common("gateway", GATEWAY), "--node-id", GATEWAY, *here]
        gateway = await self._processes.start(GATEWAY, argv)
        try:
            async with asyncio.TaskGroup() as group:
                for host, names in shape.hosts.items():
                    for number, name in enumerate(names):
                        group.create_task(self._worker(name, self.network.hosts[host], number, control, shape))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        await gateway.ready(lambda: grpc_serving(self.gateway, "gateway"), READY_S)
        await gateway.ready(self.well, READY_S)
        self._admin = Admin(control, self._processes)
        steering = Steering(self._processes, control)
        await steering.connected()
        await steering.steer(shape.policy)

    async def _worker(self, name: str, host: Host, number: int, control: str, shape: Shape) -> None:
        worker = Worker(name, host, f"{host.ip}:{WORKER_PORT + number}", METRICS_PORT + number)
        here = ["--node-id", name, "--listen", worker.address, "--metrics", f"127.0.0.1:{worker.metrics}"]
        argv = ["-m", "services.worker", *self._common("worker", name), *here, "--control", control]
        argv += ["--served-model-name", MODEL, *shape.flags]
        child = await self._processes.start(name, host.inside(argv), shape.environment)
        await child.ready(lambda: grpc_serving(worker.address), START_S)
        child.cpu_s()  # so that its descendants are known, whatever becomes of it
        self.workers[name] = worker

    def _common(self, kind: str, name: str) -> list[str]:
        tls = self._papers.issue(kind, name)
        files = ["--tls-ca", str(tls.ca), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key)]
        return ["--mesh", MESH, "--parent-pid", str(os.getpid()), "--log-level", "info", *files]

    async def states(self) -> Mapping[str, str]:
        """Of the workers, as the gateway has them."""
        async with self._session.get(self._door, server_hostname=self._person.name_of("gateway")) as answer:
            workers: Mapping[str, str] = (await answer.json())["workers"]
        return workers

    async def well(self) -> bool:
        """Whether the gateway has a link to every worker, and its breaker closed."""
        try:
            states = await self.states()
        except (aiohttp.ClientError, TimeoutError):
            return False
        return bool(self.workers) and all(states.get(name) == SERVING for name in self.workers)

    async def held(self, names: Sequence[str]) -> float:
        return sum(await asyncio.gather(*(self.workers[name].held() for name in names)))

    async def ended(self, names: Sequence[str], outcome: str) -> float:
        """Requests that have ended so at these workers."""
        found = await asyncio.gather(*(self.workers[name].ended() for name in names))
        return sum(each.get(outcome, 0.0) for each in found)

    async def close(self) -> None:
        if self._admin is not None:
            await self._admin.close()

    def check(self) -> None:
        """BenchError when a process has ended."""
        self._processes.check()


@asynccontextmanager
async def mesh(directory: Path, shape: Shape) -> AsyncIterator[Mesh]:
    """Everything is ended on leaving, and with this process's last the hosts are gone."""
    papers = Papers(directory / "certificates")
    person = papers.issue("admin", "drill")
    use_tls(person)
    trusted = ssl.create_default_context(cafile=str(person.ca))
    trusted.load_cert_chain(person.cert, person.key)
    timeout = aiohttp.ClientTimeout(total=ASK_S)
    async with (
        Secured(directory, person) as processes,
        aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(ssl=trusted)) as session,
    ):
        running = Mesh(processes, papers, person)
        try:
            await running.start(shape, session)
            yield running
        finally:
            await running.close()
