"""Nodes, windows and meshes for controllers, with sane defaults; a virtual clock that starts at NOW.

A test says only what it is about: `a_seen(a_node(waiting=12))` is a mesh of one healthy worker at which twelve REALTIME requests wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from controlplane.controllers.decision import PolicyOf
from controlplane.seen import WINDOW_S, WINDOWS, Lengths, NodeSeen, Seen, Window
from trimtab.measures import (
    BATCH_RUNNING,
    BATCH_WAITING,
    BUSY,
    COLD_WAITING,
    HOT,
    HUNG_S,
    KV_BYTES_PER_TOKEN,
    KV_USED,
    REALTIME_RUNNING,
    REALTIME_WAITING,
    STORED_TOKENS,
    itl,
    ttft,
)
from trimtab.messages import Load, NodeState, Outlier, Role, Workload
from trimtab.policy import Policy, Value, with_fields
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment, Limits, Node, Scope, ScopeKind

NOW = 1000.0
BLOCK_TOKENS, BLOCKS = 16, 10_000


def sketch_of(values: Iterable[float]) -> Sketch:
    found = Sketch()
    for value in values:
        found.add(value)
    return found


def policy_of(
    fields: Mapping[str, Value] | None = None, of: Mapping[str, Mapping[str, Value]] | None = None
) -> PolicyOf:
    """What people have set: `fields` for everyone, and `of` by pool or node id on top of them."""
    base = with_fields(Policy(), fields or {})
    whole = {name: with_fields(base, own) for name, own in (of or {}).items()}

    def found(node: Node | None) -> Policy:
        return base if node is None else whole.get(node.node_id, whole.get(node.pool, base))

    return found


def an_outlier(
    request_id: str = "r0", *, workload: Workload = Workload.REALTIME, prompt_tokens: int = 100, **more: Any
) -> Outlier:
    """`more` are its other fields."""
    return Outlier(request_id, workload, prompt_tokens, **more)


def a_window(
    number: int = 1,
    *,
    ttfts_ms: Iterable[float] = (),
    itls_ms: Iterable[float] = (),
    workload: Workload = Workload.REALTIME,
    path: str = HOT,
    sketches: Mapping[str, Iterable[float]] | None = None,
    counters: Mapping[str, int] | None = None,
    peaks: Mapping[str, float] | None = None,
    outliers: Iterable[Outlier] = (),
    ended: float | None = None,
) -> Window:
    """A closed window of five seconds; window `number` ends at NOW + 5 · number unless `ended` says when."""
    end = NOW + WINDOW_S * number if ended is None else ended
    values = {ttft(workload, path): list(ttfts_ms), itl(workload): list(itls_ms), **(sketches or {})}
    found = {name: sketch_of(v) for name, v in values.items()}
    return Window(
        number,
        end - WINDOW_S,
        end,
        counters=dict(counters or {}),
        sketches={name: s for name, s in found.items() if s.count},
        outliers=list(outliers),
        peaks=dict(peaks or {}),
    )


def a_node(
    node_id: str = "w0",
    *,
    pool: str = "default",
    role: Role = Role.WORKER,
    model: str = "m",
    state: NodeState = NodeState.SERVING,
    connected: bool = True,
    incarnation: str = "i0",
    joined_at: float = 0.0,
    reported_at: float | None = NOW,
    running: int = 0,
    batch_running: int = 0,
    waiting: int = 0,
    batch_waiting: int = 0,
    cold_waiting: int = 0,
    kv_used: float = 0.1,
    gauges: Mapping[str, float | None] | None = None,
    windows: Iterable[Window] = (),
    counters: Mapping[str, int] | None = None,
    limits: Limits | None = None,
    load: Load | None = None,
    labels: Mapping[str, str] | None = None,
    refused: str = "",
    restarts: int = 0,
    out_of_memory_at: float | None = None,
    idle_since: float | None = None,
) -> NodeSeen:
    """`running` and `waiting` are REALTIME. `gauges` adds to those that a healthy worker has; None takes one away."""
    worker: dict[str, float] = {
        REALTIME_RUNNING: running, BATCH_RUNNING: batch_running, REALTIME_WAITING: waiting, BATCH_WAITING: batch_waiting,
        COLD_WAITING: cold_waiting, KV_USED: kv_used, STORED_TOKENS: kv_used * BLOCK_TOKENS * BLOCKS, KV_BYTES_PER_TOKEN: 1000.0,
        BUSY: 0.5, HUNG_S: 0.0,
    }  # fmt: skip
    gateway = (REALTIME_RUNNING, BATCH_RUNNING, REALTIME_WAITING, BATCH_WAITING)
    has = worker if role is Role.WORKER else {name: worker[name] for name in gateway}
    said = {**has, **(gauges or {})}
    free = round((1 - kv_used) * BLOCKS)
    # A gateway has no engine.
    blocks = (free, BLOCKS) if role is Role.WORKER else (0, 0)
    return NodeSeen(
        Node(
            node_id,
            pool,
            labels or {},
            limits or (Limits(64, 8192, 131_072, BLOCK_TOKENS, BLOCKS, "vllm") if role is Role.WORKER else Limits()),
        ),
        incarnation,
        role,
        model if role is Role.WORKER else "",
        state,
        connected,
        joined_at,
        reported_at,
        load or Load(running + batch_running, waiting + batch_waiting, 0, *blocks),
        gauges={name: value for name, value in said.items() if value is not None},
        totals=dict(counters or {}),
        windows=deque(windows, maxlen=WINDOWS),
        restarts=restarts,
        out_of_memory_at=out_of_memory_at,
        refused=refused,
        idle_since=idle_since,
    )


def a_seen(
    *nodes: NodeSeen,
    now: float = NOW,
    started_at: float = 0.0,
    lengths: Mapping[str, Lengths] | None = None,
    adjustments: Iterable[Adjustment] = (),
) -> Seen:
    return Seen(now, started_at, {n.node_id: n for n in nodes}, lengths or {}, tuple(adjustments))


def some_lengths(
    prompts: Iterable[float] = (), totals: Iterable[float] = (), day: Iterable[float] = (), day_span_s: float = 0.0
) -> Lengths:
    return Lengths(sketch_of(prompts), sketch_of(day), sketch_of(totals), day_span_s)


def an_adjustment(
    controller: str,
    field: str,
    scope: Scope | None = None,
    *,
    factor: float | None = None,
    delta: int = 0,
    state: str | None = None,
    reason: str = "because",
    evidence: str = "",
) -> Adjustment:
    """One that lives."""
    return Adjustment(controller, field, scope or Scope(), reason, 1 << 60, factor, delta, evidence, state)


def on_node(node_id: str = "w0") -> Scope:
    return Scope(ScopeKind.NODE, (node_id,))


def on_pool(pool: str = "default") -> Scope:
    return Scope(ScopeKind.POOL, (pool,))
