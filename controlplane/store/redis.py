"""The policy store on Redis or Valkey: a few keys in one Cluster slot, one script for each write, streams for the logs.

`tt:{mesh}:meta` holds the numbers, `policy` the snapshot and its author, `log` an entry for every put, `past` one for every person's write
and refused attempt, `documents` what each of the former said, `leader` the loop's lease, `answers` what nodes made of pushes, `replica:ID` a
replica and who is connected to it. Readers take meta and policy in one transaction, so they never see halves. A follower waits on the log
and then reads the newest whole: entries that it missed, or that were trimmed, cost nothing. Every few seconds it reads anyway, which finds
a store that was emptied or fell back to an older copy.
"""

from __future__ import annotations

import hashlib
import json
import random
import zlib
from asyncio import sleep
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from controlplane.store import (
    ANSWERS_BATCH,
    ANSWERS_LENGTH,
    LOG_LENGTH,
    PAST_LENGTH,
    RESENT_WITHIN,
    Answer,
    Damaged,
    Entry,
    Lease,
    Moved,
    Peer,
    Receipt,
    Stored,
    StoreState,
    Write,
    WriteKind,
    entry_of,
    fenced,
    stale,
)
from controlplane.store.connection import Connection
from controlplane.store.scripts import LEASE, PUT, REFUSED, RELEASE
from trimtab.errors import StoreUnavailable
from trimtab.policy import Change, Value
from trimtab.snapshot import Identity, Snapshot

REREAD_S = 2.0
"""A follower reads the store at least this often, also when the stream says nothing."""
RECONNECT_S = (0.1, 2.0)


class RedisStore:
    """`url` as `connection.SCHEMES` has it. Connects at the first call. `replicas` must have a write within `wait_ms` to call it committed."""

    def __init__(self, url: str, mesh: str, *, replicas: int = 0, wait_ms: int = 200) -> None:
        prefix = f"tt:{{{mesh}}}:"
        names = ("meta", "policy", "log", "past", "documents", "leader")
        self._meta, self._policy, self._log, self._past, self._documents, self._leader = (prefix + n for n in names)
        self._answers, self._peers, self._peer = prefix + "answers", prefix + "replicas", prefix + "replica:"
        self._replicas, self._wait_ms = replicas, wait_ms
        self._at = Connection(url, block_s=REREAD_S, wanted=replicas)

    @property
    def state(self) -> StoreState:
        return self._at.state

    async def load(self) -> Stored | None:
        return await self._load(self._at.redis)

    async def _load(self, redis: Any) -> Stored | None:
        async with redis.pipeline(transaction=True) as both:
            both.hgetall(self._meta)
            both.hgetall(self._policy)
            meta, policy = await self._at.ask(both.execute())
        return decode_stored(meta, policy) if b"epoch" in meta else None

    async def put(self, write: Write) -> Receipt:
        x, lease = write.stored, write.lease
        identity = x.identity
        expect = "" if write.expect_version is None else str(write.expect_version)
        head = (write.request_id, write.upon.epoch, write.upon.revision, expect)
        led = (lease.term, lease.holder) if lease else ("", "")
        numbers = (write.term_floor, identity.epoch, identity.revision, x.spec_version, x.snapshot.document)
        kept = (LOG_LENGTH, PAST_LENGTH, RESENT_WITHIN, "" if x.kind is WriteKind.CONTROLLER else "past")
        said = [part for pair in encode_entry(entry_of(x)).items() for part in pair]
        args = (*head, *led, *numbers, *kept, *said, "traceparent", x.traceparent)
        keys = (self._meta, self._policy, self._log, self._past, self._documents)
        wait = [("WAIT", self._replicas, self._wait_ms)] if self._replicas else []
        (outcome, found), *acknowledged = await self._at.run_then(PUT, keys, args, *wait)
        match outcome:
            case b"VERSION":
                raise stale(write.expect_version or 0, int(found))
            case b"MOVED":
                raise Moved(f"the store holds {found.decode()}, the write was built on {write.upon}")
            case b"FENCED":
                assert lease is not None
                raise fenced(lease, found.decode())
        return Receipt(int(acknowledged[0]) if acknowledged else 0, self._replicas)

    async def record_refused(self, entry: Entry) -> None:
        said = [part for pair in encode_entry(entry).items() for part in pair]
        await self._at.run(REFUSED, (self._past, self._documents), PAST_LENGTH, *said)

    async def history(self, limit: int, *, controllers: bool = False) -> list[Entry]:
        key = self._log if controllers else self._past
        entries = await self._at.ask(self._at.redis.execute_command("XREVRANGE", key, "+", "-", "COUNT", limit))
        return [decode_entry(fields) for _, fields in entries]

    async def revision(self, epoch: int, revision: int) -> Snapshot | None:
        document = await self._at.ask(self._at.redis.execute_command("HGET", self._documents, f"{epoch}.{revision}"))
        if document is None:
            return None
        return Snapshot(Identity(epoch, revision, hashlib.sha256(document).digest()), document)

    async def lease(self, holder: str, *, ttl_ms: int, floor: int) -> Lease:
        held, term = await self._at.run(LEASE, (self._leader, self._meta), holder, ttl_ms, floor)
        return Lease(held.decode(), int(term))

    async def release(self, lease: Lease) -> None:
        await self._at.run(RELEASE, (self._leader,), lease.holder, lease.term)

    async def record_answers(self, answers: Sequence[Answer]) -> None:
        async with self._at.redis.pipeline(transaction=False) as each:
            for first in range(0, len(answers), ANSWERS_BATCH):
                rows = encode_answers(answers[first : first + ANSWERS_BATCH])
                each.execute_command("XADD", self._answers, "MAXLEN", "~", ANSWERS_LENGTH, "*", "rows", rows)
            await self._at.ask(each.execute(), writes=True)

    async def answers(self) -> list[Answer]:
        batches = await self._at.ask(self._at.redis.execute_command("XREVRANGE", self._answers, "+", "-"))
        return [answer for _, fields in batches for answer in reversed(decode_answers(fields[b"rows"]))]

    async def announce(self, peer: Peer, *, ttl_ms: int) -> bool:
        key = self._peer + peer.replica_id
        said: dict[str, Any] = {"address": peer.address, "seq": peer.seq, "info": peer.info}
        if peer.nodes is not None:
            said["nodes"] = peer.nodes
        async with self._at.redis.pipeline(transaction=True) as all_:
            all_.hset(key, mapping=said)
            all_.pexpire(key, ttl_ms)
            all_.sadd(self._peers, peer.replica_id)
            all_.hexists(key, "nodes")
            answers = await self._at.ask(all_.execute(), writes=True)
        return bool(answers[-1])

    async def peers(self, known: Mapping[str, int]) -> list[Peer]:
        ids = sorted(x.decode() for x in await self._at.ask(self._at.redis.smembers(self._peers)))
        async with self._at.redis.pipeline(transaction=False) as each:
            for name in ids:
                each.hmget(self._peer + name, "address", "seq", "info")
            found = await self._at.ask(each.execute()) if ids else []
        alive = []
        for name, (address, seq, info) in zip(ids, found, strict=True):
            if address is None:
                await self._at.ask(self._at.redis.srem(self._peers, name), writes=True)
                continue
            nodes = None
            if known.get(name) != int(seq):
                nodes = await self._at.ask(self._at.redis.hget(self._peer + name, "nodes"))
            alive.append(Peer(name, address.decode(), int(seq), info, nodes))
        return alive

    async def withdraw(self, replica_id: str) -> None:
        async with self._at.redis.pipeline(transaction=True) as both:
            both.delete(self._peer + replica_id)
            both.srem(self._peers, replica_id)
            await self._at.ask(both.execute(), writes=True)

    async def watch(self) -> AsyncGenerator[Stored | None, None]:
        given: list[Stored | None] = []
        wait_s = RECONNECT_S[0]
        while True:
            try:
                last = await self._last_id()
                while True:
                    # The id was read before the state: a put between the two wakes the wait below at once.
                    stored = await self._whole(self._at.tail)
                    wait_s = RECONNECT_S[0]
                    if given != [stored]:
                        given = [stored]
                        yield stored
                    last = await self._next_id(last)
            except StoreUnavailable:
                await sleep(random.uniform(wait_s / 2, wait_s))
                wait_s = min(2 * wait_s, RECONNECT_S[1])

    async def _whole(self, redis: Any) -> Stored | None:
        """A damaged store is as good as an empty one to a follower: whoever knows a policy writes it anew."""
        try:
            return await self._load(redis)
        except Damaged:
            return None

    async def _last_id(self) -> bytes:
        newest = await self._at.ask(self._at.tail.execute_command("XREVRANGE", self._log, "+", "-", "COUNT", 1))
        return newest[0][0] if newest else b"0-0"

    async def _next_id(self, last: bytes) -> bytes:
        """The id of the log's newest entry once it is past `last`, or after REREAD_S, whatever it is then."""
        wait = ("XREAD", "COUNT", RESENT_WITHIN, "BLOCK", int(REREAD_S * 1000), "STREAMS", self._log, last)
        came = await self._at.ask(self._at.tail.execute_command(*wait))
        return came[0][1][-1][0] if came else await self._last_id()

    async def close(self) -> None:
        await self._at.close()


def encode_changes(changes: Sequence[Change]) -> str:
    return json.dumps([[c.field, c.before, c.after, c.scope] for c in changes])


def decode_changes(data: bytes) -> tuple[Change, ...]:
    def value(x: Any) -> Value | None:
        # JSON has no tuples; a list of names is one everywhere else.
        return tuple(x) if isinstance(x, list) else x

    return tuple(Change(path, value(before), value(after), scope) for path, before, after, scope in json.loads(data))


def encode_answers(answers: Sequence[Answer]) -> bytes:
    rows = [
        [a.node_id, a.incarnation, a.identity.epoch, a.identity.revision, a.identity.sha256.hex(), *said(a)]
        for a in answers
    ]
    return zlib.compress(json.dumps(rows).encode(), 1)


def said(a: Answer) -> tuple[str, int, float, str, str]:
    return (a.result, a.at_unix_ms, round(a.apply_ms, 3), a.reason, a.message)


def decode_answers(data: bytes) -> list[Answer]:
    return [
        Answer(node_id, incarnation, Identity(epoch, revision, bytes.fromhex(sha256)), *rest)
        for node_id, incarnation, epoch, revision, sha256, *rest in json.loads(zlib.decompress(data))
    ]


def encode_entry(x: Entry) -> dict[str, str | int]:
    return {
        "epoch": x.identity.epoch,
        "revision": x.identity.revision,
        "sha256": x.identity.sha256.hex(),
        "spec_version": x.spec_version,
        "author": x.author,
        "reason": x.reason,
        "written_unix_ms": x.written_unix_ms,
        "changes": encode_changes(x.changes),
        "refused_because": x.refused_because,
        "kind": x.kind.value,
        "term": x.term,
        "evidence": x.evidence,
    }


def decode_entry(fields: dict[bytes, bytes]) -> Entry:
    return Entry(
        Identity(int(fields[b"epoch"]), int(fields[b"revision"]), bytes.fromhex(fields[b"sha256"].decode())),
        int(fields[b"spec_version"]),
        fields[b"author"].decode(),
        fields[b"reason"].decode(),
        int(fields[b"written_unix_ms"]),
        decode_changes(fields[b"changes"]),
        fields[b"refused_because"].decode(),
        WriteKind(fields[b"kind"].decode()),
        int(fields[b"term"]),
        fields[b"evidence"].decode(),
    )


def decode_stored(meta: dict[bytes, bytes], policy: dict[bytes, bytes]) -> Stored:
    """Damaged when the bytes do not match their digest: a store that lost half of it must not steer anything."""
    held = Identity(int(meta[b"epoch"]), int(meta[b"revision"]))
    document = policy.get(b"document", b"")
    if hashlib.sha256(document).hexdigest() != policy.get(b"sha256", b"").decode():
        raise Damaged(held)
    entry = decode_entry(policy)
    if entry.identity != held:
        raise Damaged(held)
    x = entry
    return Stored(
        Snapshot(x.identity, document),
        x.spec_version,
        x.author,
        x.reason,
        x.written_unix_ms,
        x.changes,
        policy[b"traceparent"].decode(),
        x.kind,
        x.term,
        x.evidence,
    )
