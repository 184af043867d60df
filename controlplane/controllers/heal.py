"""Workers that need a restart, or their policy told again; and those that refuse it.

Restarted is one whose KV blocks are held while it is idle (a leak of blocks), whose memory grows beside no more work (`growth`), or that is
hung for long: the latter at once, the others after a drain, one at a time in a pool and never the last that serves while others start. An
incarnation that has been told is told again only where it goes on as if it had not, which a command that was lost looks like; a node is told
a few times an hour, and then people are instead. Where REALTIME waits longer than BATCH, the node is sent its policy anew, and again now and
then for as long as that lasts.

What the signals miss: a leak on a worker that is never idle shows only once it fills the cache; one block may be the engine's own (vLLM
holds a null block), so a leak of that size is none; a step that is long and moves nothing for a while looks hung only by the engine's own
prediction; mean waits hide one request that waits for ever; and of restarts under an earlier leader those count that the store still tells of.

With `loops.heal=advise` nobody is restarted by it, so nobody is expected back: a restart is advised again now and then while its reason lasts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.controllers.decision import Alert, Decision, PolicyOf, Reload, Restart, Severity
from controlplane.controllers.growth import Growth, begun
from controlplane.controllers.inversion import inverted
from controlplane.seen import NodeSeen, Seen
from trimtab.measures import HUNG_S
from trimtab.messages import NodeState
from trimtab.policy import Loop
from trimtab.snapshot import Adjustment, Node

name = "heal"
HOUR_S = 3600.0
OWN_BLOCKS = 1
"""vLLM keeps one for itself."""
REFUSED_S = 10.0
UNHEEDED_S = 30.0
"""A worker that serves on for so long, beside what it was given to drain, was not told after all."""
RELOAD_S = 300.0
"""A node whose policy was told again is told it once more after this, where nothing came of it."""
LATE_S = 300.0
"""Of one that did not come back, and that nobody remembers by then, it is told for so long."""
ADVISED_S = 600.0
"""The same process is advised to be restarted again no sooner."""
LOOKS = 100
"""Workers whose memory is looked at in one tick, or a tenth of all."""
NAMED = 5
"""Nodes that an alert names."""


@dataclass(frozen=True, slots=True)
class Told:
    """A restart that was commanded. `due` is when it should be leaving, `by` when it should be back."""

    incarnation: str
    pool: str
    due: float
    by: float


@dataclass(frozen=True, slots=True)
class State:
    """All by node id. `hung` has the process and since when; `looked` the newest window; `inverted` the figures while an inversion lasts,
    and when the policy was last told for it; `advised` the process and when its restart was last advised, where this controller only advises.
    """

    hung: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    refused: Mapping[str, float] = field(default_factory=dict)
    looked: Mapping[str, int] = field(default_factory=dict)
    inverted: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    growths: Mapping[str, Growth] = field(default_factory=dict)
    told: Mapping[str, Told] = field(default_factory=dict)
    restarts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    advised: Mapping[str, tuple[str, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Finding:
    """Why a worker is to be restarted. A hung one is `urgent`."""

    node: NodeSeen
    reason: str
    evidence: str
    urgent: bool = False


def start(live: Iterable[Adjustment]) -> State:
    """It holds no adjustments."""
    return State()


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    workers = list(seen.workers())
    fresh = [n for n in workers if n.fresh(now)]
    hung = _hung(state, workers, now)
    growths = _grown(state, seen, fresh, policy, now)
    findings = [f for n in fresh if (f := _finding(n, hung, growths, policy, now)) is not None]
    told = {k: t for k, t in state.told.items() if not _over(t, seen.nodes.get(k), now)}
    advises = policy(None).loops.heal == Loop.ADVISE
    advised = {k: (i, at) for k, (i, at) in state.advised.items() if advises and now - at < ADVISED_S}
    restarts = _of_last_hour(state.restarts, seen.restarted, now)
    # Those of a rolling restart are looked after already, and one of a pool at a time is enough.
    findings = [f for f in findings if f.node.node_id not in seen.restarting]
    rolling = {n.node.pool for k, n in seen.nodes.items() if k in seen.restarting}
    findings = [f for f in findings if advised.get(f.node.node_id, ("", now))[0] != f.node.incarnation]
    # What is only advised is done to nobody: nobody is away by it, and nothing is counted.
    by_us = ({**told}, {**restarts}) if advises else (told, restarts)
    commands, alerts = _restarted(findings, workers, *by_us, rolling, policy, now)
    advised |= {c.node_id: (c.incarnation, now) for c in commands if advises}
    reloads, looked, inversions = _inversions(state, workers, policy, now)
    refused = {n.node_id: state.refused.get(n.node_id, now) for n in workers if n.refused}
    alerts += _late(told, now)
    alerts += [
        Alert(f"inversion/{k}", Severity.WARNING, f"REALTIME waits longer than BATCH at {k}", figures)
        for k, (figures, _) in inversions.items()
    ]
    alerts += _refusals(refused, seen, now)
    silent = len(workers) - len(fresh)
    holds = (f"{silent} workers say nothing now: they are left as they are",) if silent else ()
    state = State(hung, refused, looked, inversions, growths, told, restarts, advised)
    return Decision(state, commands=(*commands, *reloads), alerts=tuple(alerts), holds=holds)


# ---- what is found


def _hung(state: State, workers: Iterable[NodeSeen], now: float) -> dict[str, tuple[str, float]]:
    found = {}
    for n in workers:
        if n.state is NodeState.HUNG:
            before = state.hung.get(n.node_id)
            found[n.node_id] = before if before is not None and before[0] == n.incarnation else (n.incarnation, now)
    return found


def _grown(state: State, seen: Seen, fresh: Sequence[NodeSeen], policy: PolicyOf, now: float) -> dict[str, Growth]:
    """With new points of those that are due, a part of them a tick, so that not all of a large mesh are due at once ever after."""
    growths = {k: g for k, g in state.growths.items() if k in seen.nodes}
    spans: dict[str, int] = {}
    room = max(LOOKS, len(fresh) // 10)
    for n in fresh:
        pool = n.node.pool
        if pool not in spans:
            spans[pool] = policy(Node("", pool)).heal.growth_s
        growth = growths[n.node_id] = begun(n, growths.get(n.node_id))
        if room and growth.due(now, spans[pool]):
            room -= 1
            growths[n.node_id] = growth.noted(n, now, spans[pool])
    return growths


def _finding(
    n: NodeSeen, hung: Mapping[str, tuple[str, float]], growths: Mapping[str, Growth], policy: PolicyOf, now: float
) -> Finding | None:
    if n.state is NodeState.HUNG:
        hung_s = max(now - hung[n.node_id][1], n.gauges.get(HUNG_S, 0.0))
        limit = policy(n.node).heal.no_progress_s
        if hung_s < limit:
            return None
        return Finding(n, "it makes no progress", f"hung for {hung_s:.0f} s (limit {limit} s)", urgent=True)
    if n.state is not NodeState.SERVING:
        return None
    held = n.load.total_blocks - n.load.free_blocks - OWN_BLOCKS
    if n.idle_since is not None and held > 0:
        limit, idle_s = policy(n.node).heal.leak_s, now - n.idle_since
        if idle_s >= limit:
            figures = f"{held} of {n.load.total_blocks} KV blocks held, idle for {idle_s:.0f} s (limit {limit} s)"
            return Finding(n, "it leaks KV blocks", figures)
    growth = growths[n.node_id].per_min
    if growth is not None and growth > 0.0:
        rule = policy(n.node).heal
        if growth > rule.growth_mb_per_min:
            figures = f"{growth:.0f} MB a minute or more for {rule.growth_s} s (limit {rule.growth_mb_per_min}), beside no more work"
            return Finding(n, "its memory grows", figures)
    return None


def _inversions(
    state: State, workers: Iterable[NodeSeen], policy: PolicyOf, now: float
) -> tuple[list[Reload], dict[str, int], dict[str, tuple[str, float]]]:
    """Looks at each closed window once."""
    reloads: list[Reload] = []
    looked: dict[str, int] = {}
    lasting: dict[str, tuple[str, float]] = {}
    for n in workers:
        newest = n.windows[-1].number if n.windows else 0
        looked[n.node_id] = newest
        before = state.inverted.get(n.node_id)
        if newest == state.looked.get(n.node_id) or not n.fresh(now):
            if before is not None:
                lasting[n.node_id] = before
            continue
        figures = inverted(n, policy)
        if figures:
            due = before is None or now - before[1] >= RELOAD_S
            lasting[n.node_id] = before if before is not None and not due else (figures, now)
            if due:
                reason = "REALTIME waits longer than BATCH: the policy is told again"
                reloads.append(Reload(n.node_id, reason, figures))
    return reloads, looked, lasting


# ---- what is done


def _over(told: Told, n: NodeSeen | None, now: float) -> bool:
    """Whether the node runs as another process, or as the same one as if nobody had told it anything, or is gone for good: an engine may
    take longer to load than a silent node is remembered."""
    if n is None:
        return now >= told.by + LATE_S
    if n.incarnation == told.incarnation:
        return now >= told.due and n.fresh(now) and n.state is not NodeState.DRAINING
    return n.connected and n.state is NodeState.SERVING


def _of_last_hour(
    own: Mapping[str, tuple[float, ...]], earlier: Mapping[str, tuple[float, ...]], now: float
) -> dict[str, tuple[float, ...]]:
    """Of this leader and of earlier ones, each once."""
    whole = {k: sorted({*own.get(k, ()), *earlier.get(k, ())}) for k in (*own, *earlier)}
    found = {k: tuple(at for at in times if now - at < HOUR_S) for k, times in whole.items()}
    return {k: times for k, times in found.items() if times}


def _restarted(
    findings: Iterable[Finding],
    workers: Iterable[NodeSeen],
    told: dict[str, Told],
    restarts: dict[str, tuple[float, ...]],
    rolling: set[str],
    policy: PolicyOf,
    now: float,
) -> tuple[list[Restart], list[Alert]]:
    """Commands, which `told` and `restarts` have afterwards too, and alerts where there are to be no more of them. `rolling` are pools where
    people have workers started anew now."""
    commands: list[Restart] = []
    alerts: list[Alert] = []
    for f in sorted(findings, key=lambda f: not f.urgent):
        node_id, rule = f.node.node_id, policy(f.node.node).heal
        before = told.get(node_id)
        if before is not None and before.incarnation == f.node.incarnation:
            continue
        if len(restarts.get(node_id, ())) >= rule.restarts_per_h:
            text = f"{node_id}: {f.reason}, and it is not restarted more than {rule.restarts_per_h} times an hour"
            alerts.append(Alert(f"heal/{node_id}", Severity.CRITICAL, text, f.evidence))
            continue
        if not f.urgent and (f.node.node.pool in rolling or not _may_go(f.node, workers, told, now)):
            continue
        drain_s = 0.0 if f.urgent else float(rule.grace_s)
        commands.append(Restart(node_id, f.node.incarnation, drain_s, f.reason, f.evidence))
        told[node_id] = Told(
            f.node.incarnation, f.node.node.pool, now + drain_s + UNHEEDED_S, now + drain_s + rule.return_s
        )
        restarts[node_id] = (*restarts.get(node_id, ()), now)
    return commands, alerts


def _may_go(n: NodeSeen, workers: Iterable[NodeSeen], told: Mapping[str, Told], now: float) -> bool:
    """Nobody else of its pool is on the way, and it is not the last that serves while others start."""
    pool = n.node.pool
    if any(t.pool == pool and now < t.by for t in told.values()):
        return False
    others = [w.state for w in workers if w.node.pool == pool and w.node_id != n.node_id]
    return NodeState.SERVING in others or NodeState.STARTING not in others


def _late(told: Mapping[str, Told], now: float) -> list[Alert]:
    text = "{} was told to restart and is not back"
    return [Alert(f"heal/{k}", Severity.WARNING, text.format(k)) for k, t in sorted(told.items()) if now >= t.by]


def _refusals(refused: Mapping[str, float], seen: Seen, now: float) -> list[Alert]:
    """One alert for each pool: a bad policy is refused by all of it."""
    pools: dict[str, list[NodeSeen]] = {}
    for node_id, since in sorted(refused.items()):
        if now - since > REFUSED_S:
            n = seen.nodes[node_id]
            pools.setdefault(n.node.pool, []).append(n)
    alerts = []
    for pool, nodes in pools.items():
        names = ", ".join(n.node_id for n in nodes[:NAMED]) + (", …" if len(nodes) > NAMED else "")
        text = f"{len(nodes)} workers of pool {pool} refuse the newest policy: {names}"
        alerts.append(Alert(f"refused/{pool}", Severity.WARNING, text, nodes[0].refused))
    return alerts
