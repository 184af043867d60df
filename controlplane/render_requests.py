"""What became of requests that an operator acted on, for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from trimtab import measures
from trimtab.kit.cli import WIDTH, ExitCode
from trimtab.messages import Workload

GATEWAY = 2
"""Role's number."""
WAITING = {Workload.REALTIME: measures.REALTIME_WAITING, Workload.BATCH: measures.BATCH_WAITING}
NOT_CONNECTED = "NOT_CONNECTED"
OPEN_ENDED = ("NO_ANSWER", "LOST")
"""Reasons after which a worker may have done it all the same."""


def affected(answer: Any) -> int:
    return sum(node.affected for node in answer.nodes)


def exit_code(answer: Any) -> ExitCode:
    """A worker that could not be asked may have such requests, or none: it is shown, and does not count."""
    asked = [n for n in answer.nodes if n.reason != NOT_CONNECTED]
    undone = [n for n in asked if not n.done]
    if undone and (len(undone) < len(asked) or any(n.reason in OPEN_ENDED for n in undone)):
        return ExitCode.PARTIAL
    return ExitCode.OK if affected(answer) else ExitCode.REFUSED


def steered_text(action: str, answer: Any, details: Mapping[str, Any]) -> str:
    n = affected(answer)
    who = "1 request" if n == 1 else f"{n} requests"
    match action:
        case "reprioritise":
            said = _moved(n, details["delta"])
        case "isolate":
            said = "isolated: one runs at a time on each worker" if details["isolated"] else "no longer isolated"
        case _:
            said = "released"
    lines = [f"{who} {said}"]
    lines += [f"  {node.node_id}: {node.affected}" for node in answer.nodes if node.affected]
    return "\n".join([*lines, *_undone(answer)])


def _moved(n: int, delta: int) -> str:
    if not delta:
        return "put back to its own place" if n == 1 else "put back to their own places"
    levels = "1 level" if abs(delta) == 1 else f"{abs(delta)} levels"
    return f"moved {levels} {'earlier' if delta > 0 else 'later'}, as far as priority.max_priority_diff allows"


def nobody_text(answer: Any) -> str:
    """Why nothing came of it."""
    asked = [n for n in answer.nodes if n.reason != NOT_CONNECTED]
    done = sum(n.done for n in asked)
    if not asked:
        said = "no worker is connected; see `trimtab fleet`"
    elif done == len(asked):
        workers = "the one connected worker has none" if done == 1 else f"none of the {done} connected workers has one"
        said = f"nobody has such a request: {workers} that waits or runs now"
    elif done:
        said = f"nobody who answered has such a request ({done} of {len(asked)} connected workers did)"
    else:
        said = "no connected worker has done it"
    return "\n".join([said, *_undone(answer)])


def in_gateways(telemetry: Any, workload: Workload | None) -> int:
    """How many wait there now, of this workload or of both: nobody acts on them."""
    names = [name for w, name in WAITING.items() if workload in (None, w)]
    heard = (n for n in telemetry.nodes if n.role == GATEWAY and n.connected and not n.stale)
    return int(sum(n.gauges.get(name, 0.0) for n in heard for name in names))


def untouched_text(waiting: int, workload: Workload | None) -> str:
    kind = f"{workload.value.upper()} " if workload is not None else ""
    who = f"1 {kind}request waits in a gateway" if waiting == 1 else f"{waiting} {kind}requests wait in gateways"
    said = f"{who}: what is there is not touched, only what workers have"
    return "\n".join(textwrap.wrap(said, WIDTH))


def _undone(answer: Any) -> list[str]:
    return [
        line
        for node in answer.nodes
        if not node.done
        for line in textwrap.wrap(
            f"{node.node_id}: {node.reason}: {node.message}", WIDTH, initial_indent="  ", subsequent_indent="    "
        )
    ]


def steered_json(action: str, answer: Any, details: Mapping[str, Any]) -> dict[str, Any]:
    """`done` false with reason NO_ANSWER or LOST: the worker may have done it all the same."""
    return {
        "action": action,
        **details,
        "affected": affected(answer),
        "nodes": [
            {
                "node_id": n.node_id,
                "done": n.done,
                "affected": n.affected,
                "reason": n.reason or None,
                "message": n.message or None,
            }
            for n in answer.nodes
        ],
    }
