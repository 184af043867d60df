"""Our gateway with one Generate at the worker for each request, all else as it is: `python -m services.bench.gateway.unmuxed`, with a gateway's
options. What it costs more than ours is what the one stream per worker saves.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from services.gateway import __main__ as gateway
from services.gateway import endpoints
from services.gateway.endpoint import Endpoint
from trimtab.errors import EngineDead
from trimtab.kit import rpc
from trimtab.v1 import inference_pb2


class PerRequest(Endpoint):
    """Its Attach stream only tells of the worker."""

    def __init__(self, *args: Any, **facts: Any) -> None:
        super().__init__(*args, **facts)
        self._calls: dict[str, asyncio.Task[None]] = {}

    def send(self, message: inference_pb2.AttachRequest) -> None:
        match message.WhichOneof("event"):
            case "start":
                start = message.start
                self._starts_sent -= 1  # it goes by no link, where the worker would count it
                self._calls[start.request_id] = asyncio.create_task(self._generate(start))
            case "cancel":
                self._calls.pop(message.cancel.request_id).cancel()
            case "superseded":
                self._calls.pop(message.superseded.request_id).cancel()

    async def _generate(self, start: inference_pb2.Start) -> None:
        stream = self._streams[start.request_id]
        call: Any = self._stub.Generate(start.generate_request, timeout=start.timeout_ms / 1000.0)
        try:
            async for response in call:
                if not stream.gained:
                    self._note(stream, response)
                stream.push(response)
        except grpc.aio.AioRpcError as e:
            stream.fail(rpc.from_call(e))
        else:
            stream.fail(EngineDead("the stream ended without a finish"))
        finally:
            call.cancel()


if __name__ == "__main__":
    setattr(endpoints, "Endpoint", PerRequest)  # noqa: B010 - a name of that module, not this one's class
    gateway.main()
