"""The policy store on Redis or Valkey: three keys in one Cluster slot, one script for each write, a stream for the log.

`tt:{mesh}:meta` holds the numbers, `tt:{mesh}:policy` the snapshot and its author, `tt:{mesh}:log` an entry for every put and refused
attempt. The script compares and writes in one step; readers take both hashes in one transaction, so they never see halves. A follower
waits on the stream and then reads the newest whole: entries that it missed, or that were trimmed, cost nothing. Every few seconds it
reads anyway, which finds a store that was emptied or fell back to an older copy. Works from Redis 6.2 on: no Functions, no IFEQ.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from asyncio import sleep
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import structlog
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError

from controlplane.store import LOG_LENGTH, RESENT_WITHIN, Entry, Moved, Stored, StoreState, Write, stale
from trimtab.errors import StoreUnavailable
from trimtab.policy import Change, Value
from trimtab.snapshot import Identity, Snapshot

T = TypeVar("T")
log = structlog.get_logger(__name__)

REREAD_S = 2.0
"""A follower reads the store at least this often, also when the stream says nothing."""
RECONNECT_S = (0.1, 2.0)
NOT_TRIED = "not asked yet"

PUT = """
-- KEYS: meta, policy, log.
-- ARGV: request id, epoch and revision built upon, expected spec_version or '', then what is written; the log's length comes last.
local held = redis.call('HMGET', KEYS[1], 'epoch', 'revision', 'spec_version')
local epoch, revision, version = held[1] or '0', held[2] or '0', held[3] or '0'
local moved = epoch ~= ARGV[2] or revision ~= ARGV[3]
if moved then
  for _, entry in ipairs(redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', ARGV[16])) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'request' and fields[i + 1] == ARGV[1] then return {'WRITTEN', version} end
    end
  end
end
if ARGV[4] ~= '' and ARGV[4] ~= version then return {'VERSION', version} end
if moved then return {'MOVED', epoch .. '.' .. revision} end
redis.call('HSET', KEYS[1], 'epoch', ARGV[5], 'revision', ARGV[6], 'spec_version', ARGV[7])
redis.call('HSET', KEYS[2], 'sha256', ARGV[8], 'author', ARGV[9], 'reason', ARGV[10], 'written_unix_ms', ARGV[11],
  'changes', ARGV[12], 'traceparent', ARGV[13], 'document', ARGV[14])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', ARGV[15], '*', 'request', ARGV[1], 'epoch', ARGV[5], 'revision', ARGV[6],
  'spec_version', ARGV[7], 'sha256', ARGV[8], 'author', ARGV[9], 'reason', ARGV[10], 'written_unix_ms', ARGV[11],
  'changes', ARGV[12], 'refused_because', '')
return {'WRITTEN', ARGV[7]}
"""
PUT_SHA = hashlib.sha1(PUT.encode()).hexdigest()


class RedisStore:
    """`url` as redis-py has it: redis://, rediss:// or unix://. Connects at the first call."""

    def __init__(self, url: str, mesh: str) -> None:
        prefix = f"tt:{{{mesh}}}:"
        self._meta, self._policy, self._log = prefix + "meta", prefix + "policy", prefix + "log"
        # Shapes of answers differ between RESP2 and RESP3; short time-outs, because a person waits for the answer.
        common: dict[str, Any] = {"protocol": 2, "socket_connect_timeout": 1.0}
        self._redis: Any = Redis.from_url(url, socket_timeout=1.5, retry=Retry(ConstantBackoff(0.05), 1), **common)
        # A blocking read needs a connection of its own, whose time-out is longer than the wait.
        self._tail: Any = Redis.from_url(url, socket_timeout=REREAD_S + 3, retry=Retry(NoBackoff(), 0), **common)
        parts = urlsplit(url)
        self._shown = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self._fault: str | None = NOT_TRIED
        self._since = time.monotonic()

    @property
    def state(self) -> StoreState:
        if self._fault is None:
            return StoreState(True, self._shown)
        away_s = time.monotonic() - self._since
        return StoreState(False, f"{self._shown}: unreachable for {away_s:.0f} s ({self._fault})")

    def _up(self) -> None:
        if self._fault is not None:
            self._fault, self._since = None, time.monotonic()
            log.info("store reached", store=self._shown)

    def _down(self, error: Exception) -> StoreUnavailable:
        said = str(error) or type(error).__name__
        if self._fault in (None, NOT_TRIED):
            self._since = time.monotonic()
            log.warning("store away", store=self._shown, error=said)
        self._fault = said
        return StoreUnavailable(
            f"the policy store {self._shown} can't be used: {said}; nodes keep the policy that they have. "
            "Look at it again (trimtab policy get) before you repeat a change"
        )

    async def _ask(self, answer: Awaitable[T]) -> T:
        try:
            got = await answer
        except ReadOnlyError as e:
            raise StoreUnavailable(
                f"the policy store {self._shown} is a read-only replica; point --redis at its primary"
            ) from e
        except NoScriptError:
            raise
        except (RedisError, OSError, TimeoutError) as e:
            raise self._down(e) from e
        self._up()
        return got

    async def load(self) -> Stored | None:
        return await self._load(self._redis)

    async def _load(self, redis: Any) -> Stored | None:
        async with redis.pipeline(transaction=True) as both:
            both.hgetall(self._meta)
            both.hgetall(self._policy)
            meta, policy = await self._ask(both.execute())
        return decode_stored(meta, policy) if meta else None

    async def put(self, write: Write) -> None:
        x, identity = write.stored, write.stored.identity
        expect = "" if write.expect_version is None else str(write.expect_version)
        head = (write.request_id, write.upon.epoch, write.upon.revision, expect)
        numbers = (identity.epoch, identity.revision, x.spec_version, identity.sha256.hex())
        said = (x.author, x.reason, x.written_unix_ms, encode_changes(x.changes), x.traceparent, x.snapshot.document)
        rest = (3, self._meta, self._policy, self._log, *head, *numbers, *said, LOG_LENGTH, RESENT_WITHIN)
        try:
            outcome, found = await self._ask(self._redis.execute_command("EVALSHA", PUT_SHA, *rest))
        except NoScriptError:
            outcome, found = await self._ask(self._redis.execute_command("EVAL", PUT, *rest))
        if outcome == b"VERSION":
            raise stale(write.expect_version or 0, int(found))
        if outcome == b"MOVED":
            raise Moved(f"the store holds {found.decode()}, the write was built on {write.upon}")

    async def record_refused(self, entry: Entry) -> None:
        fields = [part for pair in encode_entry(entry).items() for part in pair]
        await self._ask(self._redis.execute_command("XADD", self._log, "MAXLEN", "~", LOG_LENGTH, "*", *fields))

    async def history(self, limit: int) -> list[Entry]:
        entries = await self._ask(self._redis.execute_command("XREVRANGE", self._log, "+", "-", "COUNT", limit))
        return [decode_entry(fields) for _, fields in entries]

    async def watch(self) -> AsyncGenerator[Stored | None, None]:
        given: list[Stored | None] = []
        wait_s = RECONNECT_S[0]
        while True:
            try:
                last = await self._last_id()
                while True:
                    # The id was read before the state: a put between the two wakes the wait below at once.
                    stored = await self._load(self._tail)
                    wait_s = RECONNECT_S[0]
                    if given != [stored]:
                        given = [stored]
                        yield stored
                    last = await self._next_id(last)
            except StoreUnavailable:
                await sleep(random.uniform(wait_s / 2, wait_s))
                wait_s = min(2 * wait_s, RECONNECT_S[1])

    async def _last_id(self) -> bytes:
        newest = await self._ask(self._tail.execute_command("XREVRANGE", self._log, "+", "-", "COUNT", 1))
        return newest[0][0] if newest else b"0-0"

    async def _next_id(self, last: bytes) -> bytes:
        """The id of the log's newest entry once it is past `last`, or after REREAD_S, whatever it is then."""
        wait = ("XREAD", "COUNT", LOG_LENGTH, "BLOCK", int(REREAD_S * 1000), "STREAMS", self._log, last)
        came = await self._ask(self._tail.execute_command(*wait))
        return came[0][1][-1][0] if came else await self._last_id()

    async def close(self) -> None:
        await self._redis.aclose()
        await self._tail.aclose()


def encode_changes(changes: Sequence[Change]) -> str:
    return json.dumps([[c.field, c.before, c.after] for c in changes])


def decode_changes(data: bytes) -> tuple[Change, ...]:
    def value(x: Any) -> Value | None:
        # JSON has no tuples; a list of names is one everywhere else.
        return tuple(x) if isinstance(x, list) else x

    return tuple(Change(path, value(before), value(after)) for path, before, after in json.loads(data))


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
    )


def decode_stored(meta: dict[bytes, bytes], policy: dict[bytes, bytes]) -> Stored:
    """StoreUnavailable when the bytes do not match their digest: a store that lost half of it must not steer anything."""
    digest = bytes.fromhex(policy.get(b"sha256", b"").decode())
    document = policy.get(b"document", b"")
    if hashlib.sha256(document).digest() != digest:
        raise StoreUnavailable("the policy in the store does not match its digest; restore the store from its backup")
    return Stored(
        Snapshot(Identity(int(meta[b"epoch"]), int(meta[b"revision"]), digest), document),
        int(meta[b"spec_version"]),
        policy[b"author"].decode(),
        policy[b"reason"].decode(),
        int(policy[b"written_unix_ms"]),
        decode_changes(policy[b"changes"]),
        policy[b"traceparent"].decode(),
    )
