"""Replicas as processes: killed, stopped and woken, with a store that is killed, emptied and read-only. Nothing regresses, all converge."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from controlplane.admin.client import AdminClient
from tests.controlplane.mesh import PATIENCE_S
from tests.controlplane.replicas import LEASE_S, Planes, Store, a_store, now, planes, serving, stop, until, wake
from trimtab.errors import StoreUnavailable, TrimtabError
from trimtab.kit.rpc import channel

pytestmark = pytest.mark.slow

NEW_LEADER_WITHIN_S = 5.0

Both = tuple[Store, Planes]


@pytest.fixture
async def two(tmp_path: Path) -> AsyncIterator[Both]:
    with a_store(tmp_path / "store") as store:
        async with planes(store.url, tmp_path / "state", 2) as made:
            yield store, made


async def test_a_killed_leader_is_replaced_and_nodes_go_on_elsewhere(two: Both) -> None:
    _, mesh = two
    nodes = [mesh.node(f"w{i}") for i in range(4)]
    first = await mesh.put_somewhere(8)
    await mesh.all_hold(first.identity)
    led = await mesh.leader()
    killed_at = now()
    await mesh.by_id(led.replica_id).kill()
    new = await mesh.leader(other_than=led.replica_id)
    took_s = now() - killed_at
    assert new.term > led.term
    assert took_s <= NEW_LEADER_WITHIN_S
    second = await mesh.put_somewhere(9)
    await mesh.all_hold(second.identity)
    assert all(n.active[-1] == 9 for n in nodes)
    assert all(n.backwards == 0 for n in nodes)


async def test_a_leader_that_was_stopped_past_its_lease_leads_no_more(two: Both) -> None:
    _, mesh = two
    led = await mesh.leader()
    asleep = mesh.by_id(led.replica_id)
    stop(asleep)
    try:
        new = await mesh.leader(other_than=led.replica_id)
    finally:
        wake(asleep)
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(TrimtabError):
                me = next(r for r in (await asleep.fleet()).replicas if r.replica_id == led.replica_id)
                if not me.leader:
                    break
            await asyncio.sleep(0.05)
    assert (await mesh.leader()).term == new.term


async def test_while_the_store_is_away_reads_go_on_and_writes_are_refused(two: Both) -> None:
    store, mesh = two
    node = mesh.node("w0")
    first = await mesh.put_somewhere(8)
    await mesh.all_hold(first.identity)
    store.kill()
    at = mesh.replicas[0]
    with pytest.raises(StoreUnavailable):
        await mesh.put(9, at)
    async with AdminClient(at.address) as admin:
        assert (await admin.get_policy()).snapshot.identity == first.identity
        assert not (await admin.fleet()).store.connected
    await until_store_is(at.address, "NOT_SERVING")
    assert await store_health(at.address, "") == "SERVING"
    store.start()
    back = await mesh.put_somewhere(10)
    assert (back.identity.epoch, back.identity.revision) == (first.identity.epoch, first.identity.revision + 1)
    await mesh.all_hold(back.identity)
    assert node.backwards == 0
    await until_store_is(at.address, "SERVING")


async def test_a_store_that_comes_back_empty_gets_its_policy_back_under_a_higher_epoch(two: Both) -> None:
    store, mesh = two
    node = mesh.node("w0")
    first = await mesh.put_somewhere(8)
    await mesh.all_hold(first.identity)
    led = await mesh.leader()
    store.kill()
    store.empty()
    store.start()
    await until(lambda: node.held.value.epoch > first.identity.epoch)
    epoch, _ = await mesh.agree()
    assert epoch == first.identity.epoch + 1
    assert node.active[-1] == 8
    async with asyncio.timeout(PATIENCE_S):
        while (await mesh.leader()).term <= led.term:  # a term is never granted twice
            await asyncio.sleep(0.05)
    second = await mesh.put_somewhere(9)
    await mesh.all_hold(second.identity)


async def test_a_store_that_takes_no_writes_is_degraded_and_comes_back(two: Both) -> None:
    store, mesh = two
    at = mesh.replicas[0]
    await mesh.put_somewhere(8)
    async with redis(store) as direct:
        await direct.execute_command("CONFIG", "SET", "min-replicas-to-write", "1")
        with pytest.raises(StoreUnavailable, match=r"NOREPLICAS|replicas"):
            await mesh.put(9, at)
        fleet = await at.fleet()
        assert (fleet.store.connected, fleet.store.writable) == (True, False)
        await direct.execute_command("CONFIG", "SET", "min-replicas-to-write", "0")
    await mesh.put_somewhere(9)
    await until_store_is(at.address, "SERVING")


async def test_a_store_that_answers_after_seconds_refuses_writes_in_time_and_holds_up_nothing_else(two: Both) -> None:
    store, mesh = two
    at = mesh.replicas[0]
    node = mesh.node("w0")
    first = await mesh.put_somewhere(8)
    await mesh.all_hold(first.identity)
    async with asyncio.timeout(PATIENCE_S):
        while not (
            await at.fleet()
        ).nodes:  # it may have gone to the other replica, which tells of it through the store
            await asyncio.sleep(0.05)
    async with redis(store) as direct:
        asleep = asyncio.create_task(direct.execute_command("DEBUG", "SLEEP", "5"))
        await asyncio.sleep(0.2)
        asked_at = now()
        async with AdminClient(at.address) as admin:
            assert (await admin.get_policy()).snapshot.identity == first.identity
            assert [n.connected for n in (await admin.fleet()).nodes] == [True]
        assert now() - asked_at < 3.0
        with pytest.raises(StoreUnavailable):
            await mesh.put(9, at)
        await asleep
    second = await mesh.put_somewhere(10)
    await mesh.all_hold(second.identity)
    assert node.backwards == 0


async def test_a_write_is_committed_once_a_replica_of_the_store_has_it(tmp_path: Path) -> None:
    with a_store(tmp_path / "primary") as primary:
        flags = ("--store-replicas", "1", "--store-wait-ms", "500")
        async with planes(primary.url, tmp_path / "state", 1, *flags) as mesh:
            alone = await mesh.put_somewhere(8)
            assert (alone.durability.committed, alone.durability.replicas, alone.durability.wanted) == (False, 0, 1)
            with a_store(tmp_path / "replica", "--replicaof", "127.0.0.1", str(primary.port)):
                async with redis(primary) as direct, asyncio.timeout(PATIENCE_S):
                    while (await direct.info("replication"))["connected_slaves"] == 0:
                        await asyncio.sleep(0.05)
                    while (await direct.info("replication"))["slave0"]["state"] != "online":
                        await asyncio.sleep(0.05)
                # A replica that has just come online may still be loading.
                for value in range(9, 30):
                    both = await mesh.put_somewhere(value)
                    if both.durability.committed:
                        break
                assert (both.durability.committed, both.durability.replicas) == (True, 1)


async def test_a_restarted_replica_is_another_one_and_serves_what_there_is(two: Both) -> None:
    _, mesh = two
    first = await mesh.put_somewhere(8)
    at = mesh.replicas[1]
    await at.kill()
    await at.start()
    await serving(at)
    assert (await at.fleet()).desired == first.identity
    async with asyncio.timeout(PATIENCE_S):
        while True:
            names = {r.replica_id for r in (await mesh.replicas[0].fleet()).replicas}
            if names == {r.replica_id for r in mesh.replicas}:
                break
            await asyncio.sleep(LEASE_S / 10)


async def store_health(address: str, service: str = "store") -> str:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with channel(address, "control") as link:
        stub = health_pb2_grpc.HealthStub(link)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


async def until_store_is(address: str, health: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await store_health(address) != health:
            await asyncio.sleep(0.05)


def redis(store: Store):  # type: ignore[no-untyped-def]
    """A client of its own, as an operator's."""
    from redis.asyncio import Redis

    return Redis.from_url(store.url, protocol=2, socket_timeout=60)
