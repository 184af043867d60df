"""The verbs that look back: `trimtab policy show|diff|rollback|explain`. They read the log of changes; a rollback is an ordinary change.

They join the group `policy` of `cli.py`; the command takes the group from here, so that it has all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane import history as past
from controlplane.cli import PRESET_WAIT_MS, ask, end_partial, field_of, policy, user
from trimtab.kit.cli import control_option, echo_json, json_option

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

LOG = 1024
"""Entries; all that the store keeps."""


async def _looked_back(client: AdminClient, said: str) -> tuple[Any, int, list[past.Net], dict[str, str]]:
    """The policy now, the revision that was meant, what changed since, and the fields that are set now."""
    from controlplane.spec import shown
    from trimtab.codec import decode_document

    now = await client.get_policy()
    newest = now.snapshot.identity
    wanted = past.revision(said, newest.epoch, newest.revision)
    entries = (await client.history(LOG)).entries
    since = past.net(entries, newest.epoch, wanted, newest.revision)
    base = decode_document(now.snapshot.document).base
    return now, wanted, since, {path: shown(value) for path, value in base.items()}


@policy.command("show")
@click.argument("revision", metavar="REVISION")
@control_option
@json_option
def show(revision: str, control: str | None, as_json: bool) -> None:
    """Show the fields that people had set at a REVISION of the history, such as 12."""
    from controlplane import render

    async def look(client: AdminClient) -> tuple[Any, int, dict[str, str]]:
        now, wanted, since, base = await _looked_back(client, revision)
        return now, wanted, past.as_of(base, since)

    now, wanted, fields = ask(control, as_json, look)
    epoch = now.snapshot.identity.epoch
    if as_json:
        values = {path: render.typed(path, said) for path, said in sorted(fields.items())}
        echo_json({"epoch": epoch, "revision": wanted, "fields": values})
    else:
        lines = [f"policy {epoch}.{wanted}: {len(fields)} fields set, all others as the guides say"]
        click.echo("\n".join([*lines, *(f"  {path}={said}" for path, said in sorted(fields.items()))]))


@policy.command("diff")
@click.argument("first", metavar="FROM")
@click.argument("last", metavar="[TO]", required=False)
@control_option
@json_option
def diff(first: str, last: str | None, control: str | None, as_json: bool) -> None:
    """Show what differs between two revisions of the history; TO is the newest one where it is left out."""
    from controlplane import render

    async def look(client: AdminClient) -> tuple[int, int, int, list[past.Net]]:
        newest = (await client.get_policy()).snapshot.identity
        a = past.revision(first, newest.epoch, newest.revision)
        b = past.revision(last, newest.epoch, newest.revision) if last else newest.revision
        entries = (await client.history(LOG)).entries
        found = past.net(entries, newest.epoch, min(a, b), max(a, b))
        turned = [past.Net(n.field, n.after, n.before) for n in found]
        return newest.epoch, a, b, found if a <= b else turned

    epoch, a, b, found = ask(control, as_json, look)
    if as_json:
        echo_json({"epoch": epoch, "from": a, "to": b, "changes": render.changes_json(found)})
    else:
        head = f"policy {epoch}.{a} → {epoch}.{b}"
        said = [f"  {c}" for c in render.changes_text(found)] or ["  nothing differs"]
        click.echo("\n".join([head, *said]))


@policy.command("rollback")
@click.argument("revision", metavar="REVISION")
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@control_option
@json_option
def rollback(revision: str, reason: str, author: str | None, dry_run: bool, control: str | None, as_json: bool) -> None:
    """Set every field back to what it was at REVISION, as a new revision. Refused where somebody changes the policy meanwhile.

    Exit codes are those of `policy set`.
    """
    from controlplane import render

    async def write(client: AdminClient) -> Any:
        now, wanted, since, _ = await _looked_back(client, revision)
        if not since:
            return now, None
        identity = now.snapshot.identity
        why = f"rollback to {identity.epoch}.{wanted}" + (f": {reason}" if reason else "")
        return now, await client.set_policy(
            {n.field: n.before for n in since},
            author=author or user(),
            reason=why,
            expect_version=now.spec_version,
            dry_run=dry_run,
            wait_ms=PRESET_WAIT_MS,
        )

    now, answer = ask(control, as_json, write)
    if answer is None:
        same = f"nothing to change: policy {render.place(now.snapshot.identity)} says what {revision} said"
        if as_json:
            echo_json({"written": False, "dry_run": dry_run, "changes": [], "nodes": []})
        else:
            click.echo(same)
        return
    if as_json:
        echo_json(render.set_json(answer, dry_run=dry_run))
    else:
        click.echo(render.set_text(answer, dry_run=dry_run, waited=True))
    end_partial(answer)


@policy.command("explain")
@click.argument("name", metavar="FIELD")
@control_option
@json_option
def explain(name: str, control: str | None, as_json: bool) -> None:
    """Show why a FIELD is what it is: its value on every worker and where that comes from, and who changed it when, refused attempts too."""
    from controlplane import render
    from trimtab.codec import decode_hello
    from trimtab.messages import Role

    asked = field_of(name)

    async def look(client: AdminClient) -> tuple[Any, dict[str, Any], list[Any]]:
        now = await client.get_policy()
        nodes = [decode_hello(n.hello) for n in (await client.fleet()).nodes if n.connected]
        workers = [hello.node.node_id for hello in nodes if hello.role is Role.WORKER]
        each = {node_id: await client.get_policy(node_id) for node_id in workers}
        entries = (await client.history(LOG)).entries
        # A refused attempt says what was tried in words, each field by its name.
        return now, each, [e for e in entries if _concerns(e, asked.path)]

    now, each, entries = ask(control, as_json, look)
    if as_json:
        one = {node_id: render.policy_json(answer, [asked])["fields"][asked.path] for node_id, answer in each.items()}
        nodes = {node_id: {"value": f["value"], "source": f["source"]} for node_id, f in one.items()}
        whole = render.policy_json(now, [asked])
        echo_json(
            {
                "field": asked.path,
                **whole["fields"][asked.path],
                "nodes": nodes,
                "history": render.history_json(entries),
            }
        )
        return
    lines = [render.policy_text(now, [asked]), ""]
    lines += [f"  {node_id}: {render.field_text(asked, answer)}" for node_id, answer in each.items()]
    if not each:
        lines.append("  no worker is connected")
    click.echo("\n".join([*lines, "", render.history_text(entries) if entries else "nobody has changed it"]))


def _concerns(entry: Any, path: str) -> bool:
    return any(c.field == path for c in entry.changes) or f"{path}=" in entry.refused_because
