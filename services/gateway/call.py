"""One request through a gateway: deadline, choice of worker, retries, resuming, and its account.

The only place that retries and resumes. A worker that fails costs its requests a moment: before the first token another one begins anew,
after it another one goes on at the next token and byte, and the client sees one stream (`trimtab.resuming` decides). Invariants: what was
handed to the client is never sent again and never missing; only the newest attempt is listened to; however a call ends, the worker is told at
once, and nothing of the call is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from opentelemetry.context import Context

from services.gateway import notices
from services.gateway.account import Account
from services.gateway.attempt import ELSEWHERE, Attempt, cause_of, cut
from services.gateway.delivered import Delivered
from services.gateway.endpoint import WINDOW_TOKENS, Endpoint
from services.gateway.search import Nobody, Search
from services.gateway.stream import Stream
from trimtab import codec, resuming, routing, validation
from trimtab.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    Quarantined,
    QueueFull,
    SlowReader,
    StreamCut,
    TrimtabError,
)
from trimtab.kit import telemetry
from trimtab.messages import Request, Workload
from trimtab.resuming import Cause
from trimtab.tenant import Tenant
from trimtab.v1 import inference_pb2

if TYPE_CHECKING:
    from services.gateway.dispatch import Dispatch

_WIRE_WORKLOAD = {Workload.REALTIME: inference_pb2.WORKLOAD_REALTIME, Workload.BATCH: inference_pb2.WORKLOAD_BATCH}


class Call:
    """`request_id`, `trace_id` and `traceparent` are known from the start."""

    def __init__(
        self,
        dispatch: Dispatch,
        pb: inference_pb2.GenerateRequest,
        tenant: Tenant,
        timeout_s: float | None,
        parent: Context | None,
    ) -> None:
        self._dispatch = dispatch
        self._pb = pb
        self.tenant = tenant
        self._error: TrimtabError | None = None
        """What ends the call whatever its worker says."""
        pb.request_id = pb.request_id or f"{random.getrandbits(128):032x}"
        pb.tenant = tenant.name
        if not pb.model and len(served := dispatch.endpoints.models()) == 1:
            pb.model = next(iter(served))
        try:
            self._request = codec.decode_request(pb)
        except InvalidRequest as e:
            self._request = Request(pb.request_id, pb.model, "", tenant=tenant.name)
            self._error = e
        self.request_id = pb.request_id
        self.workload = self._request.workload or tenant.workload or dispatch.default_workload
        pb.workload = _WIRE_WORKLOAD[self.workload]
        if timeout_s is None:
            timeout_s = tenant.deadline_s.get(self.workload, dispatch.deadline_s[self.workload])
        self._deadline = time.monotonic() + timeout_s
        self._timer: asyncio.TimerHandle | None = None
        self._account = Account(self._request, self.workload, parent, dispatch.metrics, dispatch.policy)
        self._delivered = Delivered(self._request.resume)
        self._standing = resuming.Standing(
            accepted=self._request.resume is not None,
            delivered=self._delivered.next_index,
            resumable=self._request.resume is not None,
        )
        self.prompt_tokens = dispatch.tokens_of(self._request)
        self._search = Search(dispatch, self._request, self.workload, tenant.name)
        self._attempt: Attempt | None = None
        self._fault: TrimtabError | None = None
        self._admitted = False
        self._unaccepted = False
        """Admitted, and no worker has said Accepted."""
        self._finished = False
        self._reader: asyncio.Task[Any] | None = None
        self._given_up = False
        self.handed_over_at: float | None = None
        """When the reader got what it is busy with; None while it waits here."""
        self._unread_tokens = self._cap = 0
        self._to_say: list[inference_pb2.GenerateResponse] = []
        """Notices of this gateway's own, which wait for the stream's next word."""

    @property
    def trace_id(self) -> str:
        return self._account.trace_id

    @property
    def traceparent(self) -> str:
        return telemetry.traceparent(self._account.span)

    @property
    def cold(self) -> bool:
        """By the estimate of its prompt's length."""
        return self.prompt_tokens >= self._dispatch.policy().paths.hot_below

    @property
    def resumed(self) -> bool:
        """Its client goes on with what it got elsewhere; of nothing, it begins anew."""
        return self._delivered.before

    @property
    def tokens(self) -> int:
        """Of its prompt, and of its output at most where that is said."""
        return self.prompt_tokens + (self._request.sampling.max_tokens or 0)

    @contextlib.asynccontextmanager
    async def responses(self) -> AsyncIterator[AsyncIterator[inference_pb2.GenerateResponse]]:
        """Accepted once, then deltas and notices, then Finish; or the error. Leaving the block, however that comes, is the call's end."""
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
        if self._attempt is not None:
            self._attempt.stream.close()
            self._attempt.stream.fail(error)
        self._search.wake()

    def give_place(self, error: TrimtabError) -> None:
        """End it, and leave admission at once: its id is another call's now."""
        self.end(error)
        self._give_back()

    def give_up(self, after_s: float) -> None:
        """Cancel a reader that takes nothing."""
        self.end(SlowReader(f"the reader took nothing for {after_s:g} s"))
        if self._reader is not None and not self._given_up:
            self._given_up = True
            self._reader.cancel()

    def cap(self, max_tokens: int, because: str) -> None:
        """Give it no more output than so many tokens, and say so."""
        asked = self._pb.sampling.max_tokens if self._pb.sampling.HasField("max_tokens") else None
        if asked is not None and asked <= max_tokens:
            return
        self._cap = max_tokens
        self._to_say.append(notices.capped(max_tokens, because))

    def _admit(self) -> None:
        if self._error is not None:
            raise self._error
        validation.check(self._request)
        now = time.monotonic()
        remaining = self._deadline - now
        if remaining <= 0:
            raise DeadlineExceeded("the deadline had passed when the request arrived")
        self._dispatch.quarantine.check(self._pb, now)
        self._dispatch.admission.enter(self)
        self._admitted = self._unaccepted = True
        self._timer = asyncio.get_running_loop().call_later(remaining, self._expire)

    async def _advance(self) -> list[inference_pb2.GenerateResponse]:
        """The next responses, after what was returned before has been read."""
        if self._unread_tokens >= WINDOW_TOKENS // 2 and self._attempt is not None:
            self._attempt.stream.grant(self._unread_tokens)
            self._unread_tokens = 0
        while True:
            try:
                if self._attempt is None:
                    self._attempt = await self._begin()
                    self._unread_tokens = 0
                stream = self._attempt.stream
                return self._digest(stream, await stream.take())
            except ELSEWHERE as fault:
                self._go_elsewhere(fault)

    async def _begin(self) -> Attempt:
        """Find a worker, wait for one where that is called for, and send it the request."""
        served = False
        while True:
            if self._error is not None:
                raise self._error
            nobody: Nobody | None = None
            try:
                found = self._search.look(served=served)
                if found is not None:
                    return self._send(*found)
            except (NoWorker, QueueFull, ModelNotFound) as e:
                nobody = e
            try:
                served = await self._search.wait(nobody, promised=resuming.waits(self._standing))
            except (NoWorker, QueueFull, ModelNotFound) as e:
                # What the last worker died of says more than that there is no other one.
                self._error = self._fault or e
                if self._standing.delivered and self._fault is not None:
                    self._error = cut(self._delivered.next_index, self._fault, e.message, here=self._account.tokens)
                raise self._error from None

    def _send(self, endpoint: Endpoint, pick: routing.Pick) -> Attempt:
        index, attempts = self._delivered.next_index, self._standing.attempts + 1
        self._standing = dataclasses.replace(self._standing, attempts=attempts)
        if index:
            self._pb.resume.CopyFrom(self._delivered.resume(attempts))
        span = self._account.attempt(pick.node_id, pick.why)
        now = time.monotonic()
        try:
            stream = endpoint.open(
                self._pb,
                # Its own for every Start of this gateway, not for this request alone: a client may use an id again at once, and what
                # the earlier request's worker still sends must not be taken for the later one's.
                self._dispatch.next_start(),
                timeout_ms=max(1, int((self._deadline - now) * 1000.0)),
                traceparent=telemetry.traceparent(span),
                age_ms=int((now - self._account.started) * 1000.0),
                cap=self._cap,
                tokens=self.prompt_tokens + index,
            )
        except TrimtabError:
            span.end()
            raise
        if pick.probe:
            endpoint.guard.probing(now * 1000.0)
        self._dispatch.admission.started(self)
        return Attempt(
            endpoint, stream, span, self._dispatch.observe, probe=pick.probe, compared=pick.compared, index=index
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
                    if delta.first_index != self._delivered.next_index:
                        stream.close()
                        stream.fail(
                            StreamCut(f"token {delta.first_index} came where {self._delivered.next_index} was due")
                        )
                        break
                    self._note_tokens(delta)
                    if last is None:
                        last = delta
                        out.append(event)
                    else:
                        last.token_ids.extend(delta.token_ids)
                        last.text += delta.text
                        last.logprobs.extend(delta.logprobs)
                case "accepted":
                    out += self._note_accepted(event)
                    last = None
                case "finish":
                    self._finished = stream.ended = True
                    self._account.finish = codec.decode_finish(event.finish)
                    out.append(event)
                case "notice" if event.notice.kind == inference_pb2.NOTICE_KIND_STARTED:
                    pass  # between worker and gateway
                case _:
                    last = None
                    out.append(event)
        return out

    def _note_tokens(self, delta: inference_pb2.Delta) -> None:
        tokens = len(delta.token_ids)
        if tokens and self._attempt is not None:
            self._attempt.token()
        self._delivered.take(delta)
        self._unread_tokens += tokens
        self._account.delivered(tokens)

    def _note_accepted(self, event: inference_pb2.GenerateResponse) -> list[inference_pb2.GenerateResponse]:
        """The client hears of the first worker; of another one only when it goes on with a stream that had begun."""
        accepted, first, told = event.accepted, self._unaccepted, self._delivered.prompt_digest
        if first:
            self._mark_accepted()
            self._dispatch.learn(self._request, accepted.prompt_tokens)
            self.prompt_tokens = accepted.prompt_tokens
        self._standing = dataclasses.replace(self._standing, accepted=True, resumable=accepted.resumable)
        if not self._delivered.next_index:
            # Of the prompt as that worker has it whose tokens come: another one may have had it otherwise.
            self._delivered.prompt_digest = accepted.prompt_digest
        self._account.prompt_tokens, self._account.worker = accepted.prompt_tokens, accepted.worker_id
        if first:
            said, self._to_say = self._to_say, []
            return [event, *said]
        if not self._delivered.next_index:
            return [event] if told != accepted.prompt_digest else []
        because = self._fault.message if self._fault else "its worker left"
        return [notices.resumed(self._delivered.next_index, accepted.worker_id, because)]

    def _go_elsewhere(self, fault: TrimtabError) -> None:
        """Returns when another worker may be asked; else raises what the client is to hear."""
        attempt = self._attempt
        self._end_attempt(fault)
        if fault is self._error or attempt is None:
            raise fault
        # From here on the attempt is over, whatever it still says.
        cause = cause_of(fault)
        self._standing, verdict = resuming.ended(
            self._standing,
            cause,
            gained=self._delivered.next_index - attempt.index,
            suspects=attempt.stream.suspects,
            attempts=self._dispatch.policy().resume.attempts,
            worker=attempt.process,
        )
        self._search.failed(attempt.key, again=cause in (Cause.BROKE, Cause.FULL), misplaced=cause is Cause.MISPLACED)
        match verdict.next:
            case resuming.Next.ELSEWHERE:
                self._fault = fault
                self._account.moved(cause.value, begun=self._standing.delivered > 0)
            case resuming.Next.GIVE_UP if self.workload is Workload.BATCH and isinstance(fault, QueueFull):
                # Its credit was another gateway's too: back into the line.
                self._fault = None
            case resuming.Next.GIVE_UP:
                raise fault
            case resuming.Next.CUT:
                told = cut(self._delivered.next_index, fault, verdict.why, here=self._account.tokens)
                raise told from (None if told is fault else fault)
            case resuming.Next.QUARANTINE:
                self._dispatch.quarantine.add(self._pb, time.monotonic())
                raise Quarantined(
                    f"{verdict.why}: it is not sent to another one ({fault.message})",
                    metadata={"tokens_delivered": str(self._delivered.next_index)},
                ) from fault

    def _end_attempt(self, error: BaseException | None, *, superseded: bool = True) -> None:
        if self._attempt is None:
            return
        attempt, self._attempt = self._attempt, None
        # First tokens of long prompts and of BATCH say more of the request than of the worker.
        comparable = attempt.compared and self.workload is Workload.REALTIME and not self.cold
        attempt.end(error, finished=self._finished, superseded=superseded, comparable=comparable)

    def _expire(self) -> None:
        self.end(DeadlineExceeded("the deadline passed before the output was complete"))

    def _mark_accepted(self) -> None:
        self._unaccepted = False
        self._dispatch.admission.accepted(self)

    def _give_back(self) -> None:
        if self._unaccepted:
            self._mark_accepted()
        if self._admitted:
            self._admitted = False
            self._dispatch.admission.leave(self)

    def _leave(self, error: BaseException | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._end_attempt(error, superseded=False)
        self._give_back()
        if error is not None and not isinstance(error, Exception):
            # The reader was cancelled or closed the iterator: by itself after the end, on the way, or because it was made to.
            error = None if self._finished else self._error or error
        self._account.close(error)
