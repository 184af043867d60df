"""The loop leader: of all replicas one runs the controllers, the one that holds the lease in the store.

The lease is for progress alone; safety is the store's, which refuses a controller's write under any lease but the newest. So a leader that
was stopped past its lease finds out at its first write, and counts itself out before that: its time runs from before it asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import Callable

import structlog

from controlplane.replica import Replica
from controlplane.store import Lease
from trimtab.errors import StoreUnavailable
from trimtab.kit.watch import Watch

log = structlog.get_logger(__name__)

RENEWALS = 3
"""A lease is renewed so often while it lasts; candidates ask as often."""


class Leader:
    """This replica's part in the election; `lease` is what it leads under, None while it does not. `clock` gives seconds.

    `holder` is what the lease names it by, its own alone: a process that takes another's replica id must not take his term too.
    """

    def __init__(
        self, replica: Replica, replica_id: str, *, lease_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.holder = f"{replica_id}/{uuid.uuid4().hex[:8]}"
        self.lease: Watch[Lease | None] = Watch(None)
        self.newest: Lease | None = None
        self._replica = replica
        self._replica_id = replica_id
        self._lease_s = lease_s
        self._clock = clock
        self._until = 0.0

    @property
    def leads(self) -> Lease | None:
        """The lease, while it has not run out by this replica's own clock."""
        return self.lease.value if self._clock() < self._until else None

    async def run(self) -> None:
        """For ever."""
        while True:
            await self.stand()
            wait_s = self._lease_s / RENEWALS
            await asyncio.sleep(random.uniform(0.8 * wait_s, wait_s))

    async def stand(self) -> None:
        """Ask for the lease, or for its renewal, once."""
        asked_at = self._clock()
        try:
            found = await self._replica.store.lease(
                self.holder, ttl_ms=int(self._lease_s * 1000), floor=self._replica.term
            )
        except StoreUnavailable:
            if self.leads is None:
                self._become(None)
            return
        self._replica.granted(found)
        self.newest = found
        if found.holder == self.holder:
            self._until = asked_at + self._lease_s
            self._become(found)
        else:
            self._become(None)

    async def resign(self) -> None:
        """Let another replica lead at once."""
        led = self.lease.value
        self._become(None)
        if led is not None:
            with contextlib.suppress(StoreUnavailable):
                await self._replica.store.release(led)

    def _become(self, lease: Lease | None) -> None:
        if lease == self.lease.value:
            return
        if lease is not None:
            log.info("leads", replica=self._replica_id, term=lease.term)
        else:
            led = self.lease.value
            log.info("leads no more", replica=self._replica_id, term=led.term if led else 0)
        self.lease.set(lease)
