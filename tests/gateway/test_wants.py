"""What a gateway tells workers of the BATCH requests that wait in it, and what two gateways make of one worker's places."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.line import Line
from services.worker.gate import Gate as WorkerGate
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import FakeWorker, Running
from tests.gateway.test_endpoints import a_view
from tests.worker.conftest import running_worker
from trimtab import messages as m
from trimtab.tenant import Tenant
from trimtab.v1 import inference_pb2

BATCH = m.Workload.BATCH


async def hold(r: Running) -> None:
    r.accept()
    await r.worker.go.wait()
    r.finish()


def told(worker: FakeWorker) -> list[int]:
    return [e.wants.batch for e in worker.heard if e.WhichOneof("event") == "wants"]


@pytest.fixture
async def full(start_worker, start_gateway):
    """A worker without a place for BATCH that hears what gateways want, and a gateway before it."""
    worker = await start_worker(script=hold)
    worker.go, worker.hears_wants = asyncio.Event(), True
    worker.credits = inference_pb2.Credits(realtime=4, batch=0)
    gateway = await start_gateway(worker)
    await until(lambda: gateway.endpoints.get(worker.address).room(BATCH) == 0)
    return worker, gateway


def asks(gateway, client_of, n: int) -> list[asyncio.Task[object]]:
    client = client_of(gateway)
    return [asyncio.create_task(client.complete(a_request(request_id=f"b{i}", workload=BATCH))) for i in range(n)]


async def test_a_worker_hears_how_many_wait_for_it_and_that_nobody_does_any_more(full, client_of):
    worker, gateway = full
    endpoint = gateway.endpoints.get(worker.address)
    tasks = asks(gateway, client_of, 3)
    await until(lambda: told(worker)[-1:] == [3])
    worker.credits = inference_pb2.Credits(realtime=4, batch=1)
    await worker.hears("start")
    worker.credits = inference_pb2.Credits(realtime=4, batch=0)
    # Whether it is taken off when it is sent, or said when the gateway looks again.
    await until(lambda: gateway.dispatch.waiting(BATCH) == endpoint.told_wants == 2)
    for task in tasks:
        task.cancel()
    await until(lambda: told(worker)[-1] == 0)


async def test_a_worker_that_does_not_divide_is_told_nothing(full, client_of):
    worker, gateway = full
    worker.hears_wants = False
    await until(lambda: not gateway.endpoints.get(worker.address)._hears_wants)
    tasks = asks(gateway, client_of, 2)
    await until(lambda: gateway.dispatch.waiting(BATCH) == 2)
    worker.credits = inference_pb2.Credits(realtime=4, batch=2)
    worker.go.set()
    await asyncio.gather(*tasks)
    assert told(worker) == []


async def test_who_waits_for_his_tenants_share_wants_nothing_of_a_worker(full, client_of, policy):
    worker, gateway = full
    policy(gateway, {"batch.active": 4})
    gateway.tenants._find = lambda *_: Tenant("acme", share=0.5)
    tasks = asks(gateway, client_of, 5)
    await until(lambda: told(worker)[-1:] == [2])
    worker.credits = inference_pb2.Credits(realtime=4, batch=4)
    await worker.hears("start", times=2)
    endpoint = gateway.endpoints.get(worker.address)
    await until(lambda: gateway.dispatch.waiting(BATCH) == 3 and endpoint.told_wants == 0)
    assert gateway.dispatch._wanted(endpoint) == 0
    worker.go.set()
    await asyncio.gather(*tasks)


async def test_a_link_that_comes_up_anew_is_told_anew(full, client_of):
    worker, gateway = full
    tasks = asks(gateway, client_of, 2)
    await until(lambda: told(worker)[-1:] == [2])
    address = worker.address
    await worker.die()
    worker.heard.clear()
    await worker.start(address)
    await until(lambda: told(worker)[-1:] == [2])
    worker.credits = inference_pb2.Credits(realtime=4, batch=2)
    worker.go.set()
    await asyncio.gather(*tasks)


async def test_a_link_that_only_ends_what_it_has_wants_nothing(full, client_of, start_gateway):
    """Else its worker would keep places for it, for as long as its last stream runs."""
    worker, _ = full
    gateway = await start_gateway()
    gateway.endpoints._leave_grace_s = 0.0
    gateway.endpoints.on_fleet(a_view(worker))
    await until(lambda: gateway.endpoints.can_serve)
    running = asyncio.create_task(client_of(gateway).complete(a_request()))
    await worker.hears("start")
    tasks = asks(gateway, client_of, 2)
    await until(lambda: told(worker)[-1:] == [2])
    gateway.endpoints.on_fleet(a_view())
    await until(lambda: told(worker)[-1] == 0)
    worker.go.set()
    await running
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_line_counts_those_of_each_kind_that_could_be_served():
    line, loop = Line(), asyncio.get_running_loop()
    tasks = [
        asyncio.create_task(line.wait(i, kind, loop.create_future(), None))
        for i, kind in enumerate(("a", "b", "b", "b"))
    ]
    await asyncio.sleep(0)
    assert [line.able({"a": a, "b": b}.__getitem__) for a, b in ((9, 9), (0, 2), (-1, 0))] == [4, 2, 0]
    for task in tasks[1:]:
        task.cancel()
    await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert line.able(lambda _: 9) == 1
    tasks[0].cancel()


@pytest.mark.slow
async def test_two_gateways_with_batch_waiting_share_a_workers_places_and_none_waits_there(
    tmp_path, start_gateway, client_of, monkeypatch
):
    """By a real worker: as many places as may run, and forty requests at each gateway."""
    waited: list[str] = []
    order: list[str] = []
    enter = WorkerGate.enter

    def watched(gate, request_id, workload, prompt_tokens, arrival_ms):
        ticket, ahead = enter(gate, request_id, workload, prompt_tokens, arrival_ms)
        order.append(request_id)
        if not ticket.admitted.done():
            waited.append(request_id)
        return ticket, ahead

    monkeypatch.setattr(WorkerGate, "enter", watched)
    async with running_worker(tmp_path / "policy.json") as rig:
        await rig.obey({"batch.active": 4, "batch.hard_cap": 4, "admission.engine_queue": 0})
        gateways = [await start_gateway(node_id=f"g{i}", workers=(rig.address,)) for i in range(2)]
        endpoints = [g.endpoints.get(rig.address) for g in gateways]
        await until(lambda: [e.room(BATCH) for e in endpoints] == [2, 2])
        sampling = m.Sampling(max_tokens=8, ignore_eos=True)

        async def ask(i: int, n: int) -> None:
            await client_of(gateways[i]).complete(
                a_request(request_id=f"{i}-{n}", model="sim", workload=BATCH, sampling=sampling)
            )

        async with asyncio.timeout(60):
            await asyncio.gather(*(ask(i, n) for n in range(40) for i in range(2)))
        for gateway in gateways:
            await gateway.stop()
    assert len(order) == 80
    # A promise that was taken back may still be used for a round trip: that is as many as there are places, now and then.
    assert len(waited) <= 8, f"{len(waited)} of 80 waited in the worker"
    half = [sum(request_id.startswith(f"{i}-") for request_id in order[:40]) for i in range(2)]
    assert min(half) >= 12, f"of the first 40 the gateways had {half}"
