"""Faults that a careful reading found: each of these was wrong once."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path

import pytest

from services.gateway.endpoint import Endpoint
from services.gateway.endpoints import Endpoints
from services.gateway.line import Line
from services.gateway.quarantine import Quarantine
from services.gateway.stream import Stream
from services.worker import serving
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import FakeWorker, Running, hang
from tests.gateway.test_endpoints import a_view
from tests.gateway.test_resume import TEXT, dies, failing_with, giving, rest, told
from tests.worker.conftest import running_worker
from trimtab import codec
from trimtab import messages as m
from trimtab.breaking import Phase
from trimtab.errors import (
    EngineDead,
    Internal,
    ModelNotFound,
    Quarantined,
    QueueFull,
    ResumeRefused,
    StreamCut,
    WrongPool,
)
from trimtab.kit import rpc
from trimtab.policy import Policy, with_fields
from trimtab.snapshot import Resolved
from trimtab.tenant import Tenant
from trimtab.v1 import control_pb2, inference_pb2

BATCH, REALTIME = m.Workload.BATCH, m.Workload.REALTIME


def a_call(gateway, tenant=Tenant(), **facts):  # noqa: B008
    return gateway.dispatch.generate(codec.encode_request(a_request(**facts)), tenant=tenant)


async def whole(call) -> list[m.Event]:
    async with call.responses() as responses:
        return [codec.decode_event(r) async for r in responses]


async def rooms(gateway, worker: FakeWorker, batch: int) -> None:
    """So much room for BATCH there, and the gateway knows."""
    worker.credits = inference_pb2.Credits(realtime=64, batch=batch)
    endpoint = gateway.endpoints.get(worker.address)
    await until(lambda: endpoint.credits is not None and endpoint.credits.batch == batch)


@pytest.fixture
def chain(start_worker, start_gateway):
    """As in test_resume.py: workers that are picked one after another."""

    async def start(*scripts, **settings):
        workers = []
        for i, script in enumerate(scripts):
            worker = await start_worker(f"w{i}", script=script)
            worker.load = m.Load(running=10 * i)
            workers.append(worker)
        gateway = await start_gateway(*workers, **settings)
        await until(lambda: all(gateway.endpoints.get(w.address).load == w.load for w in workers))
        return gateway, workers

    return start


async def test_a_worker_that_came_back_while_the_reader_was_busy_is_not_the_one_that_died(chain, policy):
    gateway, (only,) = await chain(giving(2, dies))
    policy(gateway, {"resume.wait_ms": 300})
    address, events = only.address, []
    endpoint = gateway.endpoints.get(address)
    async with a_call(gateway).responses() as responses:
        while told(events)[0] != "Hello":
            events.append(codec.decode_event(await anext(responses)))
        await until(lambda: only.death is not None and only.death.done())
        only.script = rest
        await only.start(address)
        await until(lambda: endpoint.life == 2 and endpoint.serving)
        events += [codec.decode_event(r) async for r in responses]
    assert told(events)[0] == "".join(TEXT)


async def test_a_batch_stream_of_a_tenant_that_has_its_share_goes_on_elsewhere(chain, policy):
    gateway, _ = await chain(giving(2, dies), rest)
    policy(gateway, {"batch.active": 1})
    async with asyncio.timeout(20):
        events = await whole(a_call(gateway, Tenant("acme", share=0.1), workload=BATCH))
    assert told(events)[0] == "".join(TEXT)


async def test_a_tenant_never_has_more_than_its_share_at_workers(start_worker, start_gateway, policy):
    peak, go = [0], asyncio.Event()

    async def counted(r: Running) -> None:
        peak[0] = max(peak[0], len(r.worker.running))
        r.accept()
        await go.wait()
        await asyncio.sleep(0.1)  # so that what begins beside it is seen
        r.finish()

    worker = await start_worker(script=counted)
    worker.credits = inference_pb2.Credits(realtime=8, batch=8)
    gateway = await start_gateway(worker)
    policy(gateway, {"batch.active": 1})
    acme = Tenant("acme", share=0.5)
    tasks = [asyncio.create_task(whole(a_call(gateway, acme, request_id=f"b{i}", workload=BATCH))) for i in range(5)]
    await until(lambda: gateway.dispatch.waiting(BATCH) == 4)
    go.set()
    async with asyncio.timeout(20):
        await asyncio.gather(*tasks)
    assert peak == [1]


async def test_who_waits_for_one_kind_of_worker_keeps_nobody_from_another_kind(start_worker, start_gateway, policy):
    plain, apart = await start_worker("w0"), await start_worker("w1")
    gateway = await start_gateway(plain, apart)
    policy(gateway, {"isolate.action": "pool", "isolate.from_tokens": 1024})
    gateway.endpoints.get(apart.address).isolates = True
    await rooms(gateway, plain, 0)
    await rooms(gateway, apart, 0)
    giant = a_call(gateway, request_id="giant", prompt=tuple(range(2000)), workload=BATCH)
    small = a_call(gateway, request_id="small", workload=BATCH)
    first = asyncio.create_task(whole(giant))
    await until(lambda: gateway.dispatch.waiting(BATCH) == 1)
    second = asyncio.create_task(whole(small))
    await until(lambda: gateway.dispatch.waiting(BATCH) == 2)
    plain.credits = inference_pb2.Credits(realtime=64, batch=1)
    async with asyncio.timeout(20):
        assert told(await second)[0] == "Hello world!"
    assert not first.done()
    apart.credits = inference_pb2.Credits(realtime=64, batch=1)
    async with asyncio.timeout(20):
        await first
    assert apart.count("start") == 1


async def test_a_newcomer_is_not_held_up_by_those_that_no_worker_with_room_may_take(
    start_worker, start_gateway, policy
):
    plain, apart = await start_worker("w0"), await start_worker("w1")
    gateway = await start_gateway(plain, apart)
    policy(gateway, {"isolate.action": "pool", "isolate.from_tokens": 1024})
    gateway.endpoints.get(apart.address).isolates = True
    await rooms(gateway, plain, 1)
    await rooms(gateway, apart, 0)
    giants = [
        asyncio.create_task(whole(a_call(gateway, request_id=f"g{i}", prompt=tuple(range(2000)), workload=BATCH)))
        for i in range(4)
    ]
    await until(lambda: gateway.dispatch.waiting(BATCH) == 4)
    for i in range(3):
        async with asyncio.timeout(20):
            await whole(a_call(gateway, request_id=f"s{i}", workload=BATCH))
    assert not any(g.done() for g in giants)
    for g in giants:
        g.cancel()
    await asyncio.gather(*giants, return_exceptions=True)


async def test_a_tenant_with_its_share_is_asked_about_once_not_once_for_each_that_waits():
    line, asked = Line(), []
    loop = asyncio.get_running_loop()
    waiting = [asyncio.create_task(line.wait(i, "acme", loop.create_future(), None)) for i in range(500)]
    other = asyncio.create_task(line.wait(500, "other", loop.create_future(), None))
    await until(lambda: len(line) == 501)
    line.serve(3, lambda kind: asked.append(kind) or (3 if kind == "other" else 0))
    assert await other
    assert len(asked) <= 4
    assert len(line) == 500
    line.serve(500)
    await asyncio.gather(*waiting)
    assert len(line) == 0


async def test_batch_that_waits_in_line_stays_there_while_a_breaker_tries(start_worker, start_gateway, client_of):
    worker = await start_worker()
    gateway = await start_gateway(worker)
    await rooms(gateway, worker, 0)
    client = client_of(gateway)
    tasks = [asyncio.create_task(client.complete(a_request(workload=BATCH))) for _ in range(6)]
    await until(lambda: gateway.dispatch.waiting(BATCH) == 6)
    guard = gateway.endpoints.get(worker.address).guard
    guard.foreign(1, "gateway g9: 8 of 10 failed")
    assert guard.state.phase is Phase.HALF_OPEN
    worker.credits = inference_pb2.Credits(realtime=8, batch=6)
    for text, _ in await asyncio.gather(*tasks):
        assert text == "Hello world!"


async def test_names_of_models_that_clients_make_up_leave_nothing(start_worker, start_gateway):
    gateway = await start_gateway(await start_worker())
    for i in range(20):
        with pytest.raises(ModelNotFound):
            await whole(a_call(gateway, model=f"made-up-{i}", workload=BATCH))
    assert not gateway.dispatch._lines


async def test_a_worker_that_left_is_forgotten(start_worker):
    worker = await start_worker()
    endpoints = Endpoints("g0", ())
    endpoints.start()
    try:
        for i in range(4):
            endpoints.on_fleet(a_view(worker, incarnation=f"i{i}"))
            await until(lambda: endpoints.can_serve)
        await until(lambda: len(endpoints._tasks) == 1)
        assert len(endpoints._models_of) == 1
    finally:
        await endpoints.close()


async def test_what_belongs_to_the_isolation_pool_goes_there_after_the_first_worker_that_says_so(chain):
    wrong = failing_with(WrongPool("another pool must take it"))
    gateway, workers = await chain(*(giving(0, wrong) for _ in range(20)), rest)
    gateway.endpoints.get(workers[-1].address).isolates = True
    events = await whole(a_call(gateway))
    assert told(events)[0] == "".join(TEXT)
    assert sum(w.count("start") for w in workers) == 2


def a_status(stream: Stream, error) -> inference_pb2.Piece:
    status = inference_pb2.RpcStatus.FromString(rpc.encode_status(error).SerializeToString())
    return inference_pb2.Piece(request_id=stream.request_id, attempt=stream.attempt, status=status)


async def an_endpoint_with(*, gained: int, begun: int = 0) -> tuple[Endpoint, list[Stream]]:
    endpoint = Endpoint("w0", "127.0.0.1:1", gateway_id="g0")
    streams = []
    for i in range(gained + begun):
        stream = Stream(endpoint, f"r{i}", 1, 0)
        stream.started, stream.gained = True, i < gained
        endpoint._streams[stream.request_id] = stream
        streams.append(stream)
    return endpoint, streams


@pytest.mark.parametrize("by_link", [0, 2])
async def test_of_a_dead_engine_all_are_judged_together_however_they_hear_of_it(by_link):
    endpoint, streams = await an_endpoint_with(gained=6)
    for stream in streams[: len(streams) - by_link]:
        endpoint._deliver(a_status(stream, EngineDead("gone")))
    endpoint._down("it is gone")
    assert [s.suspects for s in streams] == [0] * 6
    endpoint, streams = await an_endpoint_with(gained=4, begun=1)
    for stream in reversed(streams[by_link:]):
        endpoint._deliver(a_status(stream, EngineDead("gone")))
    endpoint._down("it is gone")
    assert [s.suspects for s in streams] == [0, 0, 0, 0, 1]


async def test_a_fault_of_one_request_says_nothing_of_those_beside_it_when_the_worker_dies_later():
    endpoint, (first, second, third) = await an_endpoint_with(gained=0, begun=3)
    endpoint._deliver(a_status(first, Internal("odd")))
    endpoint.leave(first, superseded=True)
    second.gained = True
    endpoint._down("it is gone")
    assert (second.suspects, third.suspects) == (0, 1)


async def test_back_pressure_on_batch_is_no_attempt_at_moving_it(chain):
    refusals = [0]

    async def full_for_a_while(r: Running) -> None:
        refusals[0] += 1
        if refusals[0] <= 4:
            r.fail(QueueFull("full"))
            return
        await giving(0, dies)(r)

    gateway, _ = await chain(full_for_a_while, hang)
    await rooms(gateway, _[1], 0)
    call = asyncio.create_task(whole(a_call(gateway, workload=BATCH)))
    await until(lambda: refusals[0] == 5)
    _[1].script = rest
    _[1].credits = inference_pb2.Credits(realtime=8, batch=8)
    async with asyncio.timeout(20):
        assert told(await call)[0] == "".join(TEXT)


async def test_a_stream_whose_model_has_left_the_mesh_is_cut_with_its_count(start_worker, start_gateway, policy):
    other, last = await start_worker("w1", model="another"), await start_worker("w0", script=giving(2, dies))
    gateway = await start_gateway(other)
    policy(gateway, {"resume.wait_ms": 500})
    gateway.endpoints._leave_grace_s = 0.0
    view = a_view(last)
    gateway.endpoints.on_fleet(view)
    await until(lambda: gateway.endpoints.links_up == 2)
    call = asyncio.create_task(whole(a_call(gateway)))
    await last.hears("start")
    gateway.endpoints.on_fleet(control_pb2.FleetView())
    with pytest.raises(StreamCut) as caught:
        await call
    assert caught.value.metadata["tokens_delivered"] == "2"


def test_what_is_quarantined_is_known_again_whatever_output_it_asks_for():
    quarantine, now = Quarantine(), time.monotonic()
    poison = codec.encode_request(a_request(prompt="poison"))
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(poison)
    poison.sampling.max_tokens = 7  # as a gateway whose queues are full caps it
    quarantine.add(poison, now)
    with pytest.raises(Quarantined):
        quarantine.check(asked, now)
    quarantine.check(codec.encode_request(a_request(prompt="harmless")), now)


async def test_a_worker_offers_no_place_that_a_prompt_on_its_way_to_tokens_will_take(
    tmp_path: Path, start_gateway, monkeypatch
):
    go = threading.Event()
    async with running_worker(tmp_path / "policy.json") as rig:
        encode = rig.engine.tokenizer.encode

        def slowly(text: str) -> tuple[int, ...]:
            go.wait(20)
            return encode(text)

        monkeypatch.setattr(serving, "LONG_TEXT", 0)
        monkeypatch.setattr(rig.engine.tokenizer, "encode", slowly, raising=False)
        gateway = await start_gateway(workers=(rig.address,))
        await until(lambda: gateway.endpoints.can_serve)
        endpoint = gateway.endpoints.get(rig.address)
        room = endpoint.room(BATCH)
        sampling = m.Sampling(max_tokens=4, ignore_eos=True)
        calls = [a_call(gateway, request_id=f"b{i}", model="sim", workload=BATCH, sampling=sampling) for i in range(3)]
        tasks = [asyncio.create_task(whole(call)) for call in calls]
        await until(lambda: endpoint._starts_seen == 3)
        assert endpoint.room(BATCH) == room - 3
        go.set()
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)
        await until(lambda: endpoint.room(BATCH) == room)
        assert not any(rig.gate._coming.values())


async def test_tokens_that_a_client_made_up_never_reach_an_engine(tmp_path: Path, start_gateway):
    async with running_worker(tmp_path / "policy.json") as rig:
        gateway = await start_gateway(workers=(rig.address,))
        await until(lambda: gateway.endpoints.can_serve)
        gateway.keeper.resolved = Resolved(with_fields(Policy(), {"resume.wait_ms": 0}), {})
        accepted = (await whole(a_call(gateway, model="sim", sampling=m.Sampling(max_tokens=1))))[0]
        made_up = m.Resume((4_000_000_000,), 0, 2, accepted.prompt_digest)
        with pytest.raises(ResumeRefused, match="vocabulary"):
            await whole(a_call(gateway, model="sim", resume=made_up))
        assert gateway.metrics.counters["errors"] == 0


async def test_all_streams_of_a_lost_link_go_on_not_only_as_many_as_may_probe(chain, policy):
    async def one_more_then_silence(r: Running) -> None:
        r.index = len(r.request.resume.token_ids) if r.request.resume else 0
        r.accept()
        r.token(TEXT[r.index])
        await asyncio.Event().wait()

    gateway, (only,) = await chain(giving(1))
    policy(gateway, {"breaker.open_ms": 100, "breaker.probes": 2})
    events: dict[int, list[m.Event]] = {}

    async def reading(i: int) -> None:
        async with a_call(gateway, request_id=f"r{i}").responses() as responses:
            async for r in responses:
                events.setdefault(i, []).append(codec.decode_event(r))

    tasks = [asyncio.create_task(reading(i)) for i in range(20)]
    await until(lambda: len(events) == 20 and all(told(e)[0] == "Hel" for e in events.values()))
    address = only.address
    await only.die()
    only.script = one_more_then_silence
    await only.start(address)
    await until(lambda: all(told(e)[0] == "Hello" for e in events.values()))
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    guard = gateway.endpoints.get(address).guard
    assert (guard.state.phase, guard.state.out) == (Phase.CLOSED, 0)


async def test_the_number_of_a_start_fits_the_wire_however_long_a_gateway_lives(start_worker, start_gateway):
    gateway = await start_gateway(await start_worker())
    gateway.dispatch.starts = itertools.count((1 << 32) - 2)
    for i in range(4):
        assert told(await whole(a_call(gateway, request_id=f"r{i}")))[0] == "Hello world!"
