"""Two who end a rollout at once, and one whose policy is refused as it is written: the policy and the mark agree afterwards."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from controlplane.admin.rollouts import Rollouts
from controlplane.fleet import Fleet
from controlplane.policies import Policies
from controlplane.replica import Replica
from controlplane.rollouts import builds
from controlplane.rollouts.driver import RolloutDriver, document_of
from controlplane.rollouts.keeper import Keeper
from controlplane.rollouts.state import Rollout, Stage
from controlplane.spec import Build, promote, set_fields
from controlplane.store import Receipt, Write
from controlplane.store.memory import MemoryStore
from tests.controlplane.rollouts.watched import FIELDS, Watched, a_rollout
from trimtab.errors import Conflict
from trimtab.snapshot import Document, Scope
from trimtab.v1 import admin_pb2

DONE_MS = 61_000
"""By then the bake is over."""


class Contended(MemoryStore):
    """Of two replicas that write at once another one's write comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Build | None = None

    async def put(self, write: Write) -> Receipt:
        build, self.before = self.before, None
        if build is not None:
            await Replica(self).write(build, list, author="bob", reason="mine")
        return await super().put(write)


class Leader:
    """A rollout whose bake is over: the next look promotes it."""

    def __init__(self) -> None:
        self.store = Contended()
        self.keeper = Keeper(self.store, lambda: None)
        self.replica = Replica(self.store)
        self.driver = RolloutDriver(self.keeper, self.replica, Fleet(), now_unix_ms=lambda: DONE_MS)
        self.mesh = Watched(a_rollout(widened=2, samples=(500, 500), looked_unix_ms=DONE_MS - 1000))

    async def begin(self) -> None:
        await self.keeper.save(self.mesh.r)
        begin = builds.begin("r-1", FIELDS, Scope(), self.mesh.r.canaries)
        await self.replica.write(begin, list, author="ada", reason="a try")

    async def tick(self) -> None:
        lease = await self.store.lease("one", ttl_ms=60_000, floor=0)
        await self.driver.tick(lease, self.mesh.seen(), Policies(document_of(self.replica)))

    async def promotes_without_its_mark(self) -> None:
        """The policy is written, and its leader ends before it can say so."""
        await self.begin()
        before = self.mesh.r
        await self.tick()
        # As the mark was before: another leader knows no more than that.
        await self.store.unmark(next(iter(await self.store.marks())))
        self.keeper = Keeper(self.store, lambda: None)
        self.driver = RolloutDriver(self.keeper, self.replica, Fleet(), now_unix_ms=lambda: DONE_MS)
        await self.keeper.save(before)

    @property
    def policy(self) -> Document:
        return document_of(self.replica)

    @property
    def rollout(self) -> Rollout:
        (found,) = self.keeper.all()
        return found


async def test_a_leader_that_nobody_disturbs_promotes_it() -> None:
    leader = Leader()
    await leader.begin()
    await leader.tick()
    assert leader.rollout.stage is Stage.PROMOTED
    assert (leader.policy.base, leader.policy.overlays) == ({"batch.active": 8}, ())


async def test_an_engine_that_runs_out_of_memory_as_its_policy_is_widened_is_seen() -> None:
    leader = Leader()
    leader.mesh.r = replace(leader.mesh.r, widened=0)
    await leader.begin()
    await leader.tick()
    assert leader.rollout.stage is Stage.WIDENING and len(leader.rollout.canaries) == 3
    leader.mesh.nodes["w0"].out_of_memory_at = leader.mesh.ahead + leader.mesh.now + 0.5
    await leader.tick()
    assert leader.rollout.verdict == "out of memory: the engine of w0"
    assert (leader.policy.base, leader.policy.overlays) == ({}, ())


@pytest.mark.parametrize(
    ("theirs", "base", "words"),
    [
        (builds.drop("r-1"), {}, "aborted: its part of the policy is gone"),
        (set_fields({"batch.active": "9"}), {"batch.active": 9}, "aborted: batch.active was set to 9 meanwhile"),
    ],
    ids=["ended", "set"],
)
async def test_what_people_do_between_a_leaders_look_and_its_write_holds(
    theirs: Build, base: dict[str, object], words: str
) -> None:
    leader = Leader()
    await leader.begin()
    leader.store.before = theirs
    with pytest.raises(Conflict):
        await leader.tick()
    assert leader.policy.base == base
    await leader.tick()
    assert (leader.rollout.stage, leader.rollout.verdict) == (Stage.ABORTED, words)
    assert (leader.policy.base, leader.policy.overlays) == (base, ())


async def test_what_was_promoted_by_a_leader_that_could_not_say_so_is_promoted() -> None:
    leader = Leader()
    await leader.promotes_without_its_mark()
    assert leader.rollout.live and leader.policy.base == {"batch.active": 8}
    await leader.tick()
    assert leader.rollout.stage is Stage.PROMOTED and leader.policy.base == {"batch.active": 8}


async def test_who_aborts_between_a_promotion_and_its_mark_hears_that_everybody_has_it() -> None:
    leader = Leader()
    await leader.promotes_without_its_mark()
    admin = Rollouts(leader.keeper, leader.replica, Fleet(), cast(Any, None), list)
    request = admin_pb2.EndRolloutRequest(rollout_id="r-1", author="bob", reason="no")
    with pytest.raises(Conflict, match="rollout r-1 is promoted: everybody has it"):
        await admin.end(request)
    assert leader.rollout.live, "nobody has said what is not so"
    await leader.tick()
    assert leader.rollout.stage is Stage.PROMOTED and leader.policy.base == {"batch.active": 8}
    with pytest.raises(Conflict, match="rollout r-1 has ended: promoted"):
        await admin.end(request)


async def test_a_leader_that_takes_back_what_a_person_has_just_promoted_says_so_of_nobody() -> None:
    leader = Leader()
    leader.mesh.r = replace(leader.mesh.r, looks=1)
    await leader.begin()
    seen_before = Policies(leader.policy)
    leader.mesh.nodes["w0"].out_of_memory_at = leader.mesh.ahead + leader.mesh.now + 0.5
    leader.store.before = promote("r-1", FIELDS, Scope())
    lease = await leader.store.lease("one", ttl_ms=60_000, floor=0)
    with pytest.raises(Conflict, match="is promoted"):
        await leader.driver.tick(lease, leader.mesh.seen(), seen_before)
    await leader.tick()
    assert (leader.rollout.stage, leader.policy.base) == (Stage.PROMOTED, {"batch.active": 8})


async def test_one_that_another_has_taken_back_already_is_aborted() -> None:
    leader = Leader()
    await leader.begin()
    await leader.replica.write(builds.drop("r-1"), list, author="eve", reason="was faster")
    admin = Rollouts(leader.keeper, leader.replica, Fleet(), cast(Any, None), list)
    await admin.end(admin_pb2.EndRolloutRequest(rollout_id="r-1", author="bob", reason="no"))
    assert (leader.rollout.stage, leader.policy.base) == (Stage.ABORTED, {})


async def test_one_that_is_undone_is_gone_though_the_leader_has_carried_it_on() -> None:
    store, changes = MemoryStore(), list[str]()
    here, leader = Keeper(store, lambda: changes.append("here")), Keeper(store, lambda: None)
    kept = await here.save(a_rollout())
    assert kept is not None and here.weight("w0") == 0.5
    await leader.look()
    assert leader.live is not None
    await leader.save(leader.live.told(1000, "the leader was faster"))
    await here.undo(kept, 2000)
    assert await store.marks() == [] and here.all() == []
    assert here.weight("w0") == 1.0 and changes == ["here", "here"]
