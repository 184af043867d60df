"""`trimtab why`: which change, by whom, on what evidence, and who obeyed it when. Of everything, of a field, of a node, or of a request."""

from __future__ import annotations

import contextlib
import difflib
import json
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from controlplane.cli import ask
from trimtab.errors import TrimtabError
from trimtab.kit.cli import WIDTH, ExitCode, astray, control_option, echo_json, fail, json_option
from trimtab.kit.process import write_atomically
from trimtab.kit.run_file import control_address
from trimtab.policy import FIELDS

if TYPE_CHECKING:
    from controlplane.admin.client import AdminClient
    from controlplane.story import Chapter
    from services.traces import Span

STDOUT = "-"
PEOPLE, ALL = 1024, 8192
"""Entries: all that the store keeps of people's writes, and of everybody's."""
ANSWERS = 100_000
DECISIONS = 500
SHOWN_NODES = 6


@click.command()
@click.argument("subject", metavar="[FIELD|NODE|REQUEST]", required=False)
@click.option(
    "-n", "limit", type=click.IntRange(1, ALL), default=10, show_default=True, metavar="N", help="Newest N changes."
)
@click.option(
    "--mesh", help="Mesh whose traces to read for a REQUEST. [default: the running `trimtab up`, else default]"
)
@click.option(
    "--export",
    "export",
    type=click.Path(dir_okay=False, allow_dash=True),
    metavar="FILE",
    help="All that is kept, as JSON lines; - is stdout.",
)
@click.option("--force", is_flag=True, help="Write over FILE where it is there already.")
@control_option
@json_option
def why(
    subject: str | None,
    limit: int,
    mesh: str | None,
    export: str | None,
    force: bool,
    control: str | None,
    as_json: bool,
) -> None:
    """Tell why things are as they are: who changed what, when, from what to what, on what evidence, and which nodes applied it when.

    Without a subject, of everything. Of a policy FIELD such as batch.active: its changes, its value on each node and where that comes
    from. Of a NODE: what it holds and what it answered. Of a REQUEST, by its id or its trace's: where its time went, under which policy,
    and what was changed meanwhile.
    """
    from controlplane import story as s

    if export is not None and export != STDOUT and Path(export).exists() and not force:
        raise click.UsageError(f"{export} is there already; name another file, or add --force")

    async def look(client: AdminClient) -> Known:
        try:
            fleet = await client.fleet()
        except TrimtabError as e:
            return Known([], None, astray(e, control_address(control), "control plane"))
        decisions: list[Any] = []
        measured: dict[str, Any] = {}
        with contextlib.suppress(TrimtabError):
            # An older build does not tell them.
            telemetry = await client.get_telemetry(windows=1, decisions=DECISIONS)
            decisions, measured = s.besides(telemetry.decisions), {n.node_id: n for n in telemetry.nodes}
        try:
            people = (await client.history(PEOPLE)).entries
            entries = s.merged(people, (await client.history(ALL, controllers=True)).entries)
            answers = (await client.answers(ANSWERS)).answers
            story = s.chapters(entries, answers, s.joined(fleet, time.time() * 1000))
            return Known(story, fleet, None, decisions, measured)
        except TrimtabError as e:
            return Known([], fleet, e, decisions, measured)

    if subject in FIELDS:
        _field(subject, look, limit, control, as_json)
        return
    known = ask(control, as_json, look)
    if export is not None:
        _export(export, s.rows(known.story_or_end(as_json)))
    elif subject is None:
        story, decisions = known.story_or_end(as_json)[:limit], known.decisions[:limit]
        besides: dict[str, Any] = {"decisions": [s.decision_json(d) for d in decisions]} if as_json else {}
        _tell("", story, as_json, **besides)
        if decisions and not as_json:
            lines = [line for d in decisions for line in s.decision_text(d)]
            click.echo("\n".join(["", "besides, controllers:", *lines]))
    elif known.fleet is not None and any(n.hello.node_id == subject for n in known.fleet.nodes):
        _node(subject, known, limit, control, as_json)
    else:
        _request(subject, known, mesh, as_json)


def _export(file: str, rows: Iterable[Mapping[str, Any]]) -> None:
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if file == STDOUT:
        click.echo(lines, nl=False)
        return
    try:
        write_atomically(Path(file), lines.encode())
    except OSError as e:
        raise click.UsageError(f"can't write {file}: {e.strerror}") from e


@dataclass(frozen=True, slots=True)
class Known:
    """What the control plane told. Without its store it has no story, and nothing at all when nobody answers; `missing` says why."""

    story: list[Chapter]
    fleet: Any
    missing: TrimtabError | None = None
    decisions: Sequence[Any] = ()
    """Of controllers, that changed no policy: newest first, as far as the leader remembers."""
    measured: Mapping[str, Any] = field(default_factory=dict)
    """NodeTelemetry of each node, as far as the replica that was asked has heard of it."""

    def story_or_end(self, as_json: bool) -> list[Chapter]:
        """For a question that is about nothing else."""
        if self.missing is not None:
            fail(self.missing, as_json)
        return self.story

    def facts(self) -> dict[str, Any]:
        """For JSON that has `changes` beside something else: why there are none."""
        return {"changes_missing": self.missing.message} if self.missing else {}


def _tell(
    head: str, story: list[Chapter], as_json: bool, *, nothing: str = "no change is on record", **more: Any
) -> None:
    from controlplane import story as s

    if as_json:
        echo_json({**more, "changes": [s.chapter_json(c) for c in story]})
        return
    lines = [head] if head else []
    for c in story:
        lines += _chapter_text(c)
    click.echo("\n".join(lines if story else [*lines, nothing]))


def _chapter_text(c: Chapter) -> list[str]:
    from controlplane.render import history_text

    lines = history_text([c.entry]).splitlines()
    by_result: dict[tuple[str, bool], list[Any]] = {}
    for a in c.answers:
        by_result.setdefault((a.result, a.result != "refused" and c.later(a)), []).append(a)
    for (result, later), answers in by_result.items():
        if result == "refused":
            words = [f"refused by {a.node_id} ({a.reason}): {a.message}" for a in answers]
        else:
            first, last = answers[0].at_unix_ms, answers[-1].at_unix_ms
            names = ", ".join(a.node_id for a in answers[:SHOWN_NODES])
            rest = f" and {len(answers) - SHOWN_NODES} more" if len(answers) > SHOWN_NODES else ""
            verb = "applied by" if result == "applied" else "passed over, for a newer one, by"
            since = ", later, as they joined" if later else _since(c, first, last)
            words = [f"{verb} {names}{rest}{since}"]
        for said in words:
            lines += textwrap.wrap(said, WIDTH, initial_indent=" " * 10, subsequent_indent=" " * 12)
    return lines


def _since(c: Chapter, first: int, last: int) -> str:
    """How long after the write; clocks of machines differ, so never less than at once."""
    spans = [max(0, at - c.entry.written_unix_ms) for at in (first, last)]
    shown = [f"{ms} ms" if ms < 10_000 else f"{ms / 1000:.0f} s" for ms in spans]
    return (
        f", {shown[0]} after it was written"
        if spans[0] == spans[1]
        else f", {shown[0]} to {shown[1]} after it was written"
    )


def _field(
    path: str, look: Callable[[AdminClient], Awaitable[Known]], limit: int, control: str | None, as_json: bool
) -> None:
    from controlplane import render
    from controlplane import story as s
    from controlplane.cli_history import of_each_node

    asked = FIELDS[path]

    async def both(client: AdminClient) -> tuple[list[Chapter], Any, dict[str, Any]]:
        known = await look(client)
        if known.missing is not None:
            raise known.missing
        return known.story, await client.get_policy(), await of_each_node(client)

    story, now, each = ask(control, as_json, both)
    found = s.of_field(story, path)[:limit]
    if as_json:
        nodes = {name: render.node_field_json(asked, a) for name, a in each.items()}
        _tell("", found, as_json, field=path, **render.policy_json(now, [asked])["fields"][path], nodes=nodes)
        return
    lines = [f"{path}: {render.field_text(asked, now)}"]
    lines += [f"  {name}: {render.node_field_text(asked, a)}" for name, a in each.items()] or ["  no node is connected"]
    _tell("\n".join([*lines, ""]), found, as_json)


def _node(node_id: str, known: Known, limit: int, control: str | None, as_json: bool) -> None:
    from controlplane import render, render_fleet
    from controlplane import render_workers as workers
    from controlplane import story as s

    fleet = known.fleet
    node = next(n for n in fleet.nodes if n.hello.node_id == node_id)
    answered = [replace(c, answers=tuple(a for a in c.answers if a.node_id == node_id)) for c in known.story]
    answered = [c for c in answered if c.answers][:limit]
    steered = ask(control, as_json, lambda client: _steered(client, node_id, limit))
    if as_json:
        died = s.died_json(known.measured[node_id]) if node_id in known.measured else {}
        facts = {**died, **steered.facts(), **known.facts()}
        _tell("", answered, as_json, node=render_fleet.node_json(node), **facts)
        return
    p = node.policy
    since = f"for {node.seconds_connected:.0f} s" if node.connected else render_fleet.gone_text(node)
    head = f"{node_id} at {node.hello.address}, connected to {node.replica_id} {since}, holds policy {render.place(p.applied)}"
    lines = textwrap.wrap(head, WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    if p.refused.epoch:
        lines.append(f"  it refused {render.place(p.refused)} ({p.refusal.reason}): {p.refusal.message}")
    if render.place(p.applied) != render.place(fleet.desired):
        lines.append(f"  the newest is {render.place(fleet.desired)}")
    if node_id in known.measured:
        lines += [f"  {line}" for line in s.died_text(known.measured[node_id])]
    if steered.breaker is not None:
        lines += [f"  {line}" for line in workers.breaker_text(steered.breaker, int(time.time() * 1000))]
    lines += [f"  {line}" for line in workers.actions_text(steered.actions)]
    nothing = f"what it answered is not known now: {known.missing.message}" if known.missing else "it answered nothing"
    _tell("\n".join([*lines, ""]), answered, as_json, nothing=nothing)


@dataclass(frozen=True, slots=True)
class Steered:
    """What gateways and people have made of a worker, as far as the control plane tells it."""

    breaker: Any = None
    actions: Sequence[Any] = ()
    missing: TrimtabError | None = None

    def facts(self) -> dict[str, Any]:
        from controlplane import render_workers as workers

        missing = {"actions_missing": self.missing.message} if self.missing else {}
        return {
            "breaker": workers.breaker_json(self.breaker) if self.breaker is not None else None,
            "actions": [workers.action_json(a) for a in self.actions],
            **missing,
        }


async def _steered(client: AdminClient, node_id: str, limit: int) -> Steered:
    """Without its store, or as an older build, a control plane does not tell all of it."""
    found = None
    try:
        found = next((w for w in (await client.breakers()).workers if w.node_id == node_id), None)
        return Steered(found, (await client.actions(limit, node_id=node_id)).actions)
    except TrimtabError as e:
        return Steered(found, (), e)


def _request(said: str, known: Known, mesh: str | None, as_json: bool) -> None:
    from controlplane import story as s
    from services import traces
    from services.cli import FLUSHED_AFTER_S, trace_directory

    directory = trace_directory(mesh)
    spans = _spans(said, directory)
    if not any(x.name == "worker.generate" for x in spans):
        # It may have just ended: processes write their spans every half second.
        time.sleep(FLUSHED_AFTER_S)
        spans = _spans(said, directory)
    if not spans and known.missing is not None:
        # It may be a node.
        fail(known.missing, as_json)
    if not spans:
        near = difflib.get_close_matches(said, FIELDS, n=1, cutoff=0.6)
        message = f"{said!r} is no policy field, no node, and no request whose trace is in {directory}"
        message += f"; did you mean {near[0]}?" if near else ""
        if as_json:
            echo_json({"error": {"reason": "NOT_FOUND", "message": message}})
        click.secho(
            f"error: {message}; a REQUEST is named by its id (x-request-id) or its trace id", fg="red", err=True
        )
        raise SystemExit(ExitCode.USAGE)
    first, last = min(x.start_ns for x in spans) / 1e6, max(x.end_ns for x in spans) / 1e6
    meanwhile = s.during(known.story, first, last)
    held = next((str(x.attributes["trimtab.policy"]) for x in spans if "trimtab.policy" in x.attributes), "")
    under = s.in_force(known.story, _place(held)) if held else None
    if as_json:
        tree = [traces.as_json(depth, x) for depth, x in traces.tree(spans)]
        facts = {"trace_id": spans[0].trace_id, "policy": held or None, "spans": tree, **known.facts()}
        _tell("", meanwhile, as_json, **facts, policy_written=s.chapter_json(under) if under else None)
        return
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first / 1000))
    click.echo(f"request {said}, {when}, trace {spans[0].trace_id}")
    click.echo("\n".join(f"  {line}" for line in traces.render(spans)))
    worker = next((x for x in spans if x.name == "worker.generate"), None)
    if worker is not None:
        click.echo(f"\n{_where(spans, worker)}")
    if held:
        name = worker.attributes.get("trimtab.worker", "its worker") if worker else "its worker"
        click.echo(f"\n{name} held policy {held}" + (", written so:" if under else ""))
        if under is not None:
            click.echo("\n".join(_chapter_text(under)))
    if known.missing is not None:
        click.echo(f"\nwhat was changed meanwhile is not known now: {known.missing.message}")
        return
    click.echo("\nchanged while it ran:" if meanwhile else "\nnothing was changed while it ran")
    for c in meanwhile:
        click.echo("\n".join(_chapter_text(c)))


def _where(spans: list[Span], worker: Span) -> str:
    """The longest part of it, in words."""
    where = worker.attributes.get("trimtab.worker", "its worker")
    parts = {x.name: x.duration_ms for x in spans if x.name in ("queue", "prefill", "decode")}
    if not parts:
        return f"it never ran on {where}"
    name, took = max(parts.items(), key=lambda item: item[1])
    words = {"queue": "waiting for its turn", "prefill": "reading its prompt", "decode": "writing its answer"}
    decode = next((x for x in spans if x.name == "decode"), None)
    again = int(decode.attributes.get("trimtab.preemptions", 0)) if decode else 0
    preempted = f"; it was preempted {again} times" if again else ""
    return f"most of its time on {where}, {took:.0f} of {worker.duration_ms:.0f} ms, went by {words[name]}{preempted}"


def _spans(said: str, directory: Any) -> list[Span]:
    """The request's whole trace, by the request's id or by the trace's own, which may be shortened; none when it is not one alone."""
    from services import traces

    ids = {x.trace_id for x in traces.read(directory) if x.attributes.get("trimtab.request_id") == said}
    if not ids and len(said) >= 4:
        ids = set(traces.find(directory, said.lower()))
    if len(ids) != 1:
        return []
    found = traces.find(directory, next(iter(ids)))
    return next(iter(found.values()), [])


def _place(said: str) -> tuple[int, int]:
    epoch, _, revision = said.partition(".")
    return (int(epoch), int(revision)) if epoch.isdigit() and revision.isdigit() else (0, 0)
