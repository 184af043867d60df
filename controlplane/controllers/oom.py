"""A worker ran out of memory: field guide B's emergency. Long BATCH requests there are released, its running set is halved, people are told.

The smaller running set holds for the node, not for its process: the worker is often restarted meanwhile. It stays for `oom.hold_s` and then
doubles each minute. Two signs of one accident, the engine's death and the counter of requests that ended for it, count once.

What it misses: an accident of which nobody spoke, such as a whole machine that went; one that fell between two leaders; and whose memory it
was, since a worker can be killed for what a neighbour took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from controlplane.controllers.decision import Alert, Decision, Move, PolicyOf, Release, Severity
from controlplane.seen import NodeSeen, Seen
from trimtab.measures import OUT_OF_MEMORY
from trimtab.messages import RequestMatch, Role, Workload
from trimtab.snapshot import Adjustment, Scope, ScopeKind

name = "oom"
FIELD = "batch.active"
ONCE_S = 10.0
"""What comes so soon after is of the same accident."""
NEWS_S = 30.0
"""An accident before a leader's time is news for so long."""
DOUBLE_S = 60.0
LEAST = 0.1
"""No factor is smaller."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A node's smaller running set. `at` is the newest accident; `grows_at` when it is doubled next, None until the first tick says."""

    factor: float
    at: float | None
    grows_at: float | None
    evidence: str


@dataclass(frozen=True, slots=True)
class Told:
    """What a node has said of accidents: when the last one was, and how many requests ended for them."""

    at: float | None
    count: int


@dataclass(frozen=True, slots=True)
class State:
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    told: Mapping[str, Told] = field(default_factory=dict)


def start(live: Iterable[Adjustment]) -> State:
    mine = (a for a in live if a.field == FIELD and a.scope.kind is ScopeKind.NODE and a.factor is not None)
    return State({a.scope.names[0]: Cut(a.factor or 1.0, None, None, a.evidence) for a in mine})


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    cuts = {node_id: _recovered(cut, seen, policy, node_id, now) for node_id, cut in state.cuts.items()}
    told = {}
    commands = []
    for n in seen.nodes.values():
        if n.role is not Role.WORKER:
            continue
        says = Told(n.out_of_memory_at, n.totals.get(OUT_OF_MEMORY, 0))
        before = state.told.get(n.node_id)
        if before is None and n.reported_at is None and says.at is None:
            # Its first report says what was counted before anybody here listened.
            continue
        told[n.node_id] = before if before == says and before is not None else says
        if not _news(before, says, now, known=n.node_id in state.cuts):
            continue
        cut = cuts.get(n.node_id)
        if cut is not None and cut.at is not None and now - cut.at < ONCE_S:
            continue
        rule = policy(n.node).oom
        figures = f"{n.node_id} of pool {n.node.pool}; {n.load.running} requests ran, {n.load.waiting} waited"
        factor = max(LEAST, (cut.factor if cut is not None else 1.0) * rule.decrease)
        cuts[n.node_id] = Cut(factor, now, now + rule.hold_s, figures)
        if n.connected:
            commands.append(_release(n, rule.release_after_s, figures))
    kept = {node_id: cut for node_id, cut in cuts.items() if cut.factor < 1.0 or _holds(cut, now)}
    moves = tuple(_move(node_id, cut) for node_id, cut in sorted(kept.items()) if cut.factor < 1.0)
    alerts = tuple(
        Alert(f"oom/{node_id}", Severity.CRITICAL, f"{node_id} ran out of memory", cut.evidence)
        for node_id, cut in sorted(kept.items())
    )
    return Decision(State(kept, told), moves, tuple(commands), alerts=alerts)


def _news(before: Told | None, says: Told, now: float, *, known: bool) -> bool:
    """Whether this is an accident of which nothing was heard before."""
    if before is None:
        # A leader's first look: what was counted so far may be long ago, and what is cut already has been dealt with.
        return not known and says.at is not None and now - says.at <= NEWS_S
    newer = says.at is not None and (before.at is None or says.at > before.at)
    return newer or says.count > before.count


def _recovered(cut: Cut, seen: Seen, policy: PolicyOf, node_id: str, now: float) -> Cut:
    """Twice as much for each minute since its time was over."""
    if cut.grows_at is None:
        # Of an earlier leader: nobody knows how long it has held, so it holds anew.
        n = seen.nodes.get(node_id)
        return replace(cut, grows_at=now + policy(n.node if n is not None else None).oom.hold_s)
    while cut.factor < 1.0 and now >= cut.grows_at:
        cut = replace(cut, factor=min(1.0, 2 * cut.factor), grows_at=cut.grows_at + DOUBLE_S)
    return cut


def _holds(cut: Cut, now: float) -> bool:
    """Where the policy cuts nothing, people are told all the same."""
    return cut.grows_at is not None and now < cut.grows_at and cut.at is not None and now - cut.at < DOUBLE_S


def _release(n: NodeSeen, after_s: int, figures: str) -> Release:
    match = RequestMatch(workload=Workload.BATCH, min_age_ms=1000 * after_s)
    return Release(n.node_id, match, f"out of memory: BATCH requests older than {after_s} s go", figures)


def _move(node_id: str, cut: Cut) -> Move:
    return Move(FIELD, Scope(ScopeKind.NODE, (node_id,)), "it ran out of memory", cut.evidence, factor=cut.factor)
