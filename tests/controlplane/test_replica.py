"""What a replica does with a policy that a newer build wrote, and with other content in the place of its own."""

from __future__ import annotations

import hashlib
import uuid

import pytest

from controlplane.replica import Replica
from controlplane.spec import set_fields
from controlplane.store import Stored, Write
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import a_snapshot
from trimtab.errors import PolicyRefused
from trimtab.policy import POLICY_SCHEMA
from trimtab.snapshot import Identity, Snapshot
from trimtab.v1 import policy_pb2

UNKNOWN = bytes([0xA0, 0x06, 7])
"""Field 100 of a message, the number 7."""


def of_a_newer_build() -> Snapshot:
    """It sets batch.active, a field of `batch` that this build does not know, and a word that it does not."""
    pb = policy_pb2.PolicyDocument(min_policy_schema=POLICY_SCHEMA + 1)
    pb.base.batch.active = 8
    pb.base.scheduler.mode = 77  # type: ignore[assignment]
    pb.base.batch.MergeFromString(UNKNOWN)
    data = pb.SerializeToString(deterministic=True)
    assert UNKNOWN in data
    return Snapshot(Identity(1, 1, hashlib.sha256(data).digest()), data)


async def put(store: MemoryStore, snapshot: Snapshot, upon: Identity) -> Stored:
    stored = Stored(snapshot, 1, "ada", "", 1)
    await store.put(Write(stored, upon, uuid.uuid4().hex))
    return stored


async def test_a_policy_of_a_newer_build_loses_nothing_by_a_write_of_an_older_replica() -> None:
    store = MemoryStore()
    pb = policy_pb2.PolicyDocument.FromString(of_a_newer_build().document)
    pb.base.scheduler.Clear()
    data = pb.SerializeToString(deterministic=True)
    held = await put(store, Snapshot(Identity(1, 1, hashlib.sha256(data).digest()), data), Identity())
    with pytest.raises(PolicyRefused, match="upgrade") as caught:
        await Replica(store).write(set_fields({"batch.active": "9"}), lambda: (), author="bob", reason="")
    assert caught.value.cause == "SCHEMA_TOO_OLD"
    assert await store.load() == held


async def test_a_store_that_is_behind_gets_a_newer_builds_policy_back_byte_by_byte() -> None:
    store = MemoryStore()
    held = await put(store, of_a_newer_build(), Identity())
    replica = Replica(store)
    replica.seen(Identity(3, 1, b"x"), "w0")
    after = await replica._current()
    assert after.identity.epoch == 4
    assert after.snapshot.document == held.snapshot.document


async def test_a_store_that_holds_other_content_in_the_place_of_what_was_handed_out_is_mended() -> None:
    """It fell back to an older copy, and somebody wrote there; a node of his came here before the news did."""
    store = MemoryStore()
    first = await put(store, a_snapshot(1, 1, batch__active=1), Identity())
    theirs = await put(store, a_snapshot(1, 2, batch__active=3), first.identity)
    replica = Replica(store)
    replica._take(Stored(a_snapshot(1, 2, batch__active=2), 1, "ada", "", 1))
    replica.seen(theirs.identity, "w9")
    after = await replica._current()
    assert after.identity.epoch == 2
    assert after.snapshot.document == theirs.snapshot.document
    assert replica.newest.value == after


async def test_what_one_replica_alone_has_heard_of_goes_back_into_a_store_that_another_one_mended() -> None:
    """The store is emptied, and who knows less is back first."""
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    await one.write(set_fields({"batch.active": "8"}), lambda: (), author="ada", reason="")
    before = await other._current()
    await one.write(set_fields({"batch.active": "9"}), lambda: (), author="ada", reason="")
    alone = one.newest.value
    assert alone is not None and other.newest.value == before
    store._stored.set(None)
    mended = await other._current()
    assert (mended.identity.epoch, mended.spec_version) == (2, before.spec_version)
    one._take(mended)
    after = await one._current()
    assert after.identity.epoch == 3
    assert after.snapshot.document == alone.snapshot.document
    assert after.spec_version == alone.spec_version
    assert "had not heard of" in after.reason
    assert await one._current() == after  # and that is the end of it
    other._take(after)
    assert await other._current() == after


async def test_a_person_who_writes_on_after_a_mend_is_not_overruled_by_what_is_older_or_as_old() -> None:
    store = MemoryStore()
    one, other = Replica(store), Replica(store)
    await one.write(set_fields({"batch.active": "8"}), lambda: (), author="ada", reason="")
    await other._current()
    await one.write(set_fields({"batch.active": "9"}), lambda: (), author="ada", reason="")
    store._stored.set(None)
    await other._current()
    await other.write(set_fields({"batch.active": "10"}), lambda: (), author="bob", reason="")
    one._take(other.newest.value)
    assert await one._current() == other.newest.value
