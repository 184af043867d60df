"""The policy store in memory: the fake of the Redis one, and the store of `memory://`. It lives as long as the process."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence

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
from trimtab.kit.watch import Watch
from trimtab.snapshot import Identity, Snapshot


class MemoryStore:
    """Belongs to one event loop. `clock` gives seconds, for what runs out: the lease, and replicas that are silent."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stored: Watch[Stored | None] = Watch(None)
        self._log: deque[tuple[str, Entry]] = deque(maxlen=LOG_LENGTH)
        self._past: deque[tuple[int, Entry, Snapshot]] = deque(maxlen=PAST_LENGTH)
        self._refused: deque[tuple[int, Entry]] = deque(maxlen=REFUSED_LENGTH)
        self._count = 0
        self._clock = clock
        self._granted = Lease("", 0)
        self._led_until = 0.0
        self._peers: dict[str, tuple[Peer, float]] = {}
        self._answers: deque[Answer] = deque(maxlen=ANSWERS_LENGTH * ANSWERS_BATCH)
        self._marks: Watch[dict[str, Mark]] = Watch({})
        self._actions: deque[Action] = deque(maxlen=ACTIONS_LENGTH)

    @property
    def state(self) -> StoreState:
        return StoreState(True, "memory (lost when the control plane ends)")

    async def load(self) -> Stored | None:
        return self._stored.value

    async def put(self, write: Write) -> Receipt:
        held = self._stored.value
        identity, version = (held.identity, held.spec_version) if held else (Identity(), 0)
        other = bool(write.upon.sha256) and identity.sha256 != write.upon.sha256
        if identity != write.upon or other:
            newest = list(self._log)[-RESENT_WITHIN:]
            if any(request_id == write.request_id for request_id, _ in newest):
                return Receipt()
        if write.lease is not None and write.lease != self._granted:
            raise fenced(write.lease, f"{self._granted.term} of {self._granted.holder}")
        if write.expect_version not in (None, version):
            raise stale(write.expect_version or 0, version)
        if identity != write.upon or other:
            raise Moved(f"the store holds {identity}, the write was built on {write.upon}")
        if write.term_floor > self._granted.term:
            self._granted = Lease("", write.term_floor)
        entry = entry_of(write.stored)
        self._log.append((write.request_id, entry))
        if write.stored.kind is not WriteKind.CONTROLLER:
            self._count += 1
            self._past.append((self._count, entry, write.stored.snapshot))
        self._stored.set(write.stored)
        return Receipt()

    async def record_refused(self, entry: Entry) -> None:
        self._count += 1
        self._refused.append((self._count, entry))

    async def history(self, limit: int, *, controllers: bool = False) -> list[Entry]:
        if controllers:
            return [e for _, e in self._log][::-1][:limit]
        rows = sorted([(n, e) for n, e, _ in self._past] + list(self._refused), key=lambda row: row[0], reverse=True)
        return [e for _, e in rows[:limit]]

    async def revision(self, epoch: int, revision: int) -> Snapshot | None:
        wanted = Identity(epoch, revision)
        return next((s for _, _, s in self._past if s.identity == wanted), None)

    async def lease(self, holder: str, *, ttl_ms: int, floor: int) -> Lease:
        now = self._clock()
        led = now < self._led_until
        mine = led and self._granted.holder == holder and self._granted.term >= floor
        if led and self._granted.holder not in ("", holder):
            return self._granted
        if not mine:
            self._granted = Lease(holder, max(self._granted.term, floor) + 1)
        self._led_until = now + ttl_ms / 1000
        return self._granted

    async def release(self, lease: Lease) -> None:
        if lease == self._granted:
            self._led_until = 0.0

    async def record_answers(self, answers: Sequence[Answer]) -> None:
        self._answers.extend(answers)

    async def answers(self) -> list[Answer]:
        return list(self._answers)[::-1]

    async def mark(self, mark: Mark) -> bool:
        held = self._marks.value.get(mark.key)
        if held is not None and held.stamp >= mark.stamp:
            return held == mark
        self._marks.set({**self._marks.value, mark.key: mark})
        return True

    async def marks(self) -> list[Mark]:
        return list(self._marks.value.values())

    async def watch_marks(self) -> AsyncGenerator[list[Mark], None]:
        async for marks in self._marks.follow():
            yield list(marks.values())

    async def unmark(self, mark: Mark) -> None:
        held = self._marks.value.get(mark.key)
        if held is not None and held.stamp == mark.stamp:
            del self._marks.value[mark.key]

    async def record_action(self, action: Action) -> None:
        self._actions.append(action)

    async def actions(self) -> list[Action]:
        return list(self._actions)[::-1]

    async def announce(self, peer: Peer, *, ttl_ms: int) -> bool:
        held = self._peers.get(peer.replica_id)
        nodes = peer.nodes if peer.nodes is not None else held[0].nodes if held is not None else None
        self._peers[peer.replica_id] = (dataclasses.replace(peer, nodes=nodes), self._clock() + ttl_ms / 1000)
        return nodes is not None

    async def peers(self, known: Mapping[str, int]) -> list[Peer]:
        now = self._clock()
        self._peers = {name: held for name, held in self._peers.items() if held[1] > now}
        return [
            dataclasses.replace(peer, nodes=None) if known.get(name) == peer.seq else peer
            for name, (peer, _) in self._peers.items()
        ]

    async def withdraw(self, replica_id: str) -> None:
        self._peers.pop(replica_id, None)

    async def watch(self) -> AsyncGenerator[Stored | None, None]:
        async for stored in self._stored.follow():
            yield stored

    async def close(self) -> None:
        """Nothing is held open."""
