"""From a request to a worker and back: deadline, choice of worker, retries, and the one account of each request.

The only place that retries. Until a token has been delivered, a request whose worker fails goes to another one; after that the stream is cut
with the count delivered (`Call._go_elsewhere` is where resuming belongs). Invariant: however a call ends, the worker is told at once, and
nothing of the call is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span

from services.gateway.accounting import Account
from services.gateway.admission import Admission
from services.gateway.endpoint import WINDOW_TOKENS, Stream
from services.gateway.endpoints import Endpoints
from services.gateway.metrics import GatewayMetrics
from trimtab import codec, routing, validation
from trimtab.errors import (
    DeadlineExceeded,
    Draining,
    EngineFault,
    InvalidRequest,
    NoWorker,
    SlowReader,
    StreamCut,
    TrimtabError,
    WrongPool,
)
from trimtab.kit import telemetry
from trimtab.messages import Request, Workload
from trimtab.v1 import inference_pb2

MAX_ATTEMPTS = 3
TENANT = "default"
_WIRE_WORKLOAD = {Workload.REALTIME: inference_pb2.WORKLOAD_REALTIME, Workload.BATCH: inference_pb2.WORKLOAD_BATCH}


class Dispatch:
    """What every call shares. Belongs to one event loop."""

    def __init__(
        self,
        endpoints: Endpoints,
        metrics: GatewayMetrics,
        admission: Admission,
        *,
        default_workload: Workload,
        deadline_s: Mapping[Workload, float],
    ) -> None:
        self.endpoints = endpoints
        self.metrics = metrics
        self.admission = admission
        self.default_workload = default_workload
        self.deadline_s = deadline_s
        self.starts = itertools.count(1)

    def generate(
        self, request: inference_pb2.GenerateRequest, *, timeout_s: float | None = None, parent: Context | None = None
    ) -> Call:
        """A request's call, to be read once. `timeout_s` None takes the workload's default; the message becomes the call's own."""
        return Call(self, request, timeout_s, parent)


class Call:
    """One request. `request_id`, `trace_id` and `traceparent` are known from the start."""

    def __init__(
        self,
        dispatch: Dispatch,
        pb: inference_pb2.GenerateRequest,
        timeout_s: float | None,
        parent: Context | None,
    ) -> None:
        self._dispatch = dispatch
        self._pb = pb
        self._error: TrimtabError | None = None
        """What ends the call whatever its worker says."""
        pb.request_id = pb.request_id or f"{random.getrandbits(128):032x}"
        pb.tenant = TENANT
        if not pb.model and len(served := dispatch.endpoints.models()) == 1:
            pb.model = next(iter(served))
        try:
            self._request = codec.decode_request(pb)
        except InvalidRequest as e:
            self._request = Request(pb.request_id, pb.model, "")
            self._error = e
        self.request_id = pb.request_id
        self.workload = self._request.workload or dispatch.default_workload
        pb.workload = _WIRE_WORKLOAD[self.workload]
        timeout = dispatch.deadline_s[self.workload] if timeout_s is None else timeout_s
        self._deadline = time.monotonic() + timeout
        self._timer: asyncio.TimerHandle | None = None
        self._account = Account(self._request, self.workload, parent, dispatch.metrics)
        self._stream: Stream | None = None
        self._attempt_span: Span | None = None
        self._tried: set[str] = set()
        self._fault: TrimtabError | None = None
        self._admitted = False
        self._unaccepted = False
        """Admitted, and no worker has said Accepted."""
        self._finished = False
        self._begun = False
        self._reader: asyncio.Task[Any] | None = None
        self._given_up = False
        self.handed_over_at: float | None = None
        """When the reader got what it is busy with; None while it waits here."""
        self._next_index = len(self._request.resume.token_ids) if self._request.resume else 0
        self._unread_tokens = 0

    @property
    def trace_id(self) -> str:
        return self._account.trace_id

    @property
    def traceparent(self) -> str:
        return telemetry.traceparent(self._account.span)

    @contextlib.asynccontextmanager
    async def responses(self) -> AsyncIterator[AsyncIterator[inference_pb2.GenerateResponse]]:
        """Accepted once, then deltas, then Finish; or the error. Leaving the block, however that comes, is the call's end."""
        self._reader = asyncio.current_task()
        async with aclosing(self._responses()) as responses:
            try:
                yield responses
            except asyncio.CancelledError:
                if self._reader is None or not self._given_up:
                    raise
                assert self._error is not None
                self._reader.uncancel()
                raise self._error from None

    async def _responses(self) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        error: BaseException | None = None
        try:
            self._admit()
            while not self._finished:
                self.handed_over_at = None
                responses = await self._advance()
                self.handed_over_at = time.monotonic()
                for response in responses:
                    yield response
        except BaseException as e:
            error = e
            raise
        finally:
            self._leave(error)

    def end(self, error: TrimtabError) -> None:
        """Stop it from outside; the reader gets what waits, then the error."""
        self._error = error
        if self._stream is not None:
            self._stream.close()
            self._stream.fail(error)

    def give_up(self, after_s: float) -> None:
        """Cancel a reader that takes nothing."""
        self.end(SlowReader(f"the reader took nothing for {after_s:g} s"))
        if self._reader is not None and not self._given_up:
            self._given_up = True
            self._reader.cancel()

    def _admit(self) -> None:
        if self._error is not None:
            raise self._error
        validation.check(self._request)
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        self._dispatch.admission.enter(self)
        self._admitted = self._unaccepted = True
        self._timer = asyncio.get_running_loop().call_later(remaining, self._expire)

    async def _advance(self) -> list[inference_pb2.GenerateResponse]:
        """The next responses, after what was returned before has been read."""
        if self._unread_tokens >= WINDOW_TOKENS // 2 and self._stream is not None:
            self._stream.grant(self._unread_tokens)
            self._unread_tokens = 0
        while True:
            try:
                if self._stream is None:
                    self._stream = self._begin()
                return self._digest(self._stream, await self._stream.take())
            except (EngineFault, Draining, WrongPool) as fault:
                self._go_elsewhere(fault)

    def _begin(self) -> Stream:
        """Choose a worker and send it the request."""
        if self._error is not None:
            raise self._error
        endpoints = self._dispatch.endpoints
        try:
            pick = routing.pick(endpoints.candidates(), self._request.model, avoid=self._tried, tie=random.random())
        except NoWorker as e:
            # What the last worker died of says more than that there is no other one.
            self._error = self._fault or e
            raise self._error from None
        self._tried.add(pick.node_id)
        self._attempt_span = self._account.attempt(pick.node_id, pick.why)
        return endpoints.get(pick.node_id).open(
            self._pb,
            # Its own for every Start of this gateway, not for this request alone: a client may use an id again at once, and what
            # the earlier request's worker still sends must not be taken for the later one's.
            next(self._dispatch.starts),
            timeout_ms=max(1, int((self._deadline - time.monotonic()) * 1000.0)),
            traceparent=telemetry.traceparent(self._attempt_span),
        )

    def _digest(
        self, stream: Stream, events: list[inference_pb2.GenerateResponse]
    ) -> list[inference_pb2.GenerateResponse]:
        """What the client is to see of them. Deltas that wait together become one message: messages cost, not bytes."""
        out: list[inference_pb2.GenerateResponse] = []
        last: inference_pb2.Delta | None = None
        for event in events:
            match event.WhichOneof("event"):
                case "delta":
                    delta = event.delta
                    if delta.first_index != self._next_index:
                        stream.close()
                        stream.fail(StreamCut(f"token {delta.first_index} came where {self._next_index} was due"))
                        break
                    tokens = len(delta.token_ids)
                    self._next_index += tokens
                    self._unread_tokens += tokens
                    self._begun = True
                    self._account.delivered(tokens)
                    if last is None:
                        last = delta
                        out.append(event)
                    else:
                        last.token_ids.extend(delta.token_ids)
                        last.text += delta.text
                        last.logprobs.extend(delta.logprobs)
                case "accepted":
                    if self._unaccepted:
                        self._mark_accepted()
                        self._account.prompt_tokens = event.accepted.prompt_tokens
                        self._account.worker = event.accepted.worker_id
                        out.append(event)
                case "finish":
                    self._finished = stream.ended = True
                    self._account.finish = codec.decode_finish(event.finish)
                    out.append(event)
                case _:
                    last = None
                    out.append(event)
        return out

    def _go_elsewhere(self, fault: TrimtabError) -> None:
        """Returns when another worker may be asked; else raises what the client is to hear."""
        self._end_attempt(fault)
        if self._begun:
            delivered = str(self._account.tokens)
            raise StreamCut(
                f"the stream was cut after {delivered} tokens: {fault.message}",
                metadata={"tokens_delivered": delivered, "cause": fault.reason},
            ) from fault
        if fault is self._error or self._account.attempts >= MAX_ATTEMPTS:
            raise fault
        self._fault = fault

    def _end_attempt(self, error: BaseException | None, *, superseded: bool = True) -> None:
        if self._stream is not None:
            self._stream.close(superseded=superseded)
            self._stream = None
        if self._attempt_span is not None:
            if isinstance(error, TrimtabError):
                telemetry.fail(self._attempt_span, error, error.reason)
            self._attempt_span.end()
            self._attempt_span = None

    def _expire(self) -> None:
        self.end(DeadlineExceeded("the deadline passed before the output was complete"))

    def _mark_accepted(self) -> None:
        self._unaccepted = False
        self._dispatch.admission.accepted(self)

    def _leave(self, error: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end_attempt(error, superseded=False)
        if self._unaccepted:
            self._mark_accepted()
        if self._admitted:
            self._dispatch.admission.leave(self)
        if error is not None and not isinstance(error, Exception):
            # The reader was cancelled or closed the iterator: by itself after the end, on the way, or because it was made to.
            error = None if self._finished else self._error or error
        self._account.close(error)
