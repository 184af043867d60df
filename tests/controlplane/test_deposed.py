"""A leader deposed in the middle of a tick, and controllers switched off and on: nobody acts on what is nobody's word any more."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest

from controlplane.controllers.decision import Decision, Move, Restart, Want
from controlplane.loop import FENCED_S, GONE
from controlplane.store import Lease
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from tests.controlplane.test_loop import HALF, Told, scale, until
from trimtab.snapshot import Scope
from trimtab.v1 import control_pb2

pytestmark = pytest.mark.slow

SEVEN = Want("default", 7, "of the old leader")
RESTART = Restart("w0", "i1", 0.0, "it leaks")
FOUR = {"scale.max_workers": "4"}


def at_once(step: Coroutine[Any, Any, Any]) -> Any:
    """All of it within a tick, as if this process were stopped meanwhile; nothing in it may wait."""
    try:
        step.send(None)
    except StopIteration as e:
        return e.value
    raise AssertionError("it waits")


def another_leads(mesh: Mesh) -> None:
    """By the store; the leader before has not heard of it."""
    lease = mesh.plane.leader.leads
    assert lease is not None
    at_once(mesh.store.release(lease))
    assert at_once(mesh.store.lease("B/1", ttl_ms=60_000, floor=lease.term)).holder == "B/1"


async def wanted(store: Any) -> list[str]:
    return [m.key for m in await store.marks() if m.key.startswith("want/")]


@pytest.mark.parametrize("heard", [False, True], ids=["refused by the store", "by its own lease"])
async def test_a_leader_that_is_deposed_in_the_middle_of_a_tick_commands_and_wants_nothing_more(heard: bool) -> None:
    told, after = Told(), Told("heal")
    async with a_mesh(controllers=(told, after)) as mesh:
        w0 = mesh.start_node(FakeNode(mesh.address))
        w0.obeys = lambda command: control_pb2.CommandResult(ok=True)
        await w0.holds(1, 1)
        await until(lambda: told.ticks > 1)
        plain = told.step

        def stopped(*_: Any) -> Decision:
            told.step = plain  # type: ignore[method-assign]
            another_leads(mesh)
            if heard:
                at_once(mesh.plane.leader.stand())
            after.commands = [RESTART]
            return Decision(None, (HALF,), (RESTART,), (SEVEN,))

        told.step = stopped  # type: ignore[method-assign, assignment]
        await until(lambda: told.step == plain and mesh.plane.leader.leads is None)
        await until(lambda: not mesh.plane.loop.leads)
        assert w0.commands.value == ()
        assert await wanted(mesh.store) == [] and mesh.plane.loop.wants == {}
        said = [(d.text, bool(d.failed)) for d in mesh.plane.loop.decisions]
        assert said == ([] if heard else [("batch.active at node/w0 ×0.5", True)])


async def test_a_command_whose_turn_comes_when_another_leads_is_not_given() -> None:
    told = Told()
    async with a_mesh(controllers=(told,)) as mesh:
        w0 = mesh.start_node(FakeNode(mesh.address))
        await w0.holds(1, 1)
        lease = await until(lambda: mesh.plane.leader.leads)
        another_leads(mesh)
        at_once(mesh.plane.leader.stand())
        await mesh.plane.loop._do("batch", RESTART, lease)
        assert w0.commands.value == ()
        assert [(d.text, d.failed) for d in mesh.plane.loop.decisions] == [("restart w0", GONE)]


async def test_a_replica_that_leads_no_more_wants_nothing() -> None:
    told = Told("scale", wants=(SEVEN,))
    async with a_mesh(controllers=(told,)) as mesh:
        await until(lambda: mesh.plane.loop.wants)
        another_leads(mesh)
        await until(lambda: mesh.plane.loop.wants == {})
        assert await wanted(mesh.store) == ["want/default"], "the new leader goes on from it"


@pytest.mark.parametrize("mode", ["off", "advise"])
async def test_what_was_wanted_is_nobodys_word_once_scale_does_not_act(mode: str) -> None:
    store, told = MemoryStore(), Told("scale", wants=(SEVEN,))
    async with a_mesh(store, (told,)) as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        await mesh.admin.set_policy(FOUR, author="t", reason="may grow")
        await until(lambda: mesh.plane.loop.wants)
        await mesh.admin.set_policy({"loops.scale": mode}, author="t", reason="by hand")
        await until(lambda: mesh.plane.loop.wants == {})
        assert await wanted(store) == []
        (pool,) = (await scale(mesh.address)).pools
        assert (pool.wanted, pool.running, pool.reason) == (1, 1, "nobody has decided yet")
        told.wants = ()
        await mesh.admin.set_policy({"loops.scale": "on"}, author="t", reason="go on")
        ticks = told.ticks
        await until(lambda: told.ticks > ticks + 2)
        assert told.seen is not None and told.seen.wants == {}


async def test_a_trial_that_was_switched_off_begins_anew() -> None:
    told = Told(moves=(Move("batch.active", Scope(), "too slow", factor=0.5),))
    tries = "tries batch.active on w0"

    async with a_mesh(controllers=(told,)) as mesh:
        await mesh.admin.set_policy({"rollout.through": "batch", "loops.batch": "off"}, author="t", reason="carefully")
        nodes = [mesh.start_node(FakeNode(mesh.address, name)) for name in ("w0", "w1")]
        await mesh.until(lambda fleet: len(fleet) == 2 and all(m.report for m in fleet.values()))
        for times in (1, 2):
            await mesh.admin.set_policy({"loops.batch": "on"}, author="t", reason="go on")
            await until(lambda: [d.text for d in mesh.plane.loop.decisions].count(tries) == times)  # noqa: B023
            await until(lambda: nodes[0].active[-1] == 24)
            await mesh.admin.set_policy({"loops.batch": "off"}, author="t", reason="wait")
            await until(lambda: nodes[0].active[-1] == 48)
        assert 24 not in nodes[1].active


async def test_a_lease_that_is_still_renewed_a_minute_after_a_refused_write_is_the_newest_again() -> None:
    # The store had lost the grant, and has it again: failed over to a copy without it, and back.
    async with a_mesh(controllers=(Told(),)) as mesh:
        loop, lease = mesh.plane.loop, await until(lambda: mesh.plane.leader.leads)
        loop._fenced = (lease, loop._clock())
        assert not loop._still(lease)
        loop._fenced = (lease, loop._clock() - FENCED_S)
        assert loop._still(lease)
        loop._fenced = (Lease(lease.holder, lease.term - 1), loop._clock())
        assert loop._still(lease)
