"""`trimtab backup` and `trimtab restore`: what people own of the policy store, into a file and back by the door that all changes take."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli import ask, user, wait_option
from controlplane.cli_history import LOG
from trimtab.errors import StoreUnavailable, TrimtabError
from trimtab.kit.cli import ExitCode, control_option, echo_json, fail, json_option
from trimtab.kit.duration import brief

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient
    from controlplane.backup import Backup, Forced

STDOUT = "-"
SIDES = {1: "open", 2: "closed"}
"""By BreakerForce's numbers."""


@click.command()
@click.argument("file", metavar="FILE", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--force", is_flag=True, help="Write over FILE where it is there already.")
@control_option
@json_option
def backup(file: str, force: bool, control: str | None, as_json: bool) -> None:
    """Write what people have set into FILE (- is stdout): the policy with its overlays and pins, forced breakers, and the history, which is
    for reading alone. `trimtab restore FILE` brings the policy and the breakers back.

    Not in it: what controllers do (they decide anew), a policy that is only tried on canaries, and workers' own settings.

    Exit codes: 0 written, 2 usage, 3 no control plane answers, 4 its policy is of a newer build. A store that is away keeps only the
    history out of the file.
    """
    from controlplane import backup as form

    if file != STDOUT and Path(file).exists() and not force:
        raise click.UsageError(f"{file} is there already; name another file, or add --force")
    made, trials = ask(control, as_json, _look)
    text = form.write(made)
    if form.write(form.read(text)) != text:
        raise click.ClickException("the backup does not read back as it was written; nothing was written")
    _write(file, text)
    for rollout in trials:
        click.secho(f"warning: {rollout} is on canaries yet; what it tries is not in the backup", fg="yellow", err=True)
    if made.history is None:
        click.secho("warning: the store is away; the backup has no history", fg="yellow", err=True)
    if as_json and file != STDOUT:
        echo_json({"file": file, **_facts(made), "rollouts": trials})
    elif file != STDOUT:
        click.echo(f"{file}: {_words(made)}")


async def _look(client: AdminClient) -> tuple[Backup, list[str]]:
    """The mesh's backup, and rollouts that are not over."""
    from controlplane import backup as form
    from controlplane import render
    from trimtab.codec import decode_document

    # What a replica holds is enough for all but the history, so that a backup can be made while the store is away.
    now = await client.get_policy()
    policy = form.policy_of(decode_document(now.snapshot.document))
    forced = [w for w in (await client.breakers()).workers if w.HasField("forced") and w.forced.forced in SIDES]
    history, trials = None, []
    try:
        history = render.history_json((await client.history(LOG)).entries)
        trials = [r.rollout_id for r in (await client.rollouts()).rollouts if r.live and r.kind == "policy"]
    except StoreUnavailable:
        pass
    breakers = tuple(
        form.Forced(w.node_id, SIDES[f.forced], f.until_unix_ms, f.author, f.reason) for w in forced for f in [w.forced]
    )
    identity = render.identity_json(now.snapshot.identity) or {}
    made = form.Backup(_now(), identity, now.spec_version, now.author, now.reason, policy, breakers, history)
    return made, trials


def _write(file: str, text: str) -> None:
    from trimtab.kit.process import write_atomically

    if file == STDOUT:
        click.echo(text, nl=False)
        return
    try:
        write_atomically(Path(file), text.encode())
    except OSError as e:
        raise click.UsageError(f"can't write {file}: {e.strerror}") from e


def _facts(made: Backup) -> dict[str, Any]:
    kept = made.history
    return {
        "identity": made.identity,
        "spec_version": made.spec_version,
        "fields": sum(len(part) for part in made.policy.get("fields", {}).values()),
        "overlays": len(made.policy.get("overlays", ())),
        "pins": len(made.policy.get("pins", ())),
        "breakers": len(made.breakers),
        "history": len(kept) if kept is not None else None,
    }


def _words(made: Backup) -> str:
    f = _facts(made)
    counts = [(noun, f[noun]) for noun in ("fields", "overlays", "pins")]
    counts += [("forced breakers", f["breakers"]), ("lines of history", f["history"] or 0)]
    said = ", ".join(f"{noun}: {count}" for noun, count in counts)
    return f"policy {made.place}, version {made.spec_version}; {said}"


@click.command()
@click.argument("file", metavar="FILE", type=click.File(encoding="utf-8"))
@click.option("--reason", default="", metavar="TEXT", help="Why. [default: which backup it was]")
@click.option("--author", metavar="NAME", help="Who. [default: you, as this machine knows you]")
@click.option("--expect-version", type=click.IntRange(min=0), metavar="N", help="Refuse if the policy has moved on.")
@click.option("--dry-run", is_flag=True, help="Check, and show what would change; write nothing.")
@wait_option
@control_option
@json_option
def restore(
    file: Any,
    reason: str,
    author: str | None,
    expect_version: int | None,
    dry_run: bool,
    wait_ms: int,
    control: str | None,
    as_json: bool,
) -> None:
    """Bring back what `trimtab backup` wrote into FILE: the policy as one change, checked against every connected node as any other, and
    breakers that were forced, for what is left of their time. What was set since goes back to what the backup says.

    The history is not brought back; the file has it, and the change is a new line of the present one.

    Exit codes are those of `policy apply`; 5 also where a breaker could not be forced.
    """
    from controlplane import backup as form
    from controlplane import render
    from controlplane.admin.encode import encode_spec

    try:
        kept = form.read(file.read(form.MAX_FILE_BYTES))
        spec = encode_spec(form.spec_of(kept))
    except TrimtabError as e:
        fail(e, as_json)
    except UnicodeDecodeError as e:
        raise click.BadParameter(f"{file.name} is not UTF-8: {e}", param_hint="FILE") from e
    who, why = author or user(), reason or _why(kept)

    async def bring_back(client: AdminClient) -> tuple[Any, list[dict[str, Any]]]:
        answer = await client.apply_policy(
            spec, author=who, reason=why, expect_version=expect_version, dry_run=dry_run, wait_ms=wait_ms
        )
        return answer, [await _force(client, f, who, why, dry_run=dry_run) for f in kept.breakers]

    answer, forced = ask(control, as_json, bring_back)
    if as_json:
        echo_json({**render.set_json(answer, dry_run=dry_run), "breakers": forced})
    else:
        click.echo(
            "\n".join([render.set_text(answer, dry_run=dry_run, waited=wait_ms > 0), *map(_breaker_text, forced)])
        )
    held = all(render.answer_of(node, answer.identity) == "applied" for node in answer.nodes)
    if not held or any(b["outcome"] == "failed" for b in forced):
        sys.exit(ExitCode.PARTIAL)


async def _force(client: AdminClient, f: Forced, who: str, why: str, *, dry_run: bool) -> dict[str, Any]:
    """What became of one: over, wanted (in a dry run), forced, or failed and why."""
    left_ms = f.left_ms(_now())
    from controlplane.admin.checks import MAX_REASON_CHARS

    said: dict[str, Any] = {"node_id": f.node_id, "to": f.to, "left_ms": left_ms, "message": None}
    if not left_ms:
        return {**said, "outcome": "over"}
    if dry_run:
        return {**said, "outcome": "wanted"}
    numbers: dict[str, Any] = {side: number for number, side in SIDES.items()}
    reason = f"{why}: {f.reason} ({f.author})"[:MAX_REASON_CHARS]
    try:
        await client.force_breaker(f.node_id, numbers[f.to], author=who, reason=reason, for_ms=left_ms)
    except TrimtabError as e:
        return {**said, "outcome": "failed", "message": e.message}
    return {**said, "outcome": "forced"}


def _breaker_text(said: dict[str, Any]) -> str:
    node, to, left = said["node_id"], said["to"], brief(said["left_ms"])
    match said["outcome"]:
        case "over":
            return f"  breaker of {node}: was forced {to}, and its time is over"
        case "wanted":
            return f"  breaker of {node}: would be forced {to} for {left}"
        case "forced":
            return f"  breaker of {node}: forced {to} for {left}"
        case _:
            return f"  breaker of {node}: NOT FORCED {to}: {said['message']}"


def _why(kept: Backup) -> str:
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(kept.made_unix_ms / 1000))
    return f"restored: policy {kept.place} of a backup of {made} UTC"


def _now() -> int:
    return int(time.time() * 1000)
