"""The leader's tick on a real control plane: what controllers decide is written, pushed, told, taken back, and handed to the next leader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from controlplane.controllers.decision import Decision, Move, PolicyOf, Release, Reload, Restart, Want
from controlplane.seen import Seen
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab import measures
from trimtab.errors import StoreUnavailable
from trimtab.messages import Load, NodeState, Report, RequestMatch, Workload
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment, Scope, ScopeKind
from trimtab.v1 import admin_pb2, admin_pb2_grpc, control_pb2

pytestmark = pytest.mark.slow

W0 = Scope(ScopeKind.NODE, ("w0",))
HALF = Move("batch.active", W0, "too slow", "P99 900 ms", factor=0.5)


@dataclass
class Told:
    """A controller that wants what it is told, under the name of one that there is."""

    name: str = "batch"
    moves: tuple[Move, ...] = ()
    wants: tuple[Want, ...] = ()
    commands: list[Any] = field(default_factory=list)
    holds: tuple[str, ...] = ()
    ticks: int = 0
    started: list[list[Adjustment]] = field(default_factory=list)
    seen: Seen | None = None

    def start(self, live: Iterable[Adjustment]) -> Any:
        self.started.append(list(live))
        return None

    def step(self, state: Any, seen: Seen, policy: PolicyOf, now: float) -> Decision:
        self.ticks, self.seen = self.ticks + 1, seen
        commands, self.commands = tuple(self.commands), []
        return Decision(None, self.moves, commands, self.wants, holds=self.holds)


async def until(predicate: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := predicate()):
            await asyncio.sleep(0.02)
        return found


async def telemetry(mesh: Mesh) -> admin_pb2.GetTelemetryResponse:
    async with grpc.aio.insecure_channel(mesh.address) as channel:
        return await admin_pb2_grpc.AdminServiceStub(channel).GetTelemetry(admin_pb2.GetTelemetryRequest())


async def scale(address: str) -> admin_pb2.GetScaleResponse:
    async with grpc.aio.insecure_channel(address) as channel:
        return await admin_pb2_grpc.AdminServiceStub(channel).GetScale(admin_pb2.GetScaleRequest())


async def test_a_move_is_written_pushed_told_and_taken_back() -> None:
    told = Told()
    async with a_mesh(controllers=(told,)) as mesh:
        w0, w1 = (mesh.start_node(FakeNode(mesh.address, name)) for name in ("w0", "w1"))
        await w0.holds(1, 1)
        await w1.holds(1, 1)
        told.moves = (HALF,)
        await w0.holds(1, 2)
        await w1.holds(1, 2)
        assert (w0.active[-1], w1.active[-1]) == (24, 48)
        history = await mesh.admin.history(5, controllers=True)
        entry = history.entries[0]
        assert (entry.author, entry.reason, entry.evidence) == ("controller/batch", "too slow", "P99 900 ms")
        assert (entry.kind, entry.spec_version, entry.term > 0) == (admin_pb2.HISTORY_KIND_CONTROLLER, 0, True)
        ticks = told.ticks
        await until(lambda: told.ticks > ticks + 2)
        assert mesh.plane.replica.newest.value.identity.revision == 2  # type: ignore[union-attr]
        told.moves = ()
        await w0.holds(1, 3)
        assert w0.active[-1] == 48
        said = [d.text for d in (await telemetry(mesh)).decisions]
        assert said == ["batch.active at node/w0 as people set it", "batch.active at node/w0 ×0.5"]


async def test_a_controller_that_only_advises_writes_nothing_and_says_once_what_it_would_do() -> None:
    told = Told(moves=(HALF,))
    async with a_mesh() as mesh:
        await mesh.admin.set_policy({"loops.batch": "advise"}, author="t", reason="look first")
    async with a_mesh(mesh.store, (told,)) as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 2)
        await until(lambda: told.ticks > 3)
        found = await telemetry(mesh)
        assert [(d.text, d.advised) for d in found.decisions] == [("batch.active at node/w0 ×0.5", True)]
        assert [(c.name, c.mode, c.moves) for c in found.controllers] == [("batch", "advise", 0)]
        assert mesh.plane.replica.newest.value.identity.revision == 2  # type: ignore[union-attr]


async def test_a_command_that_is_advised_again_later_is_said_again_and_done_by_nobody() -> None:
    told = Told("heal")
    async with a_mesh() as mesh:
        await mesh.admin.set_policy({"loops.heal": "advise"}, author="t", reason="look first")
    async with a_mesh(mesh.store, (told,)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await node.holds(1, 2)
        for said in (1, 2):
            told.commands = [Restart("w0", "i1", 5.0, "it leaks")]
            await until(lambda n=said: len(mesh.plane.loop.decisions) == n)
            ticks = told.ticks
            await until(lambda n=ticks: told.ticks > n + 1)
        assert [(d.text, d.advised) for d in mesh.plane.loop.decisions] == [("restart w0", True)] * 2
        assert node.commands.value == ()


async def test_a_pinned_field_is_not_moved() -> None:
    told = Told(moves=(HALF,))
    async with a_mesh() as mesh:
        await mesh.admin.pin_policy(["batch.active"], pinned=True, author="t", reason="mine")
    async with a_mesh(mesh.store, (told,)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await node.holds(1, 2)
        await until(lambda: told.ticks > 2)
        assert node.active[-1] == 48


async def test_off_takes_back_what_a_controller_holds() -> None:
    told = Told(moves=(HALF,))
    async with a_mesh(controllers=(told,)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await until(lambda: node.active and node.active[-1] == 24)
        await mesh.admin.set_policy({"loops.batch": "off"}, author="t", reason="by hand")
        await until(lambda: node.active[-1] == 48)


async def test_a_new_leader_starts_from_what_lives_and_from_what_was_wanted() -> None:
    store = MemoryStore()
    first = Told(moves=(HALF,))
    async with a_mesh(store, (first,)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await until(lambda: node.active and node.active[-1] == 24)
        first.wants = (Want("default", 3, "a queue"),)
        await until(lambda: mesh.plane.loop.wants)
        await mesh.admin.set_policy({"scale.max_workers": "4"}, author="t", reason="may grow")
    second = Told()
    async with a_mesh(store, (second,)) as mesh:
        await until(lambda: second.ticks)
        assert [a.field for a in second.started[0]] == ["batch.active"]
        assert second.seen is not None and second.seen.wants == {"default": 3}
        (pool,) = (await scale(mesh.address)).pools
        assert (pool.pool, pool.wanted, pool.max_workers, pool.reason) == ("default", 3, 4, "a queue")


async def test_commands_go_to_the_worker_that_is_meant_and_are_told() -> None:
    told = Told()
    async with a_mesh(controllers=(told,)) as mesh:
        nodes = [mesh.start_node(FakeNode(mesh.address, name)) for name in ("w0", "w1")]
        for node in nodes:
            node.obeys = lambda command: control_pb2.CommandResult(ok=True, affected=2)
            await node.holds(1, 1)
        await mesh.until(lambda fleet: all(m.report for m in fleet.values()) and len(fleet) == 2)
        match = RequestMatch(workload=Workload.BATCH, min_age_ms=60_000)
        told.commands = [
            Release("w0", match, "out of memory"),
            Reload("w0", "inverted"),
            Restart("w0", "i1", 5.0, "it leaks"),
            Restart("w0", "another", 5.0, "too late"),
        ]
        await until(lambda: len(nodes[0].commands.value) == 3)
        said = {c.WhichOneof("command"): c for c in nodes[0].commands.value}
        assert said.keys() == {"release_requests", "reload_policy", "drain"}
        assert said["release_requests"].release_requests.match.min_age_ms == 60_000
        assert said["drain"].drain.restart
        assert nodes[1].commands.value == ()
        await until(lambda: len(mesh.plane.loop.decisions) == 4)
        failed = [(r.text, r.failed) for r in mesh.plane.loop.decisions if r.failed]
        assert failed == [("restart w0", "that process is gone already")]
        actions = await mesh.admin.actions(node_id="w0")
        assert {a.author for a in actions.actions} == {"controller/batch"}
        assert {a.reason for a in actions.actions} == {"out of memory", "inverted", "it leaks"}


async def test_a_new_leader_hears_which_workers_an_earlier_ones_heal_controller_had_started_anew() -> None:
    store, told, batch = MemoryStore(), Told("heal"), Told("batch")
    async with a_mesh(store, (told, batch)) as mesh:
        nodes = [mesh.start_node(FakeNode(mesh.address, name)) for name in ("w0", "w1", "w2")]
        for node in nodes:
            node.obeys = lambda command: control_pb2.CommandResult(ok=True)
            await node.holds(1, 1)
        nodes[2].obeys = lambda command: control_pb2.CommandResult(reason="NO", message="not now")
        await mesh.until(lambda fleet: all(m.report for m in fleet.values()) and len(fleet) == 3)
        await until(lambda: told.ticks)
        told.commands = [Restart("w0", "i1", 5.0, "it leaks"), Restart("w2", "i1", 5.0, "it leaks")]
        batch.commands = [Restart("w1", "i1", 5.0, "of another"), Reload("w0", "inverted")]
        await until(lambda: len(mesh.plane.loop.decisions) == 4)
        await mesh.admin.drain("w1", 1000, author="ada", reason="mine", restart=True)
        assert told.seen is not None and told.seen.restarted == {}, "what a leader did itself its controllers know"
    second = Told("heal")
    async with a_mesh(store, (second,)) as mesh:
        await until(lambda: second.ticks)
        assert second.seen is not None and second.seen.restarted.keys() == {"w0", "w2"}
        seconds_ago = [second.seen.now - at for times in second.seen.restarted.values() for at in times]
        assert len(seconds_ago) == 2 and all(0.0 <= ago < 3600.0 for ago in seconds_ago)


class AwayStore(MemoryStore):
    """It takes no write while `away`."""

    away = False

    async def put(self, write: Any) -> Any:
        if self.away:
            raise StoreUnavailable("the store is away")
        return await super().put(write)


async def test_a_store_that_is_away_keeps_no_command_from_being_done_and_loses_no_move() -> None:
    store, told, other = AwayStore(), Told(), Told("heal")
    async with a_mesh(store, (told, other)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        node.obeys = lambda command: control_pb2.CommandResult(ok=True)
        await node.holds(1, 1)
        store.away = True
        told.moves = (HALF,)
        other.commands = [Reload("w0", "inverted")]
        await until(lambda: node.commands.value)
        ticks = told.ticks
        await until(lambda: told.ticks > ticks + 1)
        assert node.active[-1] == 48
        store.away = False
        await until(lambda: node.active[-1] == 24)


async def test_what_a_node_measures_is_there_to_be_asked_for() -> None:
    told = Told(holds=("no gateway reports",))
    sketch = Sketch()
    for i in range(40):
        sketch.add(100.0 + i)
    name = measures.ttft(Workload.REALTIME, measures.HOT)
    async with a_mesh(controllers=(told,)) as mesh:
        node = FakeNode(mesh.address)
        node.says = lambda: Report(
            0, NodeState.SERVING, Load(3, 1, 0, 90, 100), 7, {"requests": 40}, {name: sketch.to_bytes()}, 100, {"kv_used": 0.1}
        )  # fmt: skip
        mesh.start_node(node)
        await until(lambda: told.seen is not None and told.seen.nodes.get("w0") and told.seen.nodes["w0"].windows)
        found = await telemetry(mesh)
        (w0,) = found.nodes
        assert (w0.state, w0.stale, w0.gauges["kv_used"], w0.totals["requests"]) == (
            control_pb2.NODE_STATE_SERVING,
            False,
            0.1,
            40,
        )
        assert w0.ttft_objective_ms == 500
        assert w0.windows[0].quantiles[name].p50 == pytest.approx(119.5, abs=1)
        assert found.mesh[name].count >= 40
        assert [list(c.holds) for c in found.controllers] == [["no gateway reports"]]
        assert found.leader_id == found.replica_id
        assert found.tick_ms > 0


async def test_every_replica_sees_the_nodes_of_the_others_and_answers_for_the_leader() -> None:
    store = MemoryStore()
    leads, follows = Told(), Told()
    async with a_mesh(store, (leads,), "a") as one:
        await until(lambda: leads.ticks)
        async with a_mesh(store, (follows,), "b") as other:
            node = FakeNode(other.address)
            node.says = lambda: Report(0, NodeState.SERVING, Load(2), 7, {"requests": 5}, {}, 100, {"kv_used": 0.4})
            other.start_node(node)
            w0 = await until(lambda: leads.seen is not None and leads.seen.nodes.get("w0"))
            await until(lambda: leads.seen is not None and leads.seen.nodes["w0"].totals.get("requests") == 5)
            assert leads.seen.nodes["w0"].gauge("kv_used", leads.seen.now) == 0.4 and w0.connected  # type: ignore[union-attr]
            leads.holds = ("told by a",)
            async with asyncio.timeout(PATIENCE_S):
                while [list(c.holds) for c in (await telemetry(other)).controllers] != [["told by a"]]:
                    await asyncio.sleep(0.05)
            assert (await telemetry(other)).leader_id == (await scale(other.address)).leader_id == "a"
            assert follows.ticks == 0
        assert one.plane.loop.leads
