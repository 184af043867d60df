"""The network between gateways and workers: an HTTP CONNECT proxy that can cut or stall all links to an address.

gRPC goes through it when `grpc_proxy` names it, so that workers are known by their own addresses, as in any mesh.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict

from trimtab.kit.rpc import cancel_and_wait

CHUNK = 1 << 16
HEAD_S = 10.0
GOOD, BAD = b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"


class Proxy:
    """Belongs to one event loop. `start` it, `close` it."""

    def __init__(self) -> None:
        self.url = ""
        self._server: asyncio.Server | None = None
        self._cut: set[str] = set()
        self._flows: defaultdict[str, asyncio.Event] = defaultdict(_open_event)
        self._writers: defaultdict[str, set[asyncio.StreamWriter]] = defaultdict(set)
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self, target: str) -> None:
        """Every link to `target` (host:port) is reset, and none is made until `heal`."""
        self._cut.add(target)
        for writer in list(self._writers[target]):
            writer.transport.abort()

    def stall(self, target: str) -> None:
        """Nothing passes until `heal`; what was sent meanwhile does then."""
        self._flows[target].clear()

    def heal(self, target: str) -> None:
        self._cut.discard(target)
        self._flows[target].set()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in [w for writers in self._writers.values() for w in writers]:
            writer.transport.abort()
        for task in list(self._tasks):
            await cancel_and_wait(task)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One link, from its CONNECT on."""
        async with asyncio.timeout(HEAD_S):
            head = await reader.readuntil(b"\r\n\r\n")
        target = head.split(b" ", 2)[1].decode("latin-1")
        host, _, port = target.rpartition(":")
        try:
            if target in self._cut:
                raise ConnectionRefusedError
            there, back = await asyncio.open_connection(host, int(port))
        except (OSError, ValueError):
            writer.write(BAD)
            await writer.drain()
            return
        pair = {writer, back}
        self._writers[target] |= pair
        writer.write(GOOD)
        try:
            flow = self._flows[target]
            ways = [asyncio.create_task(_pump(*way, flow)) for way in ((reader, back), (there, writer))]
            try:
                # The end of one direction is the link's: gRPC never half-closes.
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    await cancel_and_wait(way)
        finally:
            self._writers[target] -= pair
            back.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, flow: asyncio.Event) -> None:
    with contextlib.suppress(OSError):
        while data := await source.read(CHUNK):
            await flow.wait()
            sink.write(data)
            await sink.drain()


def _open_event() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event
