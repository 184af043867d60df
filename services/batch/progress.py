"""How far a batch is, on stderr: a bar with the time that is left on a terminal; there and elsewhere a line when nothing goes on, and when
something does again.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

import click

from services.batch.runner import Tally
from trimtab.kit.duration import brief

SPEED_OVER_S = 300.0
"""The forecast goes by the lines of so long: answers differ in length, and gateways come and go."""
LOOK_S = 0.5
HELD_UP_S = 2.0
"""What is over sooner is not told: a gateway that is started anew."""


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
        words = f"{t.failed} failed, " if t.failed else ""
        words += f"{t.completion_tokens} completion tokens"
        self._bar.update(self._task, completed=t.done + t.failed, words=words)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._bar.console.print(text, markup=False, highlight=False)

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

    def say(self, text: str) -> None:
        click.echo(text, err=True)


async def watch(held_up: Callable[[], str], say: Callable[[str], None]) -> None:
    """For ever: says once that nothing goes on, why and that it is tried again, and once that something does again."""
    since: float | None = None
    told = False
    while True:
        why, now = held_up(), time.monotonic()
        if not why:
            if told and since is not None:
                say(f"goes on again, after {brief((now - since) * 1000)}")
            since, told = None, False
        else:
            since = now if since is None else since
            if not told and now - since >= HELD_UP_S:
                say(f"{why}; trying again until the deadline, or until this is stopped: what is done is kept")
                told = True
        await asyncio.sleep(LOOK_S)


def progress(tally: Tally) -> AbstractContextManager[Bar | Quiet]:
    """The display for where stderr goes."""
    return Bar(tally) if sys.stderr.isatty() else nullcontext(Quiet())
