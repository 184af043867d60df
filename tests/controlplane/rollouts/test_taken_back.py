"""What was tried is taken back whatever nodes say to it, and who took it back says why, though the store was away for the word."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from controlplane.rollouts import builds
from controlplane.rollouts.state import Rollout, Stage
from controlplane.spec import set_fields
from controlplane.store import Mark
from tests.controlplane.mesh import PATIENCE_S, FakeNode, a_mesh
from tests.controlplane.rollouts.test_races import Leader
from trimtab.errors import PolicyRefused, StoreUnavailable
from trimtab.snapshot import Document, Limits, Node, Scope
from trimtab.v1 import admin_pb2

ROOMY, SMALL = Limits(256, 8192), Limits(64, 8192)
TRIED = {"batch.active": "32"}


def test_a_canary_that_can_not_do_what_it_goes_back_to_keeps_nothing_from_being_taken_back() -> None:
    nodes = [Node("w1", limits=ROOMY), Node("c0", limits=SMALL)]
    began = builds.begin("r-1", TRIED, Scope(), ("c0",))(Document({"batch.active": 48}), nodes, 1).document
    theirs = set_fields({"batch.active": "128"})(began, nodes, 2).document
    back = builds.drop("r-1")(theirs, nodes, 3).document
    assert (back.base, back.overlays) == ({"batch.active": 128}, ())
    with pytest.raises(PolicyRefused, match="engine of c0"):
        # People hear of it when they set it.
        set_fields({"batch.active": "129"})(back, [*nodes], 4)


@pytest.mark.slow
async def test_a_rollout_that_people_have_overtaken_ends_though_its_canary_can_not_do_what_they_set() -> None:
    async with a_mesh() as mesh:
        for name, limits in (("c0", SMALL), ("w1", ROOMY), ("w2", ROOMY)):
            mesh.start_node(FakeNode(mesh.address, name, limits=limits))
        await mesh.until(lambda fleet: len(fleet) == 3 and all(m.report for m in fleet.values()))
        begun = await mesh.admin.start_rollout(TRIED, canary_node_ids=["c0"], author="ada", reason="x", bake_s=600)
        await mesh.admin.set_policy({"batch.active": "128"}, author="bob", reason="y")
        async with asyncio.timeout(PATIENCE_S):
            while (found := (await mesh.admin.rollouts()).rollouts[0]).live:
                await asyncio.sleep(0.05)
        assert found.rollout_id == begun.rollout.rollout_id
        assert (found.live, found.verdict) == (False, "aborted: batch.active was set to 128 meanwhile")
        again = await mesh.admin.start_rollout(
            {"batch.hard_cap": "9"}, canary_node_ids=["w1"], author="a", reason="x", bake_s=600
        )
        assert isinstance(again, admin_pb2.StartRolloutResponse)


async def without_its_word(leader: Leader) -> None:
    """One tick; the store is away for the mark alone."""
    plain = leader.store.mark

    async def away(mark: Mark) -> bool:
        raise StoreUnavailable("away")

    leader.store.mark = away  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailable):
        await leader.tick()
    leader.store.mark = plain  # type: ignore[method-assign]


async def out_of_memory() -> Leader:
    leader = Leader()
    await leader.begin()
    leader.mesh.nodes["w0"].out_of_memory_at = leader.mesh.ahead + leader.mesh.now + 0.5
    return leader


async def test_why_a_rollout_was_taken_back_is_told_once_the_store_takes_it() -> None:
    leader = await out_of_memory()
    await without_its_word(leader)
    assert leader.policy.overlays == () and leader.rollout.live
    await leader.tick()
    assert (leader.rollout.stage, leader.rollout.verdict) == (
        Stage.ROLLED_BACK,
        "out of memory: the engine of w0",
    )
    lines = leader.rollout.lines
    await leader.tick()
    assert leader.rollout.lines == lines


async def test_what_another_has_said_of_it_meanwhile_stands() -> None:
    leader = await out_of_memory()
    await without_its_word(leader)
    live = leader.rollout
    ended: Rollout = replace(live, version=live.version).ended(Stage.ABORTED, 62_000, "aborted by ada")
    assert await leader.keeper.save(ended) is not None
    await leader.tick()
    assert (leader.rollout.stage, leader.rollout.verdict) == (Stage.ABORTED, "aborted by ada")
