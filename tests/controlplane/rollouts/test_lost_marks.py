"""A store that forgets its marks forgets no rollout that is on its way, and brings none back that is over."""

from __future__ import annotations

from controlplane.fleet import Fleet
from controlplane.policies import Policies
from controlplane.replica import Replica
from controlplane.rollouts import builds
from controlplane.rollouts.driver import RolloutDriver, document_of
from controlplane.rollouts.keeper import Keeper
from controlplane.rollouts.state import Stage, decode
from controlplane.store.memory import MemoryStore
from tests.controlplane.rollouts.watched import FIELDS, Watched, a_rollout
from trimtab.snapshot import Scope

NOW_MS = 10_000
"""In the midst of its bake."""


class Leading:
    def __init__(self) -> None:
        self.store = MemoryStore()
        self.keeper = Keeper(self.store, lambda: None)
        self.replica = Replica(self.store)
        self.now_ms = NOW_MS
        self.driver = RolloutDriver(self.keeper, self.replica, Fleet(), now_unix_ms=lambda: self.now_ms)
        self.mesh = Watched(a_rollout(looked_unix_ms=NOW_MS - 1000))

    async def begin(self) -> None:
        await self.keeper.save(self.mesh.r)
        await self.replica.write(
            builds.begin("r-1", FIELDS, Scope(), self.mesh.r.canaries), list, author="ada", reason="a try"
        )
        await self.tick()

    async def tick(self) -> None:
        lease = await self.store.lease("one", ttl_ms=60_000, floor=0)
        await self.driver.tick(lease, self.mesh.seen(), Policies(document_of(self.replica)))

    async def forget(self) -> None:
        for mark in await self.store.marks():
            await self.store.unmark(mark)
        await self.keeper.look()
        assert self.keeper.all() == []


async def test_one_on_its_way_goes_on_and_is_in_the_store_again() -> None:
    leading = Leading()
    await leading.begin()
    await leading.forget()
    for _ in range(3):
        await leading.tick()
    other = Keeper(leading.store, lambda: None)
    await other.look()
    assert other.live is not None and other.live.rollout_id == "r-1" and other.live.stage is Stage.BAKING
    assert any("lost" in line.text for line in other.live.lines)
    left = builds.overlay_of(document_of(leading.replica))
    assert left is not None and left.name == "r-1"


async def test_one_that_a_person_has_ended_does_not_come_back() -> None:
    leading = Leading()
    await leading.begin()
    await leading.replica.write(builds.drop("r-1"), list, author="bob", reason="no")
    await leading.forget()
    for _ in range(3):
        await leading.tick()
    assert await leading.store.marks() == [] and leading.keeper.live is None


async def test_another_leader_takes_out_what_nobody_knows() -> None:
    leading = Leading()
    await leading.begin()
    await leading.forget()
    leading.driver = RolloutDriver(leading.keeper, leading.replica, Fleet(), now_unix_ms=lambda: NOW_MS)
    for _ in range(3):
        await leading.tick()
    assert builds.overlay_of(document_of(leading.replica)) is None


async def test_a_clock_that_is_set_back_delays_no_look_that_is_kept() -> None:
    """What the store has is what each look begins with: unkept ones would take the same time for unwatched again and again."""
    leading = Leading()
    await leading.begin()
    leading.now_ms -= 3_600_000
    await leading.tick()
    (mark,) = await leading.store.marks()
    found = decode(mark.key, mark.data)
    assert found is not None and found.looked_unix_ms == leading.now_ms
    assert found.baked_unix_ms - leading.now_ms <= 1000 * found.bake_s, "it bakes no longer than it would have"
