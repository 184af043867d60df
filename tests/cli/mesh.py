"""A gateway that answers from a script, in this process: what the client and the verbs are tested against."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from trimtab import codec
from trimtab.errors import TrimtabError
from trimtab.kit import rpc
from trimtab.messages import Accepted, Delta, Event, Finish, FinishReason, Request, Timings, Usage
from trimtab.snapshot import Identity
from trimtab.v1 import inference_pb2, inference_pb2_grpc


def accepted(**changes: Any) -> Accepted:
    facts: dict[str, Any] = {
        "request_id": "r1",
        "worker_id": "w0",
        "policy": Identity(1, 7, b"\x01" * 32),
        "queue_position": 0,
        "prompt_tokens": 3,
        "prompt_digest": b"",
        "resumable": True,
        "model": "tiny",
    }
    return Accepted(**{**facts, **changes})


def finish(reason: FinishReason = FinishReason.STOP) -> Finish:
    return Finish(reason, Usage(3, 2, 1), Timings(1.0, 2.0, 3.0, 9.0, 0))


def an_answer(*texts: str) -> list[Event]:
    """A whole stream, one token for each text."""
    deltas = [Delta(i, (100 + i,), text) for i, text in enumerate(texts)]
    return [accepted(), *deltas, finish()]


@dataclass
class FakeGateway(inference_pb2_grpc.InferenceServiceServicer):
    """Plays `script` to each call: events are sent, errors end it, an Event is waited for. Records what came."""

    script: list[Any] = field(default_factory=lambda: an_answer("Hel", "lo"))
    models: tuple[str, ...] = ("tiny",)
    requests: list[Request] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    deadlines: list[float | None] = field(default_factory=list)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    address: str = ""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(codec.decode_request(request))
        self.metadata.append(dict(context.invocation_metadata()))
        self.deadlines.append(context.time_remaining())
        try:
            for step in self.script:
                if isinstance(step, TrimtabError):
                    await rpc.abort(context, step)
                elif isinstance(step, asyncio.Event):
                    await step.wait()
                else:
                    yield codec.encode_event(step)
        except (asyncio.CancelledError, GeneratorExit):
            # While an event is being sent the cancellation is gRPC's, and this generator is closed.
            self.cancelled.set()
            raise

    async def ListModels(self, request: Any, context: Any) -> Any:
        models = [inference_pb2.Model(name=name, max_model_len=4096) for name in self.models]
        return inference_pb2.ListModelsResponse(models=models)


@asynccontextmanager
async def serving(gateway: FakeGateway) -> AsyncIterator[FakeGateway]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(gateway, server)
    gateway.address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0')}"
    await server.start()
    try:
        yield gateway
    finally:
        await server.stop(None)
