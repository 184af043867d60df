"""A worker's breaker at a gateway: what real streams do to it, and what it does to them."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import FakeWorker, Running, hello_world
from tests.gateway.test_endpoints import a_view
from trimtab import messages as m
from trimtab.breaking import Gate, Phase
from trimtab.errors import Internal, InvalidRequest, NoWorker, QueueFull
from trimtab.v1 import control_pb2


def failing(error):
    async def script(r: Running) -> None:
        r.fail(error)

    return script


def phase(gateway, worker) -> Phase:
    return gateway.endpoints.get(worker.address).guard.state.phase


def may_probe(gateway, worker) -> bool:
    return gateway.endpoints.get(worker.address).guard.gate(time.monotonic() * 1000.0) is Gate.PROBE


@pytest.fixture
async def one(start_worker, start_gateway, client_of):
    worker = await start_worker()
    gateway = await start_gateway(worker)
    return worker, gateway, client_of(gateway)


@pytest.mark.parametrize("error", [InvalidRequest("bad"), QueueFull("full")])
async def test_a_flood_of_bad_requests_and_back_pressure_leaves_it_closed(one, error):
    worker, gateway, client = one
    worker.script = failing(error)
    for _ in range(60):
        with pytest.raises(type(error)):
            await client.complete(a_request())
    assert phase(gateway, worker) is Phase.CLOSED


async def test_a_flood_of_clients_that_leave_leaves_it_closed(one):
    worker, gateway, client = one

    async def waits(r: Running) -> None:
        r.accept()
        await asyncio.Event().wait()

    worker.script = waits
    for n in range(30):
        task = asyncio.create_task(client.complete(a_request()))
        await worker.hears("start", times=n + 1)
        task.cancel()
        await worker.hears("cancel", times=n + 1)
    assert phase(gateway, worker) is Phase.CLOSED


async def test_engine_faults_open_it_and_requests_go_elsewhere(start_worker, start_gateway, client_of):
    bad, good = await start_worker("w0", script=failing(Internal("odd"))), await start_worker("w1")
    good.load = m.Load(running=5)
    gateway = await start_gateway(bad, good)
    await until(lambda: gateway.endpoints.get(good.address).load.running == 5)
    client = client_of(gateway)
    for _ in range(30):
        assert (await client.complete(a_request()))[0] == "Hello world!"
    assert phase(gateway, bad) is Phase.OPEN
    assert bad.count("start") == gateway.policy.breaker.min_outcomes
    assert b'trimtab_gateway_breaker_trips_total{dimension="errors"} 1.0' in gateway.metrics.text()


async def test_first_tokens_are_compared_where_others_could_have_given_them(start_worker, start_gateway, client_of):
    """Whoever is alone may have a backlog of its own making: late, and as fast as any."""
    alone, first, second = [await start_worker(f"w{i}") for i in range(3)]

    async def compared(*workers: FakeWorker) -> int:
        gateway = await start_gateway(*workers)
        client = client_of(gateway)
        for _ in range(3):
            await client.complete(a_request())
        return sum(len(gateway.endpoints.get(w.address).guard.state.ttfts_ms) for w in workers)

    assert await compared(alone) == 0
    assert await compared(first, second) == 3


@pytest.mark.slow
async def test_where_all_are_open_the_answer_says_when_to_try_again_and_a_probe_heals(one, policy):
    worker, gateway, client = one
    policy(gateway, {"breaker.open_ms": 300, "breaker.probes": 1, "resume.wait_ms": 0})
    worker.script = failing(Internal("odd"))
    while phase(gateway, worker) is Phase.CLOSED:
        with pytest.raises(Internal):
            await client.complete(a_request())
    with pytest.raises(NoWorker, match="breaker open") as caught:
        await client.complete(a_request())
    assert 1 <= caught.value.retry_after_ms <= 301
    worker.script = hello_world
    await until(lambda: may_probe(gateway, worker))
    assert (await client.complete(a_request()))[0] == "Hello world!"
    assert phase(gateway, worker) is Phase.CLOSED


@pytest.mark.slow
async def test_a_bad_request_as_a_probe_heals_nothing(one, policy):
    worker, gateway, client = one
    policy(gateway, {"breaker.open_ms": 50, "breaker.probes": 1, "resume.wait_ms": 0})
    worker.script = failing(Internal("odd"))
    while phase(gateway, worker) is Phase.CLOSED:
        with pytest.raises(Internal):
            await client.complete(a_request())
    worker.script = failing(InvalidRequest("bad"))
    await until(lambda: may_probe(gateway, worker))
    for _ in range(3):
        with pytest.raises(InvalidRequest):
            await client.complete(a_request())
    assert phase(gateway, worker) is Phase.HALF_OPEN


async def test_what_another_gateway_saw_asks_for_one_probe_and_is_heard_once(start_worker, start_gateway, client_of):
    worker = await start_worker()
    gateway = await start_gateway()
    view = a_view(worker)
    gateway.endpoints.on_fleet(view)
    await until(lambda: gateway.endpoints.can_serve)
    guard = gateway.endpoints.get("w0").guard
    view.workers[0].breaker.CopyFrom(
        control_pb2.BreakerNotice(gateway_id="g9", dimension="errors", trip=1, open_ms=2000, because="8 of 10 failed")
    )
    gateway.endpoints.on_fleet(view)
    assert guard.state.phase is Phase.HALF_OPEN
    assert (await client_of(gateway).complete(a_request()))[0] == "Hello world!"
    assert guard.state.phase is Phase.CLOSED
    gateway.endpoints.on_fleet(view)
    assert guard.state.phase is Phase.CLOSED
    view.workers[0].breaker.gateway_id, view.workers[0].breaker.trip = "g0", 2
    gateway.endpoints.on_fleet(view)
    assert guard.state.phase is Phase.CLOSED  # its own words, come back


async def test_an_operators_word_holds_while_the_view_has_it(start_worker, start_gateway, client_of):
    worker = await start_worker()
    gateway = await start_gateway()
    view = a_view(worker)
    view.workers[0].breaker.CopyFrom(control_pb2.BreakerNotice(forced=control_pb2.BREAKER_FORCE_OPEN, forced_ms=60_000))
    gateway.endpoints.on_fleet(view)
    await until(lambda: gateway.endpoints.links_up == 1)
    with pytest.raises(NoWorker, match="breaker open"):
        await client_of(gateway).complete(a_request())
    gateway.endpoints.on_fleet(a_view(worker))
    assert (await client_of(gateway).complete(a_request()))[0] == "Hello world!"


async def test_a_worker_that_dies_once_has_failed_once_however_many_requests_it_had(one):
    worker, gateway, client = one

    async def waits(r: Running) -> None:
        r.accept()
        await asyncio.Event().wait()

    worker.script = waits
    tasks = [asyncio.create_task(client.complete(a_request(request_id=f"r{i}"))) for i in range(30)]
    await until(lambda: len(gateway.admission.live) == 30 and not any(gateway.admission.unaccepted.values()))
    address, worker.script = worker.address, hello_world
    await worker.die()
    await until(lambda: not gateway.endpoints.can_serve)
    await worker.start(address)
    assert [(await task)[0] for task in tasks] == ["Hello world!"] * 30
    assert phase(gateway, worker) is Phase.CLOSED
