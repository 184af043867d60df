"""The `trimtab` command: it joins the verbs that live with their plane, and loads a verb only when it is typed.

Invariant: help and a mistyped verb import nothing but click (DESIGN §1: `trimtab --help` answers in under 300 ms).
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from dataclasses import dataclass
from typing import Any

import click
from click.exceptions import NoArgsIsHelpError


@dataclass(frozen=True, slots=True)
class Verb:
    """Where a verb's click command lives, and its line in the help."""

    module: str
    attribute: str
    help: str


VERBS = {
    "up": Verb("trimtab_cli.up", "up", "Run the whole mesh on this machine."),
    "chat": Verb("services.cli", "chat", "Talk to a model, or ask it one thing."),
    "generate": Verb("services.cli", "generate", "Complete a prompt."),
    "batch": Verb("services.cli_batch", "batch", "Run a file of requests as BATCH, and go on where it was stopped."),
    "trace": Verb("services.cli", "trace", "Show where a request's or a policy change's time went."),
    "bench": Verb("services.bench.cli", "bench", "Measure what the mesh costs on this machine."),
    "drill": Verb("services.drill.cli", "drill", "Strike at a mesh of its own, and see what clients notice."),
    "simulate": Verb(
        "controlplane.cli_simulate", "simulate", "Try the controllers on a simulated mesh, in virtual time."
    ),
    "policy": Verb("controlplane.cli_history", "policy", "Read and change the policy that steers the engines."),
    "backup": Verb("controlplane.cli_backup", "backup", "Write what people have set into a file."),
    "restore": Verb("controlplane.cli_backup", "restore", "Bring back what `backup` wrote, as one change."),
    "rollout": Verb("controlplane.cli_rollout", "rollout", "Try a policy on canaries before it holds for all."),
    "requests": Verb("controlplane.cli_requests", "requests", "Move, isolate or release requests that wait or run."),
    "breaker": Verb("controlplane.cli_workers", "breaker", "Show workers' breakers, or force one open or closed."),
    "drain": Verb("controlplane.cli_workers", "drain", "Take a worker out of the mesh; its streams go on elsewhere."),
    "reload": Verb("controlplane.cli_workers", "reload", "Tell a worker's engine its policy anew."),
    "blocks": Verb("controlplane.cli_blocks", "blocks", "Show KV blocks: sizes, what they waste, and what is planned."),
    "reblock": Verb("controlplane.cli_blocks", "reblock", "Cut running engines' KV cache into blocks of another size."),
    "scale": Verb("controlplane.cli_scale", "scale", "Show how many workers each pool wants; set it; follow it."),
    "fleet": Verb("controlplane.cli", "fleet", "Show the mesh's nodes, their load and their policy."),
    "top": Verb("controlplane.cli_top", "top", "Watch the mesh: workers the worst first, and what the loops do."),
    "doctor": Verb("controlplane.cli_doctor", "doctor", "Look for what is wrong, say why, and offer to set it right."),
    "why": Verb("trimtab_cli.why", "why", "Tell which change, by whom, on what evidence."),
    "certs": Verb("trimtab_cli.certs", "certs", "Make and show the certificates of a mesh."),
    "keys": Verb("services.cli_keys", "keys", "Make keys for a gateway's tenants, and check its key file."),
    "config": Verb("trimtab_cli.config", "config", "Check and show settings."),
}


AS_JSON = "trimtab.as_json"
"""In the root context's `meta`: whether the command line asks for JSON, known before any verb reads it."""


class Verbs(click.Group):
    """A group whose commands are imported on use."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        as_json = "--json" in args[: args.index("--") if "--" in args else None]
        ctx.meta[AS_JSON] = as_json
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as e:
            _told(e, as_json)
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """A verb, whatever its command line: who asked for JSON gets his error in it, and one whose reader has gone ends as a shell expects."""
        try:
            return super().invoke(ctx)
        except click.UsageError as e:
            _told(e, ctx.meta[AS_JSON])
            raise
        except BrokenPipeError:
            from trimtab.kit.cli import UNREAD

            # What is left to be written at the end of the process has nowhere to go either.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(UNREAD)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = VERBS.get(cmd_name)
        if verb is None:
            return None
        # Before gRPC is imported, which reads it then: who starts processes forks only to exec, and gRPC's threads have died of it.
        os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
        if cmd_name != "up":
            # gRPC's own lines on a failed handshake; whoever typed the verb gets ours, and servers keep theirs.
            os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
        command: click.Command = getattr(importlib.import_module(verb.module), verb.attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in VERBS and not name.startswith("-"):
            near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"verbs: {', '.join(VERBS)}"
            ctx.fail(f"there is no verb {name!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.help) for name, verb in VERBS.items()])


def _told(error: click.UsageError, as_json: bool) -> None:
    """To programs; click tells people."""
    # Without a word there is no mistake to tell: it shows the help.
    if as_json and not isinstance(error, NoArgsIsHelpError):
        from trimtab.kit.cli import usage_json

        usage_json(error)


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        click.echo(f"trimtab {version('trimtab')}")
        ctx.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
def cli() -> None:
    """Steer running vLLM engines: a mesh of workers, gateways and a control plane.

    Begin with `trimtab up`. `trimtab VERB --help` tells of each verb; every verb takes --json.
    """


def main() -> None:
    """The entry point."""
    cli(prog_name="trimtab")


if __name__ == "__main__":
    main()
