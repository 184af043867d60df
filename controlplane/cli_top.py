"""`trimtab top`: the mesh as it is now, again each second."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import click

from controlplane.cli import ask
from trimtab.errors import TrimtabError
from trimtab.kit.cli import WIDTH, control_option, json_option

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient
    from controlplane.top import View

T = TypeVar("T")

QUIT = ("q", "Q", "\x03", "\x04")
"""As a terminal sends them: q, Ctrl-C, Ctrl-D."""


@click.command()
@click.option(
    "--once", is_flag=True, help="Show it once, all workers, and end. So it is too where stdout is no terminal."
)
@click.option(
    "--interval",
    "interval_s",
    type=click.FloatRange(0.2, 3600.0),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between two looks.",
)
@control_option
@json_option
def top(once: bool, interval_s: float, control: str | None, as_json: bool) -> None:
    """Watch the mesh: workers, the worst first, with P50 and P99 of REALTIME (! is over the objective), who waits, the KV cache, the
    running set, what loops do, and their last decisions. q or Ctrl-C ends it.

    A dash is what nobody said. With --json there is one object a line for each look; --once gives one.

    Exit codes: 0 ended, 2 usage, 3 no control plane answers.
    """
    live = not once and not as_json and sys.stdout.isatty()
    if live:
        ask(control, as_json, lambda client: _watch(client, interval_s, _mesh(control)))
    elif as_json and not once:
        ask(control, as_json, lambda client: _stream(client, interval_s, _mesh(control)))
    else:
        _show_once(control, as_json)


def _show_once(control: str | None, as_json: bool) -> None:
    from controlplane import render_top as render

    view = ask(control, as_json, lambda client: _look(client, _mesh(control)))
    if as_json:
        click.echo(json.dumps(render.top_json(view, _now()), ensure_ascii=False))
    else:
        click.echo(render.plain(render.frame(view, _now(), width=_width())))


async def _look(client: AdminClient, mesh: str) -> View:
    from controlplane.top import DECISIONS, WINDOWS, view

    telemetry, policy = await asyncio.gather(
        client.get_telemetry(windows=WINDOWS, decisions=DECISIONS), client.get_policy()
    )
    return view(telemetry, policy, mesh)


async def _stream(client: AdminClient, interval_s: float, mesh: str) -> None:
    """One line of JSON for each look, until it is interrupted or whoever reads has gone."""
    from controlplane import render_top as render

    ended = _until_interrupted()
    while not ended.is_set():
        begun = time.monotonic()
        if (view := await _unless(ended, _look(client, mesh))) is None:
            return
        click.echo(json.dumps(render.top_json(view, _now()), ensure_ascii=False))
        await _unless(ended, asyncio.sleep(max(0.0, begun + interval_s - time.monotonic())))


def _until_interrupted() -> asyncio.Event:
    """Set by Ctrl-C, which is how this verb is ended: no failure."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, ended.set)
    return ended


async def _watch(client: AdminClient, interval_s: float, mesh: str) -> None:
    """Until q. The first look must succeed; after that a control plane that is away leaves the last one standing, and says so."""
    from rich.console import Console
    from rich.live import Live

    from controlplane import render_top as render

    view, fault = await _look(client, mesh), ""
    ended = _until_interrupted()
    console = Console(highlight=False)
    with _keys(ended), Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as shown:
        while not ended.is_set():
            begun = time.monotonic()
            size = console.size
            lines = render.frame(view, _now(), width=size.width, height=size.height, fault=fault)
            shown.update(_painted(lines), refresh=True)
            await _unless(ended, asyncio.sleep(max(0.01, begun + interval_s - time.monotonic())))
            try:
                view, fault = await _unless(ended, _look(client, mesh)) or view, ""
            except TrimtabError as e:
                fault = f"this is how it was; now: {e.message}"


async def _unless(ended: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """What the work comes to; None once `ended` is set, which ends the work too: a call that hangs must not hold up who wants to leave."""
    from trimtab.kit.rpc import cancel_and_wait

    doing, ending = asyncio.create_task(work), asyncio.create_task(ended.wait())
    try:
        await asyncio.wait((doing, ending), return_when=asyncio.FIRST_COMPLETED)
        return doing.result() if doing.done() else None
    finally:
        await cancel_and_wait(ending)
        if not doing.done():
            await cancel_and_wait(doing)


def _painted(lines: Any) -> Any:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    for i, line in enumerate(lines):
        if i:
            text.append("\n")
        for piece, style in line:
            text.append(piece, style or None)
    return text


@contextlib.contextmanager
def _keys(ended: asyncio.Event) -> Iterator[None]:
    """Sets `ended` when somebody types q; the terminal is as it was afterwards. Without a keyboard only a signal ends it."""
    import termios
    import tty

    if not sys.stdin.isatty():
        yield
        return
    loop, keyboard = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)

    def typed() -> None:
        import os

        text = os.read(keyboard, 64).decode(errors="ignore")
        if not text or any(key in text for key in QUIT):
            ended.set()

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, typed)
    try:
        yield
    finally:
        loop.remove_reader(keyboard)
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _width() -> int:
    return max(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def _mesh(control: str | None) -> str:
    """Its name, where it is the one of the running `trimtab up`."""
    from trimtab.kit.run_file import control_address, running

    run = running()
    return run.mesh if run is not None and run.control == control_address(control) else ""


def _now() -> int:
    return int(time.time() * 1000)
