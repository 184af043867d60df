"""Brings back a drill's workers, as `trimtab up` and an orchestrator do: whoever ends is started again at once, on the same address."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.bench.processes import BenchError
from services.drill.mesh import Worker

MOST = 6
"""Ends of one worker within a drill; more is flapping."""


@dataclass(frozen=True, slots=True)
class End:
    """A worker's process ended with `code` (negative: by that signal) and another one serves since `back`; seconds of the monotonic clock."""

    worker: str
    code: int
    at: float
    back: float


class Supervisor:
    """`ends` fills as workers are back. `before(name)` is called when a process has ended, before the next one starts.

    `may_fail` starts in a row may come to nothing; each is in `failed` by the worker's name.
    """

    def __init__(self, workers: Iterable[Worker], before: Callable[[str], None]) -> None:
        self.ends: list[End] = []
        self.may_fail = 0
        self.failed: list[str] = []
        self._workers = tuple(workers)
        self._before = before

    async def run(self) -> None:
        """Until cancelled. BenchError when a worker does not come back, or flaps."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(self._tend(worker), name=f"supervise {worker.name}")
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _tend(self, worker: Worker) -> None:
        for _ in range(MOST):
            code = await worker.child.process.wait()
            at = time.monotonic()
            self._before(worker.name)
            await self._again(worker)
            self.ends.append(End(worker.name, code, at, time.monotonic()))
        await worker.child.process.wait()
        raise BenchError(f"{worker.name} ended {MOST + 1} times; its last lines:\n{worker.child.tail()}")

    async def _again(self, worker: Worker) -> None:
        for _ in range(self.may_fail):
            try:
                await worker.start()
            except BenchError:
                if worker.child.alive:
                    raise
                self.failed.append(worker.name)
            else:
                return
        await worker.start()
