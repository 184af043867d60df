"""What is known of breakers beyond one gateway: control planes and gateways on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator

import pytest
from prometheus_client import CollectorRegistry

from controlplane.access import Access, Role, Token
from controlplane.admin.client import AdminClient
from controlplane.gatekeeper import AccessFile
from controlplane.metrics import ControlMetrics
from controlplane.server import ControlPlane
from controlplane.store import Mark, PolicyStore
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab.errors import InvalidRequest, PermissionDenied, StoreUnavailable
from trimtab.messages import Role as NodeRole
from trimtab.v1 import control_pb2

OPEN, CLOSED, NEITHER = (
    control_pb2.BREAKER_FORCE_OPEN,
    control_pb2.BREAKER_FORCE_CLOSED,
    control_pb2.BREAKER_FORCE_UNSPECIFIED,
)
LONG_MS = 500_000
"""A trip that does not end within a test."""


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PolicyStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    opened = RedisStore(request.getfixturevalue("valkey_address"), uuid.uuid4().hex)
    yield opened
    await opened.close()


# ---- trips travel


def a_gateway(mesh: Mesh, name: str) -> FakeNode:
    return mesh.start_node(FakeNode(mesh.address, name, role=NodeRole.GATEWAY))


async def sees_workers(*gateways: FakeNode) -> None:
    for gateway in gateways:
        await gateway.viewed(lambda v: bool(v.workers))


def trip(
    gateway: FakeNode, *, open_ms: int = LONG_MS, incarnation: str = "i1", because: str = "10 of 20 failed"
) -> None:
    event = control_pb2.BreakerTripped(
        node_id="w0", incarnation=incarnation, dimension="errors", open_ms=open_ms, because=because
    )
    gateway.link.send_event(control_pb2.NodeEvent(breaker_tripped=event))


def noticed(view: control_pb2.FleetView) -> bool:
    return any(w.HasField("breaker") for w in view.workers)


async def test_a_trip_at_one_gateway_is_heard_by_the_others() -> None:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address))
        g0, g1 = a_gateway(mesh, "g0"), a_gateway(mesh, "g1")
        await sees_workers(g0, g1)
        trip(g0)
        for gateway in (g0, g1):
            notice = (await gateway.viewed(noticed)).workers[0].breaker
            assert (notice.gateway_id, notice.dimension, notice.because) == ("g0", "errors", "10 of 20 failed")
            assert notice.trip and 0 < notice.open_ms <= LONG_MS and not notice.forced
        first = notice.trip
        trip(g1, because="again")
        view = await g0.viewed(lambda v: noticed(v) and v.workers[0].breaker.gateway_id == "g1")
        assert view.workers[0].breaker.trip > first
        worker = (await mesh.admin.breakers()).workers[0]
        assert (worker.trip.trips, worker.trip.because) == (2, "again")
        assert mesh.metrics.trips.labels("errors")._value.get() == 2


async def test_a_trip_that_is_over_leaves_the_view_by_itself_and_is_still_told_to_people() -> None:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address))
        g1 = a_gateway(mesh, "g1")
        g0 = a_gateway(mesh, "g0")
        await sees_workers(g0, g1)
        trip(g0, open_ms=300)
        version = (await g1.viewed(noticed)).version
        await g1.viewed(lambda v: v.version > version and not noticed(v))
        worker = (await mesh.admin.breakers()).workers[0]
        assert (worker.trip.gateway_id, worker.trip.open_ms, worker.trip.trips) == ("g0", 0, 1)


async def test_only_gateways_are_believed_and_only_of_the_process_that_runs_now() -> None:
    async with a_mesh() as mesh:
        w0 = mesh.start_node(FakeNode(mesh.address))
        g0 = a_gateway(mesh, "g0")
        await sees_workers(g0)
        trip(w0)
        trip(g0, incarnation="an older one")
        trip(g0, because="this one counts")
        notice = (await g0.viewed(noticed)).workers[0].breaker
        assert notice.because == "this one counts"
        # What the worker said came over another stream; once a later word of it was heard, so was this.
        reports = mesh.plane.fleet.member("w0")
        assert reports is not None
        async with asyncio.timeout(PATIENCE_S):
            while (now := mesh.plane.fleet.member("w0")) is not None and now.heard_at == reports.heard_at:
                await asyncio.sleep(0.02)
        assert (await mesh.admin.breakers()).workers[0].trip.trips == 1


async def test_a_gateway_that_joins_later_gets_what_is_left_of_the_time() -> None:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address))
        g0 = a_gateway(mesh, "g0")
        await sees_workers(g0)
        trip(g0)
        first = (await g0.viewed(noticed)).workers[0].breaker.open_ms
        await asyncio.sleep(0.2)
        later = (await a_gateway(mesh, "g1").viewed(noticed)).workers[0].breaker.open_ms
        assert later < first


async def test_a_restarted_worker_is_not_blamed_but_what_is_forced_stays() -> None:
    async with a_mesh() as mesh:
        w0 = mesh.start_node(FakeNode(mesh.address))
        g0 = a_gateway(mesh, "g0")
        await sees_workers(g0)
        trip(g0)
        await mesh.admin.force_breaker("w0", OPEN, author="ada", for_ms=LONG_MS)
        await g0.viewed(lambda v: noticed(v) and bool(v.workers[0].breaker.forced))
        await w0.stop()
        mesh.start_node(FakeNode(mesh.address, incarnation="i2"))
        view = await g0.viewed(lambda v: [w.incarnation for w in v.workers] == ["i2"])
        notice = view.workers[0].breaker
        assert (notice.forced, notice.gateway_id, notice.open_ms, notice.trip) == (OPEN, "", 0, 0)


# ---- what is forced


async def test_what_is_forced_reaches_gateways_and_is_taken_back() -> None:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address))
        g0 = a_gateway(mesh, "g0")
        await sees_workers(g0)
        for forced in (OPEN, CLOSED):
            answer = await mesh.admin.force_breaker("w0", forced, author="ada", reason="evening", for_ms=60_000)
            assert answer.changed and answer.worker.forced.forced == forced
            assert answer.worker.forced.until_unix_ms - answer.worker.forced.at_unix_ms == 60_000
            notice = (
                (await g0.viewed(lambda v, f=forced: noticed(v) and v.workers[0].breaker.forced == f))
                .workers[0]
                .breaker
            )  # type: ignore[misc]
            assert 0 < notice.forced_ms <= 60_000
        assert (await mesh.admin.force_breaker("w0", NEITHER, author="bob")).changed
        await g0.viewed(lambda v: bool(v.workers) and not noticed(v))
        assert not (await mesh.admin.force_breaker("w0", NEITHER, author="bob")).changed
        done = (await mesh.admin.actions(node_id="w0")).actions
        assert [(a.what, a.author, a.reason) for a in done] == [
            ("breaker as gateways see it", "bob", ""),
            ("breaker closed for 1m", "ada", "evening"),
            ("breaker open for 1m", "ada", "evening"),
        ]


async def test_what_is_forced_ends_by_itself() -> None:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address))
        g0 = a_gateway(mesh, "g0")
        await sees_workers(g0)
        await mesh.admin.force_breaker("w0", OPEN, author="ada", for_ms=300)
        version = (await g0.viewed(noticed)).version
        await g0.viewed(lambda v: v.version > version and not noticed(v))


@pytest.mark.parametrize(
    ("node_id", "for_ms", "author", "why"),
    [
        ("w00", 0, "ada", "did you mean w0"),
        ("zebra", 0, "ada", "known workers: w0"),
        ("g0", 0, "ada", "g0 is a gateway"),
        ("w0", 86_400_001, "ada", "at most 1d"),
        ("w0", 0, " ", "author"),
        ("", 0, "ada", "name a worker"),
    ],
)
async def test_what_can_not_be_forced_is_refused(node_id: str, for_ms: int, author: str, why: str) -> None:
    async with a_mesh() as mesh:
        mesh.start_node(FakeNode(mesh.address))
        await sees_workers(a_gateway(mesh, "g0"))
        with pytest.raises(InvalidRequest, match=why):
            await mesh.admin.force_breaker(node_id, OPEN, author=author, for_ms=for_ms)
        assert (await mesh.admin.actions()).actions == []


async def test_who_may_only_look_forces_and_drains_nothing() -> None:
    token = "a-viewer-with-a-token"
    access = AccessFile(None)
    access._access = Access(tokens=(Token("v", Role.VIEWER, hashlib.sha256(token.encode()).hexdigest()),), closed=True)
    plane = ControlPlane(MemoryStore(), "127.0.0.1:0", ControlMetrics(CollectorRegistry()), access=access)
    await plane.start()
    try:
        await asyncio.wait_for(plane.loaded(), PATIENCE_S)
        async with AdminClient(plane.address, token=token) as admin:
            assert (await admin.breakers()).workers == []
            with pytest.raises(PermissionDenied, match="needs the role operator"):
                await admin.force_breaker("w0", OPEN, author="v")
            with pytest.raises(PermissionDenied, match="needs the role operator"):
                await admin.drain("w0", 0, author="v")
            assert [e.refused_because[:20] for e in (await admin.history()).entries[:2]] == [
                "denied: DrainNode ne",
                "denied: ForceBreaker",
            ]
    finally:
        await plane.stop()


class Away(MemoryStore):
    """A store whose marks can be taken away."""

    away = False

    async def mark(self, mark: Mark) -> bool:
        if self.away:
            raise StoreUnavailable("the store is away")
        return await super().mark(mark)

    async def marks(self) -> list[Mark]:
        if self.away:
            raise StoreUnavailable("the store is away")
        return await super().marks()


async def test_without_its_store_a_replica_still_passes_trips_on_and_forces_nothing() -> None:
    store = Away()
    async with a_mesh(store) as mesh:
        mesh.start_node(FakeNode(mesh.address))
        g0, g1 = a_gateway(mesh, "g0"), a_gateway(mesh, "g1")
        await sees_workers(g0, g1)
        store.away = True
        trip(g0)
        await g1.viewed(noticed)
        with pytest.raises(StoreUnavailable):
            await mesh.admin.force_breaker("w0", OPEN, author="ada")
        assert (await mesh.admin.breakers()).workers[0].forced.forced == NEITHER
        store.away = False
        async with asyncio.timeout(PATIENCE_S):
            while not await store.marks():
                await asyncio.sleep(0.05)


async def test_what_is_forced_outlives_the_replica_that_took_it(store: PolicyStore) -> None:
    async with a_mesh(store) as mesh:
        mesh.start_node(FakeNode(mesh.address))
        g0 = a_gateway(mesh, "g0")
        await sees_workers(g0)
        await mesh.admin.force_breaker("w0", OPEN, author="ada", reason="evening", for_ms=LONG_MS)
        before = (await g0.viewed(noticed)).version
        await mesh.restart()
        view = await g0.viewed(lambda v: v.version > before and noticed(v))
        assert view.workers[0].breaker.forced == OPEN
        assert view.workers[0].breaker.forced_ms <= LONG_MS


# ---- two replicas


@pytest.fixture
async def pair(valkey_address: str) -> AsyncIterator[tuple[Mesh, Mesh]]:
    name = uuid.uuid4().hex
    stores = [RedisStore(valkey_address, name) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(a_mesh(store)) for store in stores]
        yield a, b
    for store in stores:
        await store.close()


async def test_a_trip_at_one_replica_is_heard_by_gateways_of_another(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    b.start_node(FakeNode(b.address))
    g0, g1 = a_gateway(a, "g0"), a_gateway(b, "g1")
    await sees_workers(g0, g1)
    trip(g0)
    notice = (await g1.viewed(noticed)).workers[0].breaker
    assert (notice.gateway_id, notice.because) == ("g0", "10 of 20 failed")
    trip(g1)
    await g0.viewed(lambda v: noticed(v) and v.workers[0].breaker.gateway_id == "g1")
    for mesh in pair:
        assert (await mesh.admin.breakers()).workers[0].trip.trips == 2


@pytest.mark.slow
async def test_what_is_forced_by_one_replica_holds_at_all_and_is_brought_back_to_a_store_that_lost_it(
    pair: tuple[Mesh, Mesh],
) -> None:
    a, b = pair
    a.start_node(FakeNode(a.address))
    g0, g1 = a_gateway(a, "g0"), a_gateway(b, "g1")
    await sees_workers(g0, g1)
    await a.admin.force_breaker("w0", OPEN, author="ada", for_ms=LONG_MS)
    for gateway in (g0, g1):
        await gateway.viewed(lambda v: noticed(v) and v.workers[0].breaker.forced == OPEN)
    assert isinstance(a.store, RedisStore)
    await a.store._at.redis.delete(a.store._marks)
    async with asyncio.timeout(PATIENCE_S):
        while not await a.store.marks():
            await asyncio.sleep(0.05)
    assert (await b.admin.force_breaker("w0", NEITHER, author="bob")).changed
    for gateway in (g0, g1):
        await gateway.viewed(lambda v: bool(v.workers) and not noticed(v))
