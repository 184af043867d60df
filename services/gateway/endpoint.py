"""One worker as a gateway reaches it: a channel, one Attach stream, and the requests that are open on it.

The reader hands each piece of an engine step to its request and goes on: no reader waits for another, and a request that nobody takes from
is held back by its window at the worker, not here. Invariant: a request that was opened ends in exactly one way, by its finish, by an error,
or by `Stream.close`; when the link dies, or the worker says that its engine is hung, every open request hears of it at once.
"""

from __future__ import annotations

import asyncio
import enum
import random
import time
from collections.abc import Callable
from typing import Any

import structlog

from services.gateway.guard import Guard
from services.gateway.link_end import why_ended
from services.gateway.stream import Stream
from trimtab import codec, resuming
from trimtab.breaking import Trip
from trimtab.errors import EngineDead, InvalidRequest
from trimtab.kit import rpc
from trimtab.kit.tls import CertificateError
from trimtab.messages import Load, NodeState, Workload
from trimtab.policy_tree import BreakerPart
from trimtab.routing import Candidate
from trimtab.v1 import inference_pb2, inference_pb2_grpc

log = structlog.get_logger(__name__)

SILENCE_TICK_S = 0.25
SILENT_TICKS = 6
"""A link without a message for 1.5 s is dead (DESIGN §3). Ticks are counted, not seconds: a stall of our own loop is no silence of theirs."""
BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0
OUTGOING_MESSAGES = 4096
"""More than this unsent means that the worker reads nothing: the link is dead."""
ENVELOPE_BYTES = 64 << 10
"""Room for what travels around a request: ids, trace, framing."""
UNBOUNDED = 1 << 30
"""Room at a worker that grants no credits."""
WINDOW_TOKENS = 256
"""What a reader may leave unread at the gateway before the worker holds his tokens back."""


class LinkState(enum.Enum):
    CONNECTING = "connecting"
    UP = "up"
    CLOSED = "closed"


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
        incarnation: str = "",
        on_dropped: Callable[[], None] = lambda: None,
        on_moved: Callable[[Endpoint], None] = lambda _: None,
        on_tripped: Callable[[Endpoint, Trip], None] = lambda e, t: None,
        rules: Callable[[], BreakerPart] = BreakerPart,
    ) -> None:
        self.node_id = node_id
        self.address = address
        self.incarnation = incarnation
        self.pool = ""
        self.isolates = False
        self.weight = 1.0
        self.life = 0
        """Grows whenever it may be another one than before: its link came up anew, or its engine moves again."""
        self.hung = self.draining = False
        """As it says itself."""
        self.guard = Guard(node_id, rules, lambda trip: on_tripped(self, trip))
        self.told_wants = 0
        """BATCH requests that wait here for it, as the worker knows."""
        self.sent_tokens = 0
        """Of prompts that have given no token yet, as estimated."""
        self.model = model
        self.max_model_len = max_model_len
        self.node_state = NodeState.SERVING
        self.state = LinkState.CONNECTING
        self.retiring = False
        """No new requests; those that run go on until they end, and a dead link is not opened again."""
        self.load = Load()
        self.credits: inference_pb2.Credits | None = None
        self.why_down = "not connected yet"
        self._gateway_id = gateway_id
        self._asks_model = asks_model
        self._on_dropped = on_dropped
        self._on_moved = on_moved
        self._starts_sent = self._starts_seen = 0
        self._hears_wants = False
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
        up = self.state is LinkState.UP and self.node_state is NodeState.SERVING
        return up and not (self.retiring or self.hung or self.draining)

    def room(self, workload: Workload) -> int:
        """Requests of this workload that it can take yet, as it said last, less what was sent since."""
        if self.credits is None:
            return UNBOUNDED
        granted = self.credits.realtime if workload is Workload.REALTIME else self.credits.batch
        return granted - (self._starts_sent - self._starts_seen)

    def candidate(self, workload: Workload, now_ms: float) -> Candidate:
        return Candidate(
            self.node_id, self.life, self.serving, self.load, len(self._streams), self.sent_tokens, self.guard.gate(now_ms),
            self.room(workload), self.isolates, self.guard.retry_after_ms(now_ms), self.guard.doubtful(now_ms), self.weight,
        )  # fmt: skip

    def open(
        self,
        request: inference_pb2.GenerateRequest,
        attempt: int,
        *,
        timeout_ms: int,
        traceparent: str,
        age_ms: int = 0,
        cap: int = 0,
        tokens: int = 0,
    ) -> Stream:
        """Send a request. `timeout_ms` is what is left of its time, `age_ms` what it has waited, `cap` the most that
        it gets of output tokens (0: as it asks), `tokens` its prompt's, as estimated."""
        if self.state is not LinkState.UP:
            raise EngineDead(f"the link to worker {self.node_id} is down: {self.why_down}")
        if request.ByteSize() > rpc.MAX_MESSAGE_BYTES - ENVELOPE_BYTES:
            # Sent, it would end the link, and with it every other stream there.
            raise InvalidRequest(f"the request is larger than {rpc.MAX_MESSAGE_BYTES - ENVELOPE_BYTES} bytes")
        stream = Stream(self, request.request_id, attempt, tokens)
        self._streams[request.request_id] = stream
        self.sent_tokens += tokens
        self._starts_sent += 1
        self.told_wants -= self.told_wants > 0 and request.workload == inference_pb2.WORKLOAD_BATCH
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
                    age_ms=age_ms,
                    output_cap=cap,
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

    def tell_wants(self, batch: int) -> None:
        """So many BATCH requests wait here that it could take. Workers that don't divide what is free are told nothing."""
        if self._hears_wants and batch != self.told_wants:
            self.told_wants = batch
            self.send(inference_pb2.AttachRequest(wants=inference_pb2.Wants(batch=batch)))

    def leave(self, stream: Stream, *, superseded: bool) -> None:
        if self._streams.get(stream.request_id) is not stream:
            return
        del self._streams[stream.request_id]
        self._counted(stream)
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
                try:
                    was_up = await self._session()
                except Exception:  # a worker without a link is lost to this gateway: the next session may do better
                    was_up = False
                    log.exception("link failed", worker=self.node_id)
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
        self._silent_ticks = self._starts_sent = self._starts_seen = self.told_wants = 0
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
            self._down(fatal.result() if fatal.done() else why_ended(work))
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
        hello = inference_pb2.AttachHello(gateway_id=self._gateway_id, tells_wants=True)
        await call.write(inference_pb2.AttachRequest(hello=hello))
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
            self.credits = step.credits if step.HasField("credits") else None
            # A worker that does not count them has seen all.
            self._hears_wants = step.hears_wants
            self._starts_seen = step.starts if step.HasField("starts") else self._starts_sent
            if self.state is LinkState.CONNECTING:
                self.state = LinkState.UP
                self.life += 1
                log.info("link up", worker=self.node_id, address=self.address, model=self.model)
            for piece in step.pieces:
                self._deliver(piece)
            self._hear_state(step)
            self._on_moved(self)

    def _hear_state(self, step: inference_pb2.Step) -> None:
        if step.draining and not self.draining:
            log.info("worker drains", worker=self.node_id, open=len(self._streams))
        self.draining = step.draining
        if step.hung == self.hung:
            return
        self.hung = step.hung
        if not step.hung:
            self.life += 1
            log.info("worker moves again", worker=self.node_id)
            return
        log.warning("worker hung", worker=self.node_id, open=len(self._streams))
        for stream in self._blame(told=True):
            stream.fail(EngineDead(f"the engine of worker {self.node_id} is hung"))
        self.guard.hung(time.monotonic() * 1000.0)

    def _blame(self, *, told: bool = False) -> list[Stream]:
        """All open requests, each with its share of suspicion for what has just become of the worker; one of them tells the breaker of it,
        unless it is `told`.
        """
        streams = list(self._streams.values())
        running = [s for s in streams if s.started and not s.ended]
        begun = sum(not s.gained for s in running)
        for s in streams:
            if not s.judged:
                s.judged, s.one_of_many, told = True, told, True
                s.suspects = resuming.blamed(
                    started=s.started, gained=s.gained, begun_there=begun, running_there=len(running)
                )
        return streams

    def _counted(self, stream: Stream) -> None:
        """Its prompt is computed, or nobody waits for it any more."""
        self.sent_tokens -= stream.tokens
        stream.tokens = 0

    def _deliver(self, piece: inference_pb2.Piece) -> None:
        stream = self._streams.get(piece.request_id)
        if stream is None or stream.ended or stream.attempt != piece.attempt:
            self._on_dropped()
            return
        match piece.WhichOneof("content"):
            case "event":
                if not stream.gained:
                    self._note(stream, piece.event)
                stream.push(piece.event)
            case "status":
                error = rpc.decode_status(piece.status)
                if isinstance(error, EngineDead) and not stream.judged:
                    self._blame()
                stream.ended = True
                stream.fail(error)
            case _:
                self._on_dropped()

    def _note(self, stream: Stream, event: inference_pb2.GenerateResponse) -> None:
        """How far it has come there."""
        match event.WhichOneof("event"):
            case "accepted":
                stream.started = event.accepted.started
            case "notice" if event.notice.kind == inference_pb2.NOTICE_KIND_STARTED:
                stream.started = True
            case "delta" if event.delta.token_ids:
                stream.started = stream.gained = True
                self._counted(stream)

    def _down(self, why: str) -> None:
        """The link is gone: so is every request on it."""
        if self.state is LinkState.UP:
            log.warning("link down", worker=self.node_id, address=self.address, why=why, open=len(self._streams))
        if self.state is not LinkState.CLOSED:
            self.state = LinkState.CONNECTING
            self.why_down = why
        self.hung = self.draining = False
        streams, self._streams = self._blame(), {}
        self.sent_tokens = 0
        self._idle.set()
        for stream in streams:
            stream.ended, stream.tokens = True, 0
            stream.fail(EngineDead(f"the link to worker {self.node_id} died: {why}"))
        self._on_moved(self)
