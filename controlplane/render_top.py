"""`trimtab top` for people (80 columns and more) and for programs (JSON): a view in, lines out; nothing here asks anybody.

A line is made of (text, style) pieces, so that the very same lines go to a terminal in colour and to a file without.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from controlplane.render import identity_json, place, store_json
from controlplane.top import DECISIONS, Row, View
from trimtab.kit.cli import WIDTH
from trimtab.kit.duration import brief
from trimtab.sketch import Quantiles

MISSING = "–"
BAD, WARN, DIM, HEAD = "bold red", "yellow", "dim", "bold"
POOLS = 3
"""That are named in the head; those that want another number of workers come first."""
HOLDS = 3
"""That are told in full."""
MODES = {"on": 0, "advise": 1, "off": 2}
DECISION_LINES = 2

Line = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Column:
    head: str
    width: int
    align: str = ">"


COLUMNS = (
    Column("STATE", 8, "<"),
    Column("TTFT50", 6),
    Column("P99", 6),
    Column("ITL50", 5),
    Column("P99", 5),
    Column("RTWAIT", 6),
    Column("BWAIT", 5),
    Column("KV%", 4),
    Column("RUN/ACTIVE", 14),
)
NAME_WIDTH = WIDTH - sum(c.width + 1 for c in COLUMNS)
MAX_NAME_WIDTH = 40


def plain(lines: Iterable[Line]) -> str:
    return "\n".join("".join(text for text, _ in line).rstrip() for line in lines)


def frame(
    view: View, now_unix_ms: int, *, width: int = WIDTH, height: int | None = None, fault: str = ""
) -> list[Line]:
    """All of it; with `height`, so many lines at most, and of the workers then the worst. `fault` says why it is old."""
    head = [*_head(view, now_unix_ms, width), *(_wrapped(fault, width, BAD) if fault else [])]
    foot = [*_gateways(view, width), *_loops(view, width)]
    decisions = _decisions(view, now_unix_ms, width)
    room = None
    if height is not None:
        # Two blank lines, and one that the terminal's cursor keeps.
        left = height - len(head) - len(foot) - 3
        decisions = decisions[: max(2, left // 3)]
        room = left - len(decisions)
    return [*head, (("", ""),), *_workers(view, width, room), (("", ""),), *foot, *decisions]


# ---- the head


def _head(view: View, now_unix_ms: int, width: int) -> list[Line]:
    t, p = view.telemetry, view.policy
    clock = time.strftime("%H:%M:%S", time.localtime(now_unix_ms / 1000))
    first = [
        (f"trimtab top{f' {view.mesh}' if view.mesh else ''}", HEAD),
        (clock, ""),
        (f"policy {place(p.snapshot.identity)} (version {p.spec_version})", ""),
        (f"{t.leader_id} leads", "") if t.leader_id else ("NOBODY LEADS: no loop runs", BAD),
    ]
    if not p.store.connected:
        first.append((f"store AWAY: {p.store.description}", BAD))
    elif not p.store.writable:
        first.append((f"store READ ONLY: {p.store.description}", BAD))
    return [*_flow(first, width), *_flow([*_nodes(view), *_pools(view)], width)]


def _nodes(view: View) -> list[tuple[str, str]]:
    there = len(view.workers) - view.in_state("drained")
    said = [(f"{_count(there, 'worker')}, {_count(len(view.gateways), 'gateway')}", "")]
    for state, style in (("lost", BAD), ("hung", BAD), ("starting", WARN), ("draining", WARN), ("drained", DIM)):
        if n := view.in_state(state):
            said.append((f"{n} {state}", style))
    for n, words, style in (
        (sum(r.stale and r.age_s is not None for r in view.workers), "silent", BAD),
        (sum(bool(r.refused) for r in view.workers), "refused the policy", BAD),
        (sum(r.behind and not r.refused for r in view.workers), "behind the policy", WARN),
        (sum(bool(r.breaker) for r in view.workers), "with a breaker open or forced", WARN),
        (sum(r.ttft_over or r.itl_over for r in view.workers), "over the objective", BAD),
    ):
        if n:
            said.append((f"{n} {words}", style))
    return said


def _pools(view: View) -> list[tuple[str, str]]:
    pools = sorted(view.telemetry.pools, key=lambda p: (p.wanted == p.running, p.pool))
    said = [
        (f"pool {p.pool}: {p.running} of {p.wanted} wanted", "" if p.running == p.wanted else WARN)
        for p in pools[:POOLS]
    ]
    return said + ([(f"{len(pools) - POOLS} more pools", DIM)] if len(pools) > POOLS else [])


def _count(n: int, noun: str) -> str:
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _flow(phrases: Sequence[tuple[str, str]], width: int) -> list[Line]:
    """Phrases with dots between them, on as many lines as they need; none is cut, and one that is too long is wrapped."""
    lines: list[list[tuple[str, str]]] = [[]]
    used = 0
    for text, style in phrases:
        for part in textwrap.wrap(text, width, break_on_hyphens=False) or [""]:
            gap = " · " if used else ""
            if used and used + len(gap) + len(part) > width:
                lines.append([])
                used, gap = 0, ""
            lines[-1] += [(gap, DIM), (part, style)] if gap else [(part, style)]
            used += len(gap) + len(part)
    return [tuple(line) for line in lines]


def _wrapped(text: str, width: int, style: str, *, indent: str = "", hang: str = "  ", most: int = 0) -> list[Line]:
    """On `most` lines at most, if it is given. Names stay whole: they have hyphens in them."""
    wrapper = textwrap.TextWrapper(
        width,
        initial_indent=indent,
        subsequent_indent=indent + hang,
        break_on_hyphens=False,
        max_lines=most or None,
        placeholder=" …",
    )
    return [((line, style),) for line in wrapper.wrap(text)]


# ---- workers


def _workers(view: View, width: int, room: int | None) -> list[Line]:
    if not view.workers:
        return [(("no worker has connected yet", WARN),)]
    extra = max(0, width - WIDTH)
    names = min(MAX_NAME_WIDTH, NAME_WIDTH + extra, max(NAME_WIDTH, *(len(r.node_id) for r in view.workers)))
    blocks = [_worker(row, names, width, view) for row in view.workers]
    head = (("WORKER".ljust(names) + "".join(f" {c.head:{c.align}{c.width}}" for c in COLUMNS), HEAD),)
    lines: list[Line] = [head]
    for shown, block in enumerate(blocks):
        left = len(blocks) - shown
        # The last line says how many are not shown, unless this block ends it.
        if room is not None and len(lines) + len(block) + (left > 1) > max(room, 2):
            return [*lines, ((f"and {left} more, no worse; all of them: trimtab top --once", DIM),)]
        lines += block
    return lines


def _worker(row: Row, names: int, width: int, view: View) -> list[Line]:
    cells: list[tuple[str, str]] = [
        (row.state, "" if row.state == "serving" else BAD if row.state in ("lost", "hung") else WARN),
        (_ms(row.ttft, "p50"), ""),
        (_ms(row.ttft, "p99") + ("!" if row.ttft_over else ""), BAD if row.ttft_over else ""),
        (_ms(row.itl, "p50"), ""),
        (_ms(row.itl, "p99") + ("!" if row.itl_over else ""), BAD if row.itl_over else ""),
        (_whole(row.realtime_waiting), ""),
        (_whole(row.batch_waiting), ""),
        (MISSING if row.kv_used is None else f"{100 * row.kv_used:.0f}", WARN if (row.kv_used or 0) > 0.9 else ""),
        (_running(row), WARN if _lowered(row) else ""),
    ]
    body = [(f" {text:{c.align}{c.width}}", style) for c, (text, style) in zip(COLUMNS, cells, strict=True)]
    lines: list[Line] = []
    name = row.node_id
    if len(name) > names:
        # A name is how one acts on it: it is never cut.
        lines += [((part, ""),) for part in textwrap.wrap(name, width)]
        name = ""
    lines.append(((name.ljust(names), ""), *body))
    for text, style in _notes(row, view):
        lines += _wrapped(text, width, style, indent="  ")
    return lines


def _notes(row: Row, view: View) -> list[tuple[str, str]]:
    """What stands below a worker, where there is something to say."""
    newest = place(view.policy.snapshot.identity)
    notes = []
    if row.age_s is None:
        notes.append(("it has reported nothing yet", WARN))
    elif row.stale or row.state in ("lost", "drained"):
        notes.append((f"last heard of {brief(row.age_s * 1000)} ago", BAD if row.state != "drained" else DIM))
    if row.refused:
        notes.append((f"refused the policy, has {row.applied}: {row.refused}", BAD))
    elif row.behind:
        notes.append((f"policy {row.applied}, the newest is {newest}", WARN))
    if row.breaker:
        notes.append((f"breaker: {row.breaker}", WARN))
    over = [
        f"{what} P99 {q.p99:.0f} ms of {objective:.0f}, n={q.count}"
        for what, q, objective, bad in (
            ("TTFT", row.ttft, row.ttft_objective_ms, row.ttft_over),
            ("ITL", row.itl, row.itl_objective_ms, row.itl_over),
        )
        if bad and q is not None
    ]
    if over:
        notes.append((f"over: {'; '.join(over)}", BAD))
    return notes


def _ms(q: Quantiles | None, name: str) -> str:
    """In five characters: milliseconds, and seconds from ten on."""
    if q is None:
        return MISSING
    ms: float = getattr(q, name)
    if ms < 9.95:
        return f"{ms:.1f}"
    return f"{ms:.0f}" if ms < 9999.5 else f"{min(ms / 1000, 999):.0f}s"


def _whole(value: float | None) -> str:
    """In four characters."""
    if value is None:
        return MISSING
    for unit, factor in (("", 1), ("k", 1000)):
        if value < 999.5 * factor:
            return f"{value / factor:.0f}{unit}"
    return f"{value / 1e6:.0f}M"


def _lowered(row: Row) -> bool:
    return row.active is not None and row.active_spec is not None and row.active != row.active_spec


def _running(row: Row) -> str:
    """Running, of how many at most; where loops have moved that, what people have set → what holds."""
    running = MISSING if row.running is None else str(row.running)
    if row.active is None:
        return running
    return f"{running}/{row.active_spec}→{row.active}" if _lowered(row) else f"{running}/{row.active}"


# ---- the foot


def _gateways(view: View, width: int) -> list[Line]:
    if not view.gateways:
        return _wrapped("no gateway is connected", width, WARN)
    waiting = [_sum(r.realtime_waiting for r in view.gateways), _sum(r.batch_waiting for r in view.gateways)]
    said = [
        (f"{_count(len(view.gateways), 'gateway')}: {waiting[0]} REALTIME and {waiting[1]} BATCH wait", ""),
        (f"TTFT to clients P50 {_ms(view.ttft, 'p50')}, P99 {_ms(view.ttft, 'p99')} ms", ""),
    ]
    bad = (r for r in view.gateways if r.state != "serving" or r.stale)
    said += [(f"{r.node_id} {'silent' if r.stale and r.state == 'serving' else r.state}", BAD) for r in bad]
    return _flow(said, width)


def _sum(values: Iterable[float | None]) -> str:
    """Of those that said; a dash where nobody did."""
    known = [v for v in values if v is not None]
    return _whole(sum(known)) if known else MISSING


def _loops(view: View, width: int) -> list[Line]:
    by_mode: dict[str, list[str]] = {}
    for c in view.telemetry.controllers:
        by_mode.setdefault(c.mode, []).append(c.name + (f" ({c.moves})" if c.moves else ""))
    if not by_mode:
        return []
    text = "; ".join(f"{mode}: {', '.join(by_mode[mode])}" for mode in sorted(by_mode, key=lambda m: MODES.get(m, 9)))
    lines = _wrapped(f"loops {text}", width, "")
    holds = [f"{c.name} holds: {why}" for c in view.telemetry.controllers for why in c.holds]
    for why in holds[:HOLDS]:
        lines += _wrapped(why, width, WARN, indent="  ")
    if len(holds) > HOLDS:
        lines += _wrapped(f"and {len(holds) - HOLDS} more holds", width, DIM, indent="  ")
    return lines


def _decisions(view: View, now_unix_ms: int, width: int) -> list[Line]:
    lines: list[Line] = []
    for d in view.telemetry.decisions[:DECISIONS]:
        ago = brief(max(0, now_unix_ms - d.at_unix_ms))
        words = f"{ago:>7} ago  {d.controller}{' (advice)' if d.advised else ''}: {d.text}"
        words += f": {d.reason}" if d.reason and d.reason not in d.text else ""
        words += f"; FAILED: {d.failed}" if d.failed else ""
        lines += _wrapped(words, width, BAD if d.failed else "", hang=" " * 8, most=DECISION_LINES)
    return lines or [(("no decision yet", DIM),)]


# ---- for programs


def top_json(view: View, now_unix_ms: int) -> dict[str, Any]:
    """One refresh. null is what nobody said."""
    t, p = view.telemetry, view.policy
    return {
        "at_unix_ms": now_unix_ms,
        "mesh": view.mesh or None,
        "replica_id": t.replica_id,
        "leader_id": t.leader_id or None,
        "tick_ms": t.tick_ms if t.HasField("tick_ms") else None,
        "policy": identity_json(p.snapshot.identity),
        "spec_version": p.spec_version,
        "store": store_json(p.store),
        "workers": [_row_json(r) for r in view.workers],
        "gateways": [_row_json(r) for r in view.gateways],
        "ttft_to_clients": _quantiles_json(view.ttft),
        "pools": [
            {"pool": x.pool, "wanted": x.wanted, "running": x.running, "min": x.min_workers, "max": x.max_workers}
            for x in t.pools
        ],
        "controllers": [{"name": c.name, "mode": c.mode, "moves": c.moves, "holds": list(c.holds)} for c in t.controllers],
        "decisions": [
            {
                "controller": d.controller,
                "at_unix_ms": d.at_unix_ms,
                "text": d.text,
                "reason": d.reason,
                "evidence": d.evidence,
                "advised": d.advised,
                "failed": d.failed or None,
            }
            for d in t.decisions
        ],
    }  # fmt: skip


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "node_id": row.node_id,
        "pool": row.pool,
        "state": row.state,
        "age_s": row.age_s,
        "stale": row.stale,
        "ttft_ms": _quantiles_json(row.ttft),
        "itl_ms": _quantiles_json(row.itl),
        "ttft_objective_ms": row.ttft_objective_ms or None,
        "itl_objective_ms": row.itl_objective_ms or None,
        "over_objective": row.ttft_over or row.itl_over,
        "realtime_waiting": row.realtime_waiting,
        "batch_waiting": row.batch_waiting,
        "kv_used": row.kv_used,
        "running": row.running,
        "batch_active": row.active,
        "batch_active_spec": row.active_spec,
        "breaker": row.breaker or None,
        "policy": row.applied,
        "behind": row.behind,
        "refused": row.refused or None,
        "restarts": row.restarts,
    }


def _quantiles_json(q: Quantiles | None) -> dict[str, float] | None:
    return None if q is None else {"count": q.count, "p50": q.p50, "p95": q.p95, "p99": q.p99, "max": q.max}
