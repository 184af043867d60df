"""Clients that ask without a pause: so many streams are open at any time, each case in turn, over all gateways in turn."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from services.drill.cases import Case
from services.drill.endpoint import Door
from services.drill.figures import Outcome, outcome
from services.drill.witness import Seen

DEADLINE_S = 120.0
AFTER_LOSS_S = 0.2
"""Who is refused at once must not ask a thousand times a second."""


class Crowd:
    """`outcomes` fill as streams end."""

    def __init__(self, gateways: Sequence[str], cases: Sequence[Case], right: Sequence[Seen] = ()) -> None:
        """`right` is the undisturbed answer of each case, where they are known."""
        self.outcomes: list[Outcome] = []
        self.seen: dict[int, Seen] = {}
        """The last stream of each case."""
        self.gaps: list[tuple[float, float]] = []
        """Of each stream that was not lost: when it was asked for, of the monotonic clock, and the longest time between two of its tokens."""
        self.waits: list[tuple[float, float]] = []
        """Of each stream that had a token: when it was asked for, and the seconds until its first one."""
        self._gateways = gateways
        self._cases = cases
        self._right = right

    async def ask(self, concurrency: int, more: Callable[[int], bool]) -> None:
        """New streams begin while `more(number of those begun)` says so; returns when all have ended."""
        numbers = itertools.count()
        async with AsyncExitStack() as stack:
            doors = [Door(address) for address in self._gateways]
            for door in doors:
                stack.push_async_callback(door.close)

            async def caller() -> None:
                while more(number := next(numbers)):
                    await self._one(doors[number % len(doors)], number % len(self._cases))

            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(caller())

    async def _one(self, door: Door, index: int) -> None:
        case, begun = self._cases[index], time.monotonic()
        seen = await door.ask(case.request(), DEADLINE_S)
        if not seen.lost:
            self.gaps.append((begun, seen.gap_s))
        if seen.first is not None:
            self.waits.append((begun, seen.first - begun))
        self.seen[index] = seen
        self.outcomes.append(outcome(index, seen, self._right[index] if self._right else None))
        if seen.lost:
            await asyncio.sleep(AFTER_LOSS_S)
