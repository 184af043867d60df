"""One process of the mesh: in its own session, its words in a log file, its whole group ended with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

from trimtab_cli.plan import Spec

LOG_BYTES = 64 << 20
"""A log past this size starts again; one older file is kept."""
TAIL_BYTES = 16 << 10


class Child:
    """Belongs to one event loop on the main thread: the parent-death signal is bound to the thread that starts it."""

    def __init__(self, spec: Spec, logs: Path) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.started_at = 0.0
        self.leaving = False
        """Told to end for good: however it ends, it is not brought back."""
        self._process: asyncio.subprocess.Process | None = None
        self._from_byte = 0

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """A new incarnation; the log goes on after the last one's."""
        # In its own session, a terminal's Ctrl-C reaches the supervisor alone, which then drains in order.
        with self.log.open("ab") as out:
            self._from_byte = out.tell()
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.spec.env},
            )
        self.started_at = time.monotonic()

    async def wait(self) -> int:
        """The exit code, negative for a signal."""
        assert self._process is not None, "started"
        return await self._process.wait()

    def terminate(self) -> None:
        """Ask it to drain; its own children are its own business."""
        if self.alive and self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.terminate()

    def kill(self) -> None:
        """End everything of its process group now. Also after its own end, for what it left behind."""
        if self._process is not None:
            # Its pid names the group until the group's last process is gone, so nobody else can be hit.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self, lines: int = 15) -> list[str]:
        """The last lines that this incarnation wrote, readable."""
        return [_readable(line) for line in self._written().splitlines() if line.strip()][-lines:]

    def rotate(self) -> None:
        """Bound the log. The process goes on writing at the new end, since the file is open for appending."""
        if self.log.stat().st_size > LOG_BYTES:
            keep_old(self.log, move=False)
            os.truncate(self.log, 0)
            self._from_byte = 0

    def _written(self) -> str:
        try:
            with self.log.open("rb") as f:
                size = f.seek(0, os.SEEK_END)
                f.seek(max(self._from_byte, size - TAIL_BYTES))
                return f.read().decode(errors="replace")
        except FileNotFoundError:
            return ""


def keep_old(log: Path, *, move: bool) -> None:
    """Put the log's content aside as NAME.old.log, by rename or by copy."""
    old = log.with_suffix(".old.log")
    with contextlib.suppress(FileNotFoundError):
        if move:
            log.replace(old)
        else:
            old.write_bytes(log.read_bytes())


def ended_how(code: int) -> str:
    """An exit code in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def _readable(line: str) -> str:
    """A structlog JSON line as `level event key=value…`; any other line as it is."""
    if line.startswith("{"):
        try:
            fields = json.loads(line)
        except ValueError:
            return line
        event = fields.pop("event", None)
        if isinstance(event, str):
            level = fields.pop("level", "")
            kept = {k: v for k, v in fields.items() if k not in ("timestamp", "process", "exception")}
            words = " ".join(f"{k}={v}" for k, v in kept.items())
            text = " ".join(part for part in (level, event, words) if part)
            return text + ("\n" + fields["exception"] if "exception" in fields else "")
    return line
