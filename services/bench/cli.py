"""The verb `bench`: one module for each bench, loaded when it is asked for."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from services.bench.report import Report


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a bench lives: `async def run(options: Options) -> Report`."""

    module: str
    function: str
    help: str


BENCHES = {"overhead": Bench("services.bench.overhead", "run", "what the mesh costs next to plain vLLM")}


@click.command(epilog="Benches: " + "; ".join(f"{name}: {b.help}" for name, b in BENCHES.items()))
@click.argument("name", type=click.Choice(list(BENCHES)))
@click.option("--quick", is_flag=True, help="End within 3 minutes; the report says what is left out.")
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON too; - is stdout.")
@click.option("--check", is_flag=True, help="Exit with 1 if a goal is missed. Undecided goals are listed.")
@click.option("--resume", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
              help="Keep raw results in DIR, and go on with what it has.")  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), help="Rounds of interleaved arms. [default: the bench's own]")
@click.option("--model", default="default", show_default=True, help="Model for real engines: local path or hub id.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of prompts and of bootstrap intervals.")
def bench(
    name: str,
    quick: bool,
    json_file: str | None,
    check: bool,
    resume: Path | None,
    rounds: int | None,
    model: str,
    seed: int,
) -> None:
    """Measure NAME on this machine, on processes that it starts itself, and report against its goals.

    Ctrl-C ends it with what it has measured so far.
    """
    from services.bench.options import Options
    from services.bench.processes import BenchError

    if json_file not in (None, "-") and not Path(str(json_file)).absolute().parent.is_dir():
        raise click.UsageError(f"--json: there is no directory {Path(str(json_file)).absolute().parent}")
    # This process starts others while it talks gRPC; it forks only to exec, and needs none of gRPC's care for that.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    which = BENCHES[name]
    run = getattr(importlib.import_module(which.module), which.function)
    options = Options(quick, resume.absolute() if resume else None, rounds, model, seed)
    try:
        report: Report = _until_done_or_stopped(run(options))
    except BenchError as e:
        click.secho(f"error: {e}", fg="red", err=True)
        sys.exit(e.code)
    except asyncio.CancelledError:
        sys.exit(130)
    text, facts = report.text(), json.dumps(report.as_json(), indent=2, ensure_ascii=False)
    click.echo(text, err=json_file == "-")
    if json_file == "-":
        click.echo(facts)
    elif json_file is not None:
        Path(json_file).write_text(facts + "\n")
    if check:
        click.echo(report.verdict(), err=True)
    sys.exit(report.exit_code(check=check))


def _until_done_or_stopped(work: Coroutine[Any, Any, Report]) -> Report:
    """The first signal cancels the work, which then ends its processes; later ones change nothing of that, it takes seconds."""
    import uvloop

    async def cancellable() -> Report:
        task = asyncio.ensure_future(work)
        loop = asyncio.get_running_loop()

        def stop() -> None:
            for sig in signals:
                loop.add_signal_handler(sig, lambda: None)
            click.echo("stopping: ending what was started", err=True)
            task.cancel()

        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        for sig in signals:
            loop.add_signal_handler(sig, stop)
        return await task

    # The loop that our processes run on too, so that the generator's own share is as small as theirs.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(cancellable())
