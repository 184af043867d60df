"""The requests of a batch where they lie: every line judged before any is sent, and read again when its turn comes.

What is held for each line is its place, its number and its custom_id, so that a file need not fit into memory. Standard input is spooled to a
temporary file.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Container, Iterator
from pathlib import Path
from typing import IO

from services.batch.lines import BadLine, Task, parse

STDIN = "-"
BOM = b"\xef\xbb\xbf"


class Source:
    """`bad` are the lines that can't be sent, in order."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._good: list[tuple[int, int, str]] = []
        """(line, offset, custom_id)."""
        self.bad: list[BadLine] = []
        first: dict[str, int] = {}
        number = offset = 0
        file.seek(0)
        for raw in file:
            number, here, offset = number + 1, offset, offset + len(raw)
            if not raw.strip():
                continue
            found = _parsed(number, raw)
            custom_id = found.custom_id
            if custom_id and (before := first.setdefault(custom_id, number)) != number:
                why = f"custom_id {custom_id!r} is that of line {before}"
                self.bad.append(BadLine(number, why, custom_id, code="duplicate_custom_id"))
            elif isinstance(found, BadLine):
                self.bad.append(found)
            else:
                self._good.append((number, here, custom_id))

    def __len__(self) -> int:
        """Requests that can be sent."""
        return len(self._good)

    def count(self, among: Container[str]) -> int:
        return sum(custom_id in among for _, _, custom_id in self._good)

    def tasks(self, without: Container[str]) -> Iterator[Task]:
        """Those that can be sent, in order, but for these. BadLine where the file has changed meanwhile."""
        for number, offset, custom_id in self._good:
            if custom_id in without:
                continue
            self._file.seek(offset)
            task = _parsed(number, self._file.readline())
            if isinstance(task, BadLine) or task.custom_id != custom_id:
                raise BadLine(number, f"was {custom_id!r} when it was first read: the file has changed")
            yield task


def _parsed(number: int, raw: bytes) -> Task | BadLine:
    try:
        return parse(number, raw.removeprefix(BOM) if number == 1 else raw)
    except BadLine as e:
        return e


@contextlib.contextmanager
def opened(path: str) -> Iterator[IO[bytes]]:
    """The file, or what comes on standard input, to its end. OSError where it can't be read."""
    if path != STDIN:
        with Path(path).open("rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool)
        yield spool
