"""A stream's headers go out with its first word, or once it has waited `HEADERS_S` for one.

A BATCH request may wait in this gateway's line for hours, and what stands between it and its client takes long silence for a dead connection.
Until then nothing is said, so that a request that is refused has a status of its own over HTTP too, where headers hold it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Self

HEADERS_S = 10.0


class Opening:
    """Does `act` once after `HEADERS_S`, unless `over` comes first; never while something else is written."""

    def __init__(self, act: Callable[[], Awaitable[None]]) -> None:
        self._act = act
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.pending = True
        """Whether `over` is still to be said."""

    async def over(self) -> None:
        """The stream's first word is due; what `act` has begun is done when this returns."""
        self.pending = False
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            await self._task

    async def __aenter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(HEADERS_S, self._begin)
        return self

    async def __aexit__(self, *_: object) -> None:
        # A client that is gone makes `act` fail; whoever writes next hears of it.
        with contextlib.suppress(Exception):
            await self.over()

    def _begin(self) -> None:
        async def act() -> None:
            await self._act()

        self._task = asyncio.create_task(act())
