"""Watch: the newest value, for any number of followers. A slow follower skips what it missed; nothing is queued."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Watch(Generic[T]):
    """One value and a way to wait for the next. Belongs to one event loop."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._version = 0
        self._changed = asyncio.Event()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        """Publish; every follower wakes. Setting an equal value wakes them too, so compare first where that matters."""
        self._value = value
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, *, skip_current: bool = False) -> AsyncIterator[T]:
        """The value now (unless skipped), then each newest value; never the same version twice."""
        seen = self._version if skip_current else self._version - 1
        while True:
            if seen == self._version:
                await self._changed.wait()
            seen = self._version
            yield self._value

    async def until(self, version_after: int) -> T:
        """Wait until more than `version_after` values were set; see `version`."""
        while self._version <= version_after:
            await self._changed.wait()
        return self._value

    @property
    def version(self) -> int:
        return self._version
