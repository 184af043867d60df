"""What one replica knows of the others when the store, a process or a node behaves badly: no worker vanishes, and none stays that is gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import grpc
import pytest

from controlplane.fleet import Fleet
from controlplane.leader import Leader
from controlplane.peers import ALIVE_MS, GRACE_S, Peers, decode_members, encode_members
from controlplane.replica import Replica
from controlplane.store import Peer
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import PATIENCE_S
from tests.controlplane.test_fleet import a_hello, a_report
from trimtab.errors import StoreUnavailable, TrimtabError
from trimtab.kit.rpc import cancel_and_wait
from trimtab.snapshot import Identity
from trimtab.v1 import admin_pb2, admin_pb2_grpc


class Torn(MemoryStore):
    """`torn`: the announcement arrives, its answer does not. `half`: `peers` sees a replica before its nodes. `away`: nothing answers."""

    torn = False
    half = False
    away = False
    looks = 0

    async def announce(self, peer: Peer, *, ttl_ms: int) -> bool:
        said = await super().announce(peer, ttl_ms=ttl_ms)
        if self.torn:
            raise StoreUnavailable("the answer was lost")
        return said

    async def peers(self, known: Mapping[str, int]) -> list[Peer]:
        self.looks += 1
        if self.away:
            raise StoreUnavailable("away")
        found = await super().peers(known)
        return [Peer(p.replica_id, p.address, p.seq, p.info) for p in found] if self.half else found


class Clock:
    """Stands in for the module `time`."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def time_ns(self) -> int:
        return int(self.now * 1e9)


def a_replica(store: MemoryStore, name: str, address: str = "127.0.0.1:1") -> tuple[Fleet, Peers]:
    fleet = Fleet()
    leader = Leader(Replica(store), name, lease_s=3.0)
    peers = Peers(store, fleet, leader, replica_id=name, address=address, newest=Identity, on_change=lambda: None)
    return fleet, peers


def a_worker(fleet: Fleet, node_id: str = "w0") -> int:
    session, _ = fleet.joined(a_hello(node_id), time.monotonic())
    fleet.reported(session, a_report(), time.monotonic())
    return session


def names(fleet: Fleet) -> list[str]:
    return [w.node.node_id for w in fleet.view.workers]


async def test_a_replica_that_comes_back_under_its_name_takes_back_what_its_last_process_told() -> None:
    store = Torn()
    first, told = a_replica(store, "a")
    a_worker(first)
    await told.tell()
    seen, other = a_replica(store, "b")
    await other.look()
    assert names(seen) == ["w0"]
    _, again = a_replica(store, "a")
    await again.tell()
    await other.look()
    assert names(seen) == []


async def test_what_was_told_without_an_answer_is_told_again() -> None:
    store = Torn()
    here, peers = a_replica(store, "a")
    a_worker(here)
    await peers.tell()
    seen, other = a_replica(store, "b")
    session = a_worker(here, "w1")
    store.torn = True
    with pytest.raises(StoreUnavailable):
        await peers.tell()
    store.torn = False
    here.lost(session, time.monotonic())
    await peers.tell()
    await other.look()
    assert names(seen) == ["w0"]


async def test_a_replica_that_was_seen_before_its_nodes_is_read_again() -> None:
    store = Torn()
    here, peers = a_replica(store, "a")
    a_worker(here)
    await peers.tell()
    seen, other = a_replica(store, "b")
    store.half = True
    await other.look()
    store.half = False
    await other.look()
    assert names(seen) == ["w0"]


def test_a_node_that_this_build_does_not_understand_hides_no_other() -> None:
    fleet = Fleet()
    a_worker(fleet, "w0")
    a_worker(fleet, "w1")
    told = admin_pb2.GetFleetResponse.FromString(encode_members(fleet.local()))
    told.nodes[0].hello.ClearField("role")
    assert [m.node_id for m in decode_members(told.SerializeToString(), "a", 0.0)] == ["w1"]


async def test_while_the_store_is_away_nobody_was_heard_and_nobody_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Torn()
    here, peers = a_replica(store, "a")
    a_worker(here)
    await peers.tell()
    seen, other = a_replica(store, "b")
    await other.look()
    clock = Clock()
    clock.now = time.monotonic() + 3600
    monkeypatch.setattr("controlplane.peers.time", clock)
    monkeypatch.setattr("controlplane.peers.BEAT_S", 0.001)
    store.away = True
    running = asyncio.create_task(other.run())
    await looked(store)
    (state,) = other.states()
    assert state.seconds_since_heard >= 3600
    # Back, and empty: those that are there tell it anew, and get the time to.
    store._peers.clear()
    store.away = False
    await looked(store)
    assert names(seen) == ["w0"]
    for _ in range(3):
        clock.now += GRACE_S / 3
        await looked(store)
    assert names(seen) == []
    await cancel_and_wait(running)


async def test_a_replica_that_slept_gives_the_others_time_to_tell_of_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Torn()
    here, peers = a_replica(store, "a")
    a_worker(here)
    await peers.tell()
    clock = Clock()
    clock.now = time.monotonic()
    monkeypatch.setattr("controlplane.peers.time", clock)
    seen, other = a_replica(store, "b")
    await other.look()
    store._peers.clear()
    clock.now += 60
    await other.look()
    assert names(seen) == ["w0"]
    for _ in range(3):
        clock.now += GRACE_S / 3
        await other.look()
    assert names(seen) == []


async def looked(store: Torn) -> None:
    """Somebody has looked twice since."""
    enough = store.looks + 2
    async with asyncio.timeout(PATIENCE_S):
        while store.looks < enough:
            await asyncio.sleep(0)


async def test_what_a_silent_replica_said_of_its_lead_holds_no_longer_than_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Torn()
    _, peers = a_replica(store, "a")
    await peers._leader.stand()
    await peers.tell()
    _, other = a_replica(store, "b")
    await other.look()
    assert [r.leader for r in other.states()] == [True]
    clock = Clock()
    clock.now = time.monotonic() + ALIVE_MS / 1000
    monkeypatch.setattr("controlplane.peers.time", clock)
    assert [r.leader for r in other.states()] == [False]


class Silent(admin_pb2_grpc.AdminServiceServicer):
    """Answers nothing."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def GetFleet(self, request: Any, context: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()


async def test_a_replica_that_goes_while_it_is_asked_is_an_error_and_not_the_end_of_the_asker() -> None:
    silent = Silent()
    server = grpc.aio.server()
    admin_pb2_grpc.add_AdminServiceServicer_to_server(silent, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    store = Torn()
    _, peers = a_replica(store, "a", f"127.0.0.1:{port}")
    await peers.tell()
    _, other = a_replica(store, "b")
    await other.look()
    asking = asyncio.create_task(other.ask("GetFleet", admin_pb2.GetFleetRequest(local=True), within_s=30))
    await silent.asked.wait()
    await other._hang_up("a")
    async with asyncio.timeout(PATIENCE_S):
        answers = await asking
    assert isinstance(answers["a"], TrimtabError)
    await other.close()
    await server.stop(None)


async def test_a_replica_that_is_gone_when_it_is_to_be_asked_is_no_fault_of_the_asker() -> None:
    store = Torn()
    _, peers = a_replica(store, "a")
    await peers.tell()
    _, other = a_replica(store, "b")
    await other.look()
    asking = asyncio.ensure_future(other.ask("GetFleet", admin_pb2.GetFleetRequest(local=True), within_s=1))
    asyncio.get_running_loop().call_soon(other._seen.clear)
    assert isinstance((await asking)["a"], TrimtabError)
