"""A gateway that is told to end: in which order it says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from grpc_health.v1 import health_pb2

from services.gateway.__main__ import Gateway
from tests.gateway.builders import a_request
from tests.gateway.conftest import StartGateway, StartWorker
from tests.gateway.fake_worker import WORDS, Running
from trimtab.client import Client
from trimtab.errors import Draining

pytestmark = pytest.mark.slow


async def test_health_says_no_before_anybody_is_refused_and_what_runs_ends_well(
    start_worker: StartWorker, start_gateway: StartGateway, client_of: Callable[[Gateway], Client]
) -> None:
    go_on = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        await r.tokens(WORDS[:2])
        await go_on.wait()
        await r.tokens(WORDS[2:])
        r.finish()

    worker = await start_worker(script=script)
    gateway = await start_gateway(worker)
    client = client_of(gateway)
    said: list[tuple[int, bool]] = []
    publish = gateway.health._set

    async def noted(service: str, status: int) -> None:
        said.append((status, gateway.admission.draining))
        await publish(service, status)

    gateway.health._set = noted
    running = asyncio.create_task(client.complete(a_request()))
    await worker.hears("start")
    draining = asyncio.create_task(gateway.drain())
    async with asyncio.timeout(20):
        while not gateway.admission.draining:
            await asyncio.sleep(0.01)
    with pytest.raises(Draining) as refused:
        await client.complete(a_request())
    assert refused.value.retry_after_ms
    no = [refuses for status, refuses in said if status == health_pb2.HealthCheckResponse.NOT_SERVING]
    assert no and not any(no), "said before it refuses"
    go_on.set()
    assert (await running)[0] == "Hello world!"
    await asyncio.wait_for(draining, 20)
