"""KV block sizes of workers: changed while they run, one worker after another, and shown with what they waste.

Each change is one line in the log and an action in the store that `trimtab why NODE` tells. After a worker that did not do it the others are
left as they are: what one can't take, the next rarely can, and half a pool that computes its KV anew is enough.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import structlog

from controlplane.access import Role
from controlplane.admin.checks import refuse_if, unfit, who_and_why
from controlplane.admin.encode import fitting
from controlplane.admin.workers import MAX_NODE_CHARS, NOT_CONNECTED, AskOne, unknown_worker
from controlplane.fleet import Fleet, Member
from controlplane.gatekeeper import granted
from controlplane.leader import Leader
from controlplane.peers import ASK_S, Peers
from controlplane.replica import unix_ms
from controlplane.seen import NodeSeen
from controlplane.store import Action, Mark, PolicyStore
from controlplane.telemetry import Telemetry
from trimtab import measures
from trimtab.blocks import LADDER, recompute_s
from trimtab.codec import encode_limits
from trimtab.errors import InvalidRequest, StoreUnavailable, Violation
from trimtab.kit.tls import PLAIN
from trimtab.messages import NodeState
from trimtab.messages import Role as NodeRole
from trimtab.v1 import admin_pb2, control_pb2

log = structlog.get_logger(__name__)

ANSWER_S = 30.0
"""What a worker gets: its engine changes between two steps, and one of a long prompt on a CPU takes seconds."""
MAX_BLOCK_SIZE = 1 << 20
"""Tokens; beyond any engine's window."""
MAX_NODES = 1000
PLAN = "plan/"
"""Marks of the store under which pools' plans are kept, by pool."""


class Blocks:
    """What AdminService does about KV blocks. Belongs to one event loop."""

    def __init__(
        self, fleet: Fleet, telemetry: Telemetry, store: PolicyStore, peers: Peers, ask_one: AskOne, leader: Leader
    ) -> None:
        self._fleet = fleet
        self._telemetry = telemetry
        self._store = store
        self._peers = peers
        self._ask_one = ask_one
        self._leader = leader
        self._plans: list[admin_pb2.PoolBlocks] = []

    async def reblock(self, request: admin_pb2.ReblockNodesRequest) -> admin_pb2.ReblockNodesResponse:
        """InvalidRequest before any worker is asked; then what each said, or why it said nothing. A dry run asks all of them."""
        grant = granted()
        if grant.caller != PLAIN and grant.role < Role.ADMIN:
            request.author = grant.caller.name
        _check(request)
        workers = self._meant(request)
        seen = self._seen()
        found = []
        for worker in workers:
            node = await self._reblock_one(request, worker)
            rate, more_ms = _prefill(seen.get(worker.node_id))
            if node.HasField("result") and rate and node.result.recompute_tokens:
                node.recompute_s = recompute_s(node.result.recompute_tokens, _context(node.result), rate, more_ms)
            found.append(node)
            if not request.dry_run and not request.local:
                await self._record(request, worker, node)
            if not node.done and not request.dry_run:
                break
        return admin_pb2.ReblockNodesResponse(nodes=found)

    async def show(self) -> admin_pb2.GetBlocksResponse:
        """Of connected workers; pools' plans as the store had them last."""
        seen, now = self._seen(), time.monotonic()
        nodes = (_node(m, seen.get(m.node_id), now) for m in self._fleet.connected(NodeRole.WORKER))
        leader_id = self._peers.replica_id if self._leader.leads is not None else (self._peers.leader() or "")
        return admin_pb2.GetBlocksResponse(nodes=fitting(nodes), pools=await self._pools(), leader_id=leader_id)

    def _seen(self) -> Mapping[str, NodeSeen]:
        return self._telemetry.seen(self._fleet, (), time.monotonic()).nodes

    async def _pools(self) -> list[admin_pb2.PoolBlocks]:
        try:
            found = [pool for mark in await self._store.marks() if (pool := _plan(mark)) is not None]
            self._plans = sorted(found, key=lambda pool: pool.pool)
        except StoreUnavailable as e:
            log.warning("plans are shown as they were last read", because=e.message)
        return self._plans

    def _meant(self, request: admin_pb2.ReblockNodesRequest) -> list[Member]:
        """By node id. InvalidRequest for a name that no worker has, and for a pool without workers."""
        workers = {m.node_id: m for m in self._fleet if m.hello.role is NodeRole.WORKER}
        if request.node_ids:
            for name in request.node_ids:
                if name not in workers:
                    raise unknown_worker(name, workers)
            return [workers[name] for name in sorted(set(request.node_ids))]
        found = [m for m in workers.values() if m.connected and m.hello.node.pool == request.pool and not _leaves(m)]
        if not found:
            pools = ", ".join(sorted({m.hello.node.pool for m in workers.values() if m.connected})) or "none"
            message = f"no connected worker is in pool {request.pool!r}; pools with workers: {pools}"
            raise InvalidRequest(message, violations=(Violation("pool", message),))
        return found

    async def _reblock_one(self, request: admin_pb2.ReblockNodesRequest, worker: Member) -> admin_pb2.NodeReblocked:
        if not worker.connected:
            return _unheard(worker, NOT_CONNECTED, "not asked: it has no control stream now; see `trimtab fleet`")
        if worker.replica:
            if request.local:
                return _unheard(worker, NOT_CONNECTED, "not asked: it is connected to another replica")
            return await self._reblock_there(request, worker)
        command = control_pb2.Command(command_id=uuid.uuid4().hex)
        c = command.reblock
        c.block_size, c.when, c.dry_run = request.block_size, request.when, request.dry_run
        c.max_recompute_tokens, c.recompute = request.max_recompute_tokens, request.recompute
        result = await self._ask_one(worker.node_id, command, within_s=ANSWER_S)
        if result is None:
            return _unheard(worker, NOT_CONNECTED, "not asked: it has just left")
        return admin_pb2.NodeReblocked(
            node_id=worker.node_id,
            done=result.ok,
            result=result.reblock if result.ok else None,
            reason=result.reason,
            message=result.message,
            accepted_block_sizes=result.accepted_block_sizes,
        )

    async def _reblock_there(self, request: admin_pb2.ReblockNodesRequest, worker: Member) -> admin_pb2.NodeReblocked:
        """By the replica that it is connected to."""
        forwarded = admin_pb2.ReblockNodesRequest()
        forwarded.CopyFrom(request)
        del forwarded.node_ids[:]
        forwarded.node_ids.append(worker.node_id)
        forwarded.pool, forwarded.local = "", True
        asked = {worker.replica: forwarded}
        answer = (await self._peers.ask_each("ReblockNodes", asked, within_s=ANSWER_S + ASK_S)).get(worker.replica)
        if isinstance(answer, admin_pb2.ReblockNodesResponse) and answer.nodes:
            node: admin_pb2.NodeReblocked = answer.nodes[0]
            node.ClearField("recompute_s")
            return node
        words = f"replica {worker.replica}, which it is connected to, gave no answer; it may still do it"
        return _unheard(worker, "NO_ANSWER", words)

    async def _record(
        self, request: admin_pb2.ReblockNodesRequest, worker: Member, node: admin_pb2.NodeReblocked
    ) -> None:
        what = _told(request, node)
        log.info("worker steered", node=worker.node_id, what=what, author=request.author, reason=request.reason)
        try:
            action = Action(worker.node_id, what, request.author, request.reason, unix_ms())
            await self._store.record_action(action)
        except StoreUnavailable as e:
            log.warning("action not recorded", node=worker.node_id, what=what, because=e.message)


def _check(request: admin_pb2.ReblockNodesRequest) -> None:
    """Every fault of it at once."""
    faults = who_and_why(request.author, request.reason)
    faults += unfit([("node_ids", name, MAX_NODE_CHARS) for name in request.node_ids])
    faults += unfit([("pool", request.pool, MAX_NODE_CHARS)])
    if not request.node_ids and not request.pool:
        faults.append(Violation("node_ids", "name workers, or a pool"))
    if request.node_ids and request.pool:
        faults.append(Violation("pool", "workers are named: leave it empty"))
    if len(request.node_ids) > MAX_NODES:
        faults.append(Violation("node_ids", f"at most {MAX_NODES} at once"))
    if not 1 <= request.block_size <= MAX_BLOCK_SIZE:
        faults.append(Violation("block_size", f"between 1 and {MAX_BLOCK_SIZE} tokens"))
    if request.when not in control_pb2.ReblockWhen.values():
        faults.append(Violation("when", "idle or now"))
    refuse_if(faults)


def _leaves(m: Member) -> bool:
    """It drains: what runs there is not to be computed anew for nothing."""
    return m.report is not None and m.report.state is NodeState.DRAINING


def _unheard(worker: Member, reason: str, words: str) -> admin_pb2.NodeReblocked:
    return admin_pb2.NodeReblocked(node_id=worker.node_id, reason=reason, message=words)


def _told(request: admin_pb2.ReblockNodesRequest, node: admin_pb2.NodeReblocked) -> str:
    """As an action of the store."""
    if not node.done:
        return f"KV block size to {request.block_size}; not done: {node.reason}"
    r = node.result
    if r.before_block_size == r.after_block_size:
        return f"KV block size stays {r.after_block_size}: it had that one already"
    cost = f"{r.recompute_tokens} tokens computed anew"
    if r.carried_tokens:
        cost = f"{r.carried_tokens} tokens carried over" + (f", {cost}" if r.recompute_tokens else "")
    return f"KV block size {r.before_block_size} → {r.after_block_size}, {cost}"


def _context(r: control_pb2.ReblockResult) -> float:
    """Of a worker of an older build as if its requests were equally long."""
    return float(r.recompute_context) or r.recompute_tokens**2 / (2.0 * max(1, r.requests))


def _prefill(node: NodeSeen | None) -> tuple[float | None, float]:
    """Tokens a second at which it computes prompts, and the milliseconds that 1,000 tokens before it cost a token beside, by its own steps.
    The rate is None where it has said nothing of that lately.
    """
    if node is None:
        return None, 0.0
    now = time.monotonic()
    return node.gauge(measures.PREFILL_TOKENS_PER_S, now), node.gauge(measures.PREFILL_MS_PER_1000_CONTEXT, now) or 0.0


def _node(m: Member, seen: NodeSeen | None, now: float) -> admin_pb2.NodeBlocks:
    pb = admin_pb2.NodeBlocks(node_id=m.node_id, pool=m.hello.node.pool, limits=encode_limits(m.hello.node.limits))
    if seen is None or seen.incarnation != m.hello.incarnation or not seen.fresh(now):
        return pb
    gauges = seen.gauges
    if (fragmentation := gauges.get(measures.FRAGMENTATION)) is not None:
        pb.fragmentation = fragmentation
    pb.resident_tokens = int(max(0.0, gauges.get(measures.STORED_TOKENS, 0.0)))
    for size in LADDER:
        if (waste := gauges.get(measures.block_waste(size))) is not None:
            pb.waste[size] = waste
        if (kept := gauges.get(measures.prefix_kept(size))) is not None:
            pb.prefix_kept[size] = kept
    return pb


def _plan(mark: Mark) -> admin_pb2.PoolBlocks | None:
    """None for what is something else, or of a build that says it otherwise."""
    if not mark.key.startswith(PLAN):
        return None
    try:
        said: Any = json.loads(mark.data)
        return admin_pb2.PoolBlocks(
            pool=str(said["pool"]),
            phase=str(said["phase"]),
            named_block_size=int(said["named"]),
            planned_block_size=int(said["planned"]),
            reason=str(said["reason"]),
            evidence=str(said["evidence"]),
            at_unix_ms=mark.stamp,
            gain=dict(_gains(said["gain"].items())),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _gains(said: Iterable[tuple[Any, Any]]) -> Iterable[tuple[int, float]]:
    return ((int(size), float(gain)) for size, gain in said)
