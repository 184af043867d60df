"""The loop leader: one at a time, replaced when it dies, and powerless once another was granted."""

from __future__ import annotations

import pytest

from controlplane.leader import Leader
from controlplane.replica import Replica
from controlplane.spec import adjust
from controlplane.store import Fenced, Lease, PolicyStore, Stored, StoreState
from controlplane.store.memory import MemoryStore
from tests.controlplane.test_store_lease import Clock
from trimtab.errors import StoreUnavailable
from trimtab.snapshot import Adjustment, Scope

LEASE_S = 3.0


class Away(MemoryStore):
    """A store that can be cut off."""

    away = False

    @property
    def state(self) -> StoreState:
        return StoreState(not self.away, "a store for tests")

    async def lease(self, holder: str, *, ttl_ms: int, floor: int) -> Lease:
        if self.away:
            raise StoreUnavailable("cut off")
        return await super().lease(holder, ttl_ms=ttl_ms, floor=floor)

    async def load(self) -> Stored | None:
        if self.away:
            raise StoreUnavailable("cut off")
        return await super().load()


def a_leader(store: PolicyStore, name: str, clock: Clock) -> tuple[Replica, Leader]:
    replica = Replica(store)
    return replica, Leader(replica, name, lease_s=LEASE_S, clock=clock)


def a_move(until_unix_ms: int = 1 << 50) -> Adjustment:
    return Adjustment("batch", "batch.active", Scope(), "p99", until_unix_ms, factor=0.5)


async def test_a_dead_leader_is_replaced_within_its_lease() -> None:
    clock = Clock()
    store = Away(clock=clock)
    _, a = a_leader(store, "a", clock)
    _, b = a_leader(store, "b", clock)
    await a.stand()
    await b.stand()
    assert (a.leads, b.leads) == (Lease(a.holder, 1), None)
    clock.now = LEASE_S - 0.01
    await b.stand()
    assert b.leads is None
    clock.now = LEASE_S
    await b.stand()
    assert (a.leads, b.leads) == (None, Lease(b.holder, 2)), "a counts itself out, without a word from anybody"


async def test_a_leader_that_slept_past_its_lease_writes_nothing() -> None:
    clock = Clock()
    store = Away(clock=clock)
    old, a = a_leader(store, "a", clock)
    _, b = a_leader(store, "b", clock)
    await a.stand()
    slept_with = a.leads
    assert slept_with is not None
    clock.now = LEASE_S + 1
    await b.stand()
    with pytest.raises(Fenced):
        await old.write(adjust([a_move()]), lambda: (), author="batch", reason="p99", lease=slept_with)
    await a.stand()
    assert a.leads is None
    assert a.newest is not None
    assert a.newest.term == 2


async def test_a_leader_writes_under_its_term() -> None:
    clock = Clock()
    replica, a = a_leader(Away(clock=clock), "a", clock)
    await a.stand()
    outcome = await replica.write(
        adjust([a_move()]), lambda: (), author="batch", reason="p99", lease=a.leads, evidence="p99 = 700 ms"
    )
    assert (outcome.stored.term, outcome.stored.spec_version, outcome.stored.evidence) == (1, 0, "p99 = 700 ms")


async def test_a_leader_that_cannot_renew_leads_until_its_lease_is_over_and_no_longer() -> None:
    clock = Clock()
    store = Away(clock=clock)
    _, a = a_leader(store, "a", clock)
    await a.stand()
    store.away = True
    clock.now = 1.0
    await a.stand()
    assert a.leads == Lease(a.holder, 1)
    clock.now = LEASE_S
    await a.stand()
    assert (a.leads, a.lease.value) == (None, None)


async def test_a_store_that_comes_back_empty_grants_no_term_twice() -> None:
    clock = Clock()
    replica, a = a_leader(Away(clock=clock), "a", clock)
    for _ in range(3):
        await a.stand()
        await a.resign()
    assert replica.term == 3
    replica.store = Away(clock=clock)
    await a.stand()
    assert a.leads == Lease(a.holder, 4)


async def test_a_process_that_takes_the_name_of_another_is_granted_a_term_of_its_own() -> None:
    """The other may only be asleep: under the same term its writes would land."""
    clock = Clock()
    store = Away(clock=clock)
    _, a = a_leader(store, "a", clock)
    _, again = a_leader(store, "a", clock)
    await a.stand()
    await again.stand()
    assert (a.leads, again.leads) == (Lease(a.holder, 1), None)
    clock.now = LEASE_S
    await again.stand()
    assert (a.leads, again.leads) == (None, Lease(again.holder, 2))


async def test_who_resigns_is_followed_at_once() -> None:
    clock = Clock()
    store = Away(clock=clock)
    _, a = a_leader(store, "a", clock)
    _, b = a_leader(store, "b", clock)
    await a.stand()
    await a.resign()
    await b.stand()
    assert (a.leads, b.leads) == (None, Lease(b.holder, 2))
