"""How many gateways the mesh has, this one among them: each gives tenants an equal part of what the mesh allows them.

The control plane says it with each view of the fleet. More are believed at once; fewer when it has said so for a while, since after a restart of
the control plane they come back one by one. While it is away its last word holds, also over a restart of this process, from the view on disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)


class Census:
    """Belongs to one event loop. `least` is how many there are in any case; `on_fewer` hears when a smaller number is believed."""

    def __init__(self, least: int = 1, *, grace_s: float, on_fewer: Callable[[], None] = lambda: None) -> None:
        self.grace_s = grace_s
        self.connected: Callable[[], bool] = lambda: True
        """Whether the newest word is still kept up to date; while it is not, nobody is struck off."""
        self._least = max(1, least)
        self._on_fewer = on_fewer
        self._believed = 0
        self._said = 0
        self._falling: asyncio.TimerHandle | None = None

    @property
    def gateways(self) -> int:
        """1 at least."""
        return max(self._least, self._believed)

    @property
    def falling(self) -> bool:
        """Fewer were said than are believed yet."""
        return self._falling is not None

    def hear(self, said: int) -> None:
        """What a view says; 0 where its control plane does not count them, which changes nothing."""
        if not said:
            return
        self._said = said
        if said >= self._believed:
            self.close()
            self._believe()
        elif self._falling is None:
            self._falling = asyncio.get_running_loop().call_later(self.grace_s, self._fall)

    def close(self) -> None:
        if self._falling is not None:
            self._falling.cancel()
            self._falling = None

    def _fall(self) -> None:
        self._falling = None
        if self.connected():
            self._believe()
            self._on_fewer()

    def _believe(self) -> None:
        if self._said != self._believed:
            self._believed = self._said
            log.info("gateways counted", gateways=self._believed)
