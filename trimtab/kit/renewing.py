"""A channel for a process that outlives its certificate: new calls take one with the certificate as it is now.

gRPC for Python has no way to give a channel another certificate, and a channel that connects again shows the one that it was opened with.
So once the files were renewed a second channel is opened for new calls, and the first one is closed when the last call on it has ended: no
stream is lost. Without TLS it is a channel, and nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc.aio

from trimtab.kit import rpc
from trimtab.kit.tls import Tls

S = TypeVar("S")


@dataclass(slots=True, eq=False)
class _Open(Generic[S]):
    channel: grpc.aio.Channel
    stub: S
    generation: int
    calls: int = 0


class Renewing(Generic[S]):
    """To a server of this kind, `stub` being what is made of a channel. Belongs to one event loop. CertificateError at construction where
    certificates can't be read.
    """

    def __init__(
        self, address: str, kind: str, stub: Callable[[grpc.aio.Channel], S], *, tls: Tls | None = None
    ) -> None:
        self._address = address
        self._kind = kind
        self._stub = stub
        self._tls = tls
        self._newest = self._open()
        self._older: set[_Open[S]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def call(self) -> Iterator[S]:
        """For the time of one call, its stream included."""
        if self._newest.generation != rpc.generation(self._tls):
            self._older.add(self._newest)
            self._newest = self._open()
            for old in [each for each in self._older if not each.calls]:
                self._let_go(old)
        mine = self._newest
        mine.calls += 1
        try:
            yield mine.stub
        finally:
            mine.calls -= 1
            if mine in self._older and not mine.calls:
                self._let_go(mine)

    async def close(self) -> None:
        """Cancels what still runs."""
        older, self._older = self._older, set()
        for each in (*older, self._newest):
            await each.channel.close()
        await asyncio.gather(*self._closing)

    def _open(self) -> _Open[S]:
        # Asked first: files that change meanwhile make another generation, and so another channel with the next call.
        generation = rpc.generation(self._tls)
        channel = rpc.channel(self._address, self._kind, tls=self._tls)
        return _Open(channel, self._stub(channel), generation)

    def _let_go(self, old: _Open[S]) -> None:
        self._older.discard(old)
        task = asyncio.get_running_loop().create_task(old.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
