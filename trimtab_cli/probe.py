"""Is a process healthy? gRPC health v1 for ours, PING for the store; the answer is waited for, never assumed."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import Any

from trimtab_cli.plan import Spec, Tier

POLL_S = 0.03
KINDS = {Tier.CONTROL: "control", Tier.WORKER: "worker", Tier.GATEWAY: "gateway"}
"""What a server's certificate calls it."""


async def until_healthy(spec: Spec) -> None:
    """Returns when the process serves. Waits as long as it takes; the caller bounds it."""
    if spec.tier is Tier.STORE:
        await _until(_pong, spec.address)
    else:
        # A channel's reconnect back-off would see a fresh listener late, so the port is knocked at first.
        await _until(_listens, spec.address)
        await _until(functools.partial(serves, KINDS[spec.tier]), spec.address)


async def _until(holds: Callable[[str], Awaitable[bool]], address: str) -> None:
    while not await holds(address):
        await asyncio.sleep(POLL_S)


async def _pong(path: str) -> bool:
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(path)
            try:
                writer.write(b"PING\r\n")
                await writer.drain()
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def _listens(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host, int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


async def serves(kind: str, address: str) -> bool:
    """What its gRPC health says; False where nobody answers within 2 s."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from trimtab.kit import rpc

    async with rpc.channel(address, kind) as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
