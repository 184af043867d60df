"""One worker as a gateway reaches it: a channel, one Attach stream, and the requests that are open on it.

The reader hands each piece of an engine step to its request and goes on: no reader waits for another, and a request that nobody takes from
is held back by its window at the worker, not here. Invariant: a request that was opened ends in exactly one way, by its finish, by an error,
or by `Stream.close`; when the link dies, every open request hears of it at once.
"""

from __future__ import annotations

import asyncio
import enum
import random
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from trimtab import codec
from trimtab.errors import EngineDead, InvalidRequest, TrimtabError
from trimtab.kit import rpc
from trimtab.kit.tls import CertificateError
from trimtab.messages import Load, NodeState
from trimtab.v1 import inference_pb2, inference_pb2_grpc

log = structlog.get_logger(__name__)

SILENCE_TICK_S = 0.25
SILENT_TICKS = 6
"""A link without a message for 1.5 s is dead (DESIGN §3). Ticks are counted, not seconds: a stall of our own loop is no silence of theirs."""
BACKOFF_S = 0.1
MAX_BACKOFF_S = 2.0
OUTGOING_MESSAGES = 4096
"""More than this unsent means that the worker reads nothing: the link is dead."""
ENVELOPE_BYTES = 64 << 10
"""Room for what travels around a request: ids, trace, framing."""
WINDOW_TOKENS = 256
"""What a reader may leave unread at the gateway before the worker holds his tokens back."""


class LinkState(enum.Enum):
    CONNECTING = "connecting"
    UP = "up"
    CLOSED = "closed"


class Stream:
    """What one attempt at a request receives. One reader; the endpoint is the writer."""

    __slots__ = ("_endpoint", "_error", "_events", "_waiter", "attempt", "ended", "request_id")

    def __init__(self, endpoint: Endpoint, request_id: str, attempt: int) -> None:
        self.request_id = request_id
        self.attempt = attempt
        self.ended = False
        """True once the worker has nothing more to say of it, so that leaving needs no Cancel."""
        self._endpoint = endpoint
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
            self._endpoint.send(
                inference_pb2.AttachRequest(
                    window=inference_pb2.Window(request_id=self.request_id, attempt=self.attempt, n=tokens)
                )
            )

    def close(self, *, superseded: bool = False) -> None:
        """Leave; the worker is told unless it has ended the request itself. Safe to call again."""
        self._endpoint.leave(self, superseded=superseded)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Endpoint:
    """Belongs to one event loop. `run` keeps the link up until `close`; `node_state` and `model` are what membership knows of the worker."""

    def __init__(
        self,
        node_id: str,
        address: str,
        *,
        gateway_id: str,
        model: str = "",
        max_model_len: int = 0,
        asks_model: bool = False,
        on_dropped: Callable[[], None] = lambda: None,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.model = model
        self.max_model_len = max_model_len
        self.node_state = NodeState.SERVING
        self.state = LinkState.CONNECTING
        self.retiring = False
        """No new requests; those that run go on until they end, and a dead link is not opened again."""
        self.load = Load()
        self.credits = inference_pb2.Credits()
        self.why_down = "not connected yet"
        self._gateway_id = gateway_id
        self._asks_model = asks_model
        self._on_dropped = on_dropped
        self._open()
        self._streams: dict[str, Stream] = {}
        self._outgoing: asyncio.Queue[inference_pb2.AttachRequest] = asyncio.Queue()
        self._fatal: asyncio.Future[str] | None = None
        self._silent_ticks = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def open_requests(self) -> int:
        return len(self._streams)

    @property
    def serving(self) -> bool:
        """Whether new requests may go there."""
        return self.state is LinkState.UP and not self.retiring and self.node_state is NodeState.SERVING

    def open(
        self, request: inference_pb2.GenerateRequest, attempt: int, *, timeout_ms: int, traceparent: str
    ) -> Stream:
        """Send a request. `timeout_ms` is what is left of its time."""
        if self.state is not LinkState.UP:
            raise EngineDead(f"the link to worker {self.node_id} is down: {self.why_down}")
        if request.ByteSize() > rpc.MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
            # Sent, it would end the link, and with it every other stream there.
            raise InvalidRequest(f"the request is larger than {rpc.MAX_MESSAGE_BYTES - ENVELOPE_BYTES} bytes")
        stream = Stream(self, request.request_id, attempt)
        self._streams[request.request_id] = stream
        self._idle.clear()
        self.send(
            inference_pb2.AttachRequest(
                start=inference_pb2.Start(
                    request_id=request.request_id,
                    attempt=attempt,
                    generate_request=request,
                    timeout_ms=timeout_ms,
                    traceparent=traceparent,
                    window=WINDOW_TOKENS,
                )
            )
        )
        return stream

    def send(self, message: inference_pb2.AttachRequest) -> None:
        """Queue a message; on a dead link it goes nowhere, since the worker forgets the link's requests by itself."""
        if self._fatal is None or self._fatal.done():
            return
        if self._outgoing.qsize() >= OUTGOING_MESSAGES:
            self._fatal.set_result("it reads nothing from its link")
            return
        self._outgoing.put_nowait(message)

    def leave(self, stream: Stream, *, superseded: bool) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return
        del self._streams[stream.request_id]
        if not self._streams:
            self._idle.set()
        if stream.ended:
            return
        stream.ended = True
        request_id, attempt = stream.request_id, stream.attempt
        message = inference_pb2.AttachRequest()
        if superseded:
            message.superseded.CopyFrom(inference_pb2.Superseded(request_id=request_id, attempt=attempt))
        else:
            message.cancel.CopyFrom(inference_pb2.Cancel(request_id=request_id, attempt=attempt))
        self.send(message)

    async def run(self) -> None:
        """Until cancelled, or until the link of a retiring endpoint has ended."""
        backoff = BACKOFF_S
        try:
            while not self.retiring:
                was_up = await self._session()
                if not was_up:
                    await self._open_anew()
                backoff = BACKOFF_S if was_up else min(MAX_BACKOFF_S, backoff * 2)
                if not self.retiring:
                    await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
        finally:
            self.state = LinkState.CLOSED
            self._down("closed")
            await self._channel.close()

    def _open(self) -> None:
        self._channel = rpc.channel(self.address, "worker")
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def _open_anew(self) -> None:
        """With the certificate as it is now: the one that this channel has may have run out."""
        if not rpc.uses_tls():
            return
        old = self._channel
        try:
            self._open()
        except CertificateError as e:
            log.warning("certificate not read", because=str(e))
        else:
            await old.close()

    async def until_idle(self) -> None:
        """Wait until what runs here has ended, or the link has died."""
        await self._idle.wait()

    async def _session(self) -> bool:
        """One Attach stream, from its opening to its end; whether it was ever up."""
        loop = asyncio.get_running_loop()
        fatal: asyncio.Future[str] = loop.create_future()
        self._fatal = fatal
        self._outgoing = asyncio.Queue()
        self._silent_ticks = 0
        watchdog = loop.call_later(SILENCE_TICK_S, self._tick, fatal)
        call = self._stub.Attach()
        work = [
            asyncio.create_task(self._read(call), name=f"read {self.node_id}"),
            asyncio.create_task(self._write(call, self._outgoing), name=f"write {self.node_id}"),
        ]
        was_up = False
        try:
            ends: list[asyncio.Future[Any]] = [*work, fatal]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            was_up = self.state is LinkState.UP
            self._down(fatal.result() if fatal.done() else _why(work))
        finally:
            self._fatal = None
            watchdog.cancel()
            fatal.cancel()
            call.cancel()
            for task in work:
                await rpc.cancel_and_wait(task)
        return was_up

    def _tick(self, fatal: asyncio.Future[str]) -> None:
        if fatal.done():
            return
        self._silent_ticks += 1
        if self._silent_ticks >= SILENT_TICKS:
            fatal.set_result(f"it said nothing for {SILENCE_TICK_S * SILENT_TICKS:g} s")
            return
        asyncio.get_running_loop().call_later(SILENCE_TICK_S, self._tick, fatal)

    async def _write(self, call: Any, outgoing: asyncio.Queue[inference_pb2.AttachRequest]) -> None:
        await call.write(inference_pb2.AttachRequest(hello=inference_pb2.AttachHello(gateway_id=self._gateway_id)))
        while True:
            await call.write(await outgoing.get())

    async def _read(self, call: Any) -> None:
        if self._asks_model:
            answer = await self._stub.ListModels(inference_pb2.ListModelsRequest())
            for model in answer.models[:1]:
                self.model, self.max_model_len = model.name, model.max_model_len
        async for response in call:
            self._silent_ticks = 0
            if response.WhichOneof("event") != "step":
                continue
            step = response.step
            self.load = codec.decode_load(step.load)
            self.credits = step.credits
            if self.state is LinkState.CONNECTING:
                self.state = LinkState.UP
                log.info("link up", worker=self.node_id, address=self.address, model=self.model)
            for piece in step.pieces:
                self._deliver(piece)

    def _deliver(self, piece: inference_pb2.Piece) -> None:
        stream = self._streams.get(piece.request_id)
        if stream is None or stream.ended or stream.attempt != piece.attempt:
            self._on_dropped()
            return
        match piece.WhichOneof("content"):
            case "event":
                stream.push(piece.event)
            case "status":
                stream.ended = True
                stream.fail(rpc.decode_status(piece.status))
            case _:
                self._on_dropped()

    def _down(self, why: str) -> None:
        """The link is gone: so is every request on it."""
        if self.state is LinkState.UP:
            log.warning("link down", worker=self.node_id, address=self.address, why=why, open=len(self._streams))
        if self.state is not LinkState.CLOSED:
            self.state = LinkState.CONNECTING
            self.why_down = why
        streams, self._streams = self._streams, {}
        self._idle.set()
        for stream in streams.values():
            stream.ended = True
            stream.fail(EngineDead(f"the link to worker {self.node_id} died: {why}"))


def _why(tasks: list[asyncio.Task[None]]) -> str:
    """What ended a link, in words."""
    for task in tasks:
        error = task.exception() if task.done() and not task.cancelled() else None
        if isinstance(error, grpc.aio.AioRpcError):
            said = error.details() or ""
            return f"{error.code().name}: {rpc.tls_fault(said, 'worker') or said}"
        if error is not None:
            return str(error) or type(error).__name__
    return "the worker closed it"
