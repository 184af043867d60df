"""The proxy between gateways and workers, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.drill.proxy import Proxy

PATIENCE_S = 30.0


@pytest.fixture
async def proxy() -> AsyncIterator[Proxy]:
    made = Proxy()
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def echo() -> AsyncIterator[str]:
    """The address of a server that says again what it hears."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()


async def connect(proxy: Proxy, target: str) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
    """(the proxy's answer, both ends of the tunnel)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(proxy.url.rpartition(":")[2]))
    writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    async with asyncio.timeout(PATIENCE_S):
        return (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0], reader, writer


async def heard(reader: asyncio.StreamReader, count: int) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return await reader.readexactly(count)


async def test_it_carries_both_ways_and_ends_with_its_target(proxy: Proxy, echo: str) -> None:
    said, reader, writer = await connect(proxy, echo)
    assert said == b"HTTP/1.1 200 OK"
    writer.write(b"hello")
    assert await heard(reader, 5) == b"hello"
    writer.close()
    await writer.wait_closed()


async def test_a_cut_ends_every_link_and_refuses_new_ones_until_it_is_healed(proxy: Proxy, echo: str) -> None:
    _, reader, writer = await connect(proxy, echo)
    writer.write(b"hello")
    await heard(reader, 5)
    proxy.cut(echo)
    with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
        await heard(reader, 1)
    assert (await connect(proxy, echo))[0] == b"HTTP/1.1 502 Bad Gateway"
    proxy.heal(echo)
    assert (await connect(proxy, echo))[0] == b"HTTP/1.1 200 OK"


async def test_a_stall_holds_everything_back_and_loses_nothing(proxy: Proxy, echo: str) -> None:
    _, reader, writer = await connect(proxy, echo)
    proxy.stall(echo)
    writer.write(b"hello")
    _, other, others = await connect(proxy, "127.0.0.1:1")
    assert await other.read() == b"", "another target's fate is its own"
    others.close()
    waiting = asyncio.create_task(heard(reader, 5))
    done, _ = await asyncio.wait([waiting], timeout=0.2)
    assert not done
    proxy.heal(echo)
    assert await waiting == b"hello"
    writer.close()


async def test_a_target_that_is_gone_is_refused(proxy: Proxy) -> None:
    assert (await connect(proxy, "127.0.0.1:1"))[0] == b"HTTP/1.1 502 Bad Gateway"
    assert (await connect(proxy, "nonsense"))[0] == b"HTTP/1.1 502 Bad Gateway"
