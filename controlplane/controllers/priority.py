"""How far REALTIME goes ahead in the queues of a pool, by how many of it wait there.

The field guides' rule: above 5 that wait at a worker REALTIME goes a level up, above 10 two, and BATCH one down; never further from what
people have set than `priority.max_priority_diff`, and not more often than each `priority.adjustment_interval_ms`. Up at once, as far as the
queue calls for; down a level at a time, once the queue has been at or below half of what the level takes for a minute.

The depth is that of the worker where most wait: one worker's queue is made no shorter by the empty one beside it. Gateways are not asked:
REALTIME does not wait there. What the signal misses: depth says how many wait, not for how long; ten short prompts that one step takes
up look like ten that wait for a minute. It says nothing of why they wait: where a slot or memory is what they lack, order alone helps little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from controlplane.controllers.decision import Decision, Move, PolicyOf
from controlplane.seen import NodeSeen, Seen
from trimtab.measures import REALTIME_WAITING
from trimtab.messages import NodeState
from trimtab.policy import Mode
from trimtab.policy_tree import PriorityPart
from trimtab.snapshot import Adjustment, Node, Scope, ScopeKind

name = "priority"

REALTIME_DELTA, BATCH_DELTA = "priority.realtime_delta", "priority.batch_delta"
CALM = 0.5
"""Of a level's threshold: at or below it the level is not needed."""
CALM_S = 60.0
"""For so long: a queue that comes and goes within a minute is one queue."""
GONE_S = 60.0
"""What was decided for a pool without workers is forgotten after so long."""


@dataclass(frozen=True, slots=True)
class Pool:
    """`level` is 0, 1 or 2: what the queue calls for. `reason` and `evidence` are those of its last change."""

    level: int = 0
    changed_at: float = -math.inf
    calm_since: float | None = None
    gone_since: float | None = None
    reason: str = ""
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """Pools with a level above 0, or that had one less than an interval ago."""

    pools: Mapping[str, Pool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Depth:
    """REALTIME requests that wait at the worker where most do; `silent` are workers that do not say."""

    requests: int
    node_id: str
    workers: int
    silent: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.requests} REALTIME requests wait at {self.node_id}, the most of {self.workers} workers"


def start(live: Iterable[Adjustment]) -> State:
    """Goes on at the level that the leader before was at."""
    pools: dict[str, Pool] = {}
    for a in live:
        if a.scope.kind is not ScopeKind.POOL or a.field not in (REALTIME_DELTA, BATCH_DELTA):
            continue
        level = 2 if a.field == BATCH_DELTA or a.delta > 1 else 1
        before = pools.get(a.scope.names[0], Pool()).level
        pools[a.scope.names[0]] = Pool(max(level, before), reason=a.reason, evidence=a.evidence)
    return State(pools)


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    by_pool: dict[str, list[NodeSeen]] = {pool: [] for pool in state.pools}
    for node in seen.workers():
        by_pool.setdefault(node.node.pool, []).append(node)
    pools: dict[str, Pool] = {}
    moves: list[Move] = []
    holds: list[str] = []
    for pool_name, nodes in by_pool.items():
        people = policy(Node("", pool_name))
        rules = people.priority
        if people.scheduler.mode != Mode.TRIMTAB:
            if nodes:
                holds.append(f"pool {pool_name}: scheduler.mode is {people.scheduler.mode}, which reads no deltas")
            continue
        depth = _depth(nodes, now)
        if depth is None or (depth.silent and state.pools.get(pool_name, Pool()).level):
            holds.append(_silence(pool_name, nodes, depth))
        pool = _next(state.pools.get(pool_name, Pool()), depth, bool(nodes), rules, now)
        if pool.level or now - pool.changed_at < rules.adjustment_interval_ms / 1000.0:
            pools[pool_name] = pool
        moves += _moves(pool_name, pool, rules)
    return Decision(State(pools), tuple(moves), holds=tuple(h for h in holds if h))


def _depth(nodes: Iterable[NodeSeen], now: float) -> Depth | None:
    """None where no worker says it. One that starts has no queue yet, and that of a hung one no order makes shorter."""
    told: list[tuple[float, str]] = []
    silent: list[str] = []
    for node in nodes:
        if node.state in (NodeState.SERVING, NodeState.DRAINING):
            waiting = node.gauge(REALTIME_WAITING, now)
            if waiting is None:
                silent.append(node.node_id)
            else:
                told.append((waiting, node.node_id))
    if not told:
        return None
    # Of equals the first by name, so that the words stay the same.
    most, node_id = min(told, key=lambda t: (-t[0], t[1]))
    return Depth(int(most), node_id, len(told), tuple(silent))


def _silence(pool: str, nodes: list[NodeSeen], depth: Depth | None) -> str:
    """Who does not say how many wait; empty where there is nobody who could."""
    if not any(n.state in (NodeState.SERVING, NodeState.DRAINING) for n in nodes):
        return ""
    who = "no worker says" if depth is None else f"{', '.join(depth.silent[:3])} did not say lately"
    return f"pool {pool}: {who} how many REALTIME requests wait"


def _next(pool: Pool, depth: Depth | None, has_workers: bool, rules: PriorityPart, now: float) -> Pool:
    """After one more tick."""
    if not has_workers:
        since = pool.gone_since if pool.gone_since is not None else now
        return Pool() if now - since >= GONE_S else replace(pool, gone_since=since, calm_since=None)
    if depth is None:
        return replace(pool, gone_since=None, calm_since=None)
    interval_s = rules.adjustment_interval_ms / 1000.0
    wanted = _level(depth.requests, rules)
    may_change = now - pool.changed_at >= interval_s
    if wanted > pool.level:
        if not may_change:
            return replace(pool, gone_since=None, calm_since=None)
        reason = f"more than {_threshold(wanted, rules)} REALTIME requests wait at a worker"
        return Pool(wanted, now, reason=reason, evidence=str(depth))
    if not pool.level or depth.silent or depth.requests > CALM * _threshold(pool.level, rules):
        return replace(pool, gone_since=None, calm_since=None)
    since = pool.calm_since if pool.calm_since is not None else now
    if not may_change or now - since < CALM_S:
        return replace(pool, gone_since=None, calm_since=since)
    reason = f"at most half of {_threshold(pool.level, rules)} REALTIME requests waited at a worker: a level down"
    return Pool(pool.level - 1, now, reason=reason, evidence=str(depth))


def _level(requests: int, rules: PriorityPart) -> int:
    if requests > rules.raise_twice_above:
        return 2
    return 1 if requests > rules.raise_above else 0


def _threshold(level: int, rules: PriorityPart) -> int:
    return rules.raise_twice_above if level > 1 else rules.raise_above


def _moves(pool_name: str, pool: Pool, rules: PriorityPart) -> list[Move]:
    """What the level makes of the deltas, as far as they may go from nothing."""
    most = rules.max_priority_diff
    up = max(0, min(pool.level, most - rules.realtime_delta))
    down = max(0, min(pool.level - 1, most + rules.batch_delta))
    scope = Scope(ScopeKind.POOL, (pool_name,))
    found = []
    if up:
        found.append(Move(REALTIME_DELTA, scope, pool.reason, pool.evidence, delta=up))
    if down:
        found.append(Move(BATCH_DELTA, scope, pool.reason, pool.evidence, delta=-down))
    return found
