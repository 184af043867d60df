"""The policy store in memory: the fake of the Redis one, and the store of `memory://`. It lives as long as the process."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator

from controlplane.store import (
    LOG_LENGTH,
    RESENT_WITHIN,
    Entry,
    Moved,
    Stored,
    StoreState,
    Write,
    entry_of,
    stale,
)
from trimtab.kit.watch import Watch
from trimtab.snapshot import Identity


class MemoryStore:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._stored: Watch[Stored | None] = Watch(None)
        self._log: deque[tuple[str, Entry]] = deque(maxlen=LOG_LENGTH)

    @property
    def state(self) -> StoreState:
        return StoreState(True, "memory (lost when the control plane ends)")

    async def load(self) -> Stored | None:
        return self._stored.value

    async def put(self, write: Write) -> None:
        held = self._stored.value
        identity, version = (held.identity, held.spec_version) if held else (Identity(), 0)
        if identity != write.upon:
            newest = list(self._log)[-RESENT_WITHIN:]
            if any(request_id == write.request_id for request_id, _ in newest):
                return
        if write.expect_version not in (None, version):
            raise stale(write.expect_version or 0, version)
        if identity != write.upon:
            raise Moved(f"the store holds {identity}, the write was built on {write.upon}")
        self._log.append((write.request_id, entry_of(write.stored)))
        self._stored.set(write.stored)

    async def record_refused(self, entry: Entry) -> None:
        self._log.append(("", entry))

    async def history(self, limit: int) -> list[Entry]:
        return [entry for _, entry in reversed(self._log)][:limit]

    async def watch(self) -> AsyncGenerator[Stored | None, None]:
        async for stored in self._stored.follow():
            yield stored

    async def close(self) -> None:
        """Nothing is held open."""
