"""What the control plane keeps: the newest policy snapshot, and a bounded log of every put and every refused attempt.

`PolicyStore` is the contract, which one suite checks on every implementation: `redis` is the product, `memory` is its fake.
A write names the snapshot that it was built upon, and is taken only when that one is still the newest: so nothing is written over unseen,
however many replicas write. What the store holds is always whole; what is known of it may be old while it can't be reached.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from trimtab.codec import seal
from trimtab.errors import Conflict
from trimtab.policy import Change
from trimtab.snapshot import Document, Identity, Snapshot

LOG_LENGTH = 1024
"""Entries that the log keeps, about; a Redis stream is trimmed in whole nodes."""
RESENT_WITHIN = 64
"""A put is recognised as re-sent while it is among this many newest entries of the log."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot and how it came to be. `spec_version` counts people's writes; `traceparent` is that of the put."""

    snapshot: Snapshot
    spec_version: int
    author: str
    reason: str
    written_unix_ms: int
    changes: tuple[Change, ...] = ()
    traceparent: str = ""

    @property
    def identity(self) -> Identity:
        return self.snapshot.identity


@dataclass(frozen=True, slots=True)
class Write:
    """`stored` is what the store holds afterwards; `upon` is what it was built on, `Identity()` being an empty store.

    With `expect_version` the write also needs that spec_version. `request_id` is new for every write, and the same when it is re-sent.
    """

    stored: Stored
    upon: Identity
    request_id: str
    expect_version: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the history. `refused_because` is set for an attempt that wrote nothing; `identity` is then the one that stayed."""

    identity: Identity
    spec_version: int
    author: str
    reason: str
    written_unix_ms: int
    changes: tuple[Change, ...] = ()
    refused_because: str = ""


@dataclass(frozen=True, slots=True)
class StoreState:
    """`description` is the backend in words, and why it is not connected."""

    connected: bool
    description: str


class Moved(Conflict):
    """Another write came between; the writer reads again and builds anew."""


class PolicyStore(Protocol):
    """Every call but `watch` raises StoreUnavailable when the store can't be reached or can't be written."""

    @property
    def state(self) -> StoreState: ...

    async def load(self) -> Stored | None:
        """The newest; None when the store is empty."""

    async def put(self, write: Write) -> None:
        """Write and log at once. Conflict when `expect_version` does not hold, Moved when `upon` is not the newest; a re-sent put succeeds."""

    async def record_refused(self, entry: Entry) -> None:
        """Log an attempt that was refused before any write."""

    async def history(self, limit: int) -> list[Entry]:
        """The newest `limit` entries, newest first."""

    def watch(self) -> AsyncGenerator[Stored | None, None]:
        """What the store holds, now and whenever it differs from the last that was given; only the newest; None when it is empty.

        Never raises for a store that is away: it tries again until it is closed.
        """

    async def close(self) -> None: ...


def stale(expected: int, found: int) -> Conflict:
    """The error of a write whose author had seen another version."""
    return Conflict(
        f"the policy is at version {found}, not {expected}: somebody else has changed it; "
        "look at it again (trimtab policy get), then repeat the change with the new version",
        metadata={"expected": str(expected), "found": str(found)},
    )


async def reseed(
    store: PolicyStore,
    document: Document,
    *,
    found: Stored | None,
    above: int,
    spec_version: int,
    reason: str,
    now_unix_ms: int,
) -> Stored:
    """Put `document` under a new epoch, above that of `found` and `above`, as its revision 1. Moved when `found` is no longer the newest."""
    held = found.identity if found else Identity()
    snapshot = seal(document, epoch=max(held.epoch, above) + 1, revision=1)
    stored = Stored(snapshot, spec_version, "trimtab", reason, now_unix_ms)
    await store.put(Write(stored, held, uuid.uuid4().hex))
    return stored


def entry_of(stored: Stored) -> Entry:
    """A put as the history shows it."""
    return Entry(
        stored.identity, stored.spec_version, stored.author, stored.reason, stored.written_unix_ms, stored.changes
    )


def open_store(url: str, mesh: str) -> PolicyStore:
    """The store behind `url`: memory://, or what redis-py takes (redis://, rediss://, unix://). ValueError for any other."""
    if url == "memory://":
        from controlplane.store.memory import MemoryStore

        return MemoryStore()
    if url.startswith(("redis://", "rediss://", "unix://")):
        from controlplane.store.redis import RedisStore

        return RedisStore(url, mesh)
    raise ValueError(f"the store must be redis://, rediss://, unix:// or memory://, not {url!r}")
