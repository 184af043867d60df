"""One node's open control stream: what was sent to it, the span of the push and the commands that it has not answered yet."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from opentelemetry.trace import Span

from controlplane.commands import Calls
from controlplane.store import Stored
from trimtab import codec
from trimtab.errors import InvalidRequest, TrimtabError
from trimtab.kit.telemetry import fail, parse_traceparent, span_at, traceparent, tracer
from trimtab.kit.watch import Watch
from trimtab.messages import Hello
from trimtab.snapshot import Identity
from trimtab.v1 import control_pb2

HELLO_S = 5.0
"""A stream that has not said who it is by then is ended."""


class Stream:
    """`due` wakes the stream's writer, which then compares `pushed` and `viewed` with what is newest, and sends what `calls` holds unsent.

    One push is unanswered at a time (`awaiting`, since `awaiting_since` in seconds of the monotonic clock): gRPC would take hundreds for a
    slow node into its own buffers, and the node would have to go through all of them.
    """

    def __init__(self, hello: Hello, session: int) -> None:
        self.hello = hello
        self.session = session
        self.due: Watch[None] = Watch(None)
        self.calls = Calls(lambda: self.due.set(None))
        self.open = True
        self.because: TrimtabError | None = None
        self.pushed = hello.held
        self.viewed = 0
        self.awaiting: Identity | None = None
        self.awaiting_since = 0.0
        self._push: tuple[Identity, Span] | None = None

    def end(self, because: TrimtabError | None = None) -> None:
        self.open = False
        self.because = self.because or because
        self.due.set(None)

    def begin_push(self, stored: Stored, *, traced: bool) -> str:
        """Opens the push's span under the put's, and gives its traceparent; untraced, it gives the put's own."""
        self.close_push("unanswered")
        self.pushed = self.awaiting = stored.identity
        self.awaiting_since = time.monotonic()
        if not traced:
            return stored.traceparent
        attributes = {"trimtab.node": self.hello.node.node_id, "trimtab.policy": str(stored.identity)}
        span = tracer().start_span("policy.push", context=parse_traceparent(stored.traceparent), attributes=attributes)
        self._push = (stored.identity, span)
        return traceparent(span)

    def answered(
        self, identity: Identity, result: str, *, refused: TrimtabError | None = None, cause: str = ""
    ) -> bool:
        """Ends the push and its span. False for an answer to another push than the open one."""
        if self.awaiting != identity:
            return False
        self.awaiting = None
        if refused is not None and self._push is not None:
            fail(self._push[1], refused, cause)
        self.close_push(result)
        return True

    def applied(self, identity: Identity, apply_ms: float, now: float) -> None:
        """The node's apply, as a span under the push; `now` is time.monotonic() at the answer."""
        if self._push is not None and self._push[0] == identity:
            facts: dict[str, Any] = {"trimtab.node": self.hello.node.node_id, "trimtab.apply_ms": round(apply_ms, 3)}
            span_at("policy.apply", self._push[1], now - apply_ms / 1000, now, facts)

    def close_push(self, result: str) -> None:
        if self._push is not None:
            self._push[1].set_attribute("trimtab.result", result)
            self._push[1].end()
            self._push = None


async def first_hello(requests: AsyncIterator[control_pb2.ConnectRequest]) -> Hello:
    """Who speaks; InvalidRequest where nobody says so in time."""
    first: control_pb2.ConnectRequest | None = None
    with contextlib.suppress(TimeoutError, StopAsyncIteration):
        async with asyncio.timeout(HELLO_S):
            first = await anext(requests)
    if first is None or not first.HasField("hello"):
        raise InvalidRequest("the first message of a control stream must be Hello")
    return codec.decode_hello(first.hello)
