"""`trimtab scale`: how many workers pools want, have that set, and have it done."""

from __future__ import annotations

import sys
from typing import Any

import click

from controlplane.cli import ask, scope_of, tell, user, wait_option
from controlplane.cli_workers import duration
from trimtab.kit.cli import ExitCode, control_option, echo_json, json_option, table

MOST = 10_000
NOBODY_LEADS = "nobody leads the control plane now: nothing is decided, and what was wanted last stands"


@click.group(invoke_without_command=True)
@control_option
@json_option
@click.pass_context
def scale(ctx: click.Context, /, control: str | None, as_json: bool) -> None:
    """Show how many workers each pool wants, and why; or set it, or follow it.

    A pool is left as it is while the policy's scale.max_workers is 0, the default. `trimtab up` follows what its own pool wants; elsewhere
    `trimtab scale follow` does, by commands of your own.

    Exit codes: 0 shown, 3 no control plane answers.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = (control, as_json)
        return
    answer = ask(control, as_json, lambda client: client.scale())
    if as_json:
        echo_json({"leader_id": answer.leader_id, "pools": [_facts(p) for p in answer.pools]})
    else:
        click.echo(_text(answer))


@scale.command("set")
@click.argument("pool", metavar="POOL")
@click.argument("workers", metavar="N|auto")
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@wait_option
@control_option
@json_option
@click.pass_context
def set_(
    ctx: click.Context,
    /,
    pool: str,
    workers: str,
    reason: str,
    author: str | None,
    dry_run: bool,
    wait_ms: int,
    control: str | None,
    as_json: bool,
) -> None:
    """Have POOL want N workers, or what the mesh's policy says (auto).

    It is `trimtab policy set --for pool/POOL scale.min_workers=N scale.max_workers=N`; auto takes both out of the pool's policy. For bounds
    between which the scale controller decides, set the two apart.

    Exit codes are those of `policy set`.
    """
    control, as_json = control or ctx.obj[0], as_json or ctx.obj[1]
    value = _count(workers)
    fields = {"scale.min_workers": value, "scale.max_workers": value}
    scope = scope_of(f"pool/{pool}")
    answer = ask(
        control,
        as_json,
        lambda client: client.set_policy(
            fields, author=author or user(), reason=reason, dry_run=dry_run, wait_ms=wait_ms, scope=scope
        ),
    )
    tell(answer, dry_run=dry_run, waited=wait_ms > 0, as_json=as_json)


@scale.command("follow")
@click.option("--pool", default="default", show_default=True, metavar="P", help="Pool whose wants are followed.")
@click.option("--start", required=True, metavar="CMD", help="Starts instance {n}; must bear to be run twice.")
@click.option("--stop", required=True, metavar="CMD", help="Ends instance {n}, draining it; must bear to be run twice.")
@click.option(
    "--node-id", default="w{n}", show_default=True, metavar="NAME", help="What instance {n} calls itself in the fleet."
)
@click.option(
    "--most",
    type=click.IntRange(1, MOST),
    metavar="N",
    help="Instances 0 to N-1 are all that there may be, and are this follower's whoever started them. [default: no bound]",
)
@click.option(
    "--min-interval",
    "min_interval_ms",
    type=duration,
    default="5s",
    show_default=True,
    metavar="TIME",
    help="Between two commands at least.",
)
@click.option(
    "--joins-within",
    "joins_within_ms",
    type=duration,
    default="5m",
    show_default=True,
    metavar="TIME",
    help="An instance is in the fleet so long after its START, or is started again: what an engine takes to load, and more.",
)
@click.option("--mesh", default="default", show_default=True, metavar="M", help="Names the state directory.")
@control_option
@click.pass_context
def follow(
    ctx: click.Context,
    /,
    pool: str,
    start: str,
    stop: str,
    node_id: str,
    most: int | None,
    min_interval_ms: int,
    joins_within_ms: int,
    mesh: str,
    control: str | None,
) -> None:
    """Start and stop workers as POOL wants them, for ever: by START where some are missing, by STOP where there are too many.

    {n} in a command stands for a free number, which is in TRIMTAB_SCALE_N too; commands are run without a shell. What was started is kept
    in the state directory: nothing else is ever stopped, save with --most, and of its own only what the control plane names as too many.
    Workers that others started are counted. While the control plane gives no answer nothing is done. A command that fails is tried again,
    later each time. One follower for each pool; none for the pool of a `trimtab up`, which follows by itself.

    \b
    trimtab scale follow --pool default \\
      --start 'systemctl start --no-block trimtab-worker@{n}' --stop 'systemctl stop trimtab-worker@{n}'

    Exit codes: 1 the list of instances can't be used, 2 usage; else it runs until it is ended.
    """
    from controlplane.follower import BadBook, Book, Commands, Follower, only_one, path_of
    from trimtab.kit.process import state_dir
    from trimtab.kit.telemetry import setup_logging

    for option, command in (("--start", start), ("--stop", stop), ("--node-id", node_id)):
        _check(option, command)
    setup_logging(f"scale {pool}", level="info")
    path = path_of(state_dir(mesh), pool)
    try:
        with only_one(path):
            follower = Follower(
                pool,
                Commands(start, stop, node_id),
                Book(path),
                min_interval_s=min_interval_ms / 1000,
                joins_s=joins_within_ms / 1000,
                most=most,
            )
            ask(control or ctx.obj[0], False, follower.run)
    except BadBook as e:
        click.secho(f"error: {e}", fg="red", err=True)
        sys.exit(ExitCode.GOAL_FAILED)


def _check(option: str, command: str) -> None:
    """A usage error where it would be the same for every instance, or can't be taken apart."""
    import shlex

    try:
        words = shlex.split(command)
    except ValueError as e:
        raise click.BadParameter(f"{command!r}: {e}", param_hint=option) from e
    if not words:
        raise click.BadParameter("it is empty", param_hint=option)
    if option == "--node-id" and "{n}" not in command:
        raise click.BadParameter(
            f"{command!r} has no {{n}} in it, so all instances would be one node", param_hint=option
        )


def _count(workers: str) -> str:
    if workers == "auto":
        return "default"
    if not workers.isascii() or not workers.isdigit() or not 1 <= int(workers) <= MOST:
        text = (
            f"{workers!r} is neither auto nor a number of workers, 1 to {MOST}; to end workers for good: trimtab drain"
        )
        raise click.BadParameter(text, param_hint="N|auto")
    return str(int(workers))


def _facts(p: Any) -> dict[str, Any]:
    return {
        "pool": p.pool,
        "wanted": p.wanted,
        "running": p.running,
        "min_workers": p.min_workers,
        "max_workers": p.max_workers,
        "reason": p.reason,
        "surplus": list(p.surplus),
    }


def _text(answer: Any) -> str:
    rows = [
        (p.pool, str(p.wanted), str(p.running), str(p.min_workers), str(p.max_workers), p.reason or "-")
        for p in answer.pools
    ]
    head = ("POOL", "WANTED", "RUNNING", "MIN", "MAX", "WHY")
    lines = [table(head, rows, right=(1, 2, 3, 4))] if rows else ["no pool is known yet"]
    return "\n".join(lines if answer.leader_id else [*lines, "", NOBODY_LEADS])
