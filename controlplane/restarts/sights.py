"""What a restart sees of workers, from what the control plane knows of them: pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from controlplane.breakers import Notice, Side
from controlplane.fleet import Member
from controlplane.restarts.steps import Sight
from controlplane.seen import NodeSeen, merged
from trimtab.kit.duration import brief
from trimtab.measures import COLD, ERRORS, HOT, REQUESTS, ttft
from trimtab.messages import NodeState, Role, Workload
from trimtab.policy import Policy
from trimtab.snapshot import Identity, Node

TTFT = tuple(ttft(Workload.REALTIME, path) for path in (HOT, COLD))
Holds = Mapping[str, tuple[Identity, str]]
"""Of workers that are connected to other replicas: what they run by, and why not by the newest."""
Noticed = Callable[[str, str], Notice | None]
"""What gateways are told of the breaker of a process, by node id and incarnation."""


def sights_of(
    members: Iterable[Member],
    nodes: Mapping[str, NodeSeen],
    elsewhere: Holds,
    newest: Identity,
    policy: Callable[[Node], Policy],
    now: float,
    measured: Collection[str] = (),
    *,
    noticed: Noticed,
) -> dict[str, Sight]:
    """By node id; `now` in seconds of the fleet's clock. A P99 takes a while, and is of those that are to be `measured`."""
    workers = (m for m in members if m.hello.role is Role.WORKER)
    return {
        m.node_id: _sight(m, nodes.get(m.node_id), elsewhere, newest, policy, now, m.node_id in measured, noticed)
        for m in workers
    }


def _sight(
    m: Member,
    n: NodeSeen | None,
    elsewhere: Holds,
    newest: Identity,
    policy: Callable[[Node], Policy],
    now: float,
    measured: bool,
    noticed: Noticed,
) -> Sight:
    applied, refused = m.applied, f"{m.refusal.reason}: {m.refusal.message}" if m.refusal is not None else ""
    if m.replica:
        applied, refused = elsewhere.get(m.node_id, (Identity(), ""))
    mine = n if n is not None and n.incarnation == m.hello.incarnation else None
    rules = policy(m.hello.node)
    ttfts = merged(mine.windows, TTFT) if mine is not None and measured else None
    known = ttfts is not None and ttfts.count >= rules.rollout.min_samples
    return Sight(
        node_id=m.node_id,
        pool=m.hello.node.pool,
        model=m.hello.model,
        incarnation=m.hello.incarnation,
        connected=m.connected,
        state=m.report.state if m.report is not None else NodeState.STARTING,
        lost_ms=int(1000 * (now - m.lost_at)) if m.lost_at is not None else 0,
        told=m.hello.told,
        took=applied >= newest,
        refused=refused,
        p99_ms=ttfts.quantile(0.99) if ttfts is not None and known else None,
        samples=ttfts.count if ttfts is not None else 0,
        objective_ms=rules.objectives.ttft_p99_ms,
        requests=mine.counters.get(REQUESTS, 0) if mine is not None else 0,
        errors=mine.counters.get(ERRORS, 0) if mine is not None else 0,
        shut=_shut(noticed(m.node_id, m.hello.incarnation)),
    )


def _shut(notice: Notice | None) -> str:
    """Why its breaker lets nothing through, in words. One that a single gateway has opened counts: the others let a probe through."""
    if notice is None or notice.side is Side.CLOSED:
        return ""
    if notice.side is Side.OPEN:
        return f"its breaker is forced open for {brief(notice.forced_ms)} yet"
    trip = notice.trip
    return f"its breaker is open at {trip.gateway_id}, on {trip.dimension}" if trip is not None else ""
