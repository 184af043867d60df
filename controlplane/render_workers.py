"""Workers' breakers, drains, and what people did to nodes, for people and for programs."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable
from typing import Any

from trimtab.kit.cli import WIDTH, ExitCode, table
from trimtab.kit.duration import brief

SIDES = {1: "open", 2: "closed"}
"""By BreakerForce's numbers."""
FORCED_OPEN = "forced open"
OPEN_ENDED = ("NO_ANSWER", "LOST")
"""Reasons after which a worker may have done it all the same."""


def breakers_text(answer: Any, now_unix_ms: int) -> str:
    if not answer.workers:
        return "no worker has connected yet"
    rows = [_row(w, now_unix_ms) for w in answer.workers]
    lines = [table(("WORKER", "FORCED", "UNTIL", "GATEWAYS SAID LAST"), rows)]
    for w in answer.workers:
        if w.HasField("forced"):
            lines += textwrap.wrap(forced_text(w, now_unix_ms), WIDTH, initial_indent="! ", subsequent_indent="  ")
    if not answer.store.connected:
        lines += ["", f"the store is away, so nothing can be forced: {answer.store.description}"]
    return "\n".join(lines)


def _row(w: Any, now_unix_ms: int) -> tuple[str, str, str, str]:
    name = w.node_id if w.connected else f"{w.node_id} (gone)"
    if not w.HasField("forced"):
        return (name, "-", "-", trip_text(w, now_unix_ms))
    return (name, SIDES.get(w.forced.forced, "?"), _clock(w.forced.until_unix_ms), trip_text(w, now_unix_ms))


def trip_text(w: Any, now_unix_ms: int) -> str:
    """What gateways said of it last, in words."""
    if not w.HasField("trip"):
        return "nothing"
    t = w.trip
    when = f"open for {brief(t.open_ms)} yet" if t.open_ms else f"opened {_ago(t.at_unix_ms, now_unix_ms)}"
    nth = "" if t.trips == 1 else f"; trip {t.trips} of this process"
    return f"{t.gateway_id}: {when}, on {t.dimension}: {t.because}{nth}"


def forced_text(w: Any, now_unix_ms: int) -> str:
    f = w.forced
    why = f' "{f.reason}"' if f.reason else ""
    left = brief(max(0, f.until_unix_ms - now_unix_ms))
    return f"{w.node_id} is forced {SIDES.get(f.forced, '?')} for {left} yet, by {f.author}{why}"


def in_force(w: Any) -> str:
    """In two words: an operator's word before a gateway's trip; nothing where neither holds."""
    if w.HasField("forced"):
        return f"forced {SIDES.get(w.forced.forced, '?')}"
    return "breaker open" if w.trip.open_ms else ""


def breaker_text(w: Any, now_unix_ms: int) -> list[str]:
    """Where there is something to say."""
    lines = [f"its breaker: {trip_text(w, now_unix_ms)}"] if w.HasField("trip") else []
    return lines + ([forced_text(w, now_unix_ms)] if w.HasField("forced") else [])


def breaker_json(w: Any) -> dict[str, Any]:
    t, f = w.trip, w.forced
    trip = {
        "gateway_id": t.gateway_id,
        "dimension": t.dimension,
        "because": t.because,
        "at_unix_ms": t.at_unix_ms,
        "open_ms": t.open_ms,
        "trips": t.trips,
    }
    forced = {
        "to": SIDES.get(f.forced),
        "at_unix_ms": f.at_unix_ms,
        "until_unix_ms": f.until_unix_ms,
        "author": f.author,
        "reason": f.reason,
    }
    return {
        "node_id": w.node_id,
        "incarnation": w.incarnation or None,
        "connected": w.connected,
        "trip": trip if w.HasField("trip") else None,
        "forced": forced if w.HasField("forced") else None,
    }


def force_text(answer: Any, now_unix_ms: int) -> str:
    w = answer.worker
    if not answer.changed:
        return f"nothing is forced on {w.node_id}"
    if not w.HasField("forced"):
        return f"{w.node_id}: every gateway decides by what it sees again"
    does = "no gateway sends it requests" if w.forced.forced == 1 else "gateways send it requests whatever they see"
    left = brief(max(0, w.forced.until_unix_ms - now_unix_ms))
    return f"{w.node_id} is forced {SIDES.get(w.forced.forced, '?')}: {does}, for {left}, until {_clock(w.forced.until_unix_ms)}"


def drain_code(answer: Any, gone: bool | None) -> ExitCode:
    """`gone` is None where nobody waited for it."""
    if not answer.done:
        return ExitCode.PARTIAL if answer.reason in OPEN_ENDED else ExitCode.REFUSED
    return ExitCode.PARTIAL if gone is False else ExitCode.OK


def drain_text(node_id: str, answer: Any, deadline_ms: int, gone: bool | None) -> str:
    if gone:
        return f"{node_id} has drained and is gone"
    then = "goes on at another worker" if answer.others else "is cut off: no other worker serves its model"
    runs = f"what runs gets {brief(deadline_ms)}, then it {then}" if deadline_ms else f"what runs {then}"
    still = "; it was still there when the wait was over, see `trimtab fleet`" if gone is False else ""
    return f"{node_id} drains: it takes no new work, and ends; {runs}{still}"


def last_text(node_id: str, answer: Any) -> str:
    """A warning, where nobody is left."""
    return f"{node_id} is the last worker that serves {answer.model}: its requests get NO_WORKER until another joins"


def drain_json(node_id: str, answer: Any, deadline_ms: int, gone: bool | None) -> dict[str, Any]:
    return {
        "node_id": node_id,
        "incarnation": answer.incarnation,
        "done": answer.done,
        "deadline_ms": deadline_ms,
        "gone": gone,
        "reason": answer.reason or None,
        "message": answer.message or None,
        "model": answer.model,
        "others": answer.others,
    }


def actions_text(actions: Iterable[Any]) -> list[str]:
    lines = []
    for a in actions:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(a.at_unix_ms / 1000))
        why = f' "{a.reason}"' if a.reason else ""
        lines.append(f"{when}  {a.what}, by {a.author}{why}")
    return lines


def action_json(a: Any) -> dict[str, Any]:
    return {
        "node_id": a.node_id,
        "what": a.what,
        "author": a.author,
        "reason": a.reason,
        "at_unix_ms": a.at_unix_ms,
    }


def _clock(unix_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_ms / 1000))


def _ago(unix_ms: int, now_unix_ms: int) -> str:
    return f"{brief(max(0, now_unix_ms - unix_ms))} ago"
