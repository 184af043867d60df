"""A gateway's client door as a drill watches it: every message of a stream, up to the server's own end of it.

Not `trimtab.client`, which mends what it can: here each fault that reaches a client is to be seen, and so is what comes after a Finish.
"""

from __future__ import annotations

import time
from typing import Any

import grpc.aio

from services.drill.witness import Seen
from trimtab import codec
from trimtab.kit import rpc
from trimtab.messages import Request
from trimtab.v1 import inference_pb2_grpc


class Door:
    """Belongs to one event loop; `close` it."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address, "gateway")
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def ask(self, request: Request, timeout_s: float) -> Seen:
        """The stream as it came, with the reason of the error where it ended by one."""
        seen = Seen()
        call = self._stub.Generate(codec.encode_request(request), timeout=timeout_s)
        try:
            async for message in call:
                event = codec.decode_event(message)
                if event is not None:
                    seen.take(event, time.monotonic())
        except grpc.aio.AioRpcError as e:
            seen.fail(rpc.from_call(e))
        finally:
            call.cancel()
        return seen

    def call(self, request: Request, timeout_s: float) -> Any:
        """The bare call, for who means to leave it: `cancel` it."""
        return self._stub.Generate(codec.encode_request(request), timeout=timeout_s)

    async def close(self) -> None:
        await self._channel.close()
