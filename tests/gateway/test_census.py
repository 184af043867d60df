"""How many gateways share the mesh's limits: what the control plane says, its absence, and what each lets in."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.census import Census
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import Running
from tests.gateway.test_endpoints import a_view, some_endpoints
from trimtab.errors import QueueFull
from trimtab.tenant import Tenant
from trimtab.v1 import control_pb2

FOREVER_S = 3600.0


def of(gateways: int, *workers) -> control_pb2.FleetView:
    view = a_view(*workers)
    view.gateways = gateways
    return view


async def test_more_gateways_are_believed_at_once_and_fewer_after_a_while():
    heard = asyncio.Event()
    census = Census(grace_s=0.02, on_fewer=heard.set)
    assert census.gateways == 1
    census.hear(3)
    assert census.gateways == 3
    census.hear(2)
    assert (census.gateways, census.falling) == (3, True)
    async with asyncio.timeout(20):
        await heard.wait()
    assert (census.gateways, census.falling) == (2, False)


async def test_gateways_that_come_back_one_by_one_were_never_gone():
    """As after a restart of the control plane."""
    census = Census(grace_s=FOREVER_S)
    census.hear(3)
    for said in (1, 2):
        census.hear(said)
        assert (census.gateways, census.falling) == (3, True)
    census.hear(3)
    assert (census.gateways, census.falling) == (3, False)


async def test_a_control_plane_that_is_lost_again_strikes_nobody_off():
    census = Census(grace_s=0.01, on_fewer=lambda: pytest.fail("nobody knows that they are fewer"))
    connected = False
    census.connected = lambda: connected
    census.hear(3)
    census.hear(1)
    await until(lambda: not census.falling)
    assert census.gateways == 3


def test_a_control_plane_that_counts_none_and_processes_of_this_gateway():
    census = Census(2, grace_s=FOREVER_S)
    assert census.gateways == 2
    census.hear(0)
    assert census.gateways == 2
    census.hear(5)
    census.hear(0)
    assert census.gateways == 5


async def test_the_count_is_on_disk_once_it_is_believed(tmp_path):
    cache = tmp_path / "fleet.binpb"
    async with some_endpoints(cache=cache, leave_grace_s=0.02) as endpoints:
        endpoints.on_fleet(of(4))
        endpoints.on_fleet(of(3))
        assert control_pb2.FleetView.FromString(cache.read_bytes()).gateways == 4
        await until(lambda: not endpoints.census.falling)
        assert control_pb2.FleetView.FromString(cache.read_bytes()).gateways == 3
    async with some_endpoints(cache=cache) as endpoints:
        assert endpoints.census.gateways == 3


async def hold(r: Running) -> None:
    r.accept()
    await r.worker.go.wait()
    r.finish()


async def test_of_two_gateways_each_lets_in_half_of_a_share_and_one_that_stays_alone_all_of_it(
    start_worker, start_gateway, policy, client_of
):
    worker = await start_worker(script=hold)
    worker.go = asyncio.Event()
    acme = Tenant("acme", share=0.5)
    gateways = [await start_gateway(worker, node_id=f"g{i}") for i in range(2)]
    running = []

    def asks(gateway) -> asyncio.Task[object]:
        return asyncio.create_task(client_of(gateway).complete(a_request()))

    for gateway in gateways:
        gateway.endpoints.census.grace_s = 0.02
        policy(gateway, {"batch.active": 4})
        gateway.tenants._find = lambda *_: acme
        gateway.endpoints.on_fleet(of(2))
    for gateway in gateways:
        running.append(asks(gateway))
        await until(lambda g=gateway: g.admission._taken.get("acme") == 1)
        with pytest.raises(
            QueueFull, match=r"its share of the slots \(0.5 in the mesh, and here its part of 2 gateways"
        ):
            await asks(gateway)
    gateways[0].endpoints.on_fleet(of(1))
    await until(lambda: gateways[0].endpoints.census.gateways == 1)
    running.append(asks(gateways[0]))
    await until(lambda: gateways[0].admission._taken["acme"] == 2)
    worker.go.set()
    await asyncio.gather(*running)
