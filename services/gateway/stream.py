"""What one attempt at a request receives from its worker. One reader; the endpoint is the writer."""

from __future__ import annotations

import asyncio
from typing import Protocol

from trimtab.errors import TrimtabError
from trimtab.v1 import inference_pb2


class Way(Protocol):
    """What a stream needs of its endpoint."""

    def send(self, message: inference_pb2.AttachRequest) -> None: ...

    def leave(self, stream: Stream, *, superseded: bool) -> None: ...


class Stream:
    __slots__ = (
        "_error",
        "_events",
        "_waiter",
        "_way",
        "attempt",
        "ended",
        "gained",
        "judged",
        "one_of_many",
        "request_id",
        "started",
        "suspects",
        "tokens",
    )

    def __init__(self, way: Way, request_id: str, attempt: int, tokens: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.ended = False
        """True once the worker has nothing more to say of it, so that leaving needs no Cancel."""
        self.started = False
        """Whether the worker's engine has it."""
        self.gained = False
        """Whether it gave a token."""
        self.tokens = tokens
        """Of its prompt, estimated, until its first token comes."""
        self.suspects = 0
        """When the worker died: as `resuming.blamed` has it."""
        self.judged = False
        """Whether `suspects` is said: it is not said anew as one after the other hears of the same death."""
        self.one_of_many = False
        """It ended by a death that another one has told of: a worker that dies once has failed once, however many it had."""
        self._way = way
        self._events: list[inference_pb2.GenerateResponse] = []
        self._error: TrimtabError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def push(self, event: inference_pb2.GenerateResponse) -> None:
        self._events.append(event)
        self._wake()

    def fail(self, error: TrimtabError) -> None:
        """End it; what came before is still taken first. The first error counts."""
        if self._error is None:
            self._error = error
            self._wake()

    async def take(self) -> list[inference_pb2.GenerateResponse]:
        """Everything that waits, at least one event; then the error that ended it."""
        while not self._events:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        events, self._events = self._events, []
        return events

    def grant(self, tokens: int) -> None:
        """The reader can take so many more."""
        if not self.ended:
            window = inference_pb2.Window(request_id=self.request_id, attempt=self.attempt, n=tokens)
            self._way.send(inference_pb2.AttachRequest(window=window))

    def close(self, *, superseded: bool = False) -> None:
        """Leave; the worker is told unless it has ended the request itself. Safe to call again."""
        self._way.leave(self, superseded=superseded)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
