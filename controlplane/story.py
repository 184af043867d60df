"""What happened to the policy, as one story: changes, refused attempts and nodes' answers, newest first. Pure.

`trimtab why` tells it of everything, of one field, of one node, or of the time in which a request ran.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from controlplane.render import history_json, identity_json
from trimtab.kit.cli import WIDTH
from trimtab.kit.duration import brief

Place = tuple[int, int]
"""(epoch, revision)"""
CLOCKS_MS = 1000
"""Moments of different machines, and ages that are told in seconds, are no better than this."""
LATE_MS = 60_000
"""An answer that comes so long after the write is of a node that joined since: it says nothing of how fast the change was."""


@dataclass(frozen=True, slots=True)
class Chapter:
    """One entry of the history (PolicyHistoryEntry), and what nodes made of it (PolicyAnswer), oldest answer first."""

    entry: Any
    answers: tuple[Any, ...] = field(default=())
    joined: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """When processes that are connected now joined, by node id and incarnation, in Unix milliseconds."""

    def later(self, answer: Any) -> bool:
        """Whether the answer is of a process that was not there when this was written: it took it as it joined."""
        written = self.entry.written_unix_ms
        joined = self.joined.get((answer.node_id, answer.incarnation), 0.0)
        # A process that was there, and whose stream is a new one, has answered before it joined anew.
        new = joined > written + CLOCKS_MS and answer.at_unix_ms >= joined - CLOCKS_MS
        return bool(new or answer.at_unix_ms - written >= LATE_MS)

    @property
    def took_ms(self) -> float | None:
        """From the write to the last answer of those nodes that were there, by the control planes' clocks; None without an answer."""
        if self.entry.refused_because:
            return None
        took = (a.at_unix_ms - self.entry.written_unix_ms for a in self.answers if not self.later(a))
        return max((float(ms) for ms in took), default=None)


def place(identity: Any) -> Place:
    return (identity.epoch, identity.revision)


def merged(people: Iterable[Any], all_writes: Iterable[Any]) -> list[Any]:
    """Both logs as one, newest first, each entry once: the one holds refused attempts, the other controllers' writes."""
    seen: set[tuple[Place, int, str]] = set()
    entries = []
    for e in (*people, *all_writes):
        key = (place(e.identity), e.written_unix_ms, e.refused_because)
        if key not in seen:
            seen.add(key)
            entries.append(e)
    # A refused attempt comes after the write that it left in place.
    return sorted(entries, key=lambda e: (place(e.identity), bool(e.refused_because), e.written_unix_ms), reverse=True)


def joined(fleet: Any, now_unix_ms: float) -> dict[tuple[str, str], float]:
    """Of GetFleet's answer, as a Chapter wants it."""
    nodes = (n for n in fleet.nodes if n.connected)
    return {(n.hello.node_id, n.hello.incarnation): now_unix_ms - 1000 * n.seconds_connected for n in nodes}


def chapters(
    entries: Sequence[Any], answers: Iterable[Any], joined: Mapping[tuple[str, str], float] | None = None
) -> list[Chapter]:
    by_place: dict[Place, list[Any]] = {}
    for a in answers:
        by_place.setdefault(place(a.identity), []).append(a)
    return [
        Chapter(e, () if e.refused_because else _sorted(by_place.get(place(e.identity), ())), joined or {})
        for e in entries
    ]


def _sorted(answers: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(sorted(answers, key=lambda a: (a.at_unix_ms, a.node_id)))


def of_field(story: Iterable[Chapter], path: str) -> list[Chapter]:
    """Those that changed the field, or tried to: a refused attempt says in words what was tried or what is to blame, each field by its name."""
    named = re.compile(rf"(?<![\w.]){re.escape(path)}(?![\w.]\w)(?!\w)")
    return [c for c in story if any(x.field == path for x in c.entry.changes) or named.search(c.entry.refused_because)]


def during(story: Iterable[Chapter], first_unix_ms: float, last_unix_ms: float) -> list[Chapter]:
    """Those that were written between two moments."""
    return [c for c in story if first_unix_ms <= c.entry.written_unix_ms <= last_unix_ms]


def in_force(story: Iterable[Chapter], at: Place) -> Chapter | None:
    """The one that wrote this revision."""
    return next((c for c in story if not c.entry.refused_because and place(c.entry.identity) == at), None)


def besides(decisions: Iterable[Any]) -> list[Any]:
    """Controllers' decisions (ControllerDecision) that no entry of the history tells: commands, wants, advice, and what could not be done."""
    return [d for d in decisions if d.kind != "move" or d.advised or d.failed]


def decision_json(d: Any) -> dict[str, Any]:
    return {
        "controller": d.controller,
        "at_unix_ms": d.at_unix_ms,
        "what": d.text,
        "reason": d.reason,
        "evidence": d.evidence or None,
        "advised": d.advised,
        "failed": d.failed or None,
    }


def decision_text(d: Any) -> list[str]:
    """`why`'s lines for one."""
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(d.at_unix_ms / 1000))
    said = "would: " if d.advised else ""
    lines = _wrapped(f'{when}  controller/{d.controller}  {said}{d.text} "{d.reason}"', "")
    for words in (d.evidence, d.failed and f"not done: {d.failed}"):
        lines += _wrapped(words, " " * 10) if words else []
    return lines


def _wrapped(text: str, indent: str) -> list[str]:
    """At 80 columns; a name that is longer is never cut."""
    more = indent or " " * 10
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=more, break_long_words=False, break_on_hyphens=False
    )


def died_text(n: Any) -> list[str]:
    """What NodeTelemetry knows of a node's processes that ended without a drain before: nothing where none did."""
    if not n.deaths:
        return []
    nth = "its process before this one" if n.deaths == 1 else f"{n.deaths} of its processes"
    last = "" if n.deaths == 1 else ", the last"
    return [f"{nth} ended without a drain{last}: last heard of {brief(n.died_ago_s * 1000)} ago; see its log"]


def died_json(n: Any) -> dict[str, Any]:
    return {"deaths": n.deaths, "died_ago_s": round(n.died_ago_s, 1) if n.deaths else None}


def answer_json(a: Any) -> dict[str, Any]:
    return {
        "node_id": a.node_id,
        "incarnation": a.incarnation,
        "identity": identity_json(a.identity),
        "result": a.result,
        "at_unix_ms": a.at_unix_ms,
        "apply_ms": a.apply_ms,
        "reason": a.reason or None,
        "message": a.message or None,
    }


def chapter_json(c: Chapter) -> dict[str, Any]:
    return {**history_json([c.entry])[0], "took_ms": c.took_ms, "answers": [answer_json(a) for a in c.answers]}


def rows(story: Iterable[Chapter]) -> Iterable[Mapping[str, Any]]:
    """For export, one object a line: each change, then each answer to it; oldest first, so that a later export goes on where one ended."""
    for c in reversed(list(story)):
        yield {"row": "change", **history_json([c.entry])[0]}
        for a in c.answers:
            yield {"row": "answer", **answer_json(a)}
