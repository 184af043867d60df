"""What people and tools ask of the control plane. Reads are answered from memory while the store is away, and say so.

Every write goes through `Writer`, and from there through `Replica.write`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import Any

from controlplane.admin.blocks import Blocks
from controlplane.admin.encode import (
    encode_action,
    encode_answer,
    encode_entry,
    encode_member,
    encode_spec,
    encode_store,
    fitting,
    freshest,
    one_leader,
)
from controlplane.admin.restarts import Restarts
from controlplane.admin.rollouts import Rollouts, encode_rollout
from controlplane.admin.steering import AskWorkers, steer
from controlplane.admin.telemetry import TelemetryAdmin
from controlplane.admin.workers import Workers
from controlplane.admin.writing import MAX_WAIT_MS, Writer, apply_work, pin_work, set_work
from controlplane.answers import Answers, chosen
from controlplane.fleet import Fleet
from controlplane.gatekeeper import granted
from controlplane.leader import Leader
from controlplane.metrics import ControlMetrics
from controlplane.peers import Peers
from controlplane.replica import Replica, unix_ms
from controlplane.spec import spec_of
from controlplane.store import PAST_LENGTH, REFUSED_LENGTH, Answer, Stored
from trimtab.codec import decode_document, decode_identity, encode_identity, encode_partial, encode_snapshot
from trimtab.errors import InvalidRequest, StoreUnavailable, Violation
from trimtab.kit.rpc import guarded
from trimtab.kit.watch import Watch
from trimtab.messages import Role
from trimtab.policy import flatten
from trimtab.snapshot import Identity, Limits, Node, resolve
from trimtab.v1 import admin_pb2, admin_pb2_grpc

HISTORY_DEFAULT = 20
TELLS_OF = 8
"""Revisions that are named where another one is not told."""
ANSWERS_DEFAULT = 100
ACTIONS_DEFAULT = 20
LAST_REFUSED_S = 0.5


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`answers` is set whenever a node answers a push, joins or is lost; `ask` puts a command to every worker of this replica."""

    def __init__(
        self,
        replica: Replica,
        fleet: Fleet,
        answers: Watch[None],
        metrics: ControlMetrics,
        ask: AskWorkers,
        peers: Peers,
        leader: Leader,
        log: Answers,
        workers: Workers,
        telemetry: TelemetryAdmin,
        blocks: Blocks,
        restarts: Restarts,
        rollouts: Rollouts,
    ) -> None:
        self._replica = replica
        self._ask = ask
        self._fleet = fleet
        self._peers = peers
        self._leader = leader
        self._log = log
        self._workers = workers
        self._telemetry = telemetry
        self._blocks = blocks
        self._restarts = restarts
        self._rollouts = rollouts
        self._writer = Writer(replica, fleet, answers, metrics, peers)

    async def GetPolicy(self, request: admin_pb2.GetPolicyRequest, context: Any) -> admin_pb2.GetPolicyResponse:
        async with guarded(context):
            stored = self._newest()
            node = self._node(request.node_id) if request.node_id else self._any_node()
            resolved = resolve(decode_document(stored.snapshot.document), node, now_unix_ms=unix_ms())
            return admin_pb2.GetPolicyResponse(
                snapshot=encode_snapshot(stored.snapshot),
                spec_version=stored.spec_version,
                author=stored.author,
                reason=stored.reason,
                effective=encode_partial(flatten(resolved.policy)),
                sources=resolved.sources,
                store=self._store_state(),
                inactive=resolved.inactive,
            )

    async def SetPolicy(self, request: admin_pb2.SetPolicyRequest, context: Any) -> admin_pb2.SetPolicyResponse:
        async with guarded(context):
            return admin_pb2.SetPolicyResponse(**await self._writer.write(request, set_work, _caller(context)))

    async def ApplyPolicy(self, request: admin_pb2.ApplyPolicyRequest, context: Any) -> admin_pb2.ApplyPolicyResponse:
        async with guarded(context):
            return admin_pb2.ApplyPolicyResponse(**await self._writer.write(request, apply_work, _caller(context)))

    async def PinPolicy(self, request: admin_pb2.PinPolicyRequest, context: Any) -> admin_pb2.PinPolicyResponse:
        async with guarded(context):
            return admin_pb2.PinPolicyResponse(**await self._writer.write(request, pin_work, _caller(context)))

    async def GetPolicyRevision(
        self, request: admin_pb2.GetPolicyRevisionRequest, context: Any
    ) -> admin_pb2.GetPolicyRevisionResponse:
        async with guarded(context):
            newest = self._newest().identity
            wanted = Identity(request.epoch or newest.epoch, request.revision)
            entries = await self._replica.store.history(PAST_LENGTH + 2 * REFUSED_LENGTH)
            # Controllers' writes leave the spec as it is: at one of theirs it is that of the person before.
            entry = next((e for e in entries if not e.refused_because and e.identity <= wanted), None)
            snapshot = None
            if entry is not None and entry.identity.epoch == wanted.epoch and Identity() < wanted <= newest:
                snapshot = await self._replica.store.revision(entry.identity.epoch, entry.identity.revision)
            if snapshot is None or entry is None:
                told = [e.identity for e in entries if not e.refused_because]
                message = f"the history does not tell the policy as of {wanted}; {await self._tells(told)}"
                raise InvalidRequest(message, violations=(Violation("revision", message),))
            return admin_pb2.GetPolicyRevisionResponse(
                entry=encode_entry(entry), spec=encode_spec(spec_of(decode_document(snapshot.document)))
            )

    async def _tells(self, identities: Sequence[Identity]) -> str:
        """Which revisions can be shown and gone back to, the newest first and a few of them; in words."""
        store = self._replica.store
        found = [str(i) for i in identities[:TELLS_OF] if await store.revision(i.epoch, i.revision) is not None]
        return f"the newest that it tells are {', '.join(found)}" if found else "it tells none"

    async def ListPolicyHistory(
        self, request: admin_pb2.ListPolicyHistoryRequest, context: Any
    ) -> admin_pb2.ListPolicyHistoryResponse:
        async with guarded(context):
            limit = request.limit or HISTORY_DEFAULT
            entries = await self._replica.store.history(limit, controllers=request.controllers)
            return admin_pb2.ListPolicyHistoryResponse(entries=fitting(encode_entry(e) for e in entries))

    async def ListPolicyAnswers(
        self, request: admin_pb2.ListPolicyAnswersRequest, context: Any
    ) -> admin_pb2.ListPolicyAnswersResponse:
        async with guarded(context):
            kept: list[Answer] = []
            with contextlib.suppress(StoreUnavailable):
                kept = await self._replica.store.answers()
            # What waits for the store is told as well; all that it holds already comes once.
            known = dict.fromkeys((*self._log.pending, *kept))
            newest = sorted(known, key=lambda a: a.at_unix_ms, reverse=True)
            found = chosen(
                newest,
                node_id=request.node_id,
                epoch=request.identity.epoch,
                revision=request.identity.revision,
                limit=request.limit or ANSWERS_DEFAULT,
            )
            return admin_pb2.ListPolicyAnswersResponse(answers=fitting(encode_answer(a) for a in found))

    async def GetFleet(self, request: admin_pb2.GetFleetRequest, context: Any) -> admin_pb2.GetFleetResponse:
        async with guarded(context):
            newest, now = self._replica.newest.value, time.monotonic()
            me = self._me(newest)
            members = self._fleet.local() if request.local else list(self._fleet)
            here = [m for m in members if not m.replica]
            elsewhere = {}
            if not request.local:
                # Elsewhere only who they are is known here; what they said last is asked for.
                answers = (await self._peers.ask("GetFleet", admin_pb2.GetFleetRequest(local=True))).values()
                elsewhere = freshest(n for a in answers if isinstance(a, admin_pb2.GetFleetResponse) for n in a.nodes)
            nodes = {m.node_id: encode_member(m, now) for m in members if m.replica} | elsewhere
            for m in here:
                mine = encode_member(m, now)
                there = nodes.get(m.node_id)
                nodes[m.node_id] = mine if m.connected or there is None else freshest((mine, there))[m.node_id]
            for node in nodes.values():
                node.replica_id = node.replica_id or me.replica_id
                breaker = None if request.local else self._workers.in_force(node.hello.node_id)
                if breaker is not None:
                    node.breaker.CopyFrom(breaker)
            return admin_pb2.GetFleetResponse(
                desired=encode_identity(newest.identity) if newest else None,
                nodes=[nodes[name] for name in sorted(nodes)],
                store=self._store_state(),
                last_refused=None if request.local else await self._last_refused(),
                replica_id=me.replica_id,
                replicas=one_leader([me, *sorted(self._peers.states(), key=lambda r: r.replica_id)]),
            )

    def _me(self, newest: Stored | None) -> admin_pb2.ReplicaState:
        led = self._leader.leads
        return admin_pb2.ReplicaState(
            replica_id=self._peers.replica_id,
            address=self._peers.address,
            leader=led is not None,
            term=led.term if led else 0,
            nodes=sum(m.connected for m in self._fleet.local()),
            newest=encode_identity(newest.identity) if newest else None,
        )

    async def AwaitPolicy(self, request: admin_pb2.AwaitPolicyRequest, context: Any) -> admin_pb2.AwaitPolicyResponse:
        async with guarded(context):
            identity, wait_ms = decode_identity(request.identity), min(request.wait_ms, MAX_WAIT_MS)
            nodes = await self._writer.answers(identity, wait_ms, local=request.local)
            return admin_pb2.AwaitPolicyResponse(nodes=nodes)

    async def _last_refused(self) -> admin_pb2.PolicyHistoryEntry | None:
        """The newest entry of the log when it is a refusal; the fleet is shown without it while the store is away or slow."""
        if not self._replica.store.state.connected:
            return None
        with contextlib.suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(LAST_REFUSED_S):
                newest = await self._replica.store.history(1)
            if newest and newest[0].refused_because:
                return encode_entry(newest[0])
        return None

    async def WhoAmI(self, request: admin_pb2.WhoAmIRequest, context: Any) -> admin_pb2.WhoAmIResponse:
        async with guarded(context):
            grant = granted()
            role = grant.role.name.lower() if grant.role else ""
            return admin_pb2.WhoAmIResponse(identity=grant.caller.name, role=role, by=grant.caller.by)

    async def SteerRequests(
        self, request: admin_pb2.SteerRequestsRequest, context: Any
    ) -> admin_pb2.SteerRequestsResponse:
        async with guarded(context):
            return await steer(request, self._ask, self._fleet, self._peers)

    async def ListBreakers(
        self, request: admin_pb2.ListBreakersRequest, context: Any
    ) -> admin_pb2.ListBreakersResponse:
        async with guarded(context):
            workers = fitting(self._workers.breakers())
            return admin_pb2.ListBreakersResponse(workers=workers, store=self._store_state())

    async def ForceBreaker(
        self, request: admin_pb2.ForceBreakerRequest, context: Any
    ) -> admin_pb2.ForceBreakerResponse:
        async with guarded(context):
            return await self._workers.force(request)

    async def DrainNode(self, request: admin_pb2.DrainNodeRequest, context: Any) -> admin_pb2.DrainNodeResponse:
        async with guarded(context):
            return await self._workers.drain(request)

    async def ListActions(self, request: admin_pb2.ListActionsRequest, context: Any) -> admin_pb2.ListActionsResponse:
        async with guarded(context):
            found = await self._workers.actions(request.node_id, request.limit or ACTIONS_DEFAULT)
            return admin_pb2.ListActionsResponse(actions=fitting(encode_action(a) for a in found))

    async def GetTelemetry(
        self, request: admin_pb2.GetTelemetryRequest, context: Any
    ) -> admin_pb2.GetTelemetryResponse:
        async with guarded(context):
            return await self._telemetry.telemetry(request)

    async def ListReports(self, request: admin_pb2.ListReportsRequest, context: Any) -> admin_pb2.ListReportsResponse:
        async with guarded(context):
            return self._telemetry.reports(request)

    async def GetScale(self, request: admin_pb2.GetScaleRequest, context: Any) -> admin_pb2.GetScaleResponse:
        async with guarded(context):
            return await self._telemetry.scale(request)

    async def ReloadNode(self, request: admin_pb2.ReloadNodeRequest, context: Any) -> admin_pb2.ReloadNodeResponse:
        async with guarded(context):
            return await self._workers.reload(request)

    async def ReblockNodes(
        self, request: admin_pb2.ReblockNodesRequest, context: Any
    ) -> admin_pb2.ReblockNodesResponse:
        async with guarded(context):
            return await self._blocks.reblock(request)

    async def GetBlocks(self, request: admin_pb2.GetBlocksRequest, context: Any) -> admin_pb2.GetBlocksResponse:
        async with guarded(context):
            return await self._blocks.show()

    async def StartRollout(
        self, request: admin_pb2.StartRolloutRequest, context: Any
    ) -> admin_pb2.StartRolloutResponse:
        async with guarded(context):
            return admin_pb2.StartRolloutResponse(rollout=encode_rollout(await self._rollouts.start(request)))

    async def ListRollouts(
        self, request: admin_pb2.ListRolloutsRequest, context: Any
    ) -> admin_pb2.ListRolloutsResponse:
        async with guarded(context):
            restarts = [r for r in self._restarts.rollouts() if request.rollout_id in ("", r.rollout_id)]
            found = restarts if restarts and request.rollout_id else restarts + await self._rollouts.listed(request)
            found.sort(key=lambda r: r.started_unix_ms, reverse=True)
            return admin_pb2.ListRolloutsResponse(
                rollouts=fitting(found[: request.limit or HISTORY_DEFAULT]), leader_id=self._rollouts.leader_id
            )

    async def EndRollout(self, request: admin_pb2.EndRolloutRequest, context: Any) -> admin_pb2.EndRolloutResponse:
        async with guarded(context):
            if any(r.rollout_id == request.rollout_id for r in self._restarts.rollouts()):
                return admin_pb2.EndRolloutResponse(rollout=await self._restarts.end(request))
            return admin_pb2.EndRolloutResponse(rollout=encode_rollout(await self._rollouts.end(request)))

    async def StartRestart(
        self, request: admin_pb2.StartRestartRequest, context: Any
    ) -> admin_pb2.StartRestartResponse:
        async with guarded(context):
            return await self._restarts.start(request)

    def _newest(self) -> Stored:
        stored = self._replica.newest.value
        if stored is None:
            raise StoreUnavailable(f"no policy is loaded yet: {self._replica.store.state.description}")
        return stored

    def _node(self, node_id: str) -> Node:
        member = self._fleet.member(node_id)
        if member is None:
            known = ", ".join(m.node_id for m in self._fleet) or "none"
            message = f"no node is called {node_id!r}; known nodes: {known}"
            raise InvalidRequest(message, violations=(Violation("node_id", message),))
        return member.hello.node

    def _any_node(self) -> Node:
        """No overlay is for it. Its window is the longest of the connected workers', so that `inactive` is what no worker acts on."""
        windows = [m.hello.node.limits.max_model_len for m in self._fleet.connected(Role.WORKER)]
        longest = max(windows) if windows and all(windows) else 0
        return Node("a node without overlays", limits=Limits(max_model_len=longest))

    def _store_state(self) -> admin_pb2.StoreState:
        return encode_store(self._replica.store.state)


def _caller(context: Any) -> str:
    return str(dict(context.invocation_metadata() or ()).get("traceparent", ""))
