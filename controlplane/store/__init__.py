"""What the control plane keeps: the newest policy snapshot, a bounded log of every put and every refused attempt, the loop's lease, and
marks on nodes.

`PolicyStore` is the contract, which one suite checks on every implementation: `redis` is the product, `memory` is its fake.
A write names the snapshot that it was built upon, and is taken only when that one is still the newest: so nothing is written over unseen,
however many replicas write. A controller's write also carries the term under which it leads, and is refused once another was granted.
What the store holds is always whole; what is known of it may be old while it can't be reached.
"""

from __future__ import annotations

import enum
import hashlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from trimtab.codec import seal
from trimtab.errors import Conflict, StoreUnavailable
from trimtab.policy import Change
from trimtab.snapshot import Document, Identity, Snapshot

LOG_LENGTH = 8192
"""Entries of the log of all puts, about; a Redis stream is trimmed in whole nodes. One write each second fills it in two hours."""
PAST_LENGTH = 1024
"""People's writes and re-seedings that are kept, each whole."""
REFUSED_LENGTH = 256
"""Refused attempts that are kept, about: apart, so that whoever tries and tries pushes no write out."""
ANSWERS_LENGTH = 1024
"""Batches of nodes' answers that are kept, about, each of ANSWERS_BATCH at most: some 40 bytes an answer."""
ANSWERS_BATCH = 200
ACTIONS_LENGTH = 1024
"""Things that people did to nodes that are kept, about."""
RESENT_WITHIN = 64
"""A put is recognised as re-sent while it is among this many newest entries of the log."""


class WriteKind(enum.StrEnum):
    """Whose write it is."""

    PERSON = "person"
    CONTROLLER = "controller"
    RESEED = "reseed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Stored:
    """A snapshot and how it came to be. `spec_version` counts people's writes; `traceparent` is that of the put.

    `term` and `evidence` are a controller's: the lease under which it wrote, and what it had seen.
    """

    snapshot: Snapshot
    spec_version: int
    author: str
    reason: str
    written_unix_ms: int
    changes: tuple[Change, ...] = ()
    traceparent: str = ""
    kind: WriteKind = WriteKind.PERSON
    term: int = 0
    evidence: str = ""

    @property
    def identity(self) -> Identity:
        return self.snapshot.identity


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to run the controllers. `term` is new with every grant and never used again."""

    holder: str
    term: int


@dataclass(frozen=True, slots=True)
class Write:
    """`stored` is what the store holds afterwards; `upon` is what it was built on, `Identity()` being an empty store. Without a digest it
    stands for whatever the store holds under these numbers.

    With `expect_version` the write also needs that spec_version; with `lease`, that no other was granted since. `request_id` is new for
    every write, and the same when it is re-sent. `term_floor` is the highest term that the writer has seen, for a store that lost it.
    """

    stored: Stored
    upon: Identity
    request_id: str
    expect_version: int | None = None
    lease: Lease | None = None
    term_floor: int = 0


@dataclass(frozen=True, slots=True)
class Receipt:
    """How safe a write is that the store took: replicas that acknowledged it, of those that must have before it is called committed."""

    replicas: int = 0
    wanted: int = 0

    @property
    def committed(self) -> bool:
        return self.replicas >= self.wanted


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
    kind: WriteKind = WriteKind.PERSON
    term: int = 0
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one node made of one push. `result` is applied, refused or ignored_holding; `reason` and `message` say why it was refused."""

    node_id: str
    incarnation: str
    identity: Identity
    result: str
    at_unix_ms: int
    apply_ms: float = 0.0
    reason: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """Something about a node that all replicas are to know for a while. Of one `key` the highest `stamp` stands; the data is theirs."""

    key: str
    stamp: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Action:
    """What a person did to a node, in words; it is no change of the policy."""

    node_id: str
    what: str
    author: str
    reason: str
    at_unix_ms: int


@dataclass(frozen=True, slots=True)
class Peer:
    """A replica as the others know it. `nodes` is who is connected to it, in bytes that it and they understand, and `seq` rises whenever
    that changes; `nodes` is None for whoever has this `seq` already. `info` is a few words of its own.
    """

    replica_id: str
    address: str
    seq: int
    info: bytes = b""
    nodes: bytes | None = None


@dataclass(frozen=True, slots=True)
class StoreState:
    """`description` is the backend in words, and why it is not connected or takes no writes."""

    connected: bool
    description: str
    writable: bool = True
    wanted: int = 0


class Moved(Conflict):
    """Another write came between; the writer reads again and builds anew."""


class Fenced(Conflict):
    """A controller's write under a lease that is no longer the newest: its writer leads no more."""


class Damaged(StoreUnavailable):
    """The store holds no whole policy. `upon` is what its numbers say, so that a survivor can write over it."""

    def __init__(self, upon: Identity) -> None:
        super().__init__("the policy in the store does not match its digest; restore the store from its backup")
        self.upon = upon


class PolicyStore(Protocol):
    """Every call but `watch` raises StoreUnavailable when the store can't be reached or can't be written."""

    @property
    def state(self) -> StoreState: ...

    async def load(self) -> Stored | None:
        """The newest; None when the store is empty. Damaged when half of it is lost."""

    async def put(self, write: Write) -> Receipt:
        """Write and log at once. Conflict when `expect_version` does not hold, Moved when `upon` is not the newest, Fenced when `lease` is
        not the newest that was granted; a re-sent put succeeds."""

    async def record_refused(self, entry: Entry) -> None:
        """Log an attempt that was refused before any write."""

    async def history(self, limit: int, *, controllers: bool = False) -> list[Entry]:
        """The newest `limit` entries, newest first; controllers' writes only when asked for, and then without refused attempts."""

    async def revision(self, epoch: int, revision: int) -> Snapshot | None:
        """A person's write or a re-seeding as it was written; None for any other, or once it is too old."""

    def watch(self) -> AsyncGenerator[Stored | None, None]:
        """What the store holds, now and whenever it differs from the last that was given; only the newest; None when it is empty.

        Never raises for a store that is away: it tries again until it is closed.
        """

    async def lease(self, holder: str, *, ttl_ms: int, floor: int) -> Lease:
        """Take the lease when nobody holds it, renew it when `holder` does. Whoever holds it afterwards is what comes back.

        A new grant's term is above every earlier one and above `floor`, the highest that the caller remembers.
        """

    async def release(self, lease: Lease) -> None:
        """Give the lease back, when it is still this one."""

    async def record_answers(self, answers: Sequence[Answer]) -> None:
        """Keep what nodes said, oldest first, within a bound."""

    async def answers(self) -> list[Answer]:
        """All that are kept, newest first."""

    async def mark(self, mark: Mark) -> bool:
        """Keep it. False, and nothing is written, where another with its stamp or a higher one is there; a re-sent mark succeeds."""

    async def marks(self) -> list[Mark]:
        """All that are kept."""

    def watch_marks(self) -> AsyncGenerator[list[Mark], None]:
        """All that are kept, now and whenever one was kept since. Never raises for a store that is away, as `watch`."""

    async def unmark(self, mark: Mark) -> None:
        """Nobody needs it any more; one with another stamp stays."""

    async def record_action(self, action: Action) -> None:
        """Keep what somebody did, within a bound."""

    async def actions(self) -> list[Action]:
        """All that are kept, newest first."""

    async def announce(self, peer: Peer, *, ttl_ms: int) -> bool:
        """Tell the other replicas of this one, for as long as `ttl_ms`. False when they need its nodes and `peer` has none."""

    async def peers(self, known: Mapping[str, int]) -> list[Peer]:
        """Every replica that lives; `nodes` of those whose `seq` differs from what is known of them."""

    async def withdraw(self, replica_id: str) -> None:
        """It ends; nobody needs to wait until it is silent for too long."""

    async def close(self) -> None: ...


def stale(expected: int, found: int) -> Conflict:
    """The error of a write whose author had seen another version."""
    return Conflict(
        f"the policy is at version {found}, not {expected}: somebody else has changed it; "
        "look at it again (trimtab policy get), then repeat the change with the new version",
        metadata={"expected": str(expected), "found": str(found)},
    )


def fenced(lease: Lease, granted: str) -> Fenced:
    """The error of a write by a leader that was deposed."""
    return Fenced(
        f"{lease.holder} led in term {lease.term}, the newest is {granted}; it leads no more",
        metadata={"term": str(lease.term), "granted": granted},
    )


async def reseed(
    store: PolicyStore,
    document: Document | bytes,
    *,
    upon: Identity,
    above: int,
    spec_version: int,
    reason: str,
    now_unix_ms: int,
    term_floor: int = 0,
) -> Stored:
    """Put `document` under a new epoch, above that of `upon` and `above`, as its revision 1. Moved when `upon` is no longer the newest.

    Bytes go in as they are: a newer build may have written what this one does not know.
    """
    epoch = max(upon.epoch, above) + 1
    if isinstance(document, Document):
        snapshot = seal(document, epoch=epoch, revision=1)
    else:
        snapshot = Snapshot(Identity(epoch, 1, hashlib.sha256(document).digest()), document)
    stored = Stored(snapshot, spec_version, "trimtab", reason, now_unix_ms, kind=WriteKind.RESEED)
    await store.put(Write(stored, upon, uuid.uuid4().hex, term_floor=term_floor))
    return stored


def entry_of(stored: Stored) -> Entry:
    """A put as the history shows it."""
    x = stored
    return Entry(
        x.identity, x.spec_version, x.author, x.reason, x.written_unix_ms, x.changes, "", x.kind, x.term, x.evidence
    )


def open_store(url: str, mesh: str, *, password: str = "", replicas: int = 0, wait_ms: int = 200) -> PolicyStore:
    """The store behind `url`: memory://, or Redis as `connection.SCHEMES` has it. ValueError for any other, and for two passwords.

    `password` is as it is, not escaped. `replicas` must acknowledge a write within `wait_ms` before it is called committed.
    """
    if url == "memory://":
        if replicas:
            raise ValueError("memory:// has no replicas; leave store_replicas at 0")
        from controlplane.store.memory import MemoryStore

        return MemoryStore()
    from controlplane.store.connection import SCHEMES, shown, with_password

    if not url.startswith(SCHEMES):
        raise ValueError(f"the store must be memory:// or one of {', '.join(SCHEMES)}, not {shown(url)!r}")
    from controlplane.store.redis import RedisStore

    return RedisStore(with_password(url, password), mesh, replicas=replicas, wait_ms=wait_ms)
