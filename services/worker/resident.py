"""How much memory the worker's processes hold: the front process, the engine's, and whatever they started."""

from __future__ import annotations

import asyncio
import contextlib

import psutil

INTERVAL_S = 5.0


def resident_bytes(pid: int) -> int:
    """Resident memory of this process and of all below it, summed: what they share counts for each."""
    total = 0
    root = psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        # Some end while they are looked at.
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            total += process.memory_info().rss
    return total


class Resident:
    """`bytes` is as it was `INTERVAL_S` ago at most; None before it was first measured."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.bytes: int | None = None

    async def run(self) -> None:
        """For the life of the process. It reads many small files: not on the event loop."""
        while True:
            with contextlib.suppress(
                OSError, psutil.Error
            ):  # such as no file more to open: no reason to end a worker that serves
                self.bytes = await asyncio.to_thread(resident_bytes, self._pid)
            await asyncio.sleep(INTERVAL_S)
