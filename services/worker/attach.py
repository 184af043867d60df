"""One gateway's link: many requests up, one message down for each engine step.

Tokens of one step reach this link within one turn of the event loop, so its writer, woken once, finds them together: messages are cut, not
bytes. The link never blocks: a request whose reader has no window left is buffered up to `SLOW_READER_TOKENS`, then ended. When the link
ends, every request on it is aborted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace

import structlog

from services.worker.gate import Gate
from services.worker.serving import Serving
from services.worker.shares import Shares
from trimtab import codec
from trimtab import messages as m
from trimtab.errors import DeadlineExceeded, Internal, InvalidRequest, SlowReader, TrimtabError
from trimtab.kit import rpc
from trimtab.v1 import inference_pb2

log = structlog.get_logger(__name__)

IDLE_S = 0.25
HELLO_S = 0.1
"""What a gateway gets to introduce itself before it is told what it may send: who says what it wants is not promised what others want."""
SLOW_READER_TOKENS = 256


@dataclass(slots=True, eq=False)
class _Open:
    """One request on the link. `window` counts tokens that its reader can take; `held` waits for a window."""

    attempt: int
    window: int = 0
    held: deque[inference_pb2.Piece] = field(default_factory=deque)
    held_tokens: int = 0
    task: asyncio.Task[None] | None = None
    coming: m.Workload | None = None
    """Until it has its place in the queue: what it is, so that nobody is promised that place."""


class Link:
    """Belongs to one event loop; `aclose` aborts what is open."""

    def __init__(
        self,
        serving: Serving,
        gate: Gate,
        shares: Shares,
        step_no: Callable[[], int],
        hung: Callable[[], bool] = lambda: False,
    ) -> None:
        self._serving = serving
        self._gate = gate
        self._step_no = step_no
        self._hung = hung
        self._starts = 0
        self._open: dict[str, _Open] = {}
        self._pieces: list[inference_pb2.Piece] = []
        self._wake = asyncio.Event()
        # The first message waits for nothing but the gateway's own: it tells the gateway that the link is up.
        self._wake.set()
        self._heard = asyncio.Event()
        self._shares = shares
        self._share = shares.join(self._wake.set)
        self._closed = False

    async def read(self, requests: AsyncIterator[inference_pb2.AttachRequest]) -> None:
        """Until the gateway closes its side."""
        gateway = ""
        try:
            async for message in requests:
                self._heard.set()
                match message.WhichOneof("event"):
                    case "hello":
                        gateway = message.hello.gateway_id
                        log.info("gateway attached", gateway=gateway)
                        if message.hello.tells_wants:
                            self._shares.want(self._share, 0)
                            self._wake.set()
                    case "wants":
                        self._shares.want(self._share, message.wants.batch)
                    case "start":
                        self._start(message.start)
                    case "window":
                        self._grant(message.window)
                    case "cancel":
                        self._end(message.cancel.request_id, message.cancel.attempt)
                    case "superseded":
                        self._end(message.superseded.request_id, message.superseded.attempt)
                    case _:
                        # A newer gateway's event; what it needs it learns by our silence.
                        log.warning("unknown event on the link", gateway=gateway)
        finally:
            log.info("gateway detached", gateway=gateway, open=len(self._open))
            self._closed = True
            self._wake.set()
            self._heard.set()

    async def steps(self) -> AsyncIterator[inference_pb2.Step]:
        """The link's messages down: at once when there is something, else each 250 ms."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HELLO_S):
                await self._heard.wait()
        while not self._closed:
            try:
                async with asyncio.timeout(IDLE_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            pieces, self._pieces = self._pieces, []
            yield inference_pb2.Step(
                step_no=self._step_no(),
                load=codec.encode_load(self._serving.load),
                credits=inference_pb2.Credits(
                    realtime=self._gate.room(m.Workload.REALTIME), batch=self._shares.promise(self._share)
                ),
                pieces=pieces,
                hung=self._hung(),
                draining=self._serving.draining,
                starts=self._starts,
                hears_wants=True,
            )

    async def aclose(self) -> None:
        self._shares.leave(self._share)
        tasks = [o.task for o in self._open.values() if o.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, start: inference_pb2.Start) -> None:
        self._starts += 1
        batch = start.generate_request.workload == inference_pb2.WORKLOAD_BATCH
        if batch:
            self._shares.started(self._share)
        before = self._open.get(start.request_id)
        if before is not None:
            if before.attempt >= start.attempt:
                error = InvalidRequest(f"request {start.request_id!r} is open on this link already")
                self._send(self._piece(start.request_id, start.attempt, error))
                return
            self._end(start.request_id, before.attempt)
        entry = _Open(start.attempt, start.window)
        self._open[start.request_id] = entry
        entry.coming = m.Workload.BATCH if batch else m.Workload.REALTIME
        self._gate.expect(entry.coming)
        entry.task = asyncio.create_task(self._serve(start, entry))
        # Also one that is cancelled before it has begun.
        entry.task.add_done_callback(lambda _: self._came(entry))

    async def _serve(self, start: inference_pb2.Start, entry: _Open) -> None:
        request_id, attempt = start.request_id, start.attempt
        error: TrimtabError | None = None
        try:
            request = codec.decode_request(start.generate_request)
            timeout_s = start.timeout_ms / 1000.0 if start.timeout_ms else None
            events = self._serving.stream(
                replace(request, request_id=request_id),
                start.traceparent,
                age_s=start.age_ms / 1000.0,
                left_s=timeout_s,
                cap=start.output_cap,
            )
            async with asyncio.timeout(timeout_s), aclosing(events):
                async for event in events:
                    self._came(entry)
                    piece = inference_pb2.Piece(request_id=request_id, attempt=attempt, event=codec.encode_event(event))
                    tokens = len(event.token_ids) if isinstance(event, m.Delta) else 0
                    try:
                        self._offer(entry, piece, tokens)
                    except SlowReader as e:
                        await events.athrow(e)  # told inside, it is what the request's own account says
                        raise
        except TimeoutError:
            error = DeadlineExceeded("the deadline passed before the output was complete")
        except TrimtabError as e:
            error = e
        except Exception:
            log.exception("request failed", request_id=request_id)
            error = Internal("an internal error; the worker's log has it")
        finally:
            if error is not None:
                self._release(entry)
                self._send(self._piece(request_id, attempt, error))
            if not entry.held and self._open.get(request_id) is entry:
                del self._open[request_id]

    def _came(self, entry: _Open) -> None:
        """It has its place, or is gone; safe to call again."""
        if entry.coming is not None:
            self._gate.expected(entry.coming)
            entry.coming = None

    def _offer(self, entry: _Open, piece: inference_pb2.Piece, tokens: int) -> None:
        """Send it while the reader has any room; keep the order in any case. A piece may have more tokens than there is room for, where several
        steps came together: it is sent whole, since a reader who has taken less than half of his window asks for no more.
        """
        if not entry.held and (entry.window > 0 or tokens == 0):
            entry.window -= tokens
            self._send(piece)
            return
        if entry.held_tokens > SLOW_READER_TOKENS:
            entry.held.clear()
            raise SlowReader(f"the reader left more than {SLOW_READER_TOKENS} tokens unread")
        entry.held.append(piece)
        entry.held_tokens += tokens

    def _grant(self, window: inference_pb2.Window) -> None:
        entry = self._open.get(window.request_id)
        if entry is None or entry.attempt != window.attempt:
            return
        entry.window += window.n
        while entry.held:
            tokens = len(entry.held[0].event.delta.token_ids)
            if tokens and entry.window <= 0:
                return
            entry.window -= tokens
            entry.held_tokens -= tokens
            self._send(entry.held.popleft())
        if entry.task is not None and entry.task.done():
            del self._open[window.request_id]

    def _release(self, entry: _Open) -> None:
        """A request that fails sends what it holds first: nothing that was made is lost."""
        while entry.held:
            self._send(entry.held.popleft())

    def _end(self, request_id: str, attempt: int) -> None:
        entry = self._open.get(request_id)
        if entry is None or entry.attempt != attempt:
            return
        del self._open[request_id]
        if entry.task is not None:
            entry.task.cancel()

    def _send(self, piece: inference_pb2.Piece) -> None:
        self._pieces.append(piece)
        self._wake.set()

    @staticmethod
    def _piece(request_id: str, attempt: int, error: TrimtabError) -> inference_pb2.Piece:
        # RpcStatus has google.rpc.Status's field numbers, so its bytes are read as one.
        status = inference_pb2.RpcStatus.FromString(rpc.encode_status(error).SerializeToString())
        return inference_pb2.Piece(request_id=request_id, attempt=attempt, status=status)
