"""`trimtab up`: the whole mesh on one machine, supervised, from one command.

It ends its start by sending one prompt through the gateway: what is called up has answered. Then, while it serves, it
may write a preset (`preset.py`). Exit codes: 0 stopped on request, 1 a process could not start, died too often, or was
ended at once by a second request; 2 usage; 4 the mesh runs already.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import click

from trimtab.errors import TrimtabError, Unauthenticated
from trimtab.kit.cli import KEY, ExitCode, json_option
from trimtab.kit.config import ConfigError, options
from trimtab.kit.tls import tls_of
from trimtab_cli import mesh
from trimtab_cli.plan import Plan, Sections, make
from trimtab_cli.progress import Screen, screen
from trimtab_cli.ready import report
from trimtab_cli.settings import UpSettings
from trimtab_cli.supervisor import GaveUp, StartFailed, Supervisor
from trimtab_cli.valkey import ValkeyMissing

FAILED_START_PATIENCE_S = 5.0
"""Processes that never served have no streams to finish."""


@click.command(
    epilog="Arguments after -- go to each worker: trimtab up -- --dtype float32 (python -m services.worker --help)."
)
@click.option("--config", "path", metavar="FILE", help="settings file [default: ./trimtab.toml, then /etc/trimtab]")
@options(UpSettings)
@json_option
@click.argument("extra", nargs=-1, type=click.UNPROCESSED)
def up(path: str | None, as_json: bool, extra: tuple[str, ...], **flags: Any) -> None:
    """Run the whole mesh on this machine: store, control plane, workers and gateway.

    Ctrl-C ends it in order, letting running streams finish; a second Ctrl-C ends it at once.
    """
    show = screen(as_json)
    try:
        sections = mesh.load_sections(path, flags, extra)
        state = mesh.state_directory(sections.up.mesh)
        with mesh.claimed(sections.up.mesh):
            code = asyncio.run(_run(sections, state, show))
    except ConfigError as e:
        show.error("settings", "\n".join(e.faults), faults=e.faults)
        code = ExitCode.USAGE
    except (mesh.ModelMissing, mesh.NoStateDirectory) as e:
        show.error("cannot_start", str(e))
        code = ExitCode.GOAL_FAILED
    except mesh.AlreadyUp as e:
        show.error("already_up", str(e))
        code = ExitCode.REFUSED
    except ValkeyMissing as e:
        show.error("no_store", str(e))
        code = ExitCode.GOAL_FAILED
    sys.exit(code)


async def _run(sections: Sections, state: Path, show: Screen) -> int:
    """From the plan to the last process's end; the exit code."""
    from trimtab.kit.rpc import use_tls

    begun = time.monotonic()
    stop = Stop(asyncio.get_running_loop())
    if await stop.or_done(mesh.fetch_model(sections.worker)):
        return ExitCode.OK
    plan = make(sections, state)
    # The control plane's own certificate opens every door of the mesh: `up` asks for health and a prompt with it.
    use_tls(tls_of(sections.control, sections.up.mesh))
    for note in plan.notes:
        show.event("port_moved", note)
    record = mesh.Record(sections.up.mesh, plan)
    supervisor = Supervisor(
        plan.specs, state / "logs", show, ready_s=sections.up.ready_s, on_change=lambda: record.write(supervisor.pids)
    )
    stop.on_second = supervisor.kill
    patience_s: float | None = FAILED_START_PATIENCE_S
    try:
        with show:
            if await stop.or_done(supervisor.start()):
                return ExitCode.OK
        if await stop.or_done(_ready(sections, plan, supervisor, record, show, begun)):
            return ExitCode.OK
        patience_s = None
        await stop.or_done(_serve(sections, plan, supervisor, show))
        show.event("stopping", "stopping: running streams may finish; Ctrl-C again ends them now")
        await supervisor.drain()
        return ExitCode.GOAL_FAILED if stop.insisted else ExitCode.OK
    except StartFailed as e:
        tail = "\n".join(f"    {line}" for line in e.tail) or "    (it wrote nothing)"
        show.error("start_failed", f"{e}; its last lines:\n{tail}\nthe whole log: {e.log}", name=e.name, tail=e.tail)
        return ExitCode.GOAL_FAILED
    except TrimtabError as e:
        say = f"the mesh is up, but a prompt got no answer: {e.message}"
        if isinstance(e, Unauthenticated):
            say += f"\nput a key of the gateway's key file into {KEY} (trimtab keys new makes one), or start with --no-prompt"
        show.error("no_answer", f"{say}\nthe logs: {state / 'logs'}")
        return ExitCode.GOAL_FAILED
    except GaveUp as e:
        patience_s = None
        show.error("gave_up", str(e))
        return ExitCode.GOAL_FAILED
    finally:
        record.remove()
        await supervisor.drain(patience_s=patience_s)
        show.event("stopped", "stopped")


async def _ready(
    sections: Sections, plan: Plan, supervisor: Supervisor, record: mesh.Record, show: Screen, begun: float
) -> None:
    from trimtab_cli.greeting import greet

    greeting = await greet(plan.gateway, plan.control) if sections.up.prompt else None
    record.write(supervisor.pids)
    report(show, sections, plan, supervisor.pids, greeting, time.monotonic() - begun)


async def _serve(sections: Sections, plan: Plan, supervisor: Supervisor, show: Screen) -> None:
    """Tend the processes until GaveUp. The preset is settled meanwhile, and what the pool wants is followed: none waits for another."""
    from trimtab_cli.following import Following
    from trimtab_cli.preset import settle

    beside = [
        asyncio.create_task(settle(show, sections.up, plan)),
        asyncio.create_task(Following(show, sections, plan, supervisor).run()),
    ]
    try:
        await supervisor.watch()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.gather(*beside, return_exceptions=True)


class Stop:
    """Signals as a request to stop. The second one insists: it calls `on_second`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._asked = asyncio.Event()
        self.insisted = False
        self.on_second: Callable[[], None] = lambda: None
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._signalled)

    def _signalled(self) -> None:
        if self._asked.is_set():
            self.insisted = True
            self.on_second()
        self._asked.set()

    async def or_done(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for the work, or for a request to stop, which cancels it. True when stopping."""
        task, asked = asyncio.create_task(work), asyncio.create_task(self._asked.wait())
        try:
            await asyncio.wait({task, asked}, return_when=asyncio.FIRST_COMPLETED)
            if self._asked.is_set():
                return True
            task.result()
            return False
        finally:
            for waiting in (task, asked):
                waiting.cancel()
            await asyncio.gather(task, asked, return_exceptions=True)
