"""A stream as its direct client reads it: what is made goes on beside him, and he is held to a bound.

Whoever hands events on waits for his reader with each of them. A stream that waited with him would keep its place in the engine for as long
as he likes; so it is read here to its end, and he is ended as SLOW_READER when he leaves much unread for a while, or takes nothing for long.
What gateways have on their links is bounded by windows (`attach.py`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Self

from services.worker.attach import SLOW_READER_TOKENS
from trimtab import messages as m
from trimtab.errors import Cancelled, SlowReader
from trimtab.kit import rpc

BEHIND_S = 2.0
"""Who leaves more than SLOW_READER_TOKENS unread for so long is ended; a moment's delay is not his fault."""
STALL_S = 30.0
"""So is who takes nothing for so long, however little there is."""
LOOK_S = 1.0


class Reading:
    """`async with Reading(stream) as events: async for event in events: await write(event)`.

    Leaving it closes the stream. Of a reader that is too slow whatever the task waits for in the block is cancelled, and the block raises
    SlowReader; errors of the stream come when all before them has been read.
    """

    def __init__(
        self, stream: AsyncGenerator[m.Event, None], *, behind_s: float = BEHIND_S, stall_s: float = STALL_S
    ) -> None:
        self._stream = stream
        self._behind_s = behind_s
        self._stall_s = stall_s
        self._unread: deque[m.Event] = deque()
        self._unread_tokens = 0
        self._behind_since: float | None = None
        self._taken_at: float | None = None
        """When the reader got what he is busy with; None while he waits for more."""
        self._more = asyncio.Event()
        self._ended = False
        self._error: Exception | None = None
        self._slow: SlowReader | None = None
        self._leaving = False

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._loop = asyncio.get_running_loop()
        self._task, self._cancelling = task, task.cancelling()
        self._filling = asyncio.create_task(self._fill())
        self._timer = self._loop.call_later(min(LOOK_S, self._stall_s), self._look)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        self._leaving = True
        # As asyncio.timeout does: a cancellation of our own ends here, and any other goes on.
        ours = self._slow is not None and self._task.uncancel() <= self._cancelling
        await rpc.cancel_and_wait(self._filling)
        await self._stream.aclose()
        if ours and kind is asyncio.CancelledError:
            assert self._slow is not None
            raise self._slow from None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> m.Event:
        self._taken_at = None
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._ended:
                raise StopAsyncIteration
            self._more.clear()
            await self._more.wait()
        event = self._unread.popleft()
        self._unread_tokens -= _tokens(event)
        if self._unread_tokens <= SLOW_READER_TOKENS:
            self._behind_since = None
        self._taken_at = self._loop.time()
        return event

    async def _fill(self) -> None:
        try:
            async for event in self._stream:
                self._unread.append(event)
                self._unread_tokens += _tokens(event)
                self._more.set()
                if self._is_behind():
                    # Told inside, it is what the request's own account says.
                    await self._stream.athrow(
                        SlowReader(f"the reader left more than {SLOW_READER_TOKENS} tokens unread")
                    )
        except SlowReader as e:
            self._give_up(e)
        except asyncio.CancelledError:
            if self._leaving:
                raise
            self._error = Cancelled("it was cancelled within the worker")
        except Exception as e:
            self._error = e  # for the reader, once he has come so far
        finally:
            self._ended = True
            self._more.set()

    def _is_behind(self) -> bool:
        if self._unread_tokens <= SLOW_READER_TOKENS:
            return False
        now = self._loop.time()
        if self._behind_since is None:
            self._behind_since = now
        return now - self._behind_since >= self._behind_s

    def _look(self) -> None:
        now = self._loop.time()
        if self._taken_at is not None and now - self._taken_at >= self._stall_s:
            self._give_up(SlowReader(f"the reader took nothing for {self._stall_s:g} s"))
            return
        self._timer = self._loop.call_later(min(LOOK_S, self._stall_s), self._look)

    def _give_up(self, slow: SlowReader) -> None:
        if self._slow is None:
            self._timer.cancel()
            self._slow = slow
            self._task.cancel()


def _tokens(event: m.Event) -> int:
    return len(event.token_ids) if isinstance(event, m.Delta) else 0
