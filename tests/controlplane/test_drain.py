"""`trimtab drain`: a worker told to end, by whichever replica was asked."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controlplane.admin import workers
from controlplane.cli import fleet
from controlplane.cli_workers import drain, reload
from controlplane.store import Action
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab.errors import InvalidRequest, StoreUnavailable
from trimtab.messages import NodeState
from trimtab.messages import Role as NodeRole
from trimtab.v1 import control_pb2
from trimtab_cli.why import why


class Worker(FakeNode):
    """Obeys a drain: it says so, and leaves once it is let go."""

    def __init__(self, address: str, node_id: str = "w0") -> None:
        super().__init__(address, node_id)
        self.obeys = self._drain
        self.left: asyncio.Task[None] | None = None
        self.may_leave = asyncio.Event()

    def _drain(self, command: control_pb2.Command) -> control_pb2.CommandResult:
        self.state = NodeState.DRAINING
        event = control_pb2.DrainBegun(deadline_ms=command.drain.deadline_ms)
        self.link.send_event(control_pb2.NodeEvent(drain_begun=event))
        self.left = asyncio.create_task(self._leave())
        return control_pb2.CommandResult(ok=True)

    async def _leave(self) -> None:
        await self.may_leave.wait()
        await self.link.said(1.0)
        await self.stop()


async def until(holds: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def state_of(mesh: Mesh, name: str = "w0") -> NodeState | None:
    """As it said last."""
    member = mesh.plane.fleet.member(name)
    return member.report.state if member is not None and member.report is not None else None


async def gone(mesh: Mesh, name: str = "w0") -> None:
    await mesh.until(lambda fleet: not fleet[name].connected)


async def test_a_worker_is_told_its_deadline_and_gateways_that_it_drains() -> None:
    async with a_mesh() as mesh:
        worker = Worker(mesh.address)
        await mesh.start_node(worker).holds(1, 1)
        mesh.start_node(FakeNode(mesh.address, "w1"))
        gateway = mesh.start_node(FakeNode(mesh.address, "g0", role=NodeRole.GATEWAY))
        await gateway.viewed(lambda v: len(v.workers) == 2)
        answer = await mesh.admin.drain("w0", 500, author="ada", reason="a new card")
        assert (answer.done, answer.others, answer.model, answer.incarnation) == (True, 1, "tiny", "i1")
        assert [c.drain.deadline_ms for c in worker.commands.value] == [500]
        await gateway.viewed(lambda v: v.workers[0].state == control_pb2.NODE_STATE_DRAINING)
        assert (await mesh.admin.drain("w1", 0, author="ada")).others == 0, "one that drains is no other"
        worker.may_leave.set()
        await gone(mesh)
        await gateway.viewed(lambda v: [w.node_id for w in v.workers] == ["w1"])
        [done] = (await mesh.admin.actions(node_id="w0")).actions
        assert (done.what, done.author, done.reason) == ("drain within 500ms", "ada", "a new card")


async def test_a_worker_that_does_not_do_it_says_why() -> None:
    async with a_mesh() as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        answer = await mesh.admin.drain("w0", 0, author="ada")
        assert (answer.done, answer.reason) == (False, "UNSUPPORTED")
        [done] = (await mesh.admin.actions()).actions
        assert done.what == "drain at once; not done: UNSUPPORTED"


async def test_one_that_hangs_has_given_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "ANSWER_S", 0.2)
    async with a_mesh() as mesh:
        worker = mesh.start_node(FakeNode(mesh.address))
        await worker.holds(1, 1)
        worker.ready.clear()
        answer = await mesh.admin.drain("w0", 0, author="ada")
        assert (answer.done, answer.reason) == (False, "NO_ANSWER")


async def test_one_that_was_gone_before_its_answer_was_heard_has_drained_when_it_had_said_so() -> None:
    async with a_mesh() as mesh:
        worker = mesh.start_node(FakeNode(mesh.address))
        await worker.holds(1, 1)
        worker.ready.clear()
        asked = asyncio.create_task(mesh.admin.drain("w0", 0, author="ada"))
        await until(lambda: worker.commands.value)
        worker.state = NodeState.DRAINING
        worker.link.send_event(control_pb2.NodeEvent(drain_begun=control_pb2.DrainBegun()))
        await until(lambda: state_of(mesh) is NodeState.DRAINING)
        await worker.stop()
        assert (await asked).done


async def test_a_node_that_ends_is_heard_to_its_last_word() -> None:
    async with a_mesh() as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        gateway = mesh.start_node(FakeNode(mesh.address, "g0", role=NodeRole.GATEWAY))
        await gateway.viewed(lambda v: bool(v.workers))
        trip = control_pb2.BreakerTripped(node_id="w0", incarnation="i1", dimension="hung", open_ms=1000)
        for _ in range(20):
            gateway.link.send_event(control_pb2.NodeEvent(breaker_tripped=trip))
        await gateway.link.said(PATIENCE_S)
        await gateway.stop()
        await gone(mesh, "g0")
        assert (await mesh.admin.breakers()).workers[0].trip.trips == 20
        await gateway.link.said(PATIENCE_S)  # nobody listens, so nobody waits


async def test_what_can_not_be_drained_is_refused() -> None:
    async with a_mesh() as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        await mesh.start_node(FakeNode(mesh.address, "g0", role=NodeRole.GATEWAY)).holds(1, 1)
        for name, deadline_ms, says in (
            ("w9", 0, "did you mean w0"),
            ("g0", 0, "SIGTERM"),
            ("w0", 86_400_001, "deadline_ms: at most 1d"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                await mesh.admin.drain(name, deadline_ms, author="ada")
        await mesh.nodes[0].stop()
        await gone(mesh)
        answer = await mesh.admin.drain("w0", 0, author="ada")
        assert (answer.done, answer.reason) == (False, "NOT_CONNECTED")


class Forgetful(MemoryStore):
    async def record_action(self, action: Action) -> None:
        raise StoreUnavailable("the store is away")


async def test_a_store_that_is_away_keeps_no_worker_from_draining() -> None:
    async with a_mesh(Forgetful()) as mesh:
        await mesh.start_node(Worker(mesh.address)).holds(1, 1)
        assert (await mesh.admin.drain("w0", 0, author="ada")).done


async def test_a_worker_of_another_replica_is_drained_too(valkey_address: str) -> None:
    name = uuid.uuid4().hex
    stores = [RedisStore(valkey_address, name) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(a_mesh(store)) for store in stores]
        worker = Worker(b.address)
        await b.start_node(worker).holds(1, 1)
        await a.until(lambda f: "w0" in f and f["w0"].replica == b.plane.peers.replica_id)
        assert (await a.admin.drain("w0", 700, author="ada")).done
        assert [c.drain.deadline_ms for c in worker.commands.value] == [700]
        assert len((await b.admin.actions()).actions) == 1, "by one replica, not by each that was asked"
    for store in stores:
        await store.close()


# ---- the verb


async def typed(mesh: Mesh, verb: Any, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, verb, [*words, "--control", mesh.address])


@pytest.fixture
async def mesh(quiet: None) -> AsyncIterator[Mesh]:
    async with a_mesh() as made:
        await made.start_node(Worker(made.address)).holds(1, 1)
        yield made


async def test_the_verb_waits_until_it_is_gone_and_warns_of_the_last_one(mesh: Mesh) -> None:
    worker = mesh.nodes[0]
    assert isinstance(worker, Worker)
    worker.may_leave.set()
    result = await typed(mesh, drain, "w0", "--deadline", "0.5s", "--wait", "--author", "ada", "--reason", "a new card")
    assert (result.exit_code, result.stdout) == (0, "w0 has drained and is gone\n")
    assert "w0 is the last worker that serves tiny: its requests get NO_WORKER" in result.stderr
    shown = (await typed(mesh, fleet)).stdout
    assert "DRAINED 0 s ago" in shown or "DRAINED 1 s ago" in shown
    [node] = json.loads((await typed(mesh, fleet, "--json")).stdout)["nodes"]
    assert (node["state"], node["connected"]) == ("drained", False)
    told = (await typed(mesh, why, "w0")).stdout
    assert 'drain within 500ms, by ada "a new card"' in told and "DRAINED" in told
    found = json.loads((await typed(mesh, why, "w0", "--json")).stdout)
    assert [(a["what"], a["author"]) for a in found["actions"]] == [("drain within 500ms", "ada")]
    assert found["breaker"]["node_id"] == "w0"


async def test_without_wait_it_says_what_will_become_of_what_runs(mesh: Mesh) -> None:
    await mesh.start_node(FakeNode(mesh.address, "w1")).holds(1, 1)
    await until(lambda: state_of(mesh, "w1") is NodeState.SERVING)
    result = await typed(mesh, drain, "w0")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == (
        "w0 drains: it takes no new work, and ends; what runs gets 30s, then it goes on at another worker\n"
    )
    found = json.loads((await typed(mesh, drain, "w0", "--deadline", "0s", "--json")).stdout)
    assert (found["done"], found["gone"], found["others"], found["deadline_ms"]) == (True, None, 1, 0)


async def test_one_that_stays_is_said_to_be_there_still(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.cli_workers.ENDS_S", 0.3)
    result = await typed(mesh, drain, "w0", "--deadline", "0s", "--wait")
    assert (result.exit_code, "still there" in result.stderr) == (5, True)


async def test_what_was_not_done_ends_with_its_code(mesh: Mesh) -> None:
    assert (await typed(mesh, drain, "w7")).exit_code == 2
    mesh.nodes[0].obeys = lambda command: None
    refused = await typed(mesh, drain, "w0")
    assert (refused.exit_code, "w0 is not drained: UNSUPPORTED" in refused.stderr) == (4, True)


async def test_a_restart_is_a_drain_whose_process_comes_back() -> None:
    async with a_mesh() as mesh:
        worker = Worker(mesh.address)
        await mesh.start_node(worker).holds(1, 1)
        await mesh.until(lambda fleet: fleet["w0"].report is not None)
        args = ["w0", "--restart", "--deadline", "2s", "--reason", "it leaks", "--control", mesh.address]
        result = await asyncio.to_thread(CliRunner().invoke, drain, args)
        assert result.exit_code == 0, result.output
        (command,) = worker.commands.value
        assert (command.drain.restart, command.drain.deadline_ms) == (True, 2000)
        (action,) = await mesh.store.actions()
        assert (action.what, action.reason) == ("drain and restart within 2s", "it leaks")


async def test_a_reload_reaches_the_worker_and_is_on_record() -> None:
    async with a_mesh() as mesh:
        worker = mesh.start_node(FakeNode(mesh.address))
        worker.obeys = lambda command: control_pb2.CommandResult(ok=True)
        await worker.holds(1, 1)
        args = ["w0", "--reason", "inverted", "--control", mesh.address]
        result = await asyncio.to_thread(CliRunner().invoke, reload, args)
        assert (result.exit_code, "w0 has told its engine the policy anew\n" in result.output) == (0, True)
        assert [c.WhichOneof("command") for c in worker.commands.value] == ["reload_policy"]
        assert [a.what for a in await mesh.store.actions()] == ["policy told anew"]


async def test_a_reload_that_a_worker_refuses_or_does_not_know_is_told() -> None:
    async with a_mesh() as mesh:
        worker = mesh.start_node(FakeNode(mesh.address))
        worker.obeys = lambda command: control_pb2.CommandResult(ok=False, reason="ABOVE_ENGINE_LIMIT", message="no")
        await worker.holds(1, 1)
        args = ["w0", "--control", mesh.address]
        result = await asyncio.to_thread(CliRunner().invoke, reload, args)
        assert (result.exit_code, "ABOVE_ENGINE_LIMIT: no" in result.output) == (4, True)
        missing = await asyncio.to_thread(CliRunner().invoke, reload, ["w7", "--control", mesh.address])
        assert missing.exit_code == 2
