"""A board in shared memory on which the engine process announces its steps; the front process reads it without a message.

One writer, any readers. A sequence number that is odd while a write is under way tells a reader to look again, so a reader never sees
half a row. Reading costs microseconds and works while the engine is stuck, which is what health needs.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from trimtab.scheduling import STATS

_ROW = struct.Struct("<QddQIIQIIQQQd")
_STATS = struct.Struct(f"<{len(STATS)}d")
_STATS_AT = 1024
_WORDS = struct.Struct("<H")
_WORDS_AT = 2048
MAX_WORDS = 1024
"""Bytes of the last words."""
_SEQ = struct.Struct("<Q")
SIZE = 4096
READ_TRIES = 100
"""A write takes about a microsecond; a reader that meets one so often meets a writer that does not go on."""


@dataclass(slots=True)
class Row:
    """What is announced. Times are seconds of time.monotonic(), which all processes of a host share."""

    step_no: int = 0
    begun: float = 0.0
    predicted_ms: float = 0.0
    ended: int = 1
    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0
    output_tokens: int = 0
    computed_tokens: int = 0
    preemptions: int = 0
    hook_us: float = 0.0
    """What the scheduler's own code has cost, in all, in microseconds."""


def create() -> Path:
    """A new, zeroed board; the creator removes it. Boards of creators that were killed are removed here."""
    shared = Path("/dev/shm")
    directory = shared if shared.is_dir() else None
    for old in (directory or Path(tempfile.gettempdir())).glob("trimtab-*-*"):
        pid = old.name.split("-")[1]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            # Another user's is not ours to remove.
            with contextlib.suppress(OSError):
                old.unlink()
    fd, name = tempfile.mkstemp(prefix=f"trimtab-{os.getpid()}-", dir=directory)
    os.write(fd, bytes(SIZE))
    os.close(fd)
    return Path(name)


class Board:
    """A view of the board at `path`, for its writer or for a reader."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as f:
            self._map = mmap.mmap(f.fileno(), SIZE)
        self._last = Row()

    def write(self, row: Row) -> None:
        (seq,) = _SEQ.unpack_from(self._map, 0)
        _SEQ.pack_into(self._map, 0, seq + 1)
        # Apart from the sequence number: packing clears all that it covers first, and a cleared number would look like a whole row.
        _ROW.pack_into(
            self._map, _SEQ.size,
            row.step_no, row.begun, row.predicted_ms, row.ended, row.running, row.waiting, row.queued_prefill_tokens,
            row.free_blocks, row.total_blocks, row.output_tokens, row.computed_tokens, row.preemptions, row.hook_us,
        )  # fmt: skip
        _SEQ.pack_into(self._map, 0, seq + 2)

    def write_stats(self, values: tuple[float, ...]) -> None:
        """The scheduler's statistics, in the order of STATS. Each number is whole; that they are of one step is not promised."""
        _STATS.pack_into(self._map, _STATS_AT, *values)

    def read_stats(self) -> dict[str, float]:
        return dict(zip(STATS, _STATS.unpack_from(self._map, _STATS_AT), strict=True))

    def write_words(self, words: str) -> None:
        """What the engine process says as it dies."""
        raw = words.encode("utf-8", "replace")[:MAX_WORDS]
        self._map[_WORDS_AT + _WORDS.size : _WORDS_AT + _WORDS.size + len(raw)] = raw
        _WORDS.pack_into(self._map, _WORDS_AT, len(raw))

    def read_words(self) -> str:
        """Empty while it has said nothing."""
        (length,) = _WORDS.unpack_from(self._map, _WORDS_AT)
        start = _WORDS_AT + _WORDS.size
        return self._map[start : start + min(length, MAX_WORDS)].decode("utf-8", "replace")

    def read(self) -> Row:
        """The newest whole row. A writer that was stopped or killed in the middle of one leaves the row before it."""
        for _ in range(READ_TRIES):
            (before,) = _SEQ.unpack_from(self._map, 0)
            values = _ROW.unpack_from(self._map, _SEQ.size)
            (after,) = _SEQ.unpack_from(self._map, 0)
            if before % 2 == 0 and after == before:
                if before:
                    self._last = Row(*values)
                break
        return self._last

    def close(self) -> None:
        self._map.close()
