"""What people do to workers: force their breakers, drain them, and look at what was done.

Each is one line in the log, and an action in the store that `trimtab why NODE` tells. A drain is not kept from happening by a store that is
away: it changes nothing that the store holds, and stands in the log alone then.
"""

from __future__ import annotations

import difflib
import uuid
from collections.abc import Awaitable, Iterable
from typing import Protocol

import structlog

from controlplane.access import Role
from controlplane.admin.checks import refuse_if, who_and_why
from controlplane.breaker_keeper import BreakerKeeper
from controlplane.breakers import DEFAULT_FORCE_MS, MAX_FORCE_MS, Word
from controlplane.fleet import Fleet, Member
from controlplane.gatekeeper import granted
from controlplane.peers import ASK_S, Peers
from controlplane.replica import unix_ms
from controlplane.restarts.steps import within
from controlplane.store import Action, PolicyStore
from controlplane.view import SIDES
from trimtab.errors import InvalidRequest, StoreUnavailable, Violation
from trimtab.kit.duration import brief
from trimtab.kit.tls import PLAIN
from trimtab.messages import NodeState
from trimtab.messages import Role as NodeRole
from trimtab.v1 import admin_pb2, control_pb2

log = structlog.get_logger(__name__)

ANSWER_S = 3.0
"""What a worker gets for its answer; the caller waits longer."""
MAX_DEADLINE_MS = 86_400_000
MAX_NODE_CHARS = 200
NOT_CONNECTED = "NOT_CONNECTED"
RESTARTED = "drain and restart"
"""How an action of the store begins that had a worker started anew."""


class AskOne(Protocol):
    """ControlServicer.command_one."""

    def __call__(
        self, node_id: str, command: control_pb2.Command, *, within_s: float
    ) -> Awaitable[control_pb2.CommandResult | None]: ...


class Changing(Protocol):
    """What each of these requests says."""

    node_id: str
    author: str
    reason: str


class Workers:
    """What AdminService does to workers."""

    def __init__(
        self, fleet: Fleet, breakers: BreakerKeeper, store: PolicyStore, peers: Peers, ask_one: AskOne
    ) -> None:
        self._fleet = fleet
        self._breakers = breakers
        self._store = store
        self._peers = peers
        self._ask_one = ask_one

    def breakers(self) -> list[admin_pb2.WorkerBreaker]:
        """Of every worker that is known, and of those that are gone while something is forced on them."""
        found = {m.node_id: self._breaker(m.node_id) for m in self._fleet if m.hello.role is NodeRole.WORKER}
        gone = (w.node_id for w in self._breakers.ledger.forced(unix_ms()))
        found.update({name: self._breaker(name) for name in gone if name not in found})
        return [found[name] for name in sorted(found)]

    def in_force(self, node_id: str) -> admin_pb2.WorkerBreaker | None:
        """None where neither an operator's word holds for it nor a gateway's trip."""
        pb = self._breaker(node_id)
        return pb if pb.HasField("forced") or pb.trip.open_ms else None

    async def force(self, request: admin_pb2.ForceBreakerRequest) -> admin_pb2.ForceBreakerResponse:
        """InvalidRequest, with the nearest name, for a worker that nobody knows; StoreUnavailable when the store did not take it."""
        side = next((side for side, forced in SIDES.items() if forced == request.forced), None)
        for_ms = request.for_ms or DEFAULT_FORCE_MS
        faults = _signed(request)
        if request.forced not in (control_pb2.BREAKER_FORCE_UNSPECIFIED, *SIDES.values()):
            faults.append(Violation("forced", "open, closed, or unspecified to take it back"))
        if for_ms > MAX_FORCE_MS:
            faults.append(Violation("for_ms", f"at most {brief(MAX_FORCE_MS)}"))
        refuse_if(faults)
        forced = [w.node_id for w in self._breakers.ledger.forced(unix_ms())]
        if request.node_id not in forced:
            self._worker(request.node_id, "has no breaker: breakers are of workers")
        word = await self._breakers.force(
            request.node_id, side, author=request.author, reason=request.reason, for_ms=for_ms
        )
        if word is not None:
            await self._record(request, _told(word))
        return admin_pb2.ForceBreakerResponse(worker=self._breaker(request.node_id), changed=word is not None)

    async def drain(self, request: admin_pb2.DrainNodeRequest) -> admin_pb2.DrainNodeResponse:
        """InvalidRequest for what can't be drained; what the worker said, or why it said nothing."""
        faults = _signed(request)
        if request.deadline_ms > MAX_DEADLINE_MS:
            faults.append(Violation("deadline_ms", f"at most {brief(MAX_DEADLINE_MS)}"))
        if request.settings and not request.restart:
            faults.append(Violation("settings", "they hold from a worker's next start on: only with restart"))
        refuse_if(faults)
        worker = self._worker(
            request.node_id, "can't be drained by command: end its process with SIGTERM, which drains it"
        )
        response = await self._drain_here(request, worker)
        if response is None:
            response = await self._drain_there(request, worker)
        response.incarnation, response.model = worker.hello.incarnation, worker.hello.model
        response.others = len(self._others(worker))
        if not request.local:
            what = RESTARTED if request.restart else "drain"
            told = "".join(f", {name}={value or 'taken back'}" for name, value in sorted(request.settings.items()))
            await self._record(request, f"{what} {within(request.deadline_ms)}{told}{_unless_done(response)}")
        return response

    def runs(self, node_id: str, incarnation: str) -> bool:
        """Whether that process is connected, here or at another replica."""
        member = self._fleet.member(node_id)
        return member is not None and member.connected and member.hello.incarnation == incarnation

    async def reload(self, request: admin_pb2.ReloadNodeRequest) -> admin_pb2.ReloadNodeResponse:
        """The worker's engine is told its policy anew. InvalidRequest for what is no worker."""
        refuse_if(_signed(request))
        worker = self._worker(request.node_id, "holds its policy in one process: there is nothing to tell anew")
        response = await self._reload_here(request.node_id)
        if response is None and worker.connected and worker.replica and not request.local:
            forwarded = admin_pb2.ReloadNodeRequest()
            forwarded.CopyFrom(request)
            forwarded.local = True
            asked = {worker.replica: forwarded}
            answer = (await self._peers.ask_each("ReloadNode", asked, within_s=ANSWER_S + ASK_S)).get(worker.replica)
            known = isinstance(answer, admin_pb2.ReloadNodeResponse)
            response = (
                answer
                if known
                else admin_pb2.ReloadNodeResponse(reason="NO_ANSWER", message="its replica gave no answer")
            )
        if response is None:
            response = admin_pb2.ReloadNodeResponse(reason=NOT_CONNECTED, message="it has no control stream now")
        if not request.local:
            failed = "" if response.done else f"; not done: {response.reason}"
            await self._record(request, f"policy told anew{failed}")
        return response

    async def _reload_here(self, node_id: str) -> admin_pb2.ReloadNodeResponse | None:
        """None where it is not connected to this replica."""
        command = control_pb2.Command(command_id=uuid.uuid4().hex)
        command.reload_policy.SetInParent()
        result = await self._ask_one(node_id, command, within_s=ANSWER_S)
        if result is None:
            return None
        return admin_pb2.ReloadNodeResponse(done=result.ok, reason=result.reason, message=result.message)

    async def actions(self, node_id: str, limit: int) -> list[Action]:
        """Newest first."""
        found = await self._store.actions()
        return [a for a in found if not node_id or a.node_id == node_id][:limit]

    async def _drain_here(
        self, request: admin_pb2.DrainNodeRequest, worker: Member
    ) -> admin_pb2.DrainNodeResponse | None:
        """None where it is connected to another replica."""
        if not worker.connected or worker.replica:
            words = "not asked: it has no control stream here now; see `trimtab fleet`"
            elsewhere = worker.connected and not request.local
            return None if elsewhere else admin_pb2.DrainNodeResponse(reason=NOT_CONNECTED, message=words)
        command = control_pb2.Command(command_id=uuid.uuid4().hex)
        command.drain.deadline_ms, command.drain.restart = request.deadline_ms, request.restart
        command.drain.settings.update(request.settings)
        result = await self._ask_one(worker.node_id, command, within_s=ANSWER_S)
        if result is None:
            return admin_pb2.DrainNodeResponse(reason=NOT_CONNECTED, message="not asked: it has just left")
        done = result.ok or (result.reason == "LOST" and self._drained(worker))
        if done:
            return admin_pb2.DrainNodeResponse(done=True)
        return admin_pb2.DrainNodeResponse(reason=result.reason, message=result.message)

    def _drained(self, worker: Member) -> bool:
        """It said that it drains, and was gone before it said that it obeys."""
        now = self._fleet.member(worker.node_id)
        same = now is not None and now.hello.incarnation == worker.hello.incarnation
        return now is not None and same and now.report is not None and now.report.state is NodeState.DRAINING

    async def _drain_there(self, request: admin_pb2.DrainNodeRequest, worker: Member) -> admin_pb2.DrainNodeResponse:
        """By the replica that it is connected to."""
        forwarded = admin_pb2.DrainNodeRequest()
        forwarded.CopyFrom(request)
        forwarded.local = True
        answers = await self._peers.ask("DrainNode", forwarded, within_s=ANSWER_S + ASK_S)
        answer = answers.get(worker.replica)
        if isinstance(answer, admin_pb2.DrainNodeResponse):
            return answer
        words = f"replica {worker.replica}, which it is connected to, gave no answer; it may still do it"
        return admin_pb2.DrainNodeResponse(reason="NO_ANSWER", message=words)

    def _others(self, worker: Member) -> list[Member]:
        return [
            m
            for m in self._fleet.connected(NodeRole.WORKER)
            if m.node_id != worker.node_id
            and m.hello.model == worker.hello.model
            and m.report is not None
            and m.report.state is NodeState.SERVING
        ]

    def _breaker(self, node_id: str) -> admin_pb2.WorkerBreaker:
        member, ledger, now = self._fleet.member(node_id), self._breakers.ledger, unix_ms()
        incarnation = member.hello.incarnation if member is not None else ""
        pb = admin_pb2.WorkerBreaker(
            node_id=node_id, incarnation=incarnation, connected=member is not None and member.connected
        )
        if (trip := ledger.trip(node_id, incarnation)) is not None:
            pb.trip.gateway_id, pb.trip.dimension, pb.trip.because = trip.gateway_id, trip.dimension, trip.because
            pb.trip.at_unix_ms, pb.trip.open_ms, pb.trip.trips = trip.at_unix_ms, ledger.open_ms(trip, now), trip.trips
        if (word := ledger.word(node_id, now)) is not None and word.side is not None:
            pb.forced.forced, pb.forced.author, pb.forced.reason = SIDES[word.side], word.author, word.reason
            pb.forced.at_unix_ms, pb.forced.until_unix_ms = word.at_unix_ms, word.until_unix_ms
        return pb

    def _worker(self, node_id: str, if_none: str) -> Member:
        """InvalidRequest where nobody knows it, or it is none; `if_none` says what is wrong with it then."""
        member = self._fleet.member(node_id)
        if member is None:
            workers = [m.node_id for m in self._fleet if m.hello.role is NodeRole.WORKER]
            raise unknown_worker(node_id, workers)
        if member.hello.role is not NodeRole.WORKER:
            message = f"{node_id} is a {member.hello.role.value} and {if_none}"
            raise InvalidRequest(message, violations=(Violation("node_id", message),))
        return member

    async def _record(self, request: Changing, what: str) -> None:
        log.info("worker steered", node=request.node_id, what=what, author=request.author, reason=request.reason)
        try:
            action = Action(request.node_id, what, request.author, request.reason, unix_ms())
            await self._store.record_action(action)
        except StoreUnavailable as e:
            log.warning("action not recorded", node=request.node_id, what=what, because=e.message)


def _signed(request: Changing) -> list[Violation]:
    """Whoever is no admin acts in his own name."""
    grant = granted()
    if grant.caller != PLAIN and grant.role < Role.ADMIN:
        request.author = grant.caller.name
    faults = who_and_why(request.author, request.reason)
    if not request.node_id or len(request.node_id) > MAX_NODE_CHARS:
        faults.append(Violation("node_id", "name a worker"))
    return faults


def unknown_worker(node_id: str, workers: Iterable[str]) -> InvalidRequest:
    """With the nearest name, or all of them."""
    names = sorted(workers)
    near = difflib.get_close_matches(node_id, names, n=1, cutoff=0.5)
    shown = ", ".join(names[:20]) or "none"
    hint = f"did you mean {near[0]}?" if near else f"known workers: {shown}"
    message = f"no worker is called {node_id!r}; {hint}"
    return InvalidRequest(message, violations=(Violation("node_id", message),))


def _told(word: Word) -> str:
    if word.side is None:
        return "breaker as gateways see it"
    return f"breaker {word.side} for {brief(word.until_unix_ms - word.at_unix_ms)}"


def _unless_done(response: admin_pb2.DrainNodeResponse) -> str:
    return "" if response.done else f"; not done: {response.reason}"
