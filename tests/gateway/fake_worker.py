"""A worker that does as it is told: the real Attach protocol on a real socket, with tokens, delays, statuses, silence and death by script.

A script is a coroutine that gets one `Running` request. What the worker heard is kept in order, and can be awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from trimtab import codec
from trimtab import messages as m
from trimtab.errors import TrimtabError
from trimtab.kit import rpc
from trimtab.snapshot import Identity
from trimtab.v1 import inference_pb2, inference_pb2_grpc

IDLE_S = 0.05
WORDS = ("Hel", "lo", " wor", "ld", "!")


@dataclass(eq=False)
class Running:
    """One request at the fake worker."""

    worker: FakeWorker
    link: _Link
    start: inference_pb2.Start
    index: int = 0
    window: int = 0
    granted: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None

    @property
    def request(self) -> m.Request:
        return codec.decode_request(self.start.generate_request)

    def event(self, event: m.Event, *, attempt: int | None = None) -> None:
        self.link.send(
            inference_pb2.Piece(
                request_id=self.start.request_id,
                attempt=self.start.attempt if attempt is None else attempt,
                event=codec.encode_event(event),
            )
        )

    def accept(self, *, prompt_tokens: int = 3, resumable: bool = True, started: bool = True) -> None:
        self.event(
            m.Accepted(
                self.start.request_id,
                self.worker.node_id,
                Identity(1, 1),
                0,
                prompt_tokens,
                b"",
                resumable,
                self.worker.model,
                started,
            )
        )

    def token(self, text: str, logprobs: tuple[m.TokenLogprobs, ...] = ()) -> None:
        """One token, whatever the window says."""
        self.event(m.Delta(self.index, (100 + self.index,), text, logprobs))
        self.index += 1

    async def tokens(self, texts: tuple[str, ...]) -> None:
        """Several, each when the reader has room for it."""
        for text in texts:
            while not self.window:
                self.granted.clear()
                await self.granted.wait()
            self.window -= 1
            self.token(text)

    def finish(self, reason: m.FinishReason = m.FinishReason.STOP) -> None:
        self.event(m.Finish(reason, m.Usage(3, self.index, 1), m.Timings(1, 2, 3, 4)))

    def fail(self, error: TrimtabError) -> None:
        status = inference_pb2.RpcStatus.FromString(rpc.encode_status(error).SerializeToString())
        self.link.send(inference_pb2.Piece(request_id=self.start.request_id, attempt=self.start.attempt, status=status))


Script = Callable[[Running], Awaitable[None]]


async def hello_world(r: Running) -> None:
    """Accepted, five tokens in one step, Finish."""
    r.accept()
    await r.tokens(WORDS)
    r.finish()


async def hang(r: Running) -> None:
    """Accepted, and nothing more."""
    r.accept()
    await asyncio.Event().wait()


async def one_token_then_hang(r: Running) -> None:
    r.accept()
    r.token("Hel")
    await asyncio.Event().wait()


class _Link:
    """One gateway's stream."""

    def __init__(self) -> None:
        self.pieces: list[inference_pb2.Piece] = []
        self.wake = asyncio.Event()
        self.closed = False

    def send(self, piece: inference_pb2.Piece) -> None:
        self.pieces.append(piece)
        self.wake.set()


class FakeWorker(inference_pb2_grpc.InferenceServiceServicer):
    """`silent` stops every message down; `die` ends the process's sockets without a word."""

    def __init__(self, node_id: str = "w0", *, model: str = "m", script: Script = hello_world) -> None:
        self.node_id = node_id
        self.model = model
        self.script = script
        self.silent = self.hung = self.draining = self.hears_wants = False
        self.credits: inference_pb2.Credits | None = None
        self.load = m.Load()
        self.heard: list[inference_pb2.AttachRequest] = []
        self.running: dict[str, Running] = {}
        self.address = ""
        self.death: asyncio.Task[None] | None = None
        self._heard_more = asyncio.Event()
        self._server: grpc.aio.Server | None = None
        self._links: set[_Link] = set()

    async def start(self, address: str = "127.0.0.1:0") -> FakeWorker:
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        port = rpc.bind(self._server, address)
        await self._server.start()
        self.address = f"127.0.0.1:{port}"
        return self

    async def die(self) -> None:
        """All at once, as a killed process does."""
        for r in list(self.running.values()):
            if r.task is not None:
                r.task.cancel()
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(0)

    async def hears(self, kind: str, *, times: int = 1, timeout_s: float = 20.0) -> Any:
        """The event of this kind that is the n-th, as soon as it has come."""
        async with asyncio.timeout(timeout_s):
            while True:
                found = [getattr(e, kind) for e in self.heard if e.WhichOneof("event") == kind]
                if len(found) >= times:
                    return found[times - 1]
                self._heard_more.clear()
                await self._heard_more.wait()

    def count(self, kind: str) -> int:
        return sum(e.WhichOneof("event") == kind for e in self.heard)

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[inference_pb2.AttachResponse]:
        link = _Link()
        self._links.add(link)
        link.wake.set()
        reader = asyncio.create_task(self._read(request_iterator, link))
        step_no = 0
        try:
            while not link.closed:
                try:
                    async with asyncio.timeout(IDLE_S):
                        await link.wake.wait()
                except TimeoutError:
                    pass
                link.wake.clear()
                if self.silent:
                    await asyncio.sleep(IDLE_S)
                    continue
                step_no += 1
                pieces, link.pieces = link.pieces, []
                yield inference_pb2.AttachResponse(
                    step=inference_pb2.Step(
                        step_no=step_no,
                        load=codec.encode_load(self.load),
                        credits=self.credits,
                        pieces=pieces,
                        hung=self.hung,
                        draining=self.draining,
                        hears_wants=self.hears_wants,
                        starts=sum(e.WhichOneof("event") == "start" for e in self.heard),
                    )
                )
        finally:
            self._links.discard(link)
            await rpc.cancel_and_wait(reader)

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:  # type: ignore[override]
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(name=self.model, max_model_len=4096)])

    async def _read(self, requests: AsyncIterator[inference_pb2.AttachRequest], link: _Link) -> None:
        async for message in requests:
            self.heard.append(message)
            self._heard_more.set()
            match message.WhichOneof("event"):
                case "start":
                    running = Running(self, link, message.start, window=message.start.window)
                    self.running[message.start.request_id] = running
                    running.task = asyncio.create_task(self._run(running))
                case "window":
                    if message.window.request_id in self.running:
                        r = self.running[message.window.request_id]
                        r.window += message.window.n
                        r.granted.set()
                case "cancel" | "superseded":
                    which = message.cancel if message.HasField("cancel") else message.superseded
                    if (running := self.running.pop(which.request_id, None)) and running.task is not None:
                        running.task.cancel()
        link.closed = True

    async def _run(self, running: Running) -> None:
        await self.script(running)
        self.running.pop(running.start.request_id, None)
