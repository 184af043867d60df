"""Several replicas on one store: any of them knows the whole mesh, takes any write, and reaches every worker."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab.messages import RequestMatch, Role
from trimtab.snapshot import Limits
from trimtab.v1 import control_pb2

Pair = tuple[Mesh, Mesh]


@pytest.fixture
async def pair(valkey_address: str) -> AsyncIterator[Pair]:
    """Two replicas, each with a connection to the store of its own."""
    name = uuid.uuid4().hex
    stores = [RedisStore(valkey_address, name) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(a_mesh(store)) for store in stores]
        yield a, b
    for store in stores:
        await store.close()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def known(mesh: Mesh) -> dict[str, str]:
    """Node id -> the replica that it is connected to; empty for the one asked."""
    return {m.node_id: m.replica for m in mesh.plane.fleet if m.connected}


async def test_a_change_by_one_replica_reaches_the_nodes_of_another(pair: Pair) -> None:
    a, b = pair
    node = b.start_node(FakeNode(b.address))
    await node.holds(1, 1)
    await until(lambda: known(a))
    answer = await a.admin.set_policy({"batch.active": "9"}, author="ada", wait_ms=5000)
    assert [(n.node_id, n.applied.revision) for n in answer.nodes] == [("w0", 2)]
    assert node.active[-1] == 9


async def test_a_gateway_is_told_of_workers_wherever_they_are(pair: Pair) -> None:
    a, b = pair
    gateway = a.start_node(FakeNode(a.address, "g0", role=Role.GATEWAY))
    a.start_node(FakeNode(a.address, "w0"))
    b.start_node(FakeNode(b.address, "w1"))
    await gateway.viewed(lambda v: [w.node_id for w in v.workers] == ["w0", "w1"])
    await b.nodes[0].stop()
    await gateway.viewed(lambda v: [w.node_id for w in v.workers] == ["w0"])


async def test_a_limit_of_another_replicas_node_refuses_a_change(pair: Pair) -> None:
    a, b = pair
    b.start_node(FakeNode(b.address, limits=Limits(max_num_seqs=4)))
    await until(lambda: known(a))
    with pytest.raises(Exception, match="w0"):
        await a.admin.set_policy({"batch.active": "5"}, author="ada")


async def test_the_fleet_is_the_same_from_any_replica(pair: Pair) -> None:
    a, b = pair
    await a.start_node(FakeNode(a.address, "w0")).holds(1, 1)
    await b.start_node(FakeNode(b.address, "w1")).holds(1, 1)
    await until(lambda: known(a).keys() == known(b).keys() == {"w0", "w1"})
    for mesh in pair:
        fleet = await mesh.admin.fleet()
        assert [n.hello.node_id for n in fleet.nodes] == ["w0", "w1"]
        assert [n.policy.applied.revision for n in fleet.nodes] == [1, 1]
        assert [n.replica_id for n in fleet.nodes] == [m.plane.peers.replica_id for m in pair]
        assert sorted(r.replica_id for r in fleet.replicas) == sorted(m.plane.peers.replica_id for m in pair)
        assert sum(r.leader for r in fleet.replicas) <= 1


async def test_telemetry_tells_what_nodes_of_any_replica_made_of_the_policy(pair: Pair) -> None:
    await until(lambda: any(m.plane.leader.leads for m in pair))
    leader = next(m for m in pair if m.plane.leader.leads)
    other = next(m for m in pair if m is not leader)
    await other.start_node(FakeNode(other.address, "w0")).holds(1, 1)
    await leader.admin.set_policy({"batch.active": "32"}, author="ada")
    other.start_node(FakeNode(other.address, "w1", limits=Limits(max_num_seqs=16)))
    wanted = {"w0": (2, 0), "w1": (0, 2)}
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told = [await m.admin.get_telemetry() for m in pair]
            if all({n.node_id: (n.applied.revision, n.refused.revision) for n in t.nodes} == wanted for t in told):
                break
            await asyncio.sleep(0.05)
    for t in told:
        (refuses,) = (n.refused_because for n in t.nodes if n.node_id == "w1")
        assert "max_num_seqs" in refuses


async def test_requests_are_steered_wherever_they_are(pair: Pair) -> None:
    a, _ = pair
    for mesh, name in zip(pair, ("w0", "w1"), strict=True):
        node = FakeNode(mesh.address, name)
        node.obeys = lambda command: control_pb2.CommandResult(ok=True, affected=2)
        mesh.start_node(node)
    await until(lambda: known(a).keys() == {"w0", "w1"})
    answer = await a.admin.release(RequestMatch(tenant="acme"), author="ada", reason="stuck")
    assert [(n.node_id, n.done, n.affected) for n in answer.nodes] == [("w0", True, 2), ("w1", True, 2)]


async def test_a_node_that_moves_is_where_it_is_now(pair: Pair) -> None:
    a, b = pair
    node = FakeNode(a.address)
    await a.start_node(node).holds(1, 1)
    await until(lambda: known(b) == {"w0": a.plane.peers.replica_id})
    await node.stop()
    again = b.start_node(FakeNode(b.address, incarnation="i2"))
    await again.holds(1, 1)
    await until(lambda: known(b) == {"w0": ""} and known(a) == {"w0": b.plane.peers.replica_id})
    assert [n.connected for n in (await a.admin.fleet()).nodes] == [True]


@pytest.mark.slow
async def test_a_replica_that_ends_takes_its_nodes_with_it(pair: Pair) -> None:
    a, b = pair
    await b.start_node(FakeNode(b.address)).holds(1, 1)
    await until(lambda: known(a))
    await b.plane.stop()
    await until(lambda: not known(a) and not a.plane.peers.states())


@pytest.mark.slow
async def test_one_of_them_leads(pair: Pair) -> None:
    await until(lambda: any(m.plane.leader.leads for m in pair))
    assert sum(m.plane.leader.leads is not None for m in pair) == 1
    leader = next(m for m in pair if m.plane.leader.leads)
    other = next(m for m in pair if m is not leader)
    await leader.plane.leader.resign()
    await until(lambda: other.plane.leader.leads or leader.plane.leader.leads)


@pytest.mark.slow
async def test_what_nodes_answered_is_told_by_any_replica(pair: Pair) -> None:
    a, b = pair
    await b.start_node(FakeNode(b.address)).holds(1, 1)
    await a.admin.set_policy({"batch.active": "9"}, author="ada", wait_ms=5000)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answers = (await a.admin.answers(node_id="w0")).answers
            if [(x.identity.revision, x.result) for x in answers] == [(2, "applied"), (1, "applied")]:
                break
            await asyncio.sleep(0.05)
    assert all(x.at_unix_ms > 0 and x.incarnation == "i1" for x in answers)
