"""Fewer, larger messages to each client while this gateway is behind: messages cost, not bytes.

A stream's first message goes at once. After each one that it is given, while the event loop is late, its writer takes nothing for `coalesce_ms`;
tokens that come meanwhile travel together. Off (0) unless it is set: docs/benchmarks.md says what it is worth. Without it too a writer takes all
that waits, so a gateway that falls behind sends fewer messages by itself.
"""

from __future__ import annotations

import asyncio

TICK_S = 0.02
LATE_S = 0.005
"""A loop this late, on average, is behind."""
WEIGHT = 0.2
"""Of the newest tick in the average."""


class Coalescer:
    """Of one process; belongs to its event loop. `watch` runs for its life."""

    def __init__(self, coalesce_ms: int) -> None:
        self._pause_s = coalesce_ms / 1000.0
        self._late_s = 0.0

    @property
    def wanted(self) -> bool:
        """Whether there is anything to watch."""
        return self._pause_s > 0.0

    @property
    def holds(self) -> bool:
        """Whether writers pause now."""
        return self._late_s > LATE_S and self.wanted

    async def pause(self) -> None:
        """After a message, while `holds`."""
        await asyncio.sleep(self._pause_s)

    def late(self, seconds: float) -> None:
        """One tick came so much too late."""
        self._late_s += WEIGHT * (seconds - self._late_s)

    async def watch(self) -> None:
        """How late the loop is."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            self.late(loop.time() - due)
