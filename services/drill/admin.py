"""What the control plane says of its loops, by AdminService, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from trimtab.codec import decode_document, decode_state
from trimtab.kit import rpc
from trimtab.messages import NodeState
from trimtab.snapshot import Adjustment
from trimtab.v1 import admin_pb2, admin_pb2_grpc

ASK_S = 10.0
DECISIONS = 200


@dataclass(frozen=True, slots=True)
class NodeNow:
    """One node, as it said last. `held_blocks` are KV blocks that are not free."""

    incarnation: str
    state: NodeState
    connected: bool
    stale: bool
    running: int
    waiting: int
    held_blocks: int
    gauges: Mapping[str, float]
    totals: Mapping[str, int]

    @property
    def serves(self) -> bool:
        return self.connected and not self.stale and self.state is NodeState.SERVING


@dataclass(frozen=True, slots=True)
class Decided:
    """One decision of a controller. `failed` says why it was not done."""

    controller: str
    at_unix_ms: int
    text: str
    reason: str
    evidence: str
    failed: str


@dataclass(frozen=True, slots=True)
class Telemetry:
    """`decisions` are newest first, without what is advised only; `holds` says of each controller why it can't decide."""

    nodes: Mapping[str, NodeNow]
    decisions: tuple[Decided, ...]
    modes: Mapping[str, str]
    holds: Mapping[str, tuple[str, ...]]
    wanted: Mapping[str, int] = field(default_factory=dict)
    """Workers, by pool."""
    leads: bool = False


@dataclass(frozen=True, slots=True)
class Written:
    """A controller's write to the policy: what was (field, scope, after)."""

    author: str
    at_unix_ms: int
    reason: str
    evidence: str
    changes: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, slots=True)
class Done:
    """What somebody did to a node."""

    author: str
    at_unix_ms: int
    what: str
    reason: str


class Admin:
    """Belongs to one event loop; `close` it. grpc.aio.AioRpcError where the control plane does not answer."""

    def __init__(self, address: str) -> None:
        self._channel = rpc.channel(address, "control")
        self._stub: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    async def telemetry(self) -> Telemetry:
        request = admin_pb2.GetTelemetryRequest(windows=1, decisions=DECISIONS)
        pb: admin_pb2.GetTelemetryResponse = await self._stub.GetTelemetry(request, timeout=ASK_S)
        return Telemetry(
            {n.node_id: _node(n) for n in pb.nodes},
            tuple(
                Decided(d.controller, d.at_unix_ms, d.text, d.reason, d.evidence, d.failed)
                for d in pb.decisions
                if not d.advised
            ),
            {c.name: c.mode for c in pb.controllers},
            {c.name: tuple(c.holds) for c in pb.controllers if c.holds},
            {p.pool: p.wanted for p in pb.pools},
            bool(pb.leader_id),
        )

    async def written(self) -> tuple[Written, ...]:
        """By controllers, newest first."""
        request = admin_pb2.ListPolicyHistoryRequest(limit=DECISIONS, controllers=True)
        pb: admin_pb2.ListPolicyHistoryResponse = await self._stub.ListPolicyHistory(request, timeout=ASK_S)
        return tuple(
            Written(
                e.author, e.written_unix_ms, e.reason, e.evidence, tuple((c.field, c.scope, c.after) for c in e.changes)
            )
            for e in pb.entries
            if e.kind == admin_pb2.HISTORY_KIND_CONTROLLER
        )

    async def done(self, node_id: str) -> tuple[Done, ...]:
        """To this node, newest first."""
        request = admin_pb2.ListActionsRequest(limit=DECISIONS, node_id=node_id)
        pb: admin_pb2.ListActionsResponse = await self._stub.ListActions(request, timeout=ASK_S)
        return tuple(Done(a.author, a.at_unix_ms, a.what, a.reason) for a in pb.actions)

    async def adjustments(self) -> tuple[Adjustment, ...]:
        """All that stand in the newest policy, the expired included."""
        pb: admin_pb2.GetPolicyResponse = await self._stub.GetPolicy(admin_pb2.GetPolicyRequest(), timeout=ASK_S)
        return decode_document(pb.snapshot.document).adjustments

    async def close(self) -> None:
        await self._channel.close()


def restarting(e: grpc.aio.AioRpcError) -> bool:
    """Whether nobody was there to answer."""
    return e.code() is grpc.StatusCode.UNAVAILABLE


def _node(pb: admin_pb2.NodeTelemetry) -> NodeNow:
    load = pb.load
    return NodeNow(
        pb.incarnation,
        decode_state(pb.state),
        pb.connected,
        pb.stale,
        load.running,
        load.waiting,
        load.total_blocks - load.free_blocks,
        dict(pb.gauges),
        dict(pb.totals),
    )
