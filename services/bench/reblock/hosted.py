"""The bench's side of the host: starts it, asks for parts, and starts it anew for comparison."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

from services.bench.processes import PATIENCE_S, BenchError, Child, Processes
from services.bench.start import LINE_BYTES, START_S, Shape

SILENCE_S = 900.0
"""For one part, of two minutes at most on a quiet machine; then it hangs."""


class Hosted(Protocol):
    """An engine that serves. `facts` are `host.facts` as it started."""

    @property
    def facts(self) -> Mapping[str, Any]: ...
    async def ask(self, part: str, **args: Any) -> dict[str, Any]:
        """One part of `host.PARTS`. BenchError when it fails or the host is gone."""

    async def restart(self) -> dict[str, float]:
        """End the engine with its process and start another: `stop_s`, and `start_s` until it serves again."""


class Process:
    """The host as a process."""

    module = "services.bench.reblock.host"

    def __init__(self, processes: Processes, shape: Shape) -> None:
        self.facts: Mapping[str, Any] = {}
        self._processes = processes
        self._shape = shape
        self._child: Child

    async def start(self) -> None:
        s = self._shape
        argv = [
            "-m", self.module, "--model", s.model, "--dtype", s.dtype,
            "--max-num-seqs", str(s.max_num_seqs), "--max-num-batched-tokens", str(s.max_step_tokens),
            "--kv-cache-gib", str(s.kv_cache_gib), "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "limit": LINE_BYTES}
        self._child = await self._processes.start("engine", argv, s.environment(), **pipes)
        self.facts = (await self._heard(START_S))["ready"]

    async def ask(self, part: str, **args: Any) -> dict[str, Any]:
        stdin = self._child.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"part": part, "args": args}).encode() + b"\n")
        found: dict[str, Any] = (await self._heard(SILENCE_S))["done"]
        return found

    async def restart(self) -> dict[str, float]:
        begun = time.monotonic()
        self._child.cpu_s()  # so that every descendant is known before its parent goes
        await self._child.end(PATIENCE_S)
        ended = time.monotonic()
        await self.start()
        return {"stop_s": ended - begun, "start_s": time.monotonic() - ended}

    async def _heard(self, limit_s: float) -> dict[str, Any]:
        stdout, child = self._child.process.stdout, self._child
        assert stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                line = await stdout.readline()
        except TimeoutError:
            raise BenchError(
                f"the engine's process said nothing for {limit_s:g} s; its last lines ({child.log}):\n{child.tail()}"
            ) from None
        if not line:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), PATIENCE_S)
            how = f"ended too early, with code {child.process.returncode}"
            raise BenchError(f"the engine's process {how}; its last lines ({child.log}):\n{child.tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise BenchError(f"the engine failed: {answer['error']}\nits log is {child.log}")
        return answer


@asynccontextmanager
async def hosted(directory: Path, shape: Shape) -> AsyncIterator[Hosted]:
    """Up and serving; ended with all its processes on leaving."""
    async with Processes(directory) as processes:
        process = Process(processes, shape)
        await process.start()
        yield process
