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
    "exhaustion": Drill(
        "services.drill.exhaustion", "a KV cache that holds a part of what is asked: fewer are let in, in time", True
    ),
    "giants": Drill("services.drill.giants", "prompts of giant length in the mix: they are kept apart for a while"),
    "inversion": Drill("services.drill.inversion", "an engine that serves batch first: it is told its policy again"),
    "restart": Drill("services.drill.restart", "workers started anew one after another, with other settings", True),
    "hosts": Drill(
        "services.drill.hosts.course", "links between hosts cut under load, without a word to anybody", True
    ),
    "silence": Drill("services.drill.silence", "a worker that serves and is not heard: nobody acts on a guess"),
}
V4 = "services.drill.giants_v4"
"""What `giants --v4` runs."""


@click.command(epilog="Drills: " + "; ".join(f"{name}: {d.help}" for name, d in DRILLS.items()))
@click.argument("name", type=click.Choice(list(DRILLS)))
@click.option("--quick", is_flag=True, help="End within 3 minutes; the report says what is left out.")
@click.option("--real", metavar="N", type=click.IntRange(0), default=0,
              help="N streams on real engines too: vLLM in float32. Minutes more, whatever --quick says.")  # fmt: skip
@click.option("--vllm/--no-vllm", "vllm", default=None,
              help="Whether vLLM is struck too (exhaustion, hang, hosts, oom, restart). "
              "[default: no; of oom yes, where vLLM is installed]")  # fmt: skip
@click.option(
    "--v4", is_flag=True, help="giants: on vLLM instead, with one giant for a model of DeepSeek-V4's architecture."
)
@click.option("--tokens", metavar="N", type=click.IntRange(1024),
              help="--v4: of the giant's prompt. [default: 100000; 8000 with --quick]")  # fmt: skip
@click.option("--plugin-path", metavar="DIR", type=click.Path(exists=True, file_okay=False, path_type=Path),
              help="--v4: plug-ins of vLLM that the engine needs, such as stand-ins for kernels that it lacks here.")  # fmt: skip
@click.option("--json", "json_file", metavar="FILE", help="Write the report as JSON too; - is stdout.")
@click.option("--check", is_flag=True, help="Exit with 1 if a goal is missed. Undecided goals are listed.")
@click.option("--model", default="default", show_default=True, help="Model for real engines: local path or hub id.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of prompts and of faults.")
def drill(
    name: str,
    quick: bool,
    real: int,
    vllm: bool | None,
    v4: bool,
    tokens: int | None,
    plugin_path: Path | None,
    json_file: str | None,
    check: bool,
    model: str,
    seed: int,
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
    if v4 and name != "giants":
        raise click.UsageError(f"--v4: {name} knows no such arm")
    if not v4 and (tokens or plugin_path):
        raise click.UsageError("--tokens and --plugin-path go with --v4")
    use_tls(None)  # whatever it talks to it has started itself, in plain text
    run = importlib.import_module(V4 if v4 else DRILLS[name].module).run
    conduct(run(DrillOptions(quick, real, model, seed, vllm, tokens, plugin_path)), json_file, check=check)
