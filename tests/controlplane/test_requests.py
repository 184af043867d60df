"""Requests steered through the control plane: asked of every worker over its stream, answered for each of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from structlog.testing import capture_logs

from controlplane.admin import steering
from controlplane.commands import Calls, ask_all
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, Obeys, a_mesh
from trimtab.codec import decode_match
from trimtab.errors import TrimtabError
from trimtab.messages import RequestMatch, Role, Workload
from trimtab.v1 import admin_pb2, control_pb2

WHY = {"author": "ada", "reason": "evening"}
BATCH = RequestMatch(workload=Workload.BATCH)


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with a_mesh() as running:
        yield running


def affects(n: int) -> Obeys:
    return lambda command: control_pb2.CommandResult(ok=True, affected=n)


async def a_worker(mesh: Mesh, node_id: str, obeys: Obeys | None = None, role: Role = Role.WORKER) -> FakeNode:
    node = FakeNode(mesh.address, node_id, role=role)
    if obeys is not None:
        node.obeys = obeys
    mesh.start_node(node)
    await mesh.until(lambda fleet: node_id in fleet)
    return node


def said(answer: admin_pb2.SteerRequestsResponse) -> list[tuple[str, bool, int, str]]:
    return [(n.node_id, n.done, n.affected, n.reason) for n in answer.nodes]


async def test_every_worker_is_asked_at_once_and_says_how_many_it_had(mesh: Mesh) -> None:
    workers = [await a_worker(mesh, f"w{i}", affects(i)) for i in range(3)]
    gateway = await a_worker(mesh, "g0", affects(9), Role.GATEWAY)
    answer = await mesh.admin.release(BATCH, **WHY)
    assert said(answer) == [("w0", True, 0, ""), ("w1", True, 1, ""), ("w2", True, 2, "")]
    heard = [w.commands.value for w in workers]
    assert [len(commands) for commands in heard] == [1, 1, 1]
    assert len({commands[0].command_id for commands in heard}) == 1
    assert gateway.commands.value == ()


async def test_each_action_becomes_its_command_with_the_match_as_it_was(mesh: Mesh) -> None:
    worker = await a_worker(mesh, "w0", affects(1))
    match = RequestMatch(frozenset({"a", "b"}), Workload.REALTIME, "acme", 7)
    await mesh.admin.reprioritise(match, -2, **WHY)
    await mesh.admin.isolate(match, True, **WHY)
    await mesh.admin.isolate(match, False, **WHY)
    await mesh.admin.release(match, **WHY)
    moved, isolated, freed, released = worker.commands.value
    assert (moved.reprioritise.delta, decode_match(moved.reprioritise.match)) == (-2, match)
    assert (isolated.isolate_requests.isolated, freed.isolate_requests.isolated) == (True, False)
    assert decode_match(isolated.isolate_requests.match) == match
    assert decode_match(released.release_requests.match) == match


async def test_a_worker_that_cannot_do_it_says_why(mesh: Mesh) -> None:
    await a_worker(mesh, "old")
    await a_worker(
        mesh, "w0", lambda _: control_pb2.CommandResult(ok=False, reason="ENGINE_DEAD", message="it is gone")
    )
    answer = await mesh.admin.release(BATCH, **WHY)
    assert said(answer) == [("old", False, 0, "UNSUPPORTED"), ("w0", False, 0, "ENGINE_DEAD")]
    assert answer.nodes[1].message == "it is gone"


@pytest.mark.slow
async def test_a_worker_that_does_not_answer_in_time_is_not_waited_for_and_answers_in_vain(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steering, "ANSWER_S", 2.0)
    slow = await a_worker(mesh, "w0", affects(1))
    await a_worker(mesh, "w1", affects(1))
    await slow.holds(1, 1)
    slow.ready.clear()
    answer = await mesh.admin.release(BATCH, **WHY)
    assert said(answer) == [("w0", False, 0, "NO_ANSWER"), ("w1", True, 1, "")]
    assert answer.nodes[0].message == "no answer within 2 s; it may still do it"
    slow.ready.set()
    assert said(await mesh.admin.release(BATCH, **WHY)) == [("w0", True, 1, ""), ("w1", True, 1, "")]


async def test_a_worker_that_is_lost_while_asked_is_not_waited_for_and_then_not_asked(mesh: Mesh) -> None:
    node = await a_worker(mesh, "w0", affects(1))
    await node.holds(1, 1)
    node.ready.clear()
    asking = asyncio.create_task(mesh.admin.release(BATCH, **WHY))
    await asyncio.wait_for(node.commands.until(0), PATIENCE_S)
    await node.stop()
    assert said(await asyncio.wait_for(asking, PATIENCE_S)) == [("w0", False, 0, "LOST")]
    await mesh.until(lambda fleet: not fleet["w0"].connected)
    assert said(await mesh.admin.release(BATCH, **WHY)) == [("w0", False, 0, "NOT_CONNECTED")]


async def test_a_mesh_without_workers_answers_with_none(mesh: Mesh) -> None:
    assert said(await mesh.admin.release(BATCH, **WHY)) == []


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"match": control_pb2.RequestMatch()}, ["match"]),
        ({"match": control_pb2.RequestMatch(request_ids=[""])}, ["match.request_ids"]),
        ({"match": control_pb2.RequestMatch(request_ids=["a" * 129])}, ["match.request_ids"]),
        ({"match": control_pb2.RequestMatch(request_ids=map(str, range(257)))}, ["match.request_ids"]),
        ({"match": control_pb2.RequestMatch(tenant="a\nb")}, ["match.tenant"]),
        ({"match": control_pb2.RequestMatch(workload=77)}, []),  # type: ignore[arg-type]
        ({"author": " "}, ["author"]),
        ({"reason": ""}, ["reason"]),
        ({"reason": "two\nlines"}, ["reason"]),
        ({"release": None}, ["action"]),
        ({"release": None, "reprioritise": admin_pb2.ReprioritiseAction(delta=3)}, ["reprioritise.delta"]),
        ({"release": None, "reprioritise": admin_pb2.ReprioritiseAction(delta=-3)}, ["reprioritise.delta"]),
        ({"author": "", "reason": "", "match": None}, ["author", "reason", "match"]),
    ],
)
async def test_what_is_not_whole_is_the_callers_fault_and_no_worker_is_asked(
    mesh: Mesh, changes: dict[str, object], fields: list[str]
) -> None:
    worker = await a_worker(mesh, "w0", affects(1))
    match = control_pb2.RequestMatch(request_ids=["a"])
    facts: dict[str, object] = {"match": match, "release": admin_pb2.ReleaseAction(), **WHY} | changes
    with pytest.raises(TrimtabError) as caught:
        await mesh.admin._steer(admin_pb2.SteerRequestsRequest(**facts))  # type: ignore[arg-type]
    assert caught.value.reason == "INVALID_REQUEST"
    assert [v.field for v in caught.value.violations] == fields
    assert worker.commands.value == ()


async def test_one_line_of_the_log_says_who_did_what_to_which_and_with_what_effect(mesh: Mesh) -> None:
    await a_worker(mesh, "w0", affects(2))
    await a_worker(mesh, "w1")
    with capture_logs() as logs:
        await mesh.admin.reprioritise(RequestMatch(frozenset({"b", "a"})), 2, **WHY)
    [line] = [entry for entry in logs if "author" in entry]
    assert len(line.pop("command_id")) == 32
    assert line == {
        "event": "requests steered",
        "log_level": "info",
        "action": "reprioritise",
        "delta": 2,
        "request_ids": ["a", "b"],
        "workload": None,
        "tenant": "",
        "min_prompt_tokens": 0,
        "min_age_ms": 0,
        "only": [],
        "author": "ada",
        "reason": "evening",
        "affected": 2,
        "nodes": {"w0": 2, "w1": "UNSUPPORTED"},
    }


async def test_a_command_that_could_not_be_sent_in_time_is_taken_back() -> None:
    woken: list[None] = []
    stuck, well = Calls(lambda: woken.append(None)), Calls(lambda: None)
    asking = asyncio.create_task(
        ask_all({"stuck": stuck, "well": well}, control_pb2.Command(command_id="c"), within_s=0.05)
    )
    await asyncio.sleep(0)
    assert [c.command_id for c in well.unsent()] == ["c"]
    assert well.answered(control_pb2.CommandResult(command_id="c", ok=True, affected=1))
    assert not well.answered(control_pb2.CommandResult(command_id="c", ok=True, affected=1)), "an answer counts once"
    results = await asking
    assert (results["stuck"].reason, results["well"].affected, len(woken)) == ("NOT_SENT", 1, 1)
    assert list(stuck.unsent()) == []
    assert not stuck.answered(control_pb2.CommandResult(command_id="c"))


async def test_a_command_is_taken_back_when_whoever_asked_leaves() -> None:
    calls = Calls(lambda: None)
    asking = asyncio.create_task(ask_all({"w0": calls}, control_pb2.Command(command_id="c"), within_s=60))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert list(calls.unsent()) == []


async def test_a_stream_that_ends_before_it_took_the_command_leaves_nothing_in_doubt() -> None:
    calls = Calls(lambda: None)
    asking = asyncio.create_task(ask_all({"w0": calls}, control_pb2.Command(command_id="c"), within_s=60))
    await asyncio.sleep(0)
    calls.close()
    assert (await asking)["w0"].reason == "NOT_SENT"
