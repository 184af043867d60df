"""`trimtab batch run`: a file of requests to a gateway, as BATCH, and their answers to another file; stopped, it goes on where it was."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import click

from trimtab.errors import TrimtabError
from trimtab.kit.cli import KEY, ExitCode, astray, echo_json, fail, gateway_option, json_option, own_key, run
from trimtab.kit.run_file import gateway_address

if TYPE_CHECKING:
    from services.batch.lines import BadLine
    from services.batch.results import Results
    from services.batch.runner import Tally
    from services.batch.source import Source

SHOWN = 20
"""Bad lines that are told one by one."""
CONNECTIONS = 4
"""To each address: of a gateway of several processes each has but a part of a tenant's rates, and one connection is with one process."""
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def _seconds(_: click.Context, __: click.Parameter, text: str) -> float:
    """A number, with one of `UNITS_S`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if not found or not float(found[1]):
        raise click.BadParameter(f"{text!r} is no time above 0, such as 24h, 90m or 30s")
    return float(found[1]) * UNITS_S[found[2]]


@click.group()
def batch() -> None:
    """Run files of requests through the mesh as BATCH."""


@batch.command("run")
@click.argument("source", metavar="IN.jsonl", type=click.Path(exists=True, dir_okay=False, allow_dash=True))
@click.argument("out", metavar="OUT.jsonl", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--in-flight", type=click.IntRange(1, 4096), default=64, show_default=True, help="Requests at once.")
@click.option(
    "--deadline",
    "deadline_s",
    default="24h",
    show_default=True,
    metavar="TIME",
    callback=_seconds,
    help="Time for the whole: 30s, 90m, 24h.",
)
@click.option("--skip-bad", is_flag=True, help="Write lines that can't be sent as errors, and run the others.")
@gateway_option
@json_option
def run_batch(
    source: str, out: Path, in_flight: int, deadline_s: float, skip_bad: bool, gateway: str | None, as_json: bool
) -> None:
    """Send each line of IN.jsonl to a gateway, and write each answer to OUT.jsonl as it comes.

    Both files are in OpenAI's batch format; - reads standard input. Every line of IN is checked before any is sent. What OUT has already
    is not sent again, so a run that was stopped (by Ctrl-C or SIGTERM), or whose time was over, goes on when it is started again. While no
    gateway answers it is tried again and again, and said. Exit code 5: some lines failed, or no time was left for them.
    """
    from services.batch.lines import BadLine
    from services.batch.results import NotOurs, Results
    from services.batch.source import STDIN, Source, opened
    from trimtab.kit.tls import CertificateError

    began = time.monotonic()
    if source != STDIN and out.exists() and out.samefile(source):
        raise click.UsageError("IN and OUT are the same file")
    try:
        with opened(source) as file:
            lines = Source(file)
            if lines.bad and not skip_bad:
                _tell_bad(lines.bad, as_json)
            with Results(out) as results:
                tally = run(_run(lines, results, gateway, in_flight, began + deadline_s))
    except asyncio.CancelledError:
        # By SIGTERM, as a shell expects.
        sys.exit(128 + signal.SIGTERM)
    except TrimtabError as failure:
        e = astray(failure, gateway_address(gateway), "gateway")
        if e.reason == "UNREACHABLE" and not as_json:
            click.echo("is the mesh running? `trimtab up` starts one here; --gateway names another", err=True)
        fail(e, as_json)
    except (NotOurs, BadLine, CertificateError) as e:
        raise click.UsageError(str(e)) from e
    except OSError as e:
        words = f"{e.filename or out}: {e.strerror or e}"
        if as_json:
            echo_json({"error": {"reason": "FILE", "message": words}})
        raise click.ClickException(words) from e
    _tell(tally, time.monotonic() - began, as_json)
    sys.exit(ExitCode.PARTIAL if tally.failed or tally.left else ExitCode.OK)


async def _run(source: Source, results: Results, gateway: str | None, in_flight: int, until: float) -> Tally:
    from services.batch.progress import progress, watch
    from services.batch.runner import Runner, Tally
    from trimtab.client import Client

    bad = [b for b in source.bad if b.custom_id not in results.done and b.line not in results.lines]
    skipped = source.count(results.done)
    tally = Tally(len(source) - skipped + len(bad), skipped + len(source.bad) - len(bad))
    try:
        client = Client(gateway_address(gateway), key=own_key(), connections=min(CONNECTIONS, in_flight))
    except ValueError as e:
        raise click.UsageError(f"{KEY}: {e}") from e
    main = asyncio.current_task()
    assert main is not None
    with contextlib.suppress(RuntimeError, ValueError):
        # In a thread that is not the main one nobody sends signals.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    async with client:
        if tally.total:
            await client.models()
        try:
            with progress(tally) as display:
                runner = Runner(client, results, tally, until=until, on_line=display.line)
                watching = asyncio.create_task(watch(lambda: runner.held_up, display.say))
                try:
                    for each in bad:
                        await runner.refuse(each)
                    await runner.run(source.tasks(results.done), min(in_flight, tally.total))
                finally:
                    watching.cancel()
        except BaseException:
            click.echo(f"stopped after {results.safe} of {tally.total} lines; start it again to go on", err=True)
            raise
    return tally


def _tell_bad(bad: Sequence[BadLine], as_json: bool) -> NoReturn:
    """Nothing is sent where something can't be."""
    words = f"{len(bad)} lines can't be sent" if len(bad) > 1 else "1 line can't be sent"
    if as_json:
        told = [{"line": b.line, "custom_id": b.custom_id or None, "code": b.code, "message": b.why} for b in bad]
        echo_json({"error": {"reason": "BAD_LINES", "message": words, "lines": told}})
    for each in bad[:SHOWN]:
        click.echo(str(each), err=True)
    more = f", {len(bad) - SHOWN} of them not shown" if len(bad) > SHOWN else ""
    click.secho(f"error: {words}{more}; nothing was sent. --skip-bad writes them as errors", fg="red", err=True)
    sys.exit(ExitCode.USAGE)


def _tell(tally: Tally, seconds: float, as_json: bool) -> None:
    if as_json:
        echo_json(
            {
                "done": tally.done,
                "failed": tally.failed,
                "skipped": tally.skipped,
                "left": tally.left,
                "tokens": tally.prompt_tokens + tally.completion_tokens,
                "prompt_tokens": tally.prompt_tokens,
                "completion_tokens": tally.completion_tokens,
                "seconds": round(seconds, 3),
            }
        )
        return
    parts = [f"{tally.done} done", f"{tally.failed} failed"]
    parts += [f"{tally.skipped} skipped: an earlier run did them"] if tally.skipped else []
    parts += [f"{tally.left} left: no time; start it again to go on"] if tally.left else []
    tokens = f"{tally.prompt_tokens} prompt and {tally.completion_tokens} completion tokens"
    click.echo(f"{', '.join(parts)}; {tokens} in {seconds:.1f} s", err=True)
