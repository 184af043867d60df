"""Rollouts of policies, for people and for programs."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from typing import Any

from trimtab.codec import decode_scope
from trimtab.kit.cli import WIDTH, table


def rollouts_text(rollouts: Iterable[Any]) -> str:
    rows = [
        (r.rollout_id, r.kind, _when(r.started_unix_ms), r.stage, r.author, _what(r) + (f"; {r.verdict}" if r.verdict else ""))
        for r in rollouts
    ]  # fmt: skip
    return table(("ID", "KIND", "BEGAN", "STAGE", "BY", "WHAT"), rows) if rows else "there has been no rollout"


def rollout_text(r: Any) -> str:
    """All that is known of one."""
    why = f' "{r.reason}"' if r.reason else ""
    scope = str(decode_scope(r.scope)) or "the mesh"
    lines = [
        _wrapped(f"{r.rollout_id}: {r.stage}, of {r.author}{why}", "", 2),
        _wrapped(
            f"{_what(r)} for {scope}; canaries {', '.join(r.node_ids)}, watched for {r.bake_s} s at {r.weight:g} of new work",
            "  ",
            4,
        ),
    ]
    if r.pending_node_ids:
        lines.append(f"  yet without it: {', '.join(r.pending_node_ids)}")
    if r.verdict:
        lines.append(_wrapped(r.verdict, "  ", 4))
    if r.measures:
        rows = [
            (m.name, _figure(m, "canary"), _figure(m, "rest"), str(m.canary_n), str(m.rest_n), m.verdict)
            for m in r.measures
        ]
        lines += ["", table(("MEASURE", "CANARY", "REST", "OF", "OF", "VERDICT"), rows, right=(1, 2, 3, 4))]
    return "\n".join([*lines, "", *map(line_text, r.lines)])


def begun_text(r: Any, *, dry_run: bool) -> str:
    head = f"would try {_what(r)}" if dry_run else f"{r.rollout_id} tries {_what(r)}"
    lines = [f"{head} on {', '.join(r.node_ids)} for {r.bake_s} s, at {r.weight:g} of new work"]
    if r.pending_node_ids:
        lines.append(f"  beside {', '.join(r.pending_node_ids)}, who get it if that does no worse")
    if not dry_run:
        lines.append(f"  trimtab rollout show {r.rollout_id}")
    return "\n".join(lines)


def line_text(line: Any) -> str:
    said = _wrapped(f"{_when(line.at_unix_ms)}  {line.text}", "", 10)
    return f"{said}\n{_wrapped(line.evidence, ' ' * 10, 10)}" if line.evidence else said


def _wrapped(text: str, indent: str, more: int) -> str:
    """At 80 columns; a name that is longer is never cut."""
    lines = textwrap.wrap(
        text, WIDTH, initial_indent=indent, subsequent_indent=" " * more, break_long_words=False, break_on_hyphens=False
    )
    return "\n".join(lines)


def rollout_json(r: Any) -> dict[str, Any]:
    return {
        "rollout_id": r.rollout_id,
        "kind": r.kind,
        "stage": r.stage,
        "live": r.live,
        "author": r.author,
        "reason": r.reason or None,
        "started_unix_ms": r.started_unix_ms,
        "ended_unix_ms": r.ended_unix_ms or None,
        "fields": dict(r.fields),
        "scope": str(decode_scope(r.scope)) if r.HasField("scope") else "",
        "node_ids": list(r.node_ids),
        "pending_node_ids": list(r.pending_node_ids),
        "weight": r.weight,
        "bake_s": r.bake_s,
        "verdict": r.verdict or None,
        "lines": [{"at_unix_ms": x.at_unix_ms, "text": x.text, "evidence": x.evidence or None} for x in r.lines],
        "measures": [
            {
                "name": m.name,
                "canary": m.canary if m.HasField("canary") else None,
                "rest": m.rest if m.HasField("rest") else None,
                "canary_n": m.canary_n,
                "rest_n": m.rest_n,
                "verdict": m.verdict,
            }
            for m in r.measures
        ],
    }


def _what(r: Any) -> str:
    return ", ".join(f"{path}={value}" for path, value in sorted(r.fields.items())) or r.kind


def _figure(m: Any, side: str) -> str:
    if not m.HasField(side):
        return "-"
    value = getattr(m, side)
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def _when(unix_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ms / 1000))
