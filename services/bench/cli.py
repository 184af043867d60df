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
from typing import TYPE_CHECKING, Any, NoReturn

import click

if TYPE_CHECKING:
    from services.bench.report import Report


@dataclass(frozen=True, slots=True)
class Bench:
    """Where a bench lives: `async def run(options: Options) -> Report`. `takes` are the options that not every bench has."""

    module: str
    function: str
    help: str
    takes: frozenset[str] = frozenset()


TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
BENCHES = {
    "overhead": Bench("services.bench.overhead", "run", "what the mesh costs next to plain vLLM"),
    "mixed": Bench(
        "services.bench.mixed.course",
        "run",
        "realtime and batch on one engine, by FCFS, priority and our scheduler",
        frozenset({"png", "arms", "block_s", "realtime_per_arm", "itl_budgets", "step_tokens", "trace"}),
    ),
    "scheduler": Bench("services.bench.scheduler", "run", "what scheduling costs per engine step, without a model"),
    "reports": Bench("services.bench.report_cost", "run", "what measuring and reporting cost a worker, of one core"),
    "long-prompt": Bench(
        "services.bench.long_prompt",
        "run",
        "what one long prompt does to the gaps of streams beside it, by ours and by FCFS",
        frozenset({"itl_budget"}),
    ),
    "policy-latency": Bench(
        "services.bench.policy_latency",
        "run",
        "how long a policy takes from the engine's channel to its acknowledgement",
    ),
    "gateway": Bench(
        "services.bench.gateway.course",
        "run",
        "what a token costs a gateway, by one stream per worker and by one per request",
        frozenset({"arms", "smg"}),
    ),
    "peers": Bench(
        "services.bench.peers.course",
        "run",
        "our HTTP door and SMG before the same worker with vLLM",
        frozenset({"smg"}),
    ),
    "loops": Bench(
        "services.bench.loops.course",
        "run",
        "a burst, or a worker that hangs, on a real mesh with the loops on and off, under our scheduler and under FCFS",
        frozenset({"arms", "scenario"}),
    ),
    "blocks": Bench(
        "services.bench.blocks.course",
        "run",
        "what each KV block size is worth in speed, memory and prefixes found again",
        frozenset({"png", "trace"}),
    ),
    "reblock": Bench(
        "services.bench.reblock.course", "run", "what a change of the KV block size does to running streams"
    ),
    "sizing": Bench("services.bench.sizing.course", "run", "memory and CPU of each process, by nodes and by streams"),
    "soak": Bench("services.bench.push.soak", "run", "ten minutes of puts: what every process's memory does"),
    "push": Bench("services.bench.push.course", "run", "from a policy's put to its holding in up to a thousand nodes"),
}


def _names(_: click.Context, __: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(x.strip() for x in (value or "").split(",") if x.strip())


def _numbers(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    try:
        found = tuple(int(x) for x in _names(context, parameter, value))
    except ValueError:
        raise click.BadParameter(f"{value!r} is no list of whole numbers such as 50,100,200") from None
    if any(x < 1 for x in found):
        raise click.BadParameter("every number must be at least 1")
    return found


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
@click.option(
    "--png", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="mixed, blocks: draw a picture too."
)
@click.option("--arms", metavar="A,B", callback=_names, help="mixed, gateway, loops: only these arms.")
@click.option(
    "--block-s", type=click.FloatRange(2.0), help="mixed: seconds of a block. [default: 120; 60 with --quick]"
)
@click.option("--realtime-per-arm", type=click.IntRange(1), help="mixed: realtime requests that count. [default: 200]")
@click.option("--itl-budgets", metavar="MS,MS", callback=_numbers, help="mixed: our points. [default: 36,100,200]")
@click.option(
    "--itl-budget", metavar="MS", type=click.IntRange(1),
    help="long-prompt: the budget of ours. [default: twice the median gap without the prompt]",
)  # fmt: skip
@click.option("--step-tokens", type=click.IntRange(32), help="mixed: tokens of an engine step at most. [default: 2048]")
@click.option("--trace", metavar="DIR", is_flag=False, flag_value=str(TRACES), type=click.Path(path_type=Path),
              help="mixed: public traces in the simulated engine instead; blocks: where they lie. [without DIR: ../shared/traces]")  # fmt: skip
@click.option("--scenario", type=click.Choice(["step", "hang"]),
              help="loops: a step of load (default), or an engine that stops; hang knows --model simulated too.")  # fmt: skip
@click.option("--smg", metavar="PATH", type=click.Path(dir_okay=False, path_type=Path),
              help="gateway, peers: SMG's command, measured beside ours.")  # fmt: skip
def bench(
    name: str,
    quick: bool,
    json_file: str | None,
    check: bool,
    resume: Path | None,
    rounds: int | None,
    model: str,
    seed: int,
    **special: Any,
) -> None:
    """Measure NAME on this machine, on processes that it starts itself, and report against its goals.

    Ctrl-C ends it with what it has measured so far.
    """
    # This process starts others while it talks gRPC; it forks only to exec, and needs none of gRPC's care for that, by which a fork may die
    # before it gets there. gRPC reads this as it is imported.
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    from services.bench.options import Options
    from trimtab.kit.rpc import use_tls

    for option, file in (("json", json_file), ("png", special["png"])):
        if file not in (None, "-") and not Path(str(file)).absolute().parent.is_dir():
            raise click.UsageError(f"--{option}: there is no directory {Path(str(file)).absolute().parent}")
    asked = {key: value for key, value in special.items() if value not in (None, ())}
    if foreign := sorted(asked.keys() - BENCHES[name].takes):
        raise click.UsageError(f"bench {name} has no option --{foreign[0].replace('_', '-')}")
    if "itl_budgets" in asked:
        asked["itl_budgets_ms"] = asked.pop("itl_budgets")
    if "itl_budget" in asked:
        asked["itl_budgets_ms"] = (asked.pop("itl_budget"),)
    use_tls(None)  # whatever it talks to it has started itself, in plain text
    which = BENCHES[name]
    run = getattr(importlib.import_module(which.module), which.function)
    options = Options(quick, resume.absolute() if resume else None, rounds, model, seed, **asked)
    conduct(run(options), json_file, check=check)


def conduct(work: Coroutine[Any, Any, Report], json_file: str | None, *, check: bool) -> NoReturn:
    """Run it to its end or to a signal, show the report and write it, and exit as it says."""
    from services.bench.processes import BenchError

    try:
        report = _until_done_or_stopped(work)
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
