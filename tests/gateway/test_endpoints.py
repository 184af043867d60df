"""Membership: the control plane's view, its absence, and workers that come back."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager

import pytest

from services.gateway.endpoints import Endpoints
from services.gateway.fleet import REMEMBERED, REMEMBERED_S, Remembered
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import WORDS, FakeWorker, Running
from trimtab import messages as m
from trimtab.errors import ModelNotFound, NoWorker
from trimtab.v1 import control_pb2


def a_view(
    *workers: FakeWorker, incarnation: str = "i1", state: int = control_pb2.NODE_STATE_SERVING
) -> control_pb2.FleetView:
    return control_pb2.FleetView(
        workers=[
            control_pb2.FleetWorker(
                node_id=w.node_id, incarnation=incarnation, address=w.address, model=w.model, state=state,  # type: ignore[arg-type]
                limits=control_pb2.EngineLimits(max_model_len=2048),
            )
            for w in workers
        ]
    )  # fmt: skip


@asynccontextmanager
async def some_endpoints(**facts):
    endpoints = Endpoints("g0", (), **facts)
    endpoints.start()
    try:
        yield endpoints
    finally:
        await endpoints.close()


async def test_a_worker_in_the_view_is_reached_and_serves_its_model(start_worker):
    worker = await start_worker()
    async with some_endpoints() as endpoints:
        endpoints.on_fleet(a_view(worker))
        await until(lambda: endpoints.can_serve)
        assert endpoints.models() == {"m": 2048}
        assert [e.node_id for e in endpoints.serving()] == ["w0"]


@pytest.mark.parametrize("state", ["STARTING", "DRAINING", "HUNG"])
async def test_a_worker_that_is_not_serving_gets_nothing(start_worker, state):
    worker = await start_worker()
    async with some_endpoints() as endpoints:
        endpoints.on_fleet(a_view(worker, state=control_pb2.NodeState.Value(f"NODE_STATE_{state}")))
        await until(lambda: endpoints.links_up == 1)
        assert not endpoints.can_serve
        endpoints.on_fleet(a_view(worker))
        assert endpoints.can_serve


async def test_a_worker_that_left_the_view_gets_nothing_new_and_finishes_what_it_has(
    start_worker, start_gateway, client_of
):
    go_on = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        await r.tokens(WORDS[:2])
        await go_on.wait()
        await r.tokens(WORDS[2:])
        r.finish()

    worker = await start_worker(script=script)
    gateway = await start_gateway()
    gateway.endpoints._leave_grace_s = 0.01
    client = client_of(gateway)
    gateway.endpoints.on_fleet(a_view(worker))
    await until(lambda: gateway.endpoints.can_serve)
    async with aclosing(client.generate(a_request())) as events:
        seen = [await anext(events), await anext(events)]
        gateway.endpoints.on_fleet(a_view())
        await until(lambda: not gateway.endpoints.states())
        with pytest.raises(NoWorker):
            await client.complete(a_request())
        go_on.set()
        seen += [e async for e in events]
    assert "".join(e.text for e in seen if isinstance(e, m.Delta)) == "Hello world!"
    await until(lambda: gateway.endpoints.links_up == 0)


async def test_a_short_absence_from_the_view_changes_nothing(start_worker):
    """After a restart of the control plane the view fills again one by one."""
    worker = await start_worker()
    async with some_endpoints(leave_grace_s=0.1) as endpoints:
        endpoints.on_fleet(a_view(worker))
        await until(lambda: endpoints.can_serve)
        endpoints.on_fleet(a_view())
        assert endpoints.can_serve
        endpoints.on_fleet(a_view(worker))
        await asyncio.sleep(0.15)
        assert endpoints.can_serve
        assert sum(e.WhichOneof("event") == "hello" for e in worker.heard) == 1


async def test_a_control_plane_that_goes_away_again_empties_nothing(start_worker, tmp_path):
    """Restarted, it shows an empty view; lost again before its nodes are back, it proves nothing by it."""
    worker = await start_worker()
    cache = tmp_path / "fleet.binpb"
    async with some_endpoints(cache=cache, leave_grace_s=0.05) as endpoints:
        endpoints.on_fleet(a_view(worker))
        await until(lambda: endpoints.can_serve)
        kept = cache.read_bytes()
        endpoints.on_fleet(a_view())
        assert cache.read_bytes() == kept
        endpoints.control_connected = lambda: False
        await asyncio.sleep(0.15)
        assert endpoints.can_serve
        assert cache.read_bytes() == kept
        endpoints.control_connected = lambda: True
        endpoints.on_fleet(a_view())
        await until(lambda: not endpoints.states())
        assert cache.read_bytes() != kept


async def test_a_model_whose_only_worker_left_is_missed_and_not_unknown(start_worker, start_gateway, client_of):
    first, second = await start_worker("w0", model="a"), await start_worker("w1", model="b")
    gateway = await start_gateway()
    gateway.endpoints._leave_grace_s = 0.01
    gateway.endpoints.on_fleet(a_view(first, second))
    await until(lambda: len(gateway.endpoints.serving()) == 2)
    gateway.endpoints.on_fleet(a_view(second))
    await until(lambda: "w0" not in gateway.endpoints.states())
    client = client_of(gateway)
    with pytest.raises(NoWorker, match="last worker of model 'a' has left") as caught:
        await client.complete(a_request(model="a"), attempts=1)
    assert caught.value.retry_after_ms
    with pytest.raises(ModelNotFound, match="model 'c' is not served here; served: b"):
        await client.complete(a_request(model="c"))
    # What is listed is what is served.
    assert [model.name for model in await client.models()] == ["b"]
    gateway.endpoints.on_fleet(a_view(first, second, incarnation="i2"))
    await until(lambda: len(gateway.endpoints.serving()) == 2)
    await client.complete(a_request(model="a"))


async def test_a_worker_that_comes_back_with_another_model_has_left_the_old_one(start_worker):
    worker = await start_worker(model="a")
    async with some_endpoints() as endpoints:
        endpoints.on_fleet(a_view(worker))
        worker.model = "b"
        endpoints.on_fleet(a_view(worker, incarnation="i2"))
        with pytest.raises(NoWorker):
            endpoints.workers("a")
        assert len(endpoints.workers("b").endpoints) == 1


def test_models_that_left_are_forgotten_after_hours_and_are_so_many_at_most():
    left = Remembered()
    for i in range(REMEMBERED + 1):
        left.add(f"m{i}", float(i))
    assert [left.knows(f"m{i}", 300.0) for i in (0, 1, REMEMBERED)] == [False, True, True]
    left.add("m1", 1000.0)
    assert left.knows("m1", 999.0 + REMEMBERED_S)
    assert not left.knows("m1", 1000.0 + REMEMBERED_S)


async def test_a_new_incarnation_takes_the_place_of_the_old_at_once(start_worker):
    worker = await start_worker()
    async with some_endpoints() as endpoints:
        endpoints.on_fleet(a_view(worker))
        await until(lambda: endpoints.can_serve)
        before = endpoints.get("w0")
        endpoints.on_fleet(a_view(worker, incarnation="i2"))
        assert before.retiring
        assert endpoints.get("w0") is not before
        await until(lambda: endpoints.can_serve and endpoints.links_up == 1)


async def test_the_last_view_on_disk_serves_without_a_control_plane(start_worker, tmp_path):
    """Also a worker that was starting when the view was kept: its link tells the truth by now."""
    worker = await start_worker()
    cache = tmp_path / "fleet.binpb"
    async with some_endpoints(cache=cache) as endpoints:
        endpoints.on_fleet(a_view(worker, state=control_pb2.NODE_STATE_STARTING))
    async with some_endpoints(cache=cache) as endpoints:
        await until(lambda: endpoints.can_serve)
        assert endpoints.models() == {"m": 2048}


@pytest.mark.parametrize("content", [b"", b"\xff\xff not a view"])
async def test_a_view_on_disk_that_cant_be_read_is_passed_over(tmp_path, content):
    cache = tmp_path / "fleet.binpb"
    cache.write_bytes(content)
    async with some_endpoints(cache=cache) as endpoints:
        assert endpoints.states() == {}


async def test_a_static_worker_that_the_view_names_too_keeps_one_link(start_worker):
    worker = await start_worker()
    endpoints = Endpoints("g0", (worker.address,))
    endpoints.start()
    try:
        await until(lambda: endpoints.can_serve)
        endpoints.on_fleet(a_view(worker))
        endpoints.on_fleet(a_view())
        assert len(endpoints.serving()) == 1
        assert worker.count("hello") == 1
    finally:
        await endpoints.close()


async def test_least_loaded_wins_and_own_requests_count_before_the_load_shows_them(
    start_worker, start_gateway, client_of
):
    go_on = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        await go_on.wait()
        r.finish()

    workers = [await start_worker(f"w{i}", script=script) for i in range(2)]
    gateway = await start_gateway(*workers)
    client = client_of(gateway)
    asking = [asyncio.create_task(client.complete(a_request())) for _ in range(6)]
    await asyncio.gather(*(w.hears("start", times=3) for w in workers))
    go_on.set()
    await asyncio.gather(*asking)


async def test_a_canary_gets_the_weight_that_the_view_says_and_a_view_on_disk_says_none(start_worker, tmp_path):
    worker = await start_worker()
    cache = tmp_path / "fleet.binpb"

    def weight(endpoints: Endpoints) -> float:
        return endpoints.get("w0").candidate(m.Workload.REALTIME, 0.0).weight

    async with some_endpoints(cache=cache) as endpoints:
        endpoints.on_fleet(a_view(worker))
        assert weight(endpoints) == 1.0
        view = a_view(worker)
        view.workers[0].weight = 0.25
        endpoints.on_fleet(view)
        assert weight(endpoints) == 0.25
    async with some_endpoints(cache=cache) as endpoints:
        # Who knows whether the rollout still lives.
        assert weight(endpoints) == 1.0
