"""A client of the gateway for tests: one stream, its tokens, text and the moment of each token."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

import grpc

from trimtab.v1 import inference_pb2 as pb
from trimtab.v1 import inference_pb2_grpc

LONG = 2000
"""Tokens of a request that does not end by itself while a test looks at it."""


@dataclass
class Stream:
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    text: str = ""
    accepted: Any = None
    finish: Any = None

    @property
    def first(self) -> float:
        return self.times[0]

    @property
    def last(self) -> float:
        return self.times[-1]


def a_request(
    text: str = "Count: one, two,", *, max_tokens: int = 16, ignore_eos: bool = True, **fields: Any
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=text, **fields)
    request.sampling.max_tokens = max_tokens
    request.sampling.temperature = 0
    request.sampling.ignore_eos = ignore_eos
    return request


async def follow(call: Any, stream: Stream | None = None) -> Stream:
    """Read to the end; checks that no index is missing or doubled."""
    s = stream or Stream()
    while (r := await call.read()) is not grpc.aio.EOF:
        match r.WhichOneof("event"):
            case "accepted":
                assert s.accepted is None, "accepted twice"
                s.accepted = r.accepted
            case "delta":
                assert r.delta.first_index == len(s.tokens), "an index is missing or doubled"
                s.tokens += r.delta.token_ids
                s.times += [time.monotonic()] * len(r.delta.token_ids)
                s.text += r.delta.text
            case "finish":
                s.finish = r.finish
    return s


class Client:
    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
        self.stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def run(self, request: pb.GenerateRequest, timeout_s: float = 120) -> Stream:
        return await follow(self.stub.Generate(request, timeout=timeout_s))

    async def begin(self, request: pb.GenerateRequest, tokens: int = 1, timeout_s: float = 120) -> tuple[Any, Stream]:
        """A call of which `tokens` tokens have come."""
        call, s = self.stub.Generate(request, timeout=timeout_s), Stream()
        async with asyncio.timeout(60):
            while len(s.tokens) < tokens:
                r = await call.read()
                assert r is not grpc.aio.EOF
                if r.WhichOneof("event") == "delta":
                    s.tokens += r.delta.token_ids
                    s.times += [time.monotonic()] * len(r.delta.token_ids)
                    s.text += r.delta.text
                elif r.WhichOneof("event") == "accepted":
                    s.accepted = r.accepted
        return call, s
