"""The verbs that talk to the control plane: `trimtab policy get|set|preset|history` and `trimtab fleet`; `cli_history.py` and
`cli_requests.py` have more.

Everything that takes long to import is imported in the verb that needs it, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from trimtab.errors import PolicyRefused, TrimtabError
from trimtab.kit.cli import ExitCode, astray, control_option, echo_json, fail, json_option, run
from trimtab.policy import FIELDS, Field, Kind, field
from trimtab.presets import BUDGET, BUDGET_TOKENS, ITL, SMALL, small
from trimtab.snapshot import Scope, parse_scope

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

TOKEN = "TRIMTAB_TOKEN"
"""Says who calls, where no certificate does."""
PRESET_WAIT_MS = 3000
"""For the nodes' answers, as `policy set` waits by default."""


def ask(control: str | None, as_json: bool, call: Callable[[AdminClient], Awaitable[T]]) -> T:
    """One call to the control plane; its failure ends the process."""
    from controlplane.admin.client import AdminClient
    from trimtab.kit.rpc import uses_tls
    from trimtab.kit.run_file import control_address
    from trimtab.kit.tls import CertificateError, is_loopback

    address, token = control_address(control), os.environ.get(TOKEN, "").strip()
    if not (token.isascii() and token.isprintable()):
        raise click.UsageError(f"{TOKEN} holds characters that can't be sent; take printable ASCII, without line ends")

    async def asking() -> T:
        if token and not uses_tls() and not all(is_loopback(each) for each in address.split(",")):
            click.secho(f"warning: {TOKEN} goes to {address} in plain text; set TRIMTAB_TLS_*", fg="yellow", err=True)
        async with AdminClient(address, token=token) as client:
            return await call(client)

    try:
        return run(asking())
    except TrimtabError as e:
        fail(astray(e, address, "control plane"), as_json)
    except CertificateError as e:
        raise click.UsageError(str(e)) from e


def wait_option(function: F) -> F:
    return click.option(
        "--wait",
        "wait_ms",
        type=click.IntRange(0, 60_000),
        default=PRESET_WAIT_MS,
        show_default=True,
        metavar="MS",
        help="Wait so long for the answers of workers and gateways.",
    )(function)


def tell(answer: Any, *, dry_run: bool, waited: bool, as_json: bool) -> None:
    """What a write came to; ends the process with its code where not all nodes applied it."""
    from controlplane import render

    if as_json:
        echo_json(render.set_json(answer, dry_run=dry_run))
    else:
        click.echo(render.set_text(answer, dry_run=dry_run, waited=waited))
    end_partial(answer)


@click.group()
def policy() -> None:
    """Read and change the policy that steers the engines."""


@policy.command("get")
@click.argument("name", metavar="[FIELD]", required=False)
@click.option("--node", metavar="W", default="", help="As this node resolves it.")
@control_option
@json_option
def get(name: str | None, node: str, control: str | None, as_json: bool) -> None:
    """Show the policy, or one FIELD of it: its value, and where that comes from."""
    from controlplane import render

    fields = [field_of(name, as_json)] if name else list(FIELDS.values())
    answer = ask(control, as_json, lambda client: client.get_policy(node))
    try:
        if as_json:
            echo_json(render.policy_json(answer, fields))
        else:
            click.echo(render.policy_text(answer, fields))
    except PolicyRefused as e:
        # A word of a newer control plane.
        fail(e, as_json)


@policy.command("set")
@click.argument("assignments", metavar="FIELD=VALUE...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option(
    "--expect-version", type=click.IntRange(min=0), metavar="N", help="Refuse if the policy has moved on since."
)
@click.option(
    "--for", "whom", default="", metavar="SCOPE", help="pool/NAME, label/KEY=VALUE or node/ID. [default: everyone]"
)
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@wait_option
@control_option
@json_option
def set_(
    assignments: tuple[str, ...],
    reason: str,
    author: str | None,
    expect_version: int | None,
    whom: str,
    dry_run: bool,
    wait_ms: int,
    control: str | None,
    as_json: bool,
) -> None:
    """Change fields, now, on every running engine, or on those of a pool, a label or one node (--for). The VALUE `default` takes a
    field out of the spec; a list of names has commas between them, and nothing after the sign empties it.

    Exit codes: 0 every connected node applied it, 2 no such field, 4 refused or in conflict (nothing changed), 5 some node refused
    it or has not answered within --wait.
    """

    fields = assigned(assignments)
    scope = scope_of(whom)
    answer = ask(
        control,
        as_json,
        lambda client: client.set_policy(
            fields,
            author=author or user(),
            reason=reason,
            expect_version=expect_version,
            dry_run=dry_run,
            wait_ms=wait_ms,
            scope=scope,
        ),
    )
    tell(answer, dry_run=dry_run, waited=wait_ms > 0, as_json=as_json)


@policy.command("preset")
@click.argument("name", metavar="small", type=click.Choice(["small"]))
@click.option("--itl-budget-ms", type=int, metavar="N", help=f"{BUDGET} too, and {ITL}. [default: both are left alone]")
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@control_option
@json_option
def preset(name: str, itl_budget_ms: int | None, dry_run: bool, control: str | None, as_json: bool) -> None:
    """Set the fields of a preset, over whatever they are now. `small` is for windows of up to 16384 tokens; `trimtab up` writes it by itself,
    with a budget and objectives that it has measured.

    Exit codes are those of `policy set`.
    """
    from controlplane import render

    fields = small(itl_budget_ms)
    answer = ask(
        control,
        as_json,
        lambda client: client.set_policy(
            fields, author=user(), reason=f"preset {name}", dry_run=dry_run, wait_ms=PRESET_WAIT_MS
        ),
    )
    left_alone = [path for path in SMALL if path not in fields]
    if as_json:
        echo_json({**render.set_json(answer, dry_run=dry_run), "preset": name, "left_alone": left_alone})
    else:
        click.echo(render.set_text(answer, dry_run=dry_run, waited=True))
    if not as_json:
        click.echo(_left_alone(left_alone))
    end_partial(answer)


def _left_alone(fields: list[str]) -> str:
    """What the preset did not set, and how to."""
    if BUDGET not in fields:
        return f"  left alone: {', '.join(fields)}"
    return (
        f"  {BUDGET} is left alone; set it by --itl-budget-ms N,\n"
        f"  {BUDGET_TOKENS} times the milliseconds from token to token of one stream alone;\n"
        f"  the objectives are left alone too"
    )


@policy.command("history")
@click.option("-n", "limit", type=click.IntRange(1, 1024), default=20, show_default=True, metavar="N", help="Newest N.")
@click.option("--controllers", is_flag=True, help="All writes, controllers' too, without refused attempts.")
@control_option
@json_option
def history(limit: int, controllers: bool, control: str | None, as_json: bool) -> None:
    """Show who changed what and why, newest first: people and re-seedings, with refused attempts."""
    from controlplane import render

    answer = ask(control, as_json, lambda client: client.history(limit, controllers=controllers))
    if as_json:
        echo_json(render.history_json(answer.entries))
    else:
        click.echo(render.history_text(answer.entries))


@click.command()
@click.option(
    "--check",
    is_flag=True,
    help="End with exit code 5 where a node is lost, or not on the newest policy, or nobody takes requests.",
)
@control_option
@json_option
def fleet(check: bool, control: str | None, as_json: bool) -> None:
    """Show the mesh's nodes: their state, their load, and the policy that each has applied or refused.

    Exit codes: 0 whatever it shows, 3 no control plane answers; with --check 5 no node is connected, no worker takes requests, a
    node is lost, or one has refused or not yet applied the newest policy. A node that was drained is not missed.
    """
    from controlplane import render_fleet

    answer = ask(control, as_json, lambda client: client.fleet())
    if as_json:
        echo_json(render_fleet.fleet_json(answer))
    else:
        click.echo(render_fleet.fleet_text(answer))
    faults = render_fleet.faults(answer) if check else []
    for fault in faults:
        click.echo(f"check: {fault}", err=True)
    if faults:
        sys.exit(ExitCode.PARTIAL)


def end_partial(answer: Any) -> None:
    """With its exit code, where some node has not applied what was written."""
    from controlplane import render

    if any(render.answer_of(node, answer.identity) != "applied" for node in answer.nodes):
        sys.exit(ExitCode.PARTIAL)


def user() -> str:
    """Who is typing, as this machine knows them; a number where it knows no name."""
    import getpass
    import os

    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return f"uid {os.getuid()}"


def field_of(name: str, as_json: bool) -> Field:
    """The field of that name; else the end of the command, as the control plane's own refusal of it is."""
    try:
        return field(name)
    except PolicyRefused as e:
        fail(e, as_json)


def scope_of(said: str) -> Scope:
    """What --for names; a usage error where it is no scope."""
    try:
        return parse_scope(said)
    except PolicyRefused as e:
        raise click.BadParameter(e.message, param_hint="--for") from e


def assigned(assignments: tuple[str, ...]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for text in assignments:
        path, sign, value = text.partition("=")
        path = path.strip()
        # Nothing is a value only where it clears a list.
        may_be_empty = path in FIELDS and FIELDS[path].kind is Kind.NAMES
        if not sign or not path or not (value.strip() or may_be_empty):
            raise click.UsageError(f"{text!r} is not FIELD=VALUE, such as batch.active=8")
        if path in fields:
            raise click.UsageError(f"{path} is given twice")
        fields[path] = value.strip()
    return fields
