"""The processes that a bench starts: each in its own session with its own log, its CPU seconds known, ended with the bench.

Invariant: nothing that was started here outlives `Processes.close`; should the bench itself be killed, the kernel ends its children.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from trimtab.kit.cli import ExitCode

ROOT = Path(__file__).resolve().parents[2]
POLL_S = 0.1
PATIENCE_S = 5.0
"""What a process gets to end by itself; by then nothing runs in it that is worth waiting for."""
LAST_WORDS_S = 2.0
GONE_WITHIN_S = 5.0
"""Of a kill. Whatever is left then can't be ended by anybody."""
FOREIGN = ("TRIMTAB_", "OTEL_", "GRPC_")
"""Variables that must not reach what is measured: another mesh's settings, where its traces go, and what is set for this process alone."""


class BenchError(Exception):
    """The bench can't go on; the message says why and what to do, `code` is how the verb ends."""

    def __init__(self, message: str, code: ExitCode = ExitCode.UNREACHABLE) -> None:
        super().__init__(message)
        self.code = code


class Child:
    """One process and everything below it."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.process: asyncio.subprocess.Process
        self._family: dict[int, psutil.Process] = {}
        self._spent_s: dict[int, float] = {}

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    def cpu_s(self) -> tuple[float, float]:
        """(itself, all its descendants): user and system seconds since they began. A descendant that ended keeps its last count."""
        with contextlib.suppress(psutil.Error):
            for p in psutil.Process(self.process.pid).children(recursive=True):
                self._family.setdefault(p.pid, p)
        own = _cpu_s(psutil.Process(self.process.pid)) if self.alive else 0.0
        for pid, p in self._family.items():
            self._spent_s[pid] = max(self._spent_s.get(pid, 0.0), _cpu_s(p))
        return own, sum(self._spent_s.values())

    def tail(self, lines: int = 12) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(f"    {line}" for line in text.splitlines()[-lines:]) or "    (it wrote nothing)"

    async def ready(self, probe: Callable[[], Awaitable[bool]], limit_s: float) -> None:
        """Until the probe says yes. BenchError when the process ends before, or takes longer than `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while self.alive:
                    if await probe():
                        return
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            why = f"was not ready after {limit_s:g} s"
        else:
            why = f"ended with code {self.process.returncode} before it was ready"
        raise BenchError(f"{self.name} {why}; its last lines ({self.log}):\n{self.tail()}")

    async def end(self, patience_s: float) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), patience_s)
        if self.alive:
            self.process.kill()
        for p in self._family.values():
            # Python's resource tracker ends by itself once the others are gone, and removes their shared memory.
            with contextlib.suppress(psutil.Error):
                if "resource_tracker" not in " ".join(p.cmdline()):
                    p.kill()
        await asyncio.to_thread(psutil.wait_procs, list(self._family.values()), timeout=LAST_WORDS_S)
        self.kill()
        await self.process.wait()
        # A kill is carried out when the kernel gets to it; memory and ports are free only then.
        await asyncio.to_thread(psutil.wait_procs, list(self._family.values()), timeout=GONE_WITHIN_S)

    def kill(self) -> None:
        """Its session leader's pid names the group for as long as anything of it lives, so nobody else can be hit."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for p in self._family.values():
            # psutil compares birth times: a number that was given to somebody else since is left alone.
            with contextlib.suppress(psutil.Error):
                p.kill()


class Processes:
    """All children of one bench, with their logs and their state below `directory`. Belongs to the main thread's event loop."""

    def __init__(self, directory: Path) -> None:
        self.children: dict[str, Child] = {}
        self._directory = directory
        (directory / "logs").mkdir(parents=True, exist_ok=True)

    async def start(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None, **pipes: Any) -> Child:
        """`argv` follows the interpreter. It runs in `directory`, so that no settings file of the caller's directory is read."""
        child = Child(name, self._directory / "logs" / f"{name}.log")
        with child.log.open("wb") as out:
            child.process = await asyncio.create_subprocess_exec(
                sys.executable,
                *argv,
                **{"stdin": asyncio.subprocess.DEVNULL, "stdout": out, **pipes},
                stderr=out,
                cwd=self._directory,
                env=self._environment() | dict(env or {}),
                start_new_session=True,
            )
        self.children[name] = child
        return child

    async def ask(self, argv: Sequence[str], limit_s: float, *, stdin: bytes = b"") -> tuple[int, str, str]:
        """One that ends by itself: its exit code, stdout and stderr. BenchError when it takes longer than `limit_s`."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._directory,
            env=self._environment(),
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(limit_s):
                out, err = await process.communicate(stdin)
        except TimeoutError:
            raise BenchError(f"{' '.join(argv[:4])} … took longer than {limit_s:g} s") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
        state = str(self._directory / "state")
        return kept | {"TRIMTAB_STATE_DIR": state, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds by process; what lies below process X is `X/engine`, and this process is `client`."""
        found = {"client": _cpu_s(psutil.Process())}
        for name, child in self.children.items():
            found[name], found[f"{name}/engine"] = child.cpu_s()
        return found

    def check(self) -> None:
        """BenchError when one of them has died."""
        for child in self.children.values():
            if not child.alive:
                how = f"ended with code {child.process.returncode}"
                raise BenchError(f"{child.name} {how}; its last lines ({child.log}):\n{child.tail()}")

    async def close(self) -> None:
        try:
            await asyncio.gather(*(child.end(PATIENCE_S) for child in self.children.values()))
        finally:
            for child in self.children.values():
                child.kill()
            self.children.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self.children.values():
            child.cpu_s()  # so that every descendant is known before its parent goes
        await self.close()


def _cpu_s(process: psutil.Process) -> float:
    try:
        t = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(t.user + t.system)


async def grpc_serving(address: str, kind: str = "worker") -> bool:
    """Whether the gRPC health service at `address` says SERVING. `kind` is what its certificate must be for, where there is TLS."""
    import grpc.aio
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from trimtab.kit import rpc

    async with rpc.channel(address, kind) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.aio.AioRpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
