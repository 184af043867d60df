"""The fleet for people (80 columns) and for programs (JSON)."""

from __future__ import annotations

import textwrap
from typing import Any

from controlplane.render import history_json, identity_json, node_policy_json, place, store_json, store_text
from trimtab.codec import decode_hello, decode_state
from trimtab.kit.cli import WIDTH, table


def _role(node: Any) -> str:
    return decode_hello(node.hello).role.value


def _state(node: Any) -> str:
    return decode_state(node.report.state).value


def fleet_text(answer: Any) -> str:
    lines: list[str] = []
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for node in answer.nodes:
        hello, load = node.hello, node.report.load
        state = _state(node) if node.connected else f"LOST {node.seconds_since_report:.0f} s ago"
        work = f"{load.running}/{load.waiting}" if _role(node) == "worker" else ""
        rows.append((hello.node_id, _role(node), hello.pool, state, work, place(node.policy.applied), hello.address))
        if node.policy.refused.epoch:
            r = node.policy.refusal
            text = f"{hello.node_id} refused policy {place(node.policy.refused)} ({r.reason}): {r.message}"
            notes += textwrap.wrap(text, WIDTH, initial_indent="! ", subsequent_indent="  ")
    if rows:
        lines += [table(("NODE", "ROLE", "POOL", "STATE", "RUN/WAIT", "POLICY", "ADDRESS"), rows), *notes]
    else:
        lines.append("no node has connected yet; start workers with --control at this control plane's address")
    lines += ["", f"newest policy: {place(answer.desired)}; {store_text(answer.store)}"]
    if answer.HasField("last_refused"):
        e = answer.last_refused
        lines += textwrap.wrap(
            f"last change by {e.author} was refused, nothing changed: {e.refused_because}",
            WIDTH,
            subsequent_indent="  ",
        )
    return "\n".join(lines)


def fleet_json(answer: Any) -> dict[str, Any]:
    return {
        "desired": identity_json(answer.desired),
        "nodes": [_node_json(n) for n in answer.nodes],
        "store": store_json(answer.store),
        "last_refused": history_json([answer.last_refused])[0] if answer.HasField("last_refused") else None,
    }


def _node_json(n: Any) -> dict[str, Any]:
    hello, report = n.hello, n.report
    limits = ("max_num_seqs", "max_step_tokens", "max_model_len", "block_size", "total_blocks", "engine")
    load = ("running", "waiting", "queued_prefill_tokens", "free_blocks", "total_blocks")
    return {
        "node_id": hello.node_id,
        "incarnation": hello.incarnation,
        "role": _role(n),
        "pool": hello.pool,
        "labels": dict(hello.labels),
        "model": hello.model,
        "build": hello.build,
        "address": hello.address,
        "metrics_address": hello.metrics_address,
        "pid": hello.pid,
        "policy_schema": hello.policy_schema,
        "limits": {name: getattr(hello.limits, name) for name in limits},
        "connected": n.connected,
        "state": _state(n) if n.connected else "lost",
        "load": {name: getattr(report.load, name) for name in load},
        "steps": report.steps,
        "counters": dict(report.counters),
        "policy": node_policy_json(n.policy),
        "seconds_since_report": n.seconds_since_report,
        "seconds_connected": n.seconds_connected,
    }
