"""The answers of a batch on disk: whole lines, each safe before its request counts as done.

Invariant: whenever the process ends, and however, the file is a sequence of whole lines, and at most a torn one at its end, which the next
run cuts off. Lines that finish together share one fsync. One process at a time writes the file.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import stat
from pathlib import Path
from types import TracebackType
from typing import Self

from services.batch.lines import ID_PREFIX

_BEGINNING = f'{{"id": "{ID_PREFIX}'.encode()


class NotOurs(Exception):
    """The file can't be gone on with; the message says why."""


class Results:
    """`done` are the custom_ids that have their line; `lines` the numbers of lines that have one without being sent."""

    def __init__(self, path: Path) -> None:
        """Opens and locks it, reads what is there, and cuts a torn last line off. NotOurs, OSError."""
        new = not path.exists()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self.done: set[str] = set()
        self.lines: set[int] = set()
        self._size = 0
        self._waiting: list[bytes] = []
        self._added = 0
        self.safe = 0
        """Lines that were added and are on disk."""
        self._lock = asyncio.Lock()
        try:
            self._take(path)
            if new:
                _sync_directory(path.parent)
        except BaseException:
            os.close(self._fd)
            raise

    def _take(self, path: Path) -> None:
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            raise NotOurs(f"{path} is no regular file: a batch that was stopped could not go on")
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise NotOurs(f"another process is writing {path}") from None
        torn = b""
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if not raw.endswith(b"\n"):
                    torn = raw
                    break
                self._note(path, number, raw)
                self._size += len(raw)
        if torn:
            if not (torn.startswith(_BEGINNING) or _BEGINNING.startswith(torn)):
                raise NotOurs(f"{path} ends in something that is no answer of a batch; is it the right file?")
            os.ftruncate(self._fd, self._size)
            os.fsync(self._fd)

    def _note(self, path: Path, number: int, raw: bytes) -> None:
        try:
            line = json.loads(raw)
            custom_id, error = line["custom_id"], line["error"]
            if isinstance(custom_id, str):
                self.done.add(custom_id)
            else:
                self.lines.add(int(error["line"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            raise NotOurs(f"{path} line {number} is no answer of a batch; is it the right file?") from None

    async def add(self, line: bytes) -> None:
        """Returns when it is on disk. OSError where it can't be: the file is then as it was."""
        self._waiting.append(line)
        mine = self._added = self._added + 1
        async with self._lock:
            if self.safe >= mine:
                return
            lines, self._waiting = self._waiting, []
            work = asyncio.ensure_future(asyncio.to_thread(self._write, b"".join(lines)))
            try:
                await asyncio.shield(work)
            finally:
                # Also when cancelled: whoever comes next must not write into the middle of it.
                await asyncio.wait([work])
                if work.exception() is None:
                    self.safe += len(lines)

    def _write(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            os.fsync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
            raise
        self._size += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._fd)


def _sync_directory(path: Path) -> None:
    """So that a new file's name outlives a power failure too."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
