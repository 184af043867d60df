"""`trimtab rollout restart`: workers are started anew one after another, with other settings where they are told some.

What a person sees of it afterwards is `trimtab rollout list|show`; `trimtab rollout abort` stops it where it is.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli import ask, user
from controlplane.cli_workers import duration
from trimtab.kit.cli import ExitCode, control_option, echo_json, goes_on, json_option

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

LOOK_S = 0.5


def add_parser(group: click.Group) -> None:
    """Register the verb under `trimtab rollout`."""
    group.add_command(restart)


def _told(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    """NAME=VALUE each; the name is that of trimtab.toml, with its section before it."""
    told = {}
    for text in values:
        name, sign, value = text.partition("=")
        if not sign or not name.strip():
            raise click.BadParameter(f"NAME=VALUE, such as worker.max_num_seqs=32, not {text!r}", ctx, param)
        if name.strip() in told:
            raise click.BadParameter(f"{name.strip()} is there twice", ctx, param)
        told[name.strip()] = value.strip()
    return told


def _sure() -> None:
    """Ends the process where nobody says so."""
    if not _at_a_terminal():
        raise click.UsageError(
            "say which workers (--pool P, --node W), or --yes where every worker of the mesh is meant"
        )
    click.echo("This starts every worker of the mesh anew, one after another; --dry-run shows the order.", err=True)
    if not click.confirm("Start them anew?", err=True):
        click.echo("nothing was started anew", err=True)
        sys.exit(ExitCode.GOAL_FAILED)


def _at_a_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


@click.command()
@click.option("--pool", default="", metavar="P", help="The workers of this pool. [default: all of the mesh]")
@click.option("--node", "node_ids", multiple=True, metavar="W", help="This worker; may be given again.")
@click.option(
    "--set",
    "settings",
    multiple=True,
    callback=_told,
    metavar="worker.NAME=VALUE",
    help="A setting of the worker, as trimtab.toml has it, from its next start on; nothing after the sign takes it back.",
)
@click.option(
    "--max-unavailable",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    metavar="N",
    help="Workers of a pool that are away or watched at a time.",
)
@click.option(
    "--drain",
    "drain_ms",
    type=duration,
    default="30s",
    show_default=True,
    metavar="TIME",
    help="What runs on a worker may end by itself so long; then it goes on at another one. 0s: at once.",
)
@click.option(
    "--ready",
    "ready_ms",
    type=duration,
    default="5m",
    show_default=True,
    metavar="TIME",
    help="A worker serves again within it, or the restart stops.",
)
@click.option(
    "--bake",
    "bake_ms",
    type=duration,
    default="10s",
    show_default=True,
    metavar="TIME",
    help="Each is watched so long before the next one goes.",
)
@click.option(
    "--revert", is_flag=True, help="A worker that does worse gets its settings of before, by another restart."
)
@click.option("--force", is_flag=True, help="Also the only worker that serves its model: its requests get NO_WORKER meanwhile.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Until it is over.")
@click.option("--yes", is_flag=True, help="Don't ask, where it is every worker of the mesh.")
@click.option("--dry-run", is_flag=True, help="Check and show who would go, and in which order; do nothing.")
@click.option("--reason", default="", metavar="TEXT", help="Why; `trimtab why W` tells it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@control_option
@json_option
def restart(control: str | None, as_json: bool, wait: bool, yes: bool, **given: Any) -> None:
    """Start workers anew, one after another: each drains, comes back, and is watched before the next one goes. Streams go on elsewhere
    without a token missing or twice.

    What a running engine can't change (its settings: --set) changes so. The first worker checks the settings; where it refuses them nothing
    has happened. Without --pool and --node it is every worker of the mesh: at a terminal it asks first, elsewhere it wants --yes.
    It stops by itself where a worker does not come back, or does worse than before.

    Exit codes: 0 begun (with --wait: done), 2 usage or an unknown worker, 3 no control plane answers, 4 refused (another restart is on its
    way, or nobody else serves the model), 5 with --wait: it stopped or was aborted.
    """
    from controlplane import render_restart as render

    if not (yes or given["pool"] or given["node_ids"] or given["dry_run"]):
        _sure()
    shown = 0

    def show(rollout: Any) -> None:
        nonlocal shown
        if not as_json:
            for line in rollout.lines[shown:]:
                click.echo(render.line_text(line))
        shown = len(rollout.lines)

    async def restarting(client: AdminClient) -> Any:
        # For the control plane 0 is the policy's own.
        rollout = (
            await client.start_restart(
                **{**given, "author": given["author"] or user(), "drain_ms": max(1, given["drain_ms"])}
            )
        ).rollout
        with goes_on(lambda: render.follow_text(rollout)):
            while wait and rollout.live and not given["dry_run"]:
                show(rollout)
                await asyncio.sleep(LOOK_S)
                rollout = next(iter((await client.rollouts(rollout_id=rollout.rollout_id)).rollouts), rollout)
        return rollout

    rollout = ask(control, as_json, restarting)
    if as_json:
        echo_json(render.restart_json(rollout))
    elif given["dry_run"]:
        click.echo(render.plan_text(rollout))
    else:
        show(rollout)
        click.echo(render.restart_text(rollout))
    if wait and not given["dry_run"] and rollout.stage != "done":
        sys.exit(ExitCode.PARTIAL)
