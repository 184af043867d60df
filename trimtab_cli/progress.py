"""What `trimtab up` tells while it runs: a live table on a terminal, plain lines elsewhere, JSON lines on request.

Whoever reads the plain or JSON lines gets the same events; only the terminal's table is redrawn.
"""

from __future__ import annotations

import contextlib
import enum
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

HEARTBEAT_S = 10.0
"""Plain output names the processes that are still starting this often."""


class State(enum.Enum):
    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    FAILED = "failed"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(slots=True)
class Row:
    """One process on the display; `last_words` reads the newest line of its log."""

    state: State
    since: float
    last_words: Callable[[], str]
    shown_at: float = 0.0
    took: str = ""


class Screen:
    """Plain lines on stdout. Subclasses change how events look, never which there are."""

    def __init__(self) -> None:
        self._rows: dict[str, Row] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.settle()

    def add(self, name: str, last_words: Callable[[], str]) -> None:
        self._rows[name] = Row(State.WAITING, time.monotonic(), last_words)

    def state(self, name: str, state: State) -> None:
        """The process is in this state from now on."""
        row, now = self._rows[name], time.monotonic()
        took_s = now - row.since
        # Of one that has served until now it would be how long it has lived.
        spent = row.state in (State.STARTING, State.STOPPING) and state in (State.READY, State.FAILED, State.STOPPED)
        row.state, row.since, row.shown_at = state, now, now
        row.took = f"{took_s:.1f} s" if spent else ""
        self.changed(name, state, took_s)

    def changed(self, name: str, state: State, took_s: float) -> None:
        took = self._rows[name].took
        self.line(f"  {name:<8} {state.value}{f' after {took}' if took else ''}")

    def event(self, kind: str, text: str, **facts: Any) -> None:
        """Something that people are told as `text`, and programs as `kind` with its facts."""
        del kind, facts
        self.line(text)

    def error(self, kind: str, text: str, **facts: Any) -> None:
        """Why it ends: for people on stderr."""
        del kind, facts
        self.settle()
        print(text, file=sys.stderr, flush=True)

    def tick(self) -> None:
        """Called a few times a second while something is awaited."""
        now = time.monotonic()
        for name, row in self._rows.items():
            if row.state is State.STARTING and now - row.shown_at > HEARTBEAT_S:
                row.shown_at = now
                self.line(f"  {name:<8} starting, {now - row.since:.0f} s: {row.last_words()}")

    def settle(self) -> None:
        """The start is over: nothing is redrawn from here on."""

    def line(self, text: str) -> None:
        """Shown to nobody once the reader has gone: what is under way, such as a drain, must not end for that."""
        with contextlib.suppress(OSError):
            self.write(text)

    def write(self, text: str) -> None:
        print(text, flush=True)


class JsonScreen(Screen):
    """One JSON object for each event, on stdout."""

    def changed(self, name: str, state: State, took_s: float) -> None:
        self.event("process", "", name=name, state=state.value, seconds=round(took_s, 3))

    def event(self, kind: str, text: str, **facts: Any) -> None:
        message = {"message": text} if text else {}
        self.line(json.dumps({"event": kind, **facts, **message}))

    def error(self, kind: str, text: str, **facts: Any) -> None:
        self.line(json.dumps({"error": {"reason": kind.upper(), "message": text, **facts}}))

    def tick(self) -> None:
        """Programs need no heartbeat."""


class LiveScreen(Screen):
    """A table that is redrawn while the mesh starts; plain lines after that."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.live import Live

        self._console = Console(highlight=False)
        self._live: Live | None = Live(get_renderable=self._table, console=self._console, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def settle(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, name: str, state: State, took_s: float) -> None:
        if self._live is None:
            super().changed(name, state, took_s)

    def tick(self) -> None:
        """The table redraws itself."""

    def write(self, text: str) -> None:
        # Through the console, so that a line lands above the table.
        self._console.print(text, markup=False, soft_wrap=True)

    def _table(self) -> Any:
        from rich.table import Table
        from rich.text import Text

        styles = {State.READY: "green", State.FAILED: "red", State.STARTING: "yellow"}
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        for name, row in list(self._rows.items()):
            seconds = f"{now - row.since:.1f} s" if row.state is State.STARTING else row.took
            words = row.last_words() if row.state is State.STARTING else ""
            table.add_row(
                f"  {name}",
                Text(row.state.value, style=styles.get(row.state, "dim")),
                seconds,
                Text(words, style="dim", no_wrap=True, overflow="ellipsis"),
            )
        return table


def screen(as_json: bool) -> Screen:
    """The display for where stdout goes."""
    if as_json:
        return JsonScreen()
    return LiveScreen() if sys.stdout.isatty() else Screen()
