"""A TCP link between two processes that tests can cut, stall and point elsewhere."""

from __future__ import annotations

import asyncio
import contextlib

from trimtab.kit.rpc import cancel_and_wait


class Proxy:
    """A TCP link that can be cut, and pointed elsewhere. New connections are refused while it is cut."""

    def __init__(self, host: str, port: int) -> None:
        self.target = (host, port)
        self.cut = False
        self.stalled = asyncio.Event()
        self.stalled.set()
        self.port = 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.cut:
            writer.close()
            return
        try:
            there, back = await asyncio.open_connection(*self.target)
        except OSError:
            writer.close()
            return
        self._open |= {writer, back}
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._pumps.add(task)
            task.add_done_callback(self._pumps.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self.stalled.wait()
                sink.write(data)
                await sink.drain()
        sink.close()
        self._open.discard(sink)

    def sever(self) -> None:
        """Every connection that is open ends, as by a reset."""
        for writer in list(self._open):
            writer.transport.abort()
        self._open.clear()

    def point_at(self, port: int) -> None:
        self.target = ("127.0.0.1", port)
        self.sever()

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        self.sever()
        self.stalled.set()
        for task in list(self._pumps):
            await cancel_and_wait(task)
