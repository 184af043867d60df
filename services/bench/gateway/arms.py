"""The ways to a worker: through our gateway, through a proxy with a stream per request, straight, and over HTTP through ours and through SMG."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import grpc.aio

from services.bench.gateway.proxy import GENERATE
from services.bench.processes import BenchError
from trimtab.v1 import inference_pb2

MODEL = "bench"
MAX_TOKENS = 100_000
"""More than a turn can last."""
CONNECTIONS = 8
"""That the streams of an arm share."""
PROMPT = "Tell of rivers, stones and windows."


class Arm(Protocol):
    """One way. `process` is the gateway's name in `Processes`; none where there is no gateway."""

    name: str
    process: str

    def open(self, request_id: str) -> AsyncGenerator[bytes, None]: ...

    def count(self, data: bytes) -> int: ...

    def engine_id(self, request_id: str, first: bytes) -> str:
        """By which name the engine knows the stream whose first message is this."""
        ...


@dataclass(eq=False)
class GrpcArm:
    """Generate, at a gateway, at the proxy or at the worker."""

    name: str
    process: str
    channels: Sequence[grpc.aio.Channel]

    def __post_init__(self) -> None:
        self._calls: Iterator[Any] = itertools.cycle([channel.unary_stream(GENERATE) for channel in self.channels])

    async def open(self, request_id: str) -> AsyncGenerator[bytes, None]:
        request = inference_pb2.GenerateRequest(request_id=request_id, model=MODEL, text=PROMPT)
        request.sampling.max_tokens = MAX_TOKENS
        request.sampling.ignore_eos = True
        call: Any = next(self._calls)(request.SerializeToString())
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    def count(self, data: bytes) -> int:
        return len(inference_pb2.GenerateResponse.FromString(data).delta.token_ids)

    def engine_id(self, request_id: str, first: bytes) -> str:
        return request_id


@dataclass(eq=False)
class HttpArm:
    """/v1/completions, streamed. The simulated engine's tokens are bytes, so a chunk's text says how many it holds."""

    name: str
    process: str
    session: aiohttp.ClientSession
    address: str

    async def open(self, request_id: str) -> AsyncGenerator[bytes, None]:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
        headers = {"x-request-id": request_id}
        async with self.session.post(f"http://{self.address}/v1/completions", json=body, headers=headers) as answer:
            if answer.status != 200:
                raise BenchError(f"{self.name} answered {answer.status}: {(await answer.text())[:300]}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    yield line

    def count(self, data: bytes) -> int:
        return len(_chunk(data)["choices"][0]["text"].encode())

    def engine_id(self, request_id: str, first: bytes) -> str:
        return request_id if self.process == "gateway" else str(_chunk(first)["id"])


def _chunk(line: bytes) -> Any:
    return json.loads(line.removeprefix(b"data: "))
