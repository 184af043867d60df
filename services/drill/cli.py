"""The verb `drill`: one module for each drill, loaded when it is asked for."""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path

import click

from services.bench.cli import conduct


@dataclass(frozen=True, slots=True)
class Drill:
    """Where a drill lives: `async def run(options: DrillOptions) -> Report`. `breaks_vllm`: it knows --vllm."""

    module: str
    help: str
    breaks_vllm: bool = False


DRILLS = {
    "streams": Drill("services.drill.streams", "workers killed, stopped, cut off and drained under a thousand streams"),
    "leavers": Drill(
        "services.drill.leavers", "ten thousand clients that leave in every phase, and what is left of them"
    ),
    "burst": Drill("services.drill.burst", "four times as many realtime requests for a minute, beside batch"),
    "leak": Drill("services.drill.leak", "KV blocks that nobody gives back: the worker is restarted"),
    "hang": Drill("services.drill.hang", "an engine that stops within a step: the worker is restarted", True),
    "oom": Drill("services.drill.oom", "an engine that runs out of memory, and one with too few KV blocks", True),
    "giants": Drill("services.drill.giants", "prompts of giant length in the mix: they are kept apart for a while"),
    "inversion": Drill("services.drill.inversion", "an engine that serves batch first: it is told its policy again"),
    "silence": Drill("services.drill.silence", "a worker that serves and is not heard: nobody acts on a guess"),
}


@click.command(epilog="Drills: " + "; ".join(f"{name}: {d.help}" for name, d in DRILLS.items()))
@click.argument("name", type=click.Choice(list(DRILLS)))
@click.option("--quick", is_flag=True, help="End within 3 minutes; the report says what is left out.")
@click.option("--real", metavar="N", type=click.IntRange(0), default=0,
              help="N streams on real engines too: vLLM in float32. Minutes more, whatever --quick says.")  # fmt: skip
@click.option("--vllm/--no-vllm", "vllm", default=None,
              help="Whether a vLLM engine is broken too (hang, oom). [default: no; of oom yes, where vLLM is installed]")  # fmt: skip
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON too; - is stdout.")
@click.option("--check", is_flag=True, help="Exit with 1 if a goal is missed. Undecided goals are listed.")
@click.option("--model", default="default", show_default=True, help="Model for real engines: local path or hub id.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of prompts and of faults.")
def drill(
    name: str, quick: bool, real: int, vllm: bool | None, json_file: str | None, check: bool, model: str, seed: int
) -> None:
    """Strike at a mesh of its own on this machine, and report what its clients saw, against NAME's goals.

    Ctrl-C ends it with what it has seen so far.
    """
    # Before gRPC is imported: this process forks only to exec (see `bench`).
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    from services.drill.options import DrillOptions
    from trimtab.kit.rpc import use_tls

    if json_file not in (None, "-") and not Path(str(json_file)).absolute().parent.is_dir():
        raise click.UsageError(f"--json: there is no directory {Path(str(json_file)).absolute().parent}")
    if vllm is not None and not DRILLS[name].breaks_vllm:
        raise click.UsageError(f"--vllm: {name} breaks no real engine")
    use_tls(None)  # whatever it talks to it has started itself, in plain text
    run = importlib.import_module(DRILLS[name].module).run
    conduct(run(DrillOptions(quick, real, model, seed, vllm)), json_file, check=check)
