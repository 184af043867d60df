"""`trimtab rollout`: a policy is tried on canaries before it holds for all, and is taken back by itself where they do worse."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Any

import click

from controlplane import cli_restart
from controlplane.cli import ask, assigned, scope_of, user
from controlplane.cli_workers import duration
from trimtab.errors import TrimtabError
from trimtab.kit.cli import ExitCode, control_option, echo_json, fail, goes_on, json_option

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

LOOK_S = 0.5
LISTED = 20


@click.group()
def rollout() -> None:
    """Try a policy on a few workers before it holds for all; what does worse is taken back by itself."""


cli_restart.add_parser(rollout)


def _canary(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> dict[str, Any]:
    """A number, a share as 25%, a label as KEY=VALUE, or workers' ids; as StartRolloutRequest has them."""
    if len(values) > 1 and any("=" in v or v.isdigit() or v.endswith("%") for v in values):
        raise click.BadParameter("several are workers' ids; of a number, a share or a label there is one", ctx, param)
    if not values:
        return {}
    said = values[0].strip()
    if said.isdigit() and int(said):
        return {"canary_count": int(said)}
    if said.endswith("%"):
        try:
            share = float(said[:-1]) / 100.0
        except ValueError:
            share = 0.0
        if not 0.0 < share < 1.0:
            raise click.BadParameter(f"a share is above 0% and below 100%, not {said}", ctx, param)
        return {"canary_share": share}
    if "=" in said:
        return {"canary_label": said}
    if not said or said.isdigit():
        raise click.BadParameter("a number from 1, a share as 25%, a label as KEY=VALUE, or a worker's id", ctx, param)
    return {"canary_node_ids": [v.strip() for v in values]}


@rollout.command("start")
@click.option(
    "-f", "--file", type=click.File("rb"), metavar="FILE", help="A policy file as `policy apply` reads it; only fields."
)
@click.option("--set", "assignments", multiple=True, metavar="FIELD=VALUE", help="A field; may be given again.")
@click.option(
    "--canary",
    "canary",
    multiple=True,
    callback=_canary,
    metavar="N|SHARE%|KEY=VALUE|ID",
    help="So many workers, that share of them, those with the label, or these. [default: one of each pool and model]",
)
@click.option(
    "--bake",
    "bake_ms",
    type=duration,
    default="0s",
    metavar="TIME",
    help="They are watched so long. [default: rollout.bake_s]",
)
@click.option(
    "--weight",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    metavar="W",
    help="New work of a canary, next to what it would get by itself. [default: rollout.weight]",
)
@click.option(
    "--scope", "whom", default="", metavar="SCOPE", help="pool/NAME, label/KEY=VALUE or node/ID. [default: everyone]"
)
@click.option(
    "--expect-version", type=click.IntRange(min=0), metavar="N", help="Refuse if the policy has moved on since."
)
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--wait", is_flag=True, help="Until it is over.")
@click.option("--dry-run", is_flag=True, help="Check, and show who would be a canary; change nothing.")
@control_option
@json_option
def start(
    file: Any, assignments: tuple[str, ...], control: str | None, as_json: bool, wait: bool, **given: Any
) -> None:
    """Try fields on canaries, and promote them by itself where these do no worse than the workers beside them.

    Canaries get less of new work meanwhile. Whatever does worse is taken back at once; what nobody could tell from the rest, for want of
    requests, is taken back in the end.

    Exit codes: 0 begun (with --wait: promoted), 2 usage, 3 no control plane answers, 4 refused (another rollout lives, or nobody would be left
    to compare with), 5 with --wait: it was rolled back or aborted.
    """
    from controlplane import render_rollout as render
    from controlplane.render_restart import follow_text

    fields = _fields(file, assignments, as_json)
    scope = scope_of(given["whom"])
    dry_run, bake_s = given["dry_run"], -(-given["bake_ms"] // 1000)
    shown = 0

    def show(r: Any) -> None:
        nonlocal shown
        if not as_json:
            for line in r.lines[shown:]:
                click.echo(render.line_text(line))
        shown = len(r.lines)

    async def starting(client: AdminClient) -> Any:
        begun = await client.start_rollout(
            fields, scope=scope, bake_s=bake_s, weight=given["weight"], author=given["author"] or user(), reason=given["reason"],
            expect_version=given["expect_version"], dry_run=dry_run, **given["canary"],
        )  # fmt: skip
        r = begun.rollout
        with goes_on(lambda: follow_text(r)):
            while wait and r.live and not dry_run:
                show(r)
                await asyncio.sleep(LOOK_S)
                r = next(iter((await client.rollouts(rollout_id=r.rollout_id)).rollouts), r)
        return r

    found = ask(control, as_json, starting)
    if as_json:
        echo_json({**render.rollout_json(found), "dry_run": dry_run})
    elif wait and not dry_run:
        show(found)
    else:
        click.echo(render.begun_text(found, dry_run=dry_run))
    if wait and not dry_run and found.stage != "promoted":
        sys.exit(ExitCode.PARTIAL)


def _fields(file: Any, assignments: tuple[str, ...], as_json: bool) -> dict[str, str]:
    """Of the file, and those that are typed, which win."""
    from controlplane import spec_file
    from controlplane.spec import shown_fields

    fields: dict[str, str] = {}
    if file is not None:
        try:
            said = spec_file.read(file.read(spec_file.MAX_FILE_BYTES + 1).decode()).spec
        except TrimtabError as e:
            fail(e, as_json)
        except UnicodeDecodeError as e:
            raise click.BadParameter(f"{file.name} is not UTF-8: {e}", param_hint="--file") from e
        if said.overlays or said.pins:
            raise click.BadParameter("a rollout takes fields alone, no overlays and no pins", param_hint="--file")
        fields = shown_fields(said.base)
    fields |= assigned(assignments)
    if not fields:
        raise click.UsageError("name at least one field: --set FIELD=VALUE, or -f FILE")
    return fields


@rollout.command("show")
@click.argument("rollout_id", metavar="[ID]", required=False)
@control_option
@json_option
def show(rollout_id: str | None, control: str | None, as_json: bool) -> None:
    """Show a rollout, the newest where none is named: canaries beside the rest, by measure, and what happened."""
    from controlplane import render_restart
    from controlplane import render_rollout as render

    answer = ask(control, as_json, lambda client: client.rollouts(1, rollout_id=rollout_id or ""))
    if not answer.rollouts:
        if as_json:
            echo_json(None)
        else:
            click.echo(f"no rollout is called {rollout_id}" if rollout_id else "there has been no rollout")
        sys.exit(ExitCode.USAGE if rollout_id else ExitCode.OK)
    found = answer.rollouts[0]
    if found.kind == "restart":
        if as_json:
            echo_json(render_restart.restart_json(found))
        else:
            click.echo(render_restart.shown_text(found))
    elif as_json:
        echo_json(render.rollout_json(found))
    else:
        click.echo(render.rollout_text(found))
    if not answer.leader_id and found.live:
        click.secho("warning: nobody leads now, so nobody carries it on", fg="yellow", err=True)


@rollout.command("list")
@click.option("-n", "limit", type=click.IntRange(1, 100), default=LISTED, show_default=True, metavar="N", help="Newest N.")  # fmt: skip
@control_option
@json_option
def list_(limit: int, control: str | None, as_json: bool) -> None:
    """Show rollouts of policies and rolling restarts, newest first."""
    from controlplane import render_rollout as render

    answer = ask(control, as_json, lambda client: client.rollouts(limit))
    if as_json:
        echo_json([render.rollout_json(r) for r in answer.rollouts])
    else:
        click.echo(render.rollouts_text(answer.rollouts))


def _end(rollout_id: str, promote: bool, reason: str, author: str | None, control: str | None, as_json: bool) -> None:
    from controlplane import render_rollout as render

    answer = ask(
        control,
        as_json,
        lambda client: client.end_rollout(rollout_id, author=author or user(), reason=reason, promote=promote),
    )
    if as_json:
        echo_json(render.rollout_json(answer.rollout))
    else:
        click.echo(f"{answer.rollout.rollout_id}: {answer.rollout.verdict or answer.rollout.stage}")


@rollout.command("abort")
@click.argument("rollout_id", metavar="ID")
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@control_option
@json_option
def abort(rollout_id: str, reason: str, author: str | None, control: str | None, as_json: bool) -> None:
    """Take it back now: canaries have what they had before. A rolling restart stops where it is."""
    _end(rollout_id, False, reason, author, control, as_json)


@rollout.command("promote")
@click.argument("rollout_id", metavar="ID")
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@control_option
@json_option
def promote(rollout_id: str, reason: str, author: str | None, control: str | None, as_json: bool) -> None:
    """Let it hold for everybody now, whatever the measures say."""
    _end(rollout_id, True, reason, author, control, as_json)
