"""Requests with sane defaults, and ways to wait."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

from trimtab import messages as m

T = TypeVar("T")


def a_request(**changes: object) -> m.Request:
    facts: dict[str, object] = {"request_id": "", "model": "m", "prompt": "Say hello"}
    return m.Request(**(facts | changes))  # type: ignore[arg-type]


async def read(events: AsyncIterator[T], seen: list[T], each: Callable[[T], Awaitable[None]] | None = None) -> None:
    """All of them, into `seen`, so that what came before an error is there to look at."""
    async for event in events:
        seen.append(event)
        if each is not None:
            await each(event)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Turn the loop until it holds; for states that nobody announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)
