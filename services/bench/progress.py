"""How far a bench is, on stderr: a bar on a terminal, a line for each stage elsewhere, both with the time that is left.

Invariant: it costs the measured machine next to nothing: a redraw a second, nothing between stages elsewhere.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

PRIOR_S = 60.0
"""So many seconds' worth of belief in what was expected."""


class Progress:
    """Plain lines. Work is counted in seconds as expected beforehand; what it really took corrects the forecast."""

    def __init__(self, expected_s: float) -> None:
        self._total_s = expected_s
        self._done_s = 0.0
        self._begun = time.monotonic()

    def stage(self, text: str) -> None:
        """What is under way from now on."""
        self.line(f"[{_clock(time.monotonic() - self._begun)}, {_clock(self.left_s)} left] {text}")

    def done(self, expected_s: float) -> None:
        """So much of the expected work lies behind."""
        self._done_s += expected_s

    def skip(self, expected_s: float) -> None:
        """So much of it need not be done."""
        self._total_s -= expected_s

    @property
    def left_s(self) -> float:
        left = max(0.0, self._total_s - self._done_s)
        # The little that the first stages say of the machine must not swing the forecast.
        return left * (time.monotonic() - self._begun + PRIOR_S) / (self._done_s + PRIOR_S)

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


class Bar(Progress):
    """The same on a terminal."""

    def __init__(self, expected_s: float) -> None:
        super().__init__(expected_s)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Rich

        columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.fields[left]} left  {task.description}"))
        self._bar = Rich(*columns, console=Console(stderr=True), refresh_per_second=1, transient=True)
        self._task = self._bar.add_task("", total=expected_s, left=_clock(expected_s))

    def stage(self, text: str) -> None:
        self._show(text)

    def done(self, expected_s: float) -> None:
        super().done(expected_s)
        self._show(None)

    def skip(self, expected_s: float) -> None:
        super().skip(expected_s)
        self._show(None)

    def line(self, text: str) -> None:
        self._bar.console.print(text, markup=False, highlight=False)

    def _show(self, text: str | None) -> None:
        words: dict[str, Any] = {} if text is None else {"description": text}
        self._bar.update(self._task, total=self._total_s, completed=self._done_s, left=_clock(self.left_s), **words)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


def progress(expected_s: float) -> Progress:
    """The display for where stderr goes."""
    return Bar(expected_s) if sys.stderr.isatty() else Progress(expected_s)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
