"""A whole gateway in this process, on free ports, with fake workers behind it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.gateway.__main__ import Gateway
from services.gateway.settings import GatewaySettings
from tests.gateway.builders import until
from tests.gateway.fake_worker import FakeWorker, Script, hello_world
from trimtab.client import Client
from trimtab.kit import telemetry
from trimtab.policy import Partial, Policy, with_fields
from trimtab.snapshot import Resolved

StartWorker = Callable[..., Awaitable[FakeWorker]]
StartGateway = Callable[..., Awaitable[Gateway]]


@pytest.fixture(autouse=True)
def _state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Every span of this process that ends, in a provider of the test's own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(telemetry, "tracer", lambda: provider.get_tracer("test"))
    return exporter


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """start_worker(node_id, script=…): a fake worker that is gone when the test ends."""
    workers: list[FakeWorker] = []

    async def start(node_id: str = "w0", *, script: Script = hello_world, model: str = "m") -> FakeWorker:
        workers.append(await FakeWorker(node_id, model=model, script=script).start())
        return workers[-1]

    yield start
    for worker in workers:
        await worker.die()


@pytest.fixture
async def start_gateway(start_worker: StartWorker) -> AsyncIterator[StartGateway]:
    """start_gateway(*workers, **settings): a gateway whose links to these workers are up."""
    async with AsyncExitStack() as stack:

        async def start(*workers: FakeWorker, **settings: object) -> Gateway:
            facts: dict[str, object] = {
                "listen": "127.0.0.1:0",
                "http": "127.0.0.1:0",
                "control": (),
                "workers": tuple(w.address for w in workers),
            }
            gateway = Gateway(GatewaySettings(**(facts | settings)))  # type: ignore[arg-type]
            stack.push_async_callback(gateway.stop)
            await gateway.start()
            await until(lambda: gateway.endpoints.links_up == len(workers))
            return gateway

        yield start


@pytest.fixture
async def client_of() -> AsyncIterator[Callable[[Gateway], Client]]:
    async with AsyncExitStack() as stack:

        def make(gateway: Gateway) -> Client:
            client = Client(f"127.0.0.1:{gateway.grpc_port}")
            stack.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture
def policy() -> Callable[[Gateway, Partial], None]:
    """policy(gateway, {"resume.attempts": 1}): in force from now on."""

    def put(gateway: Gateway, fields: Partial) -> None:
        gateway.keeper.resolved = Resolved(with_fields(Policy(), fields), {})
        gateway.endpoints.policy_changed()

    return put
