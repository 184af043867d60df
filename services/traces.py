"""Traces that the mesh's processes wrote to files: finding one by its id, and its spans as a tree.

Each process writes its own spans (`kit.telemetry.JsonlExporter`); only read together do they make a trace. A span
whose parent was written by nobody here, such as a client's own, is a root.
"""

from __future__ import annotations

import dataclasses
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimtab.kit.cli import WIDTH


@dataclass(frozen=True, slots=True)
class Span:
    """One span as it was written. Times are nanoseconds since the epoch."""

    trace_id: str
    span_id: str
    parent_id: str | None
    name: str
    service: str
    start_ns: int
    end_ns: int
    status: str
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


DULL = {"gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.response.id", "trimtab.request_id"}
"""Attributes that the tree leaves out: the same on every line, or of no use to a reader. JSON has them all."""

ROW = WIDTH - 2
"""`trimtab why` sets the tree two columns in."""
FACTS_INDENT = 12
LATE_NS = 60 * 10**9
"""A policy is pushed to whoever joins, under the trace of its write: what begins so long after that has ended is none of its time."""

_NAMESPACE = re.compile(r"^(gen_ai\.(usage\.|response\.)?|trimtab\.)")


@dataclass(frozen=True, slots=True)
class Summary:
    """One trace in a line."""

    trace_id: str
    name: str
    start_ns: int
    duration_ms: float
    """Without what began long after the first of it was over (`LATE_NS`)."""
    spans: int
    failed: bool


def read(directory: Path) -> Iterator[Span]:
    """Every span under the mesh's state directory.

    A line that is half-written, now or by a killed process, is passed over.
    """
    for path in sorted((directory / "traces").glob("*.jsonl")):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                span = _parse(line)
                if span is not None:
                    yield span


def _parse(line: str) -> Span | None:
    try:
        row = json.loads(line)
        return Span(
            row["trace_id"],
            row["span_id"],
            row.get("parent_id"),
            row["name"],
            row["service"],
            row["start_ns"],
            row["end_ns"],
            row.get("status", "UNSET"),
            row.get("attributes") or {},
            row.get("events") or [],
        )
    except (ValueError, KeyError, TypeError):
        return None


def find(directory: Path, prefix: str) -> dict[str, list[Span]]:
    """The traces whose id begins with `prefix`, each with its spans in order of time."""
    found: dict[str, list[Span]] = {}
    for span in read(directory):
        if span.trace_id.startswith(prefix):
            found.setdefault(span.trace_id, []).append(span)
    for spans in found.values():
        spans.sort(key=lambda s: (s.start_ns, s.end_ns))
    return found


def newest(directory: Path, limit: int) -> list[Summary]:
    """The traces that began last, newest first."""
    summaries = [summarise(spans) for spans in find(directory, "").values()]
    return sorted(summaries, key=lambda s: -s.start_ns)[:limit]


def summarise(spans: list[Span]) -> Summary:
    root = roots(spans)[0]
    start = min(s.start_ns for s in spans)
    end = max(s.end_ns for s in spans if s.start_ns <= root.end_ns + LATE_NS)
    failed = any(s.status == "ERROR" for s in spans)
    return Summary(root.trace_id, root.name, start, (end - start) / 1e6, len(spans), failed)


def roots(spans: list[Span]) -> list[Span]:
    ids = {s.span_id for s in spans}
    return [s for s in spans if s.parent_id not in ids]


def tree(spans: list[Span]) -> Iterator[tuple[int, Span]]:
    """(depth, span), parents before children, children in order of time. `spans` are in order of time."""
    children: dict[str | None, list[Span]] = {}
    ids = {s.span_id for s in spans}
    for span in spans:
        parent = span.parent_id if span.parent_id in ids else None
        children.setdefault(parent, []).append(span)
    stack = [(0, span) for span in reversed(children.get(None, []))]
    while stack:
        depth, span = stack.pop()
        yield depth, span
        stack += [(depth + 1, child) for child in reversed(children.get(span.span_id, []))]


def as_json(depth: int, span: Span) -> dict[str, Any]:
    """A span as an object, with its depth in the tree."""
    return {**dataclasses.asdict(span), "depth": depth, "duration_ms": span.duration_ms}


def render(spans: list[Span]) -> list[str]:
    """The tree as aligned lines: name, offset from the trace's start, duration, service, attributes."""
    start = min(s.start_ns for s in spans)
    rows = [
        (
            "  " * depth + span.name,
            f"+{(span.start_ns - start) / 1e6:.1f} ms",
            f"{span.duration_ms:.1f} ms",
            span.service,
            _facts(span),
        )
        for depth, span in tree(spans)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines: list[str] = []
    for name, offset, took, service, facts in rows:
        row = (
            f"{name:<{widths[0]}}  {offset:>{widths[1]}}  {took:>{widths[2]}}  {service:<{widths[3]}}  {facts}".rstrip()
        )
        lines += textwrap.wrap(
            row, ROW, subsequent_indent=" " * FACTS_INDENT, break_long_words=False, break_on_hyphens=False
        )
    return lines


def _facts(span: Span) -> str:
    words = ["FAILED"] if span.status == "ERROR" else []
    words += [
        f"{_NAMESPACE.sub('', key)}={_value(value)}"
        for key, value in span.attributes.items()
        if key not in DULL and not key.startswith("gen_ai.request.")
    ]
    words += [
        f"[{event.get('name', '')} +{(event.get('at_ns', span.start_ns) - span.start_ns) / 1e6:.1f} ms]"
        for event in span.events
    ]
    return " ".join(words)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
