"""The store killed for a minute under puts, with nodes connected; back with its disk, and back empty. `TRIMTAB_LONG=1` asks for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from controlplane.admin.client import AdminClient
from tests.controlplane.chaos import DEFAULT_ACTIVE, LIMITS
from tests.controlplane.mesh import FakeNode
from tests.controlplane.replicas import Planes, Replica, Store, a_store, now, planes, serving, until
from tests.controlplane.witness import Asked, History, Outcome
from trimtab.errors import StoreUnavailable, TrimtabError
from trimtab.messages import Role
from trimtab.v1 import admin_pb2, control_pb2

OUTAGE_S = 60.0
PUT_EACH_S = 0.2
PUTS = 20
"""Committed before, and after."""
WORKERS = 6
ANSWER_S = 20.0
"""For one call; a replica whose store is away answers at once, and a slow machine is not what fails."""
CONVERGE_S = 60.0
HOUR_MS = 3_600_000
TRIP_MS = 600_000


@dataclass
class Person:
    """Puts one change after another by each replica in turn, whatever comes of it."""

    mesh: Planes
    history: History = field(default_factory=History)
    because: set[type[TrimtabError]] = field(default_factory=set)
    _stop: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last(self) -> Asked:
        return self.history.asked[-1]

    def of(self, outcome: Outcome, since: float = 0.0) -> list[Asked]:
        return [a for a in self.history.asked if a.outcome is outcome and a.began >= since]

    async def run(self) -> None:
        """Until `stop`; what was asked by then has its outcome."""
        self._stop.clear()
        while not self._stop.is_set():
            await self.put()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PUT_EACH_S):
                    await self._stop.wait()

    def stop(self) -> None:
        self._stop.set()

    async def put(self) -> None:
        asked = Asked(DEFAULT_ACTIVE + 1 + len(self.history.asked), now())
        self.history.asked.append(asked)
        at = self.mesh.replicas[asked.value % len(self.mesh.replicas)]
        try:
            async with AdminClient(at.address, timeout_s=ANSWER_S) as admin:
                answer = await admin.set_policy(
                    {"batch.active": str(asked.value)}, author="ada", reason=f"{asked.value}"
                )
            asked.outcome = Outcome.COMMITTED if answer.durability.committed else Outcome.ACCEPTED
        except TrimtabError as e:
            asked.outcome = Outcome.UNKNOWN
            self.because.add(type(e))
        asked.ended = now()

    async def committed(self, count: int, since: float = 0.0) -> None:
        async with asyncio.timeout(CONVERGE_S):
            while len(self.of(Outcome.COMMITTED, since)) < count:
                await asyncio.sleep(0.05)


@pytest.mark.skipif(os.environ.get("TRIMTAB_LONG") != "1", reason="minutes long: TRIMTAB_LONG=1 asks for it")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("emptied", [False, True], ids=["back with its disk", "back empty"])
async def test_a_store_that_was_away_for_a_minute_loses_nothing_and_all_converge(tmp_path: Path, emptied: bool) -> None:
    with a_store(tmp_path / "store") as store:
        async with planes(store.url, tmp_path / "state", 2) as mesh:
            await outage(store, mesh, tmp_path / "state", emptied=emptied)


async def outage(store: Store, mesh: Planes, state: Path, *, emptied: bool) -> None:
    workers = [mesh.node(f"w{i}", limits=LIMITS) for i in range(WORKERS)]
    gateways = [mesh.node(f"g{i}", limits=LIMITS, role=Role.GATEWAY) for i in range(2)]
    await all_know(mesh)
    async with AdminClient(mesh.replicas[0].address, timeout_s=ANSWER_S) as admin:
        await admin.force_breaker("w0", control_pb2.BREAKER_FORCE_OPEN, author="ada", for_ms=HOUR_MS)
    for gateway in gateways:
        await gateway.viewed(is_forced)
    person = Person(mesh)
    puts = asyncio.create_task(person.run())
    await person.committed(PUTS)
    led = await mesh.leader()
    if emptied:
        # What one replica alone has heard of is lost with the store where the other one mends it first.
        person.stop()
        await puts
        await mesh.agree()
        puts = asyncio.create_task(person.run())
    before, value = max((n.held.value, n.active[-1]) for n in workers)
    store.kill()
    killed_at = now()
    await away(mesh, gateways, person, killed_at)
    newcomer = mesh.nodes[-1]
    if emptied:
        store.empty()
    by_then = {a.value for a in person.history.asked if a.began < killed_at}
    refused = list(person.of(Outcome.UNKNOWN, killed_at))
    assert not [a for a in person.of(Outcome.COMMITTED) if a.began > killed_at]
    back_at = now()
    store.start()
    await person.committed(PUTS, back_at)
    person.stop()
    await puts
    late = Replica("c2", store.url, state)
    mesh.replicas.append(late)
    await late.start()
    await serving(late)
    async with asyncio.timeout(CONVERGE_S):
        epoch, revision = await mesh.agree()
    assert person.last.outcome is Outcome.COMMITTED
    assert {n.active[-1] for n in mesh.nodes} == {person.last.value}
    assert person.history.faults(person.last.value, mesh.nodes) == []
    assert person.because == {StoreUnavailable}, "a replica whose store is away answers, and says why"
    assert epoch == before.epoch + emptied
    assert newcomer.active[0] in {*by_then, DEFAULT_ACTIVE}, "it came while the store was away, and got what there was"
    changes = await values_of_changes(late)
    assert changes[0][0] == (f"{value}" if emptied else "default"), "the next change is built upon what was in force"
    assert [b for b, _ in changes[1:]] == [a for _, a in changes[:-1]], "each is built upon the one before it"
    landed = [after for _, after in changes]
    lasting = person.of(Outcome.COMMITTED, back_at if emptied else 0.0)
    assert [landed.count(f"{a.value}") for a in lasting] == [1] * len(lasting)
    assert not {f"{a.value}" for a in refused if a.ended < back_at} & set(landed), "nothing was there to take it"
    for gateway in gateways:
        await gateway.viewed(lambda view: is_forced(view) and is_tripped(view))
    for replica in mesh.replicas:
        await knows_breakers(replica)
    async with asyncio.timeout(CONVERGE_S):
        while (new := await mesh.leader()).term <= led.term:
            await asyncio.sleep(0.05)
    print(
        f"{'empty' if emptied else 'with its disk'} after {back_at - killed_at:.0f} s: {len(person.history.asked)} puts, "
        f"{len(person.of(Outcome.COMMITTED))} committed, {len(refused)} refused meanwhile; from {before} to {epoch}.{revision}, "
        f"term {led.term} to {new.term}; {len(mesh.nodes)} nodes and {len(mesh.replicas)} replicas agree; none went back"
    )


async def away(mesh: Planes, gateways: list[FakeNode], person: Person, killed_at: float) -> None:
    """The whole outage. Replicas serve what they have, pass on what gateways tell, and give it to a node that joins."""
    places = {r.replica_id: (0, 0) for r in mesh.replicas}
    names = {n.node.node_id for n in mesh.nodes}
    joined = tripped = False
    while now() < killed_at + OUTAGE_S:
        for replica in mesh.replicas:
            async with AdminClient(replica.address, timeout_s=ANSWER_S) as admin:
                held = (await admin.get_policy()).snapshot.identity
                fleet = await admin.fleet()
            assert (held.epoch, held.revision) >= places[replica.replica_id]
            places[replica.replica_id] = (held.epoch, held.revision)
            assert names <= connected(fleet), "nodes stay, and stay known"
        if not joined:
            joined = True
            node = mesh.node("w-late", limits=LIMITS)
            await until(lambda node=node: node.active)  # type: ignore[misc]
        if not tripped:
            tripped = True
            trip = control_pb2.BreakerTripped(
                node_id="w1", incarnation="i1", dimension="errors", open_ms=TRIP_MS, because="10 of 20 failed"
            )
            gateways[0].link.send_event(control_pb2.NodeEvent(breaker_tripped=trip))
            await gateways[0].viewed(is_tripped)
        await asyncio.sleep(1.0)
    for replica in mesh.replicas:
        assert not (await replica.fleet()).store.connected
        async with AdminClient(replica.address, timeout_s=ANSWER_S) as admin:
            with pytest.raises(StoreUnavailable):
                await admin.force_breaker("w2", control_pb2.BREAKER_FORCE_OPEN, author="ada", for_ms=HOUR_MS)


def connected(fleet: admin_pb2.GetFleetResponse) -> set[str]:
    return {n.hello.node_id for n in fleet.nodes if n.connected}


async def all_know(mesh: Planes) -> None:
    """Each replica knows all workers, those of the other one as the store tells of them, and can ask for all nodes."""
    names = {n.node.node_id for n in mesh.nodes}
    workers = {name for name in names if name.startswith("w")}
    async with asyncio.timeout(CONVERGE_S):
        for replica in mesh.replicas:
            async with AdminClient(replica.address, timeout_s=ANSWER_S) as admin:
                while not workers <= {w.node_id for w in (await admin.breakers()).workers if w.connected}:
                    await asyncio.sleep(0.05)
                while not names <= connected(await admin.fleet()):
                    await asyncio.sleep(0.05)


def is_forced(view: control_pb2.FleetView) -> bool:
    return any(w.node_id == "w0" and w.breaker.forced == control_pb2.BREAKER_FORCE_OPEN for w in view.workers)


def is_tripped(view: control_pb2.FleetView) -> bool:
    return any(w.node_id == "w1" and w.breaker.gateway_id == "g0" for w in view.workers)


async def knows_breakers(replica: Replica) -> None:
    """What was forced before the outage, and the trip that came during it."""
    async with AdminClient(replica.address, timeout_s=ANSWER_S) as admin, asyncio.timeout(CONVERGE_S):
        while True:
            workers = {w.node_id: w for w in (await admin.breakers()).workers}
            if {"w0", "w1"} <= workers.keys() and (workers["w0"].forced.forced, workers["w1"].trip.gateway_id) == (
                control_pb2.BREAKER_FORCE_OPEN,
                "g0",
            ):
                return
            await asyncio.sleep(0.05)


async def values_of_changes(replica: Replica) -> list[tuple[str, str]]:
    """What each change that the store tells of found and left, oldest first."""
    async with AdminClient(replica.address, timeout_s=ANSWER_S) as admin:
        entries = (await admin.history(1024)).entries
    return [(c.before, c.after) for entry in reversed(entries) for c in entry.changes]
