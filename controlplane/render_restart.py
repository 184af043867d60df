"""Rolling restarts as people and programs read them."""

from __future__ import annotations

import textwrap
import time
from typing import Any

from trimtab.kit.cli import WIDTH

Rollout = Any
"""admin_pb2.Rollout."""


def line_text(line: Any) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(line.at_unix_ms / 1000))
    said = f"{at}  {line.text}" + (f"  ({line.evidence})" if line.evidence else "")
    return _wrapped(said, " " * 10)


def _wrapped(text: str, indent: str) -> str:
    """At 80 columns; a name that is longer is never cut."""
    lines = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


def told_text(rollout: Rollout) -> str:
    """The settings in one line, nothing where there are none."""
    return ", ".join(f"{name}={value or '(taken back)'}" for name, value in sorted(rollout.fields.items()))


def plan_text(rollout: Rollout) -> str:
    """Of a dry run."""
    told = told_text(rollout)
    workers = list(rollout.pending_node_ids)
    first = f"would start {len(workers)} workers anew" + (f", with {told}" if told else "")
    checks = ["the first worker checks the settings before it goes"] if told else []
    said = [_wrapped(f"  {line.text}", "    ") for line in rollout.lines]
    return "\n".join([_wrapped(first, "  "), *said, *checks])


def restart_text(rollout: Rollout) -> str:
    if rollout.live:
        return (
            f"{_wrapped(f'{rollout.rollout_id} is {rollout.stage}: {rollout.verdict}', '  ')}\n{follow_text(rollout)}"
        )
    return _wrapped(f"{rollout.rollout_id} {rollout.stage}: {rollout.verdict}", "  ")


def follow_text(rollout: Rollout) -> str:
    return f"see it: trimtab rollout show {rollout.rollout_id}; stop it: trimtab rollout abort {rollout.rollout_id}"


def shown_text(rollout: Rollout) -> str:
    """All that is known of one."""
    told = told_text(rollout)
    why = f' "{rollout.reason}"' if rollout.reason else ""
    lines = [
        restart_text(rollout),
        _wrapped(f"  of {rollout.author}{why}" + (f", with {told}" if told else ""), "    "),
    ]
    if rollout.pending_node_ids:
        lines.append(_wrapped(f"  yet to go: {', '.join(rollout.pending_node_ids)}", "    "))
    return "\n".join([*lines, "", *map(line_text, rollout.lines)])


def restart_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout_id": rollout.rollout_id,
        "kind": rollout.kind,
        "stage": rollout.stage,
        "live": rollout.live,
        "author": rollout.author,
        "reason": rollout.reason or None,
        "settings": dict(rollout.fields),
        "node_ids": list(rollout.node_ids),
        "pending_node_ids": list(rollout.pending_node_ids),
        "verdict": rollout.verdict,
        "started_unix_ms": rollout.started_unix_ms,
        "ended_unix_ms": rollout.ended_unix_ms or None,
        "lines": [{"at_unix_ms": x.at_unix_ms, "text": x.text, "evidence": x.evidence or None} for x in rollout.lines],
    }
