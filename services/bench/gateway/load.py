"""Streams that run side by side for a while, and what arrives from each: messages as they come, with the clock.

What a message holds is looked at when all is over, so that the generator's share of the machine is the same for every arm, and small.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

from services.bench.gateway.worker import FIRSTS, STAMP, STEPS
from services.bench.processes import BenchError

STEADY_MESSAGES = 10
"""Each stream has had so many before anything counts."""
STEADY_S = 60.0
SETTLE_S = 1.0

Open = Callable[[str], AsyncGenerator[bytes, None]]
"""A stream of this request id: what arrives, as bytes."""
Count = Callable[[bytes], int]
"""Tokens in what arrived."""


@dataclass(slots=True)
class Received:
    """Of one stream: the monotonic clock in seconds at each arrival, and what it was."""

    request_id: str
    at: array[float] = field(default_factory=lambda: array("d"))
    data: list[bytes] = field(default_factory=list)


class Crowd:
    """So many streams at once. BenchError when one ends, fails, or none comes to pace."""

    def __init__(self, opening: Open, request_ids: Sequence[str]) -> None:
        self.received = [Received(request_id) for request_id in request_ids]
        self._opening = opening
        self._steady = 0
        self._all_steady = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Crowd:
        """They run at their pace."""
        self._tasks = [asyncio.create_task(self._read(r)) for r in self.received]
        waiting = asyncio.create_task(self._all_steady.wait())
        try:
            async with asyncio.timeout(STEADY_S):
                await asyncio.wait([waiting, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            self.check()
            await asyncio.sleep(SETTLE_S)
        except TimeoutError:
            await self._end()
            raise BenchError(f"{self._steady} of {len(self.received)} streams ran after {STEADY_S:g} s") from None
        except BaseException:
            await self._end()
            raise
        finally:
            waiting.cancel()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._end()

    def check(self) -> None:
        for task in self._tasks:
            if task.done():
                raise BenchError(f"a stream ended too early: {task.exception() or 'without an error'}")

    async def _end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, received: Received) -> None:
        at, data, clock = received.at, received.data, time.monotonic
        async with aclosing(self._opening(received.request_id)) as arriving:
            async for message in arriving:
                at.append(clock())
                data.append(message)
                if len(data) == STEADY_MESSAGES:
                    self._steady += 1
                    if self._steady == len(self.received):
                        self._all_steady.set()


class Emissions:
    """When the engine made which token, as `services.bench.gateway.worker` wrote it down."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def read(self) -> tuple[list[float], dict[str, int]]:
        """(seconds at which each step ended, by request the step of its first token). BenchError where a request was not in every step."""
        raw = (self._directory / STEPS).read_bytes()
        steps = [x[0] for x in STAMP.iter_unpack(raw[: len(raw) // STAMP.size * STAMP.size])]
        firsts: dict[str, int] = {}
        for line in (self._directory / FIRSTS).read_text().splitlines():
            request_id, _, step = line.rpartition(" ")
            if step == "!":
                raise BenchError(f"request {request_id} was left out of a step, so its tokens can't be told apart")
            firsts[request_id] = int(step)
        return steps, firsts


@dataclass(frozen=True, slots=True)
class Seen:
    """What arrived within a window: messages with tokens in them, tokens, and milliseconds from the engine to here, one for each token."""

    messages: int
    tokens: int
    late_ms: list[float]


def seen(
    received: Sequence[Received],
    count: Count,
    emissions: tuple[list[float], dict[str, int]],
    since: float,
    until: float,
) -> Seen:
    """Pure. BenchError where a request is unknown to the engine."""
    steps, firsts = emissions
    messages, tokens, late_ms = 0, 0, array("d")
    for stream in received:
        base = firsts.get(stream.request_id)
        if base is None:
            raise BenchError(f"the engine knows no request {stream.request_id}")
        index = 0
        for at, data in zip(stream.at, stream.data, strict=True):
            new = count(data)
            if since <= at < until and new:
                messages += 1
                tokens += new
                # A step's stamp is written before its tokens leave, so it is there.
                late_ms.extend((at - steps[base + k]) * 1000.0 for k in range(index, index + new))
            index += new
    return Seen(messages, tokens, list(late_ms))
