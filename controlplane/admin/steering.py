"""Requests that are on workers now, moved, kept apart or let go by a person.

Every worker is asked at once, since nobody here knows who has them; those that have one of them act, and say how many.
Nothing is written anywhere: what was asked, by whom, why and with what effect is one line in the log.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable
from typing import Protocol

import structlog

from controlplane.access import Role
from controlplane.admin.checks import refuse_if, unfit, who_and_why
from controlplane.fleet import Fleet, Member
from controlplane.gatekeeper import granted
from controlplane.peers import ASK_S, Peers
from trimtab.codec import decode_match
from trimtab.errors import Violation
from trimtab.kit.tls import PLAIN
from trimtab.messages import RequestMatch
from trimtab.messages import Role as NodeRole
from trimtab.policy import FIELDS
from trimtab.v1 import admin_pb2, control_pb2
from trimtab.validation import MAX_REQUEST_ID

log = structlog.get_logger(__name__)

ANSWER_S = 3.0
"""What workers get for their answers; the callers wait longer."""
MAX_IDS = 256
MAX_TENANT_CHARS = 200
MAX_DELTA = FIELDS["priority.max_priority_diff"].maximum


class AskWorkers(Protocol):
    """ControlServicer.command."""

    def __call__(
        self, command: control_pb2.Command, *, within_s: float, only: frozenset[str] = frozenset()
    ) -> Awaitable[dict[str, control_pb2.CommandResult]]: ...


async def steer(
    request: admin_pb2.SteerRequestsRequest, ask: AskWorkers, fleet: Fleet, peers: Peers
) -> admin_pb2.SteerRequestsResponse:
    """This replica's workers and, unless the request is `local`, those of the others. InvalidRequest before any worker is asked."""
    grant = granted()
    if grant.caller != PLAIN and grant.role < Role.ADMIN:
        request.author = grant.caller.name
    meant = decode_match(request.match)
    _check(request, meant)
    command = _command(request)
    only = frozenset(request.node_ids)
    results, elsewhere = await asyncio.gather(ask(command, within_s=ANSWER_S, only=only), _ask_peers(request, peers))
    nodes = [_encode(node_id, result) for node_id, result in results.items()]
    nodes += [node for node in elsewhere if node.node_id not in results]
    answered = {node.node_id for node in nodes}
    members = fleet.local() if request.local else list(fleet)
    for m in members:
        if m.hello.role is NodeRole.WORKER and m.node_id not in answered and (not only or m.node_id in only):
            nodes.append(_unheard(m))
    action = request.WhichOneof("action")
    log.info(
        "requests steered",
        action=action,
        **({"delta": request.reprioritise.delta} if action == "reprioritise" else {}),
        **({"isolated": request.isolate.isolated} if action == "isolate" else {}),
        request_ids=sorted(meant.request_ids),
        workload=meant.workload.value if meant.workload else None,
        tenant=meant.tenant,
        min_prompt_tokens=meant.min_prompt_tokens,
        min_age_ms=meant.min_age_ms,
        only=sorted(only),
        author=request.author,
        reason=request.reason,
        command_id=command.command_id,
        affected=sum(node.affected for node in nodes),
        nodes={node.node_id: node.affected if node.done else node.reason for node in nodes},
    )
    return admin_pb2.SteerRequestsResponse(nodes=sorted(nodes, key=lambda node: node.node_id))


async def _ask_peers(request: admin_pb2.SteerRequestsRequest, peers: Peers) -> list[admin_pb2.NodeSteered]:
    """What the other replicas' workers made of it."""
    if request.local:
        return []
    forwarded = admin_pb2.SteerRequestsRequest()
    forwarded.CopyFrom(request)
    forwarded.local = True
    answers = await peers.ask("SteerRequests", forwarded, within_s=ANSWER_S + ASK_S)
    known = [a for a in answers.values() if isinstance(a, admin_pb2.SteerRequestsResponse)]
    return [node for answer in known for node in answer.nodes if node.reason != "NOT_CONNECTED"]


def _unheard(m: Member) -> admin_pb2.NodeSteered:
    if m.replica and m.connected:
        words = f"replica {m.replica}, which it is connected to, gave no answer; it may have done it"
        return admin_pb2.NodeSteered(node_id=m.node_id, reason="NO_ANSWER", message=words)
    words = "not asked: it has no control stream now"
    return admin_pb2.NodeSteered(node_id=m.node_id, reason="NOT_CONNECTED", message=words)


def _check(request: admin_pb2.SteerRequestsRequest, meant: RequestMatch) -> None:
    """Every fault of it at once."""
    faults = who_and_why(request.author, request.reason)
    if not request.reason.strip():
        faults.append(Violation("reason", "say why; the log shows it"))
    if request.WhichOneof("action") is None:
        faults.append(Violation("action", "set reprioritise, isolate or release"))
    if meant.empty:
        faults.append(Violation("match", "say which: request_ids, workload, tenant, min_prompt_tokens or min_age_ms"))
    if len(meant.request_ids) > MAX_IDS:
        faults.append(Violation("match.request_ids", f"at most {MAX_IDS} at once"))
    if "" in meant.request_ids:
        faults.append(Violation("match.request_ids", "an id is never empty"))
    faults += unfit(
        [
            *(("match.request_ids", request_id, MAX_REQUEST_ID) for request_id in meant.request_ids),
            ("match.tenant", meant.tenant, MAX_TENANT_CHARS),
        ]
    )
    if abs(request.reprioritise.delta) > MAX_DELTA:
        faults.append(Violation("reprioritise.delta", f"between -{MAX_DELTA:g} and {MAX_DELTA:g} levels"))
    refuse_if(faults)


def _command(request: admin_pb2.SteerRequestsRequest) -> control_pb2.Command:
    """One id for every worker, so that one search of the logs finds them all."""
    command = control_pb2.Command(command_id=uuid.uuid4().hex)
    match request.WhichOneof("action"):
        case "reprioritise":
            command.reprioritise.match.CopyFrom(request.match)
            command.reprioritise.delta = request.reprioritise.delta
        case "isolate":
            command.isolate_requests.match.CopyFrom(request.match)
            command.isolate_requests.isolated = request.isolate.isolated
        case _:
            command.release_requests.match.CopyFrom(request.match)
    return command


def _encode(node_id: str, result: control_pb2.CommandResult) -> admin_pb2.NodeSteered:
    return admin_pb2.NodeSteered(
        node_id=node_id, done=result.ok, affected=result.affected, reason=result.reason, message=result.message
    )
