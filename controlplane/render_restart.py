"""Rolling restarts as people and programs read them."""

from __future__ import annotations

import time
from typing import Any

Rollout = Any
"""admin_pb2.Rollout."""


def line_text(line: Any) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(line.at_unix_ms / 1000))
    return f"{at}  {line.text}" + (f"  ({line.evidence})" if line.evidence else "")


def told_text(rollout: Rollout) -> str:
    """The settings in one line, nothing where there are none."""
    return ", ".join(f"{name}={value or '(taken back)'}" for name, value in sorted(rollout.fields.items()))


def plan_text(rollout: Rollout) -> str:
    """Of a dry run."""
    told = told_text(rollout)
    workers = list(rollout.pending_node_ids)
    first = f"would start {len(workers)} workers anew" + (f", with {told}" if told else "")
    checks = ["the first worker checks the settings before it goes"] if told else []
    return "\n".join([first, *(f"  {line.text}" for line in rollout.lines), *checks])


def restart_text(rollout: Rollout) -> str:
    if rollout.live:
        return (
            f"{rollout.rollout_id} is {rollout.stage}: {rollout.verdict}\n"
            f"see it: trimtab rollout show {rollout.rollout_id}; stop it: trimtab rollout abort {rollout.rollout_id}"
        )
    return f"{rollout.rollout_id} {rollout.stage}: {rollout.verdict}"


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
