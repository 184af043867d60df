"""The loop's lease, and what a controller may write under it: the same suite for Redis and for its fake."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator

import pytest

from controlplane.store import Fenced, Lease, PolicyStore, Stored, Write, WriteKind
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import a_snapshot
from trimtab.snapshot import Identity

LONG_MS = 60_000


class Clock:
    """Seconds that only tests move."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PolicyStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    opened = RedisStore(request.getfixturevalue("valkey_address"), uuid.uuid4().hex)
    yield opened
    await opened.close()


def a_write(revision: int, upon: Stored | None, lease: Lease | None = None, *, floor: int = 0) -> Write:
    kind = WriteKind.CONTROLLER if lease else WriteKind.PERSON
    snapshot = a_snapshot(1, revision, batch__active=revision)
    term = lease.term if lease else 0
    stored = Stored(snapshot, 0, "batch", "because", 1, kind=kind, term=term, evidence="p99 = 700 ms" if lease else "")
    held = upon.identity if upon else Identity()
    return Write(stored, held, uuid.uuid4().hex, lease=lease, term_floor=floor)


async def test_one_holds_the_lease_until_it_gives_it_back(store: PolicyStore) -> None:
    first = await store.lease("a", ttl_ms=LONG_MS, floor=0)
    assert first == Lease("a", 1)
    assert await store.lease("b", ttl_ms=LONG_MS, floor=0) == first
    assert await store.lease("a", ttl_ms=LONG_MS, floor=0) == first
    await store.release(Lease("a", 7))
    assert await store.lease("b", ttl_ms=LONG_MS, floor=0) == first
    await store.release(first)
    assert await store.lease("b", ttl_ms=LONG_MS, floor=0) == Lease("b", 2)


async def test_of_concurrent_candidates_one_leads(store: PolicyStore) -> None:
    leases = await asyncio.gather(*(store.lease(f"r{i}", ttl_ms=LONG_MS, floor=0) for i in range(10)))
    assert len(set(leases)) == 1
    assert leases[0].term == 1


async def test_a_lease_that_ran_out_is_granted_anew_under_a_higher_term() -> None:
    clock = Clock()
    store = MemoryStore(clock=clock)
    await store.lease("a", ttl_ms=1000, floor=0)
    clock.now = 0.999
    assert (await store.lease("b", ttl_ms=1000, floor=0)).holder == "a"
    clock.now = 1.0
    assert await store.lease("b", ttl_ms=1000, floor=0) == Lease("b", 2)


async def test_redis_lets_a_lease_run_out(valkey_address: str) -> None:
    store = RedisStore(valkey_address, uuid.uuid4().hex)
    await store.lease("a", ttl_ms=1, floor=0)
    async with asyncio.timeout(20):
        while (lease := await store.lease("b", ttl_ms=LONG_MS, floor=0)).holder != "b":
            await asyncio.sleep(0.001)
    assert lease == Lease("b", 2)
    await store.close()


async def test_no_term_is_granted_below_what_the_candidate_remembers(store: PolicyStore) -> None:
    assert await store.lease("a", ttl_ms=LONG_MS, floor=41) == Lease("a", 42)


async def test_a_holder_that_has_seen_a_higher_term_than_its_own_is_granted_another(store: PolicyStore) -> None:
    """The store came back from a copy that is older than some grant: its own may have been given twice."""
    await store.lease("a", ttl_ms=LONG_MS, floor=0)
    assert await store.lease("a", ttl_ms=LONG_MS, floor=5) == Lease("a", 6)


async def test_a_leader_writes_and_the_history_of_people_does_not_show_it(store: PolicyStore) -> None:
    person = a_write(1, None)
    await store.put(person)
    lease = await store.lease("a", ttl_ms=LONG_MS, floor=0)
    moved = a_write(2, person.stored, lease)
    await store.put(moved)
    assert await store.load() == moved.stored
    assert [e.kind for e in await store.history(10)] == [WriteKind.PERSON]
    newest, oldest = await store.history(10, controllers=True)
    assert (newest.kind, newest.term, newest.evidence) == (WriteKind.CONTROLLER, 1, "p99 = 700 ms")
    assert oldest.identity == person.stored.identity


async def test_a_deposed_leader_writes_nothing(store: PolicyStore) -> None:
    person = a_write(1, None)
    await store.put(person)
    old = await store.lease("a", ttl_ms=LONG_MS, floor=0)
    await store.release(old)
    new = await store.lease("b", ttl_ms=LONG_MS, floor=0)
    with pytest.raises(Fenced, match="leads no more"):
        await store.put(a_write(2, person.stored, old))
    assert await store.load() == person.stored
    await store.put(a_write(2, person.stored, new))


async def test_the_same_term_of_another_holder_is_fenced_too(store: PolicyStore) -> None:
    person = a_write(1, None)
    await store.put(person)
    await store.lease("a", ttl_ms=LONG_MS, floor=0)
    with pytest.raises(Fenced):
        await store.put(a_write(2, person.stored, Lease("b", 1)))


async def test_a_reseeding_fences_every_lease_up_to_the_highest_that_its_writer_knows(store: PolicyStore) -> None:
    person = a_write(1, None, floor=7)
    await store.put(person)
    with pytest.raises(Fenced):
        await store.put(a_write(2, person.stored, Lease("a", 7)))
    assert await store.lease("a", ttl_ms=LONG_MS, floor=0) == Lease("a", 8)


async def test_a_persons_write_is_told_whole_and_a_controllers_is_not(store: PolicyStore) -> None:
    person = a_write(1, None)
    await store.put(person)
    lease = await store.lease("a", ttl_ms=LONG_MS, floor=0)
    await store.put(a_write(2, person.stored, lease))
    assert await store.revision(1, 1) == person.stored.snapshot
    assert await store.revision(1, 2) is None
    assert await store.revision(1, 3) is None


async def test_what_is_told_of_the_past_is_bounded(store: PolicyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(store, MemoryStore):
        pytest.skip("the fake's bound is a deque's")
    monkeypatch.setattr("controlplane.store.redis.PAST_LENGTH", 3)
    held: Stored | None = None
    for revision in range(1, 6):
        write = a_write(revision, held)
        await store.put(write)
        held = write.stored
    assert [e.identity.revision for e in await store.history(10)] == [5, 4, 3]
    assert await store.revision(1, 2) is None
    assert await store.revision(1, 3) is not None
