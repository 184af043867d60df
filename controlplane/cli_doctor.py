"""`trimtab doctor`: what is wrong, why, and setting it right."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli import ask, user
from trimtab.errors import TrimtabError
from trimtab.kit.cli import control_option, echo_json, json_option
from trimtab.kit.duration import brief

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient
    from controlplane.doctor import Case, Finding, Fix, Symptom
    from controlplane.render_doctor import Done

SYMPTOMS = (
    "p99", "throughput", "memory", "delay", "oom", "workers", "policy", "store", "leader", "breakers", "loops", "versions",
)  # fmt: skip
"""Those of the books, so that help needs no import of them."""
CHANGES = 10
WAIT_MS = 3000
MAX_REASON = 200


@click.command()
@click.option(
    "--symptom", "wanted", type=click.Choice(SYMPTOMS), multiple=True, metavar="NAME",
    help=f"Look for this alone; may be repeated. One of {', '.join(SYMPTOMS)}.",
)  # fmt: skip
@click.option(
    "--fix", "fixing", is_flag=True, help="Set right what can be, one fix after another; it asks before each."
)
@click.option("--yes", is_flag=True, help="With --fix: don't ask.")
@click.option("--author", metavar="NAME", help="Who sets it right. [default: you, as this machine knows you]")
@control_option
@json_option
def doctor(
    wanted: tuple[str, ...], fixing: bool, yes: bool, author: str | None, control: str | None, as_json: bool
) -> None:
    """Look for what is wrong with the mesh: of each symptom the checks that were run, the verdict with its figures, and what sets it right.

    A verdict is ok, FOUND, SUSPECT (it shows, and is not sure), or UNKNOWN: a metric is missing. With --fix what can be set right is, by the
    same calls that the commands shown make, and the command that takes it back is told.

    Exit codes: 0 all is well, 1 something was found or is suspect, 2 usage, 3 no control plane answers, 5 some of it can't be told.
    """
    if yes and not fixing:
        raise click.UsageError("--yes says that --fix is not to ask; there is nothing to ask about without it")
    if fixing and not yes and not _at_a_terminal():
        raise click.UsageError("--fix asks before each fix, and here is nobody to ask; say --yes")
    from controlplane import render_doctor as render
    from controlplane.doctor import examine

    case = ask(control, as_json, _case)
    findings = examine(case, _book(wanted))
    if not as_json:
        _show(findings)
    done = _set_right(case, findings, control, author or user(), ask_first=not yes, quiet=as_json) if fixing else None
    if as_json:
        echo_json(render.doctor_json(findings, done))
    sys.exit(render.exit_code(findings))


def _book(wanted: tuple[str, ...]) -> list[Symptom]:
    from controlplane.doctor_book import BOOK

    return [s for s in BOOK if not wanted or s.name in wanted]


async def _case(client: AdminClient) -> Case:
    """Without its store a control plane tells of breakers and history only in part, or not at all."""
    from controlplane.doctor import WINDOWS, Case

    telemetry, fleet, policy = await asyncio.gather(
        client.get_telemetry(windows=WINDOWS), client.fleet(), client.get_policy()
    )
    breakers, history = None, None
    with contextlib.suppress(TrimtabError):
        breakers = await client.breakers()
    with contextlib.suppress(TrimtabError):
        history = (await client.history(CHANGES)).entries
    return Case(telemetry, fleet, policy, breakers, history, _now())


def _show(findings: list[Finding]) -> None:
    from controlplane import render_doctor as render

    nth = 1
    for f in findings:
        for line, verdict in render.finding_text(f, nth):
            click.secho(line, fg=render.COLOURS[verdict] if verdict else None)
        nth += len(f.fixes) if f.verdict.value != "ok" else 0
    click.echo()
    click.echo(render.summary_text(findings))


# ---- setting it right


def _set_right(
    case: Case, findings: list[Finding], control: str | None, author: str, *, ask_first: bool, quiet: bool
) -> list[Done]:
    """Each fix once, whatever number of symptoms want it; one that fails does not keep the others from being tried."""
    from controlplane import render_doctor as render

    done: dict[str, Done] = {}
    for f in findings:
        for fix in f.fixes:
            if fix.action is None or fix.command in done:
                continue
            if ask_first and not click.confirm(f"{fix.does} ({fix.command})?", err=True):
                continue
            reason = f"doctor: {f.said}"[:MAX_REASON]
            found = _do(case, fix, control, author, reason)
            done[fix.command] = found
            if not quiet:
                click.echo("\n".join(render.done_text(found)))
    if not done and not quiet:
        click.echo("nothing was set right by this")
    return list(done.values())


def _do(case: Case, fix: Fix, control: str | None, author: str, reason: str) -> Done:
    from controlplane.render_doctor import Done

    async def doing(client: AdminClient) -> Done:
        try:
            return await _act(client, case, fix, author, reason)
        except TrimtabError as e:
            return Done(fix, False, e.message)

    return ask(control, False, doing)


async def _act(client: AdminClient, case: Case, fix: Fix, author: str, reason: str) -> Done:
    from controlplane.doctor import Reblock, Release, Reload, ResetBreaker, Restart, SetFields
    from controlplane.render_doctor import Done
    from trimtab.snapshot import parse_scope

    match fix.action:
        case SetFields(fields, scope):
            answer = await client.set_policy(
                fields, author=author, reason=reason, wait_ms=WAIT_MS, scope=parse_scope(scope)
            )
            return Done(fix, True, *_as_written(answer))
        case Restart(node_id, deadline_ms):
            drained = await client.drain(node_id, deadline_ms, author=author, reason=reason, restart=True)
            if not drained.done:
                return Done(fix, False, f"{drained.reason}: {drained.message}")
            return Done(
                fix, True, f"{node_id} drains, and is started anew by who supervises it", "nothing to take back"
            )
        case Reload(node_id):
            told = await client.reload(node_id, author=author, reason=reason)
            if not told.done:
                return Done(fix, False, f"{told.reason}: {told.message}")
            return Done(fix, True, f"{node_id} has it anew", "nothing to take back")
        case Reblock(node_id, block_size, before_size):
            (changed,) = (await client.reblock([node_id], block_size, author=author, reason=reason)).nodes
            if not changed.done:
                return Done(fix, False, f"{changed.reason}: {changed.message}")
            r = changed.result
            took = f"in {r.change_ms:.0f} ms, {r.recompute_tokens} tokens to compute anew"
            took += f", {r.carried_tokens} carried over" if r.carried_tokens else ""
            return Done(
                fix, True, f"{node_id} has blocks of {block_size} {took}", f"trimtab reblock {node_id} {before_size}"
            )
        case Release(match):
            steered = await client.release(match, author=author, reason=reason)
            count = sum(n.affected for n in steered.nodes)
            return Done(fix, True, f"{count} requests released", "none; their clients may send them again")
        case ResetBreaker(node_id):
            # Nothing forced is the first value of BreakerForce.
            before = next((w for w in case.breakers.workers if w.node_id == node_id), None)
            reset = await client.force_breaker(node_id, 0, author=author, reason=reason)  # type: ignore[arg-type]
            return Done(fix, True, "taken back" if reset.changed else "nothing was forced any more", _forced(before))
        case None:
            raise AssertionError("only what has an action is done")


def _as_written(answer: Any) -> tuple[str, str]:
    """What a write came to, and the command that takes it back."""
    from controlplane.render import answer_of, changes_text, place

    if not answer.changes:
        return "the policy says so already", ""
    waiting = [n.node_id for n in answer.nodes if answer_of(n, answer.identity) != "applied"]
    late = f"; not applied yet by {', '.join(waiting[:4])}" if waiting else ""
    by_scope: dict[str, list[str]] = {}
    for c in answer.changes:
        if not c.scope or c.scope.startswith(("pool/", "label/", "node/")):
            by_scope.setdefault(c.scope, []).append(f"{c.field}={c.before}")
    undo = " && ".join(
        f"trimtab policy set {' '.join(fields)}" + (f" --for {scope}" if scope else "")
        for scope, fields in by_scope.items()
    )
    return f"policy {place(answer.identity)}: {'; '.join(changes_text(answer.changes))}{late}", undo


def _forced(worker: Any) -> str:
    if worker is None or not worker.HasField("forced"):
        return ""
    verb = "open" if worker.forced.forced == 1 else "close"
    left = brief(max(1000, worker.forced.until_unix_ms - _now())).split()[0]
    return f"trimtab breaker {verb} {worker.node_id} --for {left}"


def _at_a_terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _now() -> int:
    return int(time.time() * 1000)
