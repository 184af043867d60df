"""The other arm: a proxy that opens one Generate at the worker for each client's stream and hands every message on as it is.

It decodes nothing, counts nothing and chooses nobody: less than any gateway does, so what it spends on a token is the least that a stream per
request costs in grpc.aio.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from typing import Any

import click
import grpc
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio

from trimtab.kit import process, rpc

GENERATE = "/trimtab.v1.InferenceService/Generate"


class PassThrough(grpc.GenericRpcHandler):
    """Generate, as bytes."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._generate: Any = channel.unary_stream(GENERATE)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        return grpc.unary_stream_rpc_method_handler(self._relay) if handler_call_details.method == GENERATE else None

    async def _relay(self, request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
        call: Any = self._generate(request, timeout=context.time_remaining())
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as e:
            await context.abort(e.code(), e.details() or "", e.trailing_metadata())
        finally:
            call.cancel()


async def serve(listen: str, worker: str) -> None:
    """Until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    server = grpc.aio.server(options=rpc.CLIENT_DOOR_OPTIONS)
    rpc.bind(server, listen)
    health = aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    async with rpc.channel(worker, "worker") as channel:
        server.add_generic_rpc_handlers((PassThrough(channel),))
        await server.start()
        await health.set("", health_pb2.HealthCheckResponse.SERVING)
        await stopping.wait()
        await server.stop(0.5)


@click.command()
@click.option("--listen", required=True)
@click.option("--worker", required=True)
@click.option("--parent-pid", type=int, required=True)
def main(listen: str, worker: str, parent_pid: int) -> None:
    process.die_with_parent(parent_pid, signal.SIGTERM)
    rpc.use_tls(None)
    uvloop.run(serve(listen, worker))


if __name__ == "__main__":
    main()
