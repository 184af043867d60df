"""The verbs over whole specs and over the past: `trimtab policy show|diff|apply|rollback|pin|unpin|explain|schema`.

They join the group `policy` of `cli.py`; the command takes the group from here, so that it has all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from controlplane import history as past
from controlplane.cli import PRESET_WAIT_MS, ask, field_of, policy, tell, user, wait_option
from trimtab.errors import InvalidRequest, PolicyRefused, TrimtabError
from trimtab.kit.cli import control_option, echo_json, fail, json_option

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient

LOG = 1024
"""Entries; all that the store keeps of people's writes."""


async def of_each_node(client: AdminClient) -> dict[str, Any]:
    """By node id what each connected node has (GetPolicyResponse), or why that can't be said: its engine may be unable to take the policy."""
    each: dict[str, Any] = {}
    for node_id in [n.hello.node_id for n in (await client.fleet()).nodes if n.connected]:
        try:
            each[node_id] = await client.get_policy(node_id)
        except TrimtabError as e:
            if e.reason not in (PolicyRefused.reason, InvalidRequest.reason):
                raise
            each[node_id] = e
    return each


async def _at(client: AdminClient, said: str | None) -> tuple[Any, Any]:
    """The policy now, and the revision that was meant; the newest where none was."""
    now = await client.get_policy()
    newest = now.snapshot.identity
    place = past.revision(said, newest.epoch, newest.revision) if said else (newest.epoch, newest.revision)
    return now, await client.revision(*place)


def _spec(answer: Any) -> Any:
    from controlplane.admin.encode import decode_spec

    return decode_spec(answer.spec, author="", reason="")


@policy.command("show")
@click.argument("revision", metavar="[REVISION]", required=False)
@click.option("--yaml", "as_yaml", is_flag=True, help="As a file that `policy apply -f` takes.")
@control_option
@json_option
def show(revision: str | None, as_yaml: bool, control: str | None, as_json: bool) -> None:
    """Show what people have set, now or at a REVISION of the history, such as 12: the base, overlays and pins."""
    from controlplane import render_spec, spec_file
    from trimtab.snapshot import Document, Overlay

    now, found = ask(control, as_json, lambda client: _at(client, revision))
    if as_json:
        echo_json(render_spec.spec_json(found, now.spec_version))
    elif as_yaml:
        spec = _spec(found)
        overlays = tuple(Overlay(str(scope), scope, partial) for scope, partial in spec.overlays.items())
        document = Document(spec.base, overlays, pins=spec.pins)
        click.echo(spec_file.write(document, now.spec_version if revision is None else None), nl=False)
    else:
        click.echo(render_spec.spec_text(found))


@policy.command("diff")
@click.argument("first", metavar="FROM")
@click.argument("last", metavar="[TO]", required=False)
@control_option
@json_option
def diff(first: str, last: str | None, control: str | None, as_json: bool) -> None:
    """Show what differs between two revisions of the history; TO is the newest one where it is left out."""
    from controlplane import render
    from controlplane.admin.encode import encode_changes

    async def look(client: AdminClient) -> tuple[Any, Any]:
        return (await _at(client, first))[1], (await _at(client, last))[1]

    a, b = ask(control, as_json, look)
    changes = encode_changes(past.between(_spec(a), _spec(b)))
    if as_json:
        places = {"from": render.identity_json(a.entry.identity), "to": render.identity_json(b.entry.identity)}
        echo_json({**places, "changes": render.changes_json(changes)})
    else:
        head = f"policy {render.place(a.entry.identity)} → {render.place(b.entry.identity)}"
        said = [f"  {c}" for c in render.changes_text(changes)] or ["  nothing differs"]
        click.echo("\n".join([head, *said]))


@policy.command("apply")
@click.option(
    "-f", "--file", "file", type=click.File(encoding="utf-8"), required=True, metavar="FILE", help="- is stdin."
)
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--expect-version", type=click.IntRange(min=0), metavar="N", help="Over what the file says.")
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@wait_option
@control_option
@json_option
def apply(
    file: Any,
    reason: str,
    author: str | None,
    expect_version: int | None,
    dry_run: bool,
    wait_ms: int,
    control: str | None,
    as_json: bool,
) -> None:
    """Make the policy what a YAML file says, as one change: its fields, its overlays for pools, labels and nodes, and its pins. What it
    does not say goes back to the default. `policy show --yaml` writes such a file; `policy schema` prints its JSON schema.

    Exit codes are those of `policy set`.
    """
    from controlplane import spec_file
    from controlplane.admin.encode import encode_spec

    try:
        said = spec_file.read(file.read(spec_file.MAX_FILE_BYTES + 1))
    except TrimtabError as e:
        fail(e, as_json)
    except UnicodeDecodeError as e:
        raise click.BadParameter(f"{file.name} is not UTF-8: {e}", param_hint="--file") from e
    expected = said.expect_version if expect_version is None else expect_version
    answer = ask(
        control,
        as_json,
        lambda client: client.apply_policy(
            encode_spec(said.spec),
            author=author or user(),
            reason=reason,
            expect_version=expected,
            dry_run=dry_run,
            wait_ms=wait_ms,
        ),
    )
    tell(answer, dry_run=dry_run, waited=wait_ms > 0, as_json=as_json)


@policy.command("schema")
@json_option
def schema(as_json: bool) -> None:
    """Print the JSON schema of the files that `policy apply -f` takes. It is JSON with --json and without."""
    from controlplane import spec_file

    echo_json(spec_file.schema())


@policy.command("rollback")
@click.argument("revision", metavar="REVISION")
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@control_option
@json_option
def rollback(revision: str, reason: str, author: str | None, dry_run: bool, control: str | None, as_json: bool) -> None:
    """Make what people have set what it was at REVISION, as a new revision: fields, overlays and pins. Controllers' adjustments stay.
    Refused where somebody changes the policy meanwhile.

    Exit codes are those of `policy set`.
    """

    async def write(client: AdminClient) -> Any:
        now, found = await _at(client, revision)
        identity = found.entry.identity
        why = f"rollback to {identity.epoch}.{identity.revision}" + (f": {reason}" if reason else "")
        return await client.apply_policy(
            found.spec,
            author=author or user(),
            reason=why,
            expect_version=now.spec_version,
            dry_run=dry_run,
            wait_ms=PRESET_WAIT_MS,
        )

    answer = ask(control, as_json, write)
    tell(answer, dry_run=dry_run, waited=True, as_json=as_json)


def _pin(
    fields: tuple[str, ...],
    pinned: bool,
    reason: str,
    author: str | None,
    dry_run: bool,
    control: str | None,
    as_json: bool,
) -> None:
    paths = [field_of(name, as_json).path for name in fields]
    answer = ask(
        control,
        as_json,
        lambda client: client.pin_policy(
            paths, pinned, author=author or user(), reason=reason, dry_run=dry_run, wait_ms=PRESET_WAIT_MS
        ),
    )
    tell(answer, dry_run=dry_run, waited=True, as_json=as_json)


@policy.command("pin")
@click.argument("fields", metavar="FIELD...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@control_option
@json_option
def pin(**options: Any) -> None:
    """Keep controllers off fields: their adjustments of them are dropped, and new ones do nothing until `policy unpin`."""
    _pin(pinned=True, **options)


@policy.command("unpin")
@click.argument("fields", metavar="FIELD...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Why; the history shows it.")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--dry-run", is_flag=True, help="Check and show; write nothing.")
@control_option
@json_option
def unpin(**options: Any) -> None:
    """Let controllers move fields again."""
    _pin(pinned=False, **options)


@policy.command("explain")
@click.argument("name", metavar="FIELD")
@control_option
@json_option
def explain(name: str, control: str | None, as_json: bool) -> None:
    """Show why a FIELD is what it is: its value on every node and where that comes from, and who changed it when, refused attempts too."""
    from controlplane import render, story

    asked = field_of(name, as_json)

    async def look(client: AdminClient) -> tuple[Any, dict[str, Any], list[Any]]:
        now = await client.get_policy()
        each = await of_each_node(client)
        people = (await client.history(LOG)).entries
        entries = story.merged(people, (await client.history(LOG, controllers=True)).entries)
        return now, each, [c.entry for c in story.of_field(story.chapters(entries, ()), asked.path)]

    now, each, entries = ask(control, as_json, look)
    if as_json:
        nodes = {node_id: render.node_field_json(asked, answer) for node_id, answer in each.items()}
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
    lines += [f"  {node_id}: {render.node_field_text(asked, answer)}" for node_id, answer in each.items()]
    if not each:
        lines.append("  no node is connected")
    click.echo("\n".join([*lines, "", render.history_text(entries) if entries else "nobody has changed it"]))
