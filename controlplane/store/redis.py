"""The policy store on Redis or Valkey: a few keys in one Cluster slot, one script for each write, streams for the logs.

`tt:{mesh}:meta` holds the numbers, `policy` the snapshot and its author, `log` an entry for every put, `past` one for every person's write
and re-seeding, `documents` what each of them said, `refused` attempts that wrote nothing, `leader` the loop's lease, `answers` what nodes
made of pushes, `replica:ID` a replica and who is connected to it, `marks` what replicas know of nodes (`marked` rings when one is kept),
`actions` what people did to nodes. Readers take meta and policy in one transaction, so they never see
halves. A follower waits on the log and then reads the newest whole: entries that it missed, or that were trimmed, cost nothing. Every few
seconds it reads anyway, which finds a store that was emptied or fell back to an older copy.
"""

from __future__ import annotations

import hashlib
import random
from asyncio import sleep
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from controlplane.store import (
    ACTIONS_LENGTH,
    ANSWERS_BATCH,
    ANSWERS_LENGTH,
    LOG_LENGTH,
    PAST_LENGTH,
    REFUSED_LENGTH,
    RESENT_WITHIN,
    Action,
    Answer,
    Damaged,
    Entry,
    Lease,
    Mark,
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
from controlplane.store.rows import (
    decode_actions,
    decode_answers,
    decode_entries,
    decode_marks,
    decode_stored,
    encode_action,
    encode_answers,
    encode_entry,
)
from controlplane.store.scripts import LEASE, MARK, PUT, RELEASE, UNMARK
from trimtab.errors import StoreUnavailable
from trimtab.snapshot import Identity, Snapshot

REREAD_S = 2.0
"""A follower reads the store at least this often, also when the stream says nothing."""
RECONNECT_S = (0.1, 2.0)
BELLS = 64
"""Entries of a stream that is there to wake those who wait on it."""
ANSWERS_PAGE = 16
"""Batches that are read at once."""


class RedisStore:
    """`url` as `connection.SCHEMES` has it. Connects at the first call. `replicas` must have a write within `wait_ms` to call it committed."""

    def __init__(self, url: str, mesh: str, *, replicas: int = 0, wait_ms: int = 200) -> None:
        prefix = f"tt:{{{mesh}}}:"
        names = ("meta", "policy", "log", "past", "documents", "refused", "leader")
        self._meta, self._policy, self._log, self._past, self._documents, self._refused, self._leader = (
            prefix + n for n in names
        )
        self._answers, self._peers, self._peer = prefix + "answers", prefix + "replicas", prefix + "replica:"
        self._marks, self._marked, self._actions = prefix + "marks", prefix + "marked", prefix + "actions"
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
        kept = (
            LOG_LENGTH,
            PAST_LENGTH,
            RESENT_WITHIN,
            "" if x.kind is WriteKind.CONTROLLER else "past",
            write.upon.sha256.hex(),
        )
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
        kept = ("MAXLEN", "~", REFUSED_LENGTH, "*")
        await self._at.ask(self._at.redis.execute_command("XADD", self._refused, *kept, *said), writes=True)

    async def history(self, limit: int, *, controllers: bool = False) -> list[Entry]:
        found: list[Entry] = []
        for key in (self._log,) if controllers else (self._past, self._refused):
            rows = await self._at.ask(self._at.redis.execute_command("XREVRANGE", key, "+", "-", "COUNT", limit))
            found += decode_entries(fields for _, fields in rows)
        # Two streams in one order: a refused attempt comes after the write that it left in place. Each is in order by itself.
        found.sort(key=lambda e: (e.identity, bool(e.refused_because)), reverse=True)
        return found[:limit]

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
        found: list[Answer] = []
        before = "+"
        while True:
            page = ("XREVRANGE", self._answers, before, "-", "COUNT", ANSWERS_PAGE)
            batches = await self._at.ask(self._at.redis.execute_command(*page))
            for _, fields in batches:
                found += reversed(decode_answers(fields[b"rows"]))
            if len(batches) < ANSWERS_PAGE:
                return found
            before = f"({batches[-1][0].decode()}"
            # A large mesh has answered a hundred thousand times; nodes must not seem silent meanwhile.
            await sleep(0)

    async def mark(self, mark: Mark) -> bool:
        keys = (self._marks, self._marked)
        return bool(await self._at.run(MARK, keys, mark.key, mark.stamp, mark.data, BELLS))

    async def marks(self) -> list[Mark]:
        return decode_marks(await self._at.ask(self._at.redis.hgetall(self._marks)))

    async def unmark(self, mark: Mark) -> None:
        await self._at.run(UNMARK, (self._marks,), mark.key, mark.stamp)

    async def watch_marks(self) -> AsyncGenerator[list[Mark], None]:
        given: dict[bytes, bytes] | None = None
        wait_s = RECONNECT_S[0]
        while True:
            try:
                last = await self._last_id(self._marked)
                while True:
                    rows = await self._at.ask(self._at.tail.hgetall(self._marks))
                    wait_s = RECONNECT_S[0]
                    if given != rows:
                        given = rows
                        yield decode_marks(rows)
                    last = await self._next_id(self._marked, last)
            except StoreUnavailable:
                await sleep(random.uniform(wait_s / 2, wait_s))
                wait_s = min(2 * wait_s, RECONNECT_S[1])

    async def record_action(self, action: Action) -> None:
        said = [part for pair in encode_action(action).items() for part in pair]
        add = ("XADD", self._actions, "MAXLEN", "~", ACTIONS_LENGTH, "*", *said)
        await self._at.ask(self._at.redis.execute_command(*add), writes=True)

    async def actions(self) -> list[Action]:
        rows = await self._at.ask(self._at.redis.execute_command("XREVRANGE", self._actions, "+", "-"))
        return decode_actions(fields for _, fields in rows)

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
                last = await self._last_id(self._log)
                while True:
                    # The id was read before the state: a put between the two wakes the wait below at once.
                    stored = await self._whole(self._at.tail)
                    wait_s = RECONNECT_S[0]
                    if given != [stored]:
                        given = [stored]
                        yield stored
                    last = await self._next_id(self._log, last)
            except StoreUnavailable:
                await sleep(random.uniform(wait_s / 2, wait_s))
                wait_s = min(2 * wait_s, RECONNECT_S[1])

    async def _whole(self, redis: Any) -> Stored | None:
        """A damaged store is as good as an empty one to a follower: whoever knows a policy writes it anew."""
        try:
            return await self._load(redis)
        except Damaged:
            return None

    async def _last_id(self, stream: str) -> bytes:
        newest = await self._at.ask(self._at.tail.execute_command("XREVRANGE", stream, "+", "-", "COUNT", 1))
        return newest[0][0] if newest else b"0-0"

    async def _next_id(self, stream: str, last: bytes) -> bytes:
        """The id of the stream's newest entry once it is past `last`, or after REREAD_S, whatever it is then."""
        wait = ("XREAD", "COUNT", RESENT_WITHIN, "BLOCK", int(REREAD_S * 1000), "STREAMS", stream, last)
        came = await self._at.ask(self._at.tail.execute_command(*wait))
        return came[0][1][-1][0] if came else await self._last_id(stream)

    async def close(self) -> None:
        await self._at.close()
