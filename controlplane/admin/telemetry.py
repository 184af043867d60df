"""GetTelemetry, ListReports and GetScale: what the mesh measures, and what the loops make of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TypeVar

from controlplane.admin.encode import encode_policy_state, fitting, freshest
from controlplane.breaker_keeper import BreakerKeeper
from controlplane.controllers.safe_batch import Fits
from controlplane.controllers.safe_batch import fitting as fitting_requests
from controlplane.exchange import Exchange
from controlplane.fleet import Fleet
from controlplane.loop import Record, TelemetryLoop
from controlplane.peers import Peers
from controlplane.policies import Policies
from controlplane.pools import Pool, pools_of
from controlplane.replica import unix_ms
from controlplane.seen import Lengths, NodeSeen, Seen, Window, merged
from controlplane.telemetry import Telemetry
from trimtab.codec import encode_limits, encode_load, encode_outlier, encode_state
from trimtab.messages import Role
from trimtab.policy import Policy
from trimtab.sketch import Quantiles, Sketch
from trimtab.v1 import admin_pb2, control_pb2

T = TypeVar("T")
WINDOWS, DECISIONS = 12, 20
ANSWERED_S = 1.0
"""What a replica gets to tell what its nodes made of the policy: less than this one gets where another asked it for all of this."""
ROLES = {Role.WORKER: control_pb2.ROLE_WORKER, Role.GATEWAY: control_pb2.ROLE_GATEWAY}


class TelemetryAdmin:
    """What AdminService says of telemetry. Where another replica leads, it is asked: only a leader's controllers run."""

    def __init__(
        self,
        fleet: Fleet,
        telemetry: Telemetry,
        loop: TelemetryLoop,
        exchange: Exchange,
        peers: Peers,
        breakers: BreakerKeeper,
    ) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._loop = loop
        self._exchange = exchange
        self._peers = peers
        self._breakers = breakers

    def reports(self, request: admin_pb2.ListReportsRequest) -> admin_pb2.ListReportsResponse:
        return self._exchange.after(request.after)

    async def scale(self, request: admin_pb2.GetScaleRequest) -> admin_pb2.GetScaleResponse:
        """Without a leader's answer nobody is said to lead: what was wanted here once is nobody's word."""
        answer = await self._of_leader("GetScale", request, admin_pb2.GetScaleResponse)
        if answer is not None:
            return answer
        pools = self._pools(self._seen(), self._loop.policies())
        leader_id = self._peers.replica_id if self._loop.leads else ""
        return admin_pb2.GetScaleResponse(pools=pools, leader_id=leader_id)

    async def telemetry(self, request: admin_pb2.GetTelemetryRequest) -> admin_pb2.GetTelemetryResponse:
        answer = await self._of_leader("GetTelemetry", request, admin_pb2.GetTelemetryResponse)
        if answer is not None:
            return answer
        answered = await self._answered()
        seen, policies = self._seen(), self._loop.policies()
        windows = request.windows or WINDOWS
        nodes = (self._node(n, answered.get(n.node_id), seen.now, windows, policies) for n in seen.nodes.values())
        newest = [n.windows[-1] for n in seen.nodes.values() if n.connected and n.windows and n.fresh(seen.now)]
        names = sorted({name for w in newest for name in w.sketches})
        return admin_pb2.GetTelemetryResponse(
            nodes=fitting(nodes),
            controllers=self._controllers(seen),
            decisions=[_decision(r) for r in list(self._loop.decisions)[: -(request.decisions or DECISIONS) - 1 : -1]],
            mesh={name: _quantiles(merged(newest, (name,))) for name in names},
            lengths=[self._lengths(model, lengths, seen, policies) for model, lengths in sorted(seen.lengths.items())],
            pools=self._pools(seen, policies),
            replica_id=self._peers.replica_id,
            leader_id=self._leader_id(),
            tick_ms=self._loop.tick_ms,
        )

    async def _answered(self) -> dict[str, admin_pb2.NodePolicyState]:
        """What each node made of the policy, as the replica tells it that it is connected to; none of one whose replica does not answer."""
        members = list(self._fleet)
        found = {m.node_id: encode_policy_state(m) for m in members if not m.replica}
        if elsewhere := {m.node_id for m in members if m.replica}:
            request = admin_pb2.GetFleetRequest(local=True)
            answers = (await self._peers.ask("GetFleet", request, within_s=ANSWERED_S)).values()
            told = freshest(n for a in answers if isinstance(a, admin_pb2.GetFleetResponse) for n in a.nodes)
            found |= {name: told[name].policy for name in elsewhere if name in told}
        return found

    def _seen(self) -> Seen:
        policies = self._loop.policies()
        adjustments = policies.document.adjustments if policies else ()
        live = tuple(a for a in adjustments if a.expires_unix_ms > unix_ms())
        return self._telemetry.seen(self._fleet, live, time.monotonic())

    async def _of_leader(self, method: str, request: object, kind: type[T]) -> T | None:
        """The leader's answer; None where this replica leads, nobody does, or the leader gives none."""
        if self._loop.leads:
            return None
        leader = self._peers.leader()
        if leader is None:
            return None
        found = (await self._peers.ask_each(method, {leader: request})).get(leader)
        # One that has just lost the lead asks on in turn, and would be asked by whom it asks.
        return found if isinstance(found, kind) else None

    def _leader_id(self) -> str:
        return self._peers.replica_id if self._loop.leads else (self._peers.leader() or "")

    def _node(
        self,
        n: NodeSeen,
        answered: admin_pb2.NodePolicyState | None,
        now: float,
        windows: int,
        policies: Policies | None,
    ) -> admin_pb2.NodeTelemetry:
        spec = policies.spec(n.node) if policies else Policy()
        effective = policies.effective(n.node, unix_ms()) if policies else Policy()
        notice = self._breakers.notice(n.node_id, n.incarnation) if n.role is Role.WORKER else None
        breaker = ""
        if notice is not None:
            breaker = (
                f"forced {notice.side}"
                if notice.side is not None
                else f"open: {notice.trip.dimension}"
                if notice.trip
                else ""
            )
        pb = admin_pb2.NodeTelemetry(
            node_id=n.node_id,
            incarnation=n.incarnation,
            role=ROLES[n.role],
            pool=n.node.pool,
            model=n.model,
            state=encode_state(n.state),
            connected=n.connected,
            age_s=now - n.reported_at if n.reported_at is not None else None,
            stale=n.connected and not n.fresh(now),
            load=encode_load(n.load),
            gauges=n.gauges,
            totals=n.totals,
            restarts=n.restarts,
            deaths=n.deaths,
            died_ago_s=now - n.died_at if n.died_at is not None else None,
            out_of_memory_ago_s=now - n.out_of_memory_at if n.out_of_memory_at is not None else None,
            windows=[_window(w, now) for w in list(n.windows)[-windows:]],
            ttft_objective_ms=effective.objectives.ttft_p99_ms,
            itl_objective_ms=effective.objectives.itl_p99_ms,
            breaker=breaker,
            limits=encode_limits(n.node.limits),
        )
        if n.role is Role.WORKER:
            pb.batch_active, pb.batch_active_spec = effective.batch.active, spec.batch.active
        if answered is not None:
            if answered.HasField("applied"):
                pb.applied.CopyFrom(answered.applied)
            if answered.HasField("refused"):
                pb.refused.CopyFrom(answered.refused)
                pb.refused_because = f"{answered.refusal.reason}: {answered.refusal.message}"
        return pb

    def _controllers(self, seen: Seen) -> Iterable[admin_pb2.ControllerTelemetry]:
        for s in self._loop.steps:
            moves = sum(a.controller == s.name for a in seen.adjustments)
            yield admin_pb2.ControllerTelemetry(name=s.name, mode=s.mode.value, holds=s.decision.holds, moves=moves)

    def _pools(self, seen: Seen, policies: Policies | None) -> list[admin_pb2.PoolScale]:
        wants = self._loop.wants if self._loop.leads else {}
        found = pools_of(seen, wants, policies.spec if policies else lambda node: Policy())
        return [admin_pb2.PoolScale(**{name: getattr(p, name) for name in Pool.__slots__}) for p in found]

    def _lengths(
        self, model: str, lengths: Lengths, seen: Seen, policies: Policies | None
    ) -> admin_pb2.LengthsTelemetry:
        found = [
            (fitting_requests(n, lengths, rules, seen.now), rules.hard_cap)
            for n in seen.workers()
            if n.model == model
            for rules in ((policies.spec(n.node) if policies else Policy()).batch,)
        ]
        safe = [max(1, min(cap, int(fits.requests))) for fits, cap in found if isinstance(fits, Fits)]
        return admin_pb2.LengthsTelemetry(
            model=model,
            recent_prompts=_quantiles(lengths.recent_prompts),
            day_prompts=_quantiles(lengths.day_prompts),
            recent_totals=_quantiles(lengths.recent_totals),
            day_span_s=lengths.day_span_s,
            safe_batch=min(safe, default=0),
        )


def _window(w: Window, now: float) -> admin_pb2.WindowTelemetry:
    return admin_pb2.WindowTelemetry(
        number=w.number,
        ended_ago_s=now - w.ended,
        span_s=w.ended - w.begun,
        counters=w.counters,
        quantiles={name: _quantiles(s) for name, s in w.sketches.items()},
        outliers=[encode_outlier(o) for o in w.outliers],
        peaks=w.peaks,
    )


def _quantiles(sketch: Sketch) -> admin_pb2.Quantiles:
    q: Quantiles = sketch.quantiles()
    return admin_pb2.Quantiles(count=q.count, p50=q.p50, p95=q.p95, p99=q.p99, max=q.max)


def _decision(r: Record) -> admin_pb2.ControllerDecision:
    return admin_pb2.ControllerDecision(
        controller=r.controller,
        at_unix_ms=r.at_unix_ms,
        text=r.text,
        reason=r.reason,
        evidence=r.evidence,
        advised=r.advised,
        failed=r.failed,
        kind=r.kind,
    )
