"""The fleet for people (80 columns) and for programs (JSON)."""

from __future__ import annotations

import textwrap
import time
from typing import Any

from controlplane.render import answer_of, history_json, identity_json, node_policy_json, place, store_json, store_text
from controlplane.render_workers import FORCED_OPEN, breaker_json, breaker_text, in_force
from trimtab.codec import decode_hello, decode_state
from trimtab.kit.cli import WIDTH, table


def role_of(node: Any) -> str:
    return decode_hello(node.hello).role.value


def state_of(node: Any) -> str:
    return decode_state(node.report.state).value


def _gone(node: Any) -> str:
    """Of one that is not connected: what had its drain begun has left, what had not was lost."""
    return "drained" if state_of(node) == "draining" else "lost"


def gone_text(node: Any) -> str:
    return f"{_gone(node).upper()} {node.seconds_since_report:.0f} s ago"


def _live_text(node: Any) -> str:
    """What it says of itself; of one that serves, what gateways make of it where that is something else."""
    state = state_of(node)
    said = in_force(node.breaker) if node.HasField("breaker") else ""
    return said if said and state == "serving" else state


def _takes_requests(node: Any) -> bool:
    """A worker that gateways send requests to, as far as is known here; a single gateway's breaker is that gateway's."""
    serves = node.connected and role_of(node) == "worker" and state_of(node) == "serving"
    return serves and not (node.HasField("breaker") and in_force(node.breaker) == FORCED_OPEN)


def fleet_text(answer: Any) -> str:
    lines: list[str] = []
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for node in answer.nodes:
        hello, load = node.hello, node.report.load
        state = _live_text(node) if node.connected else gone_text(node)
        # Of a gateway: requests that a worker has taken, and those that it looks for a worker for.
        work = f"{load.running}/{load.waiting}"
        rows.append((hello.node_id, role_of(node), hello.pool, state, work, place(node.policy.applied), hello.address))
        if node.policy.refused.epoch:
            r = node.policy.refusal
            text = f"{hello.node_id} refused policy {place(node.policy.refused)} ({r.reason}): {r.message}"
            notes += textwrap.wrap(text, WIDTH, initial_indent="! ", subsequent_indent="  ")
        if node.HasField("breaker"):
            for line in breaker_text(node.breaker, time.time_ns() // 1_000_000):
                text = line if line.startswith(hello.node_id) else f"{hello.node_id}, {line}"
                notes += textwrap.wrap(text, WIDTH, initial_indent="! ", subsequent_indent="  ")
        if hello.told:
            told = ", ".join(f"{name}={value}" for name, value in sorted(hello.told.items()))
            notes += textwrap.wrap(f"{hello.node_id} was told {told}", WIDTH, subsequent_indent="  ")
    if rows:
        lines += [table(("NODE", "ROLE", "POOL", "STATE", "RUN/WAIT", "POLICY", "ADDRESS"), rows), *notes]
    else:
        lines.append("no node has connected yet; start workers with --control at this control plane's address")
    lines += ["", f"newest policy: {place(answer.desired)}; {store_text(answer.store)}"]
    lines += [_replica_text(r, answer) for r in answer.replicas]
    if answer.HasField("last_refused"):
        e = answer.last_refused
        lines += textwrap.wrap(
            f"last change by {e.author} was refused, nothing changed: {e.refused_because}",
            WIDTH,
            subsequent_indent="  ",
        )
    return "\n".join(lines)


def faults(answer: Any) -> list[str]:
    """In words, what is wrong with a fleet whose every node should be there and on the newest policy; a node that was drained is not missed, as
    long as another worker takes requests."""
    found = []
    if not any(n.connected for n in answer.nodes):
        found = ["no node is connected"]
    elif not any(map(_takes_requests, answer.nodes)):
        found = ["no worker takes requests"]
    for node in answer.nodes:
        node_id = node.hello.node_id
        if not node.connected:
            found += [f"{node_id} is lost"] if _gone(node) == "lost" else []
            continue
        match answer_of(node.policy, answer.desired):
            case "refused":
                found.append(f"{node_id} refused policy {place(answer.desired)}")
            case "waiting":
                found.append(f"{node_id} has not applied policy {place(answer.desired)} yet")
    return found


def fleet_json(answer: Any) -> dict[str, Any]:
    return {
        "desired": identity_json(answer.desired),
        "nodes": [node_json(n) for n in answer.nodes],
        "store": store_json(answer.store),
        "replica_id": answer.replica_id,
        "replicas": [_replica_json(r) for r in answer.replicas],
        "last_refused": history_json([answer.last_refused])[0] if answer.HasField("last_refused") else None,
    }


def node_json(n: Any) -> dict[str, Any]:
    hello, report = n.hello, n.report
    limits = ("max_num_seqs", "max_step_tokens", "max_model_len", "block_size", "total_blocks", "engine")
    load = ("running", "waiting", "queued_prefill_tokens", "free_blocks", "total_blocks")
    return {
        "node_id": hello.node_id,
        "incarnation": hello.incarnation,
        "role": role_of(n),
        "pool": hello.pool,
        "labels": dict(hello.labels),
        "model": hello.model,
        "build": hello.build,
        "address": hello.address,
        "metrics_address": hello.metrics_address,
        "pid": hello.pid,
        "policy_schema": hello.policy_schema,
        "limits": {name: getattr(hello.limits, name) for name in limits},
        "told": dict(hello.told),
        "connected": n.connected,
        "state": state_of(n) if n.connected else _gone(n),
        "load": {name: getattr(report.load, name) for name in load},
        "breaker": breaker_json(n.breaker) if n.HasField("breaker") else None,
        "steps": report.steps,
        "counters": dict(report.counters),
        "policy": node_policy_json(n.policy),
        "seconds_since_report": n.seconds_since_report,
        "seconds_connected": n.seconds_connected,
        "replica_id": n.replica_id,
    }


def _replica_text(r: Any, answer: Any) -> str:
    leads = f", leads in term {r.term}" if r.leader else ""
    behind = "" if r.newest == answer.desired else f", holds policy {place(r.newest)}"
    nodes = "1 node" if r.nodes == 1 else f"{r.nodes} nodes"
    return f"control plane {r.replica_id} at {r.address}: {nodes}{leads}{behind}"


def _replica_json(r: Any) -> dict[str, Any]:
    return {
        "replica_id": r.replica_id,
        "address": r.address,
        "leader": r.leader,
        "term": r.term,
        "nodes": r.nodes,
        "newest": identity_json(r.newest),
        "seconds_since_heard": r.seconds_since_heard,
    }
