"""How far a batch is, on stderr: a bar with the time that is left on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from services.batch.runner import Tally

SPEED_OVER_S = 300.0
"""The forecast goes by the lines of so long: answers differ in length, and gateways come and go."""


class Bar:
    def __init__(self, tally: Tally) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        columns = (
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("left  {task.fields[words]}"),
        )
        self._tally = tally
        self._bar = Progress(
            *columns, console=Console(stderr=True), refresh_per_second=1, speed_estimate_period=SPEED_OVER_S
        )
        self._task = self._bar.add_task("", total=tally.total, words="")

    def line(self) -> None:
        """One more is safe."""
        t = self._tally
        words = f"{t.failed} failed, {t.completion_tokens} tokens" if t.failed else f"{t.completion_tokens} tokens"
        self._bar.update(self._task, completed=t.done + t.failed, words=words)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class Quiet:
    def line(self) -> None:
        pass


def progress(tally: Tally) -> AbstractContextManager[Bar | Quiet]:
    """The display for where stderr goes."""
    return Bar(tally) if sys.stderr.isatty() else nullcontext(Quiet())
