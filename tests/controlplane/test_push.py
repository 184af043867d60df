"""The control plane against real control streams on real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from controlplane import watchdog
from controlplane.store import Receipt, Stored, Write
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh, a_snapshot, an_identity
from trimtab import codec
from trimtab.errors import StoreUnavailable
from trimtab.kit.rpc import channel
from trimtab.messages import Hello, NodeState, Role
from trimtab.snapshot import Identity, Limits, Node
from trimtab.v1 import control_pb2, control_pb2_grpc


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with a_mesh() as running:
        yield running


async def set_active(mesh: Mesh, active: int, **more: int) -> Identity:
    answer = await mesh.admin.set_policy({"batch.active": str(active)}, author="ada", **more)  # type: ignore[arg-type]
    return codec.decode_identity(answer.identity)


async def test_a_node_gets_the_policy_when_it_joins_and_whenever_it_changes(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await node.holds(1, 1)
    await set_active(mesh, 8)
    await node.holds(1, 2)
    assert node.active == [48, 8]
    fleet = await mesh.until(lambda fleet: fleet["w0"].applied.revision == 2)
    assert fleet["w0"].apply_ms == 0.5


async def test_a_node_that_holds_the_newest_already_is_not_pushed_it_again(mesh: Mesh) -> None:
    newest = mesh.plane.replica.newest.value
    assert newest is not None
    node = mesh.start_node(FakeNode(mesh.address, held=newest.identity))
    fleet = await mesh.until(lambda fleet: "w0" in fleet)
    assert fleet["w0"].applied == newest.identity
    await set_active(mesh, 8, wait_ms=3000)
    assert node.active == [8]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a control plane that is started afterwards."""
    monkeypatch.setattr("controlplane.push.UNANSWERED_S", 0.5)


async def test_a_slow_node_skips_to_the_newest(impatient: None, mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await node.holds(1, 1)
    node.ready.clear()
    await set_active(mesh, 1)
    await asyncio.wait_for(node.begun.until(1), PATIENCE_S)
    for active in range(2, 12):
        await set_active(mesh, active)
    # All of them are there before the node is ready again; how many came by then would else be the machine's business.
    async with asyncio.timeout(PATIENCE_S):
        while node.link._push is None or node.link._push.snapshot.identity.revision != 12:
            await asyncio.sleep(0.005)
    node.ready.set()
    await node.holds(1, 12)
    assert node.active == [48, 1, 11]


async def test_a_refusal_is_kept_with_its_reason_and_the_node_stays_as_it_was(mesh: Mesh) -> None:
    await set_active(mesh, 32)
    node = mesh.start_node(FakeNode(mesh.address, limits=Limits(max_num_seqs=16)))
    fleet = await mesh.until(lambda fleet: "w0" in fleet and fleet["w0"].refusal is not None)
    refusal = fleet["w0"].refusal
    assert refusal is not None
    assert (refusal.identity.revision, refusal.reason, refusal.field) == (2, "ABOVE_ENGINE_LIMIT", "batch.active")
    assert node.active == []
    shown = (await mesh.admin.fleet()).nodes[0].policy
    assert (shown.refused.revision, shown.refusal.reason) == (2, "ABOVE_ENGINE_LIMIT")
    await set_active(mesh, 16, wait_ms=3000)
    assert node.active == [16]
    assert not (await mesh.admin.fleet()).nodes[0].policy.HasField("refused")


async def test_after_a_restart_on_the_same_port_nodes_come_back_with_what_they_hold(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await set_active(mesh, 8)
    await node.holds(1, 2)
    await mesh.restart()
    fleet = await mesh.until(lambda fleet: "w0" in fleet)
    assert (fleet["w0"].applied.epoch, fleet["w0"].applied.revision) == (1, 2)
    await set_active(mesh, 9, wait_ms=3000)
    assert node.active[-2:] == [8, 9]


async def test_a_store_that_lost_its_policy_is_put_above_what_nodes_hold(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await set_active(mesh, 8)
    await node.holds(1, 2)
    await mesh.restart(store=MemoryStore())
    await node.holds(2, 1)
    entries = (await mesh.admin.history()).entries
    assert (entries[0].identity.epoch, entries[0].author) == (2, "trimtab")
    assert "w0 holds 1.2" in entries[0].reason


async def test_a_node_that_holds_other_content_in_the_same_place_gets_a_higher_epoch(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address, held=an_identity(1, 1, b"other")))
    await node.holds(2, 1)


async def test_a_node_ahead_within_a_session_raises_the_epoch(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await node.holds(1, 1)
    node.held.set(a_snapshot(5, 7).identity)
    await set_active(mesh, 8)
    await node.holds(6, 1)
    assert node.active == [48, 8]


async def test_an_epoch_beyond_reason_is_not_followed(mesh: Mesh) -> None:
    mesh.start_node(FakeNode(mesh.address, held=an_identity((1 << 62) + 1, 1)))
    await mesh.until(lambda fleet: "w0" in fleet)
    await set_active(mesh, 8)
    assert (await mesh.admin.get_policy()).snapshot.identity.epoch == 1


async def test_an_emptied_store_gets_back_what_this_replica_holds() -> None:
    store = MemoryStore()
    async with a_mesh(store) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await set_active(mesh, 8)
        await node.holds(1, 2)
        store._stored.set(None)
        await node.holds(2, 1)
        assert node.active[-2:] == [8, 8]
        assert (await mesh.admin.get_policy()).spec_version == 1


async def test_gateways_hear_how_many_they_are(mesh: Mesh) -> None:
    first, second = (
        mesh.start_node(FakeNode(mesh.address, name, role=Role.GATEWAY, limits=Limits())) for name in ("g0", "g1.1")
    )
    for gateway in (first, second):
        await gateway.viewed(lambda view: view.gateways == 2)
    second.state = NodeState.DRAINING
    await first.viewed(lambda view: view.gateways == 1)


async def test_gateways_see_workers_come_change_and_go(mesh: Mesh) -> None:
    gateway = mesh.start_node(FakeNode(mesh.address, "g0", role=Role.GATEWAY, limits=Limits()))
    await gateway.viewed(lambda view: not view.workers)
    worker = mesh.start_node(FakeNode(mesh.address))
    view = await gateway.viewed(lambda view: len(view.workers) == 1)
    assert (view.workers[0].node_id, view.workers[0].model, view.workers[0].incarnation) == ("w0", "tiny", "i1")
    assert view.workers[0].limits.max_num_seqs == 64
    worker.state = NodeState.DRAINING
    await gateway.viewed(lambda view: view.workers[0].state == control_pb2.NODE_STATE_DRAINING)
    await worker.stop()
    gone = await gateway.viewed(lambda view: not view.workers)
    assert gone.version > view.version
    assert worker.views.value is None


async def test_a_killed_node_is_lost_at_once(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await mesh.until(lambda fleet: "w0" in fleet and fleet["w0"].applied.revision == 1)
    await node.stop()
    fleet = await mesh.until(lambda fleet: not fleet["w0"].connected)
    assert not (await mesh.admin.fleet()).nodes[0].connected
    assert fleet["w0"].applied.revision == 1


async def test_a_silent_node_with_an_open_stream_is_lost(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    assert watchdog.SILENCE_S + watchdog.TICK_S <= 3.0
    monkeypatch.setattr(watchdog, "SILENCE_S", 0.2)
    async with channel(mesh.address, "control") as link:
        call = control_pb2_grpc.ControlServiceStub(link).Connect()
        await call.write(control_pb2.ConnectRequest(hello=a_hello()))
        await mesh.until(lambda fleet: "w0" in fleet)
        await mesh.until(lambda fleet: not fleet["w0"].connected)
        await call.write(control_pb2.ConnectRequest(report=control_pb2.Report(state=control_pb2.NODE_STATE_SERVING)))
        async with asyncio.timeout(PATIENCE_S):
            while not mesh.plane.fleet.connected():
                await asyncio.sleep(0)
        call.cancel()


async def test_a_new_incarnation_ends_the_old_stream_and_its_late_messages(mesh: Mesh) -> None:
    async with channel(mesh.address, "control") as link:
        old = control_pb2_grpc.ControlServiceStub(link).Connect()
        await old.write(control_pb2.ConnectRequest(hello=a_hello("old")))
        assert (await old.read()).HasField("policy_push")  # type: ignore[union-attr]
        node = mesh.start_node(FakeNode(mesh.address, incarnation="new"))
        await node.holds(1, 1)
        assert await old.code() is grpc.StatusCode.ABORTED
        assert "replaced" in (await old.details() or "")
    fleet = await mesh.until(lambda fleet: fleet["w0"].report is not None)
    assert (fleet["w0"].hello.incarnation, fleet["w0"].connected) == ("new", True)


def a_hello(incarnation: str = "i1", role: Role = Role.WORKER) -> control_pb2.Hello:
    return codec.encode_hello(Hello(Node("w0"), incarnation, role))


@pytest.mark.parametrize(
    "first",
    [
        control_pb2.ConnectRequest(report=control_pb2.Report()),
        control_pb2.ConnectRequest(hello=control_pb2.Hello(node_id="w0", incarnation="i1")),
        control_pb2.ConnectRequest(hello=control_pb2.Hello(role=control_pb2.ROLE_WORKER)),
        None,
    ],
)
async def test_a_stream_that_does_not_begin_with_a_whole_hello_is_refused(
    mesh: Mesh, first: control_pb2.ConnectRequest | None
) -> None:
    async with channel(mesh.address, "control") as link:
        call = control_pb2_grpc.ControlServiceStub(link).Connect()
        if first is not None:
            await call.write(first)
        else:
            await call.done_writing()
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert list(mesh.plane.fleet) == []


class Away(MemoryStore):
    """A store that can be taken away."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False

    async def load(self) -> Stored | None:
        if self.away:
            raise StoreUnavailable("the store is away")
        return await super().load()

    async def put(self, write: Write) -> Receipt:
        if self.away:
            raise StoreUnavailable("the store is away")
        return await super().put(write)


async def test_without_its_store_the_control_plane_reads_on_and_refuses_writes() -> None:
    store = Away()
    async with a_mesh(store) as mesh:
        store.away = True
        with pytest.raises(Exception, match="away") as caught:
            await set_active(mesh, 8)
        assert getattr(caught.value, "reason", "") == "STORE_UNAVAILABLE"
        node = mesh.start_node(FakeNode(mesh.address))
        await node.holds(1, 1)
        assert (await mesh.admin.get_policy()).effective.batch.active == 48
        store.away = False
        await set_active(mesh, 8)
        await node.holds(1, 2)


async def test_a_change_on_a_store_that_fell_back_loses_nothing_that_was_acknowledged() -> None:
    store = MemoryStore()
    async with a_mesh(store) as mesh:
        older = store._stored.value
        await set_active(mesh, 8)
        # As after a failover to a replica that lacked the last write; nobody has been told yet.
        store._stored._value = older
        answer = await mesh.admin.set_policy({"admission.batch_queue": "7"}, author="ada")
        assert (answer.identity.epoch, answer.identity.revision, answer.spec_version) == (2, 2, 2)
        effective = (await mesh.admin.get_policy()).effective
        assert (effective.batch.active, effective.admission.batch_queue) == (8, 7)
