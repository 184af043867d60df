"""What people ask of rolling restarts: `StartRestart`, and the restarts' part of `ListRollouts` and `EndRollout`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from controlplane.access import Role
from controlplane.admin.checks import refuse_if, who_and_why
from controlplane.admin.encode import freshest
from controlplane.admin.workers import MAX_DEADLINE_MS, Workers, unknown_worker
from controlplane.fleet import Fleet, Member
from controlplane.gatekeeper import granted
from controlplane.leader import Leader
from controlplane.loop import TelemetryLoop
from controlplane.peers import Peers
from controlplane.replica import Replica, unix_ms
from controlplane.restarts.driver import Driver, new_id
from controlplane.restarts.sights import Holds, Noticed, sights_of
from controlplane.restarts.state import TO_COME, Line, Order, Restart, Stage, Step, Turn
from controlplane.restarts.steps import Answer, Ask, Sights, alone, why_shut
from controlplane.rollouts.keeper import Keeper
from controlplane.telemetry import Telemetry
from trimtab.codec import decode_identity
from trimtab.errors import Conflict, InvalidRequest, StoreUnavailable, TrimtabError, Violation
from trimtab.kit.tls import PLAIN
from trimtab.messages import NodeState
from trimtab.messages import Role as NodeRole
from trimtab.snapshot import Identity
from trimtab.v1 import admin_pb2
from trimtab.worker_settings import fault_of

READY_MS = 300_000
MAX_SETTINGS = 64
MAX_SETTING_CHARS = 512
KIND = "restart"
SENT_S = 10.0
"""After that the fleet knows of a worker that a controller sent away, or it did not go."""


class Restarts:
    """Belongs to one event loop; `run` must be running."""

    def __init__(
        self,
        replica: Replica,
        fleet: Fleet,
        telemetry: Telemetry,
        loop: TelemetryLoop,
        leader: Leader,
        peers: Peers,
        workers: Workers,
        noticed: Noticed,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._replica = replica
        self._fleet = fleet
        self._telemetry = telemetry
        self._loop = loop
        self._peers = peers
        self._workers = workers
        self._noticed = noticed
        self._clock = clock
        self.tried: Keeper | None = None
        """Policies that are tried on canaries; set where there are such."""
        self._sent: dict[str, float] = {}
        """Workers that controllers send away, by node id, and since when."""
        self._driver = Driver(replica.store, leader, self._look, self._tell)

    async def run(self) -> None:
        """For ever."""
        await self._driver.run()

    def restarting(self) -> frozenset[str]:
        """Workers that are away for a restart, or watched after it: controllers leave them alone."""
        return self._driver.under_way

    def keeps(self, node_id: str) -> str:
        """Why a controller is not to start this worker anew now, or nothing: then it is taken to go, and nobody else of its pool is told to
        before that is seen. One that hangs waits for nobody else."""
        under_way, now = self.restarting(), self._clock()
        if node_id in under_way:
            return f"{node_id} is started anew by a restart that is on its way"
        mine = self._fleet.member(node_id)
        hung = mine is not None and mine.report is not None and mine.report.state is NodeState.HUNG
        if not hung and (others := self._beside(node_id, under_way)):
            return f"a restart is on its way in its pool: {', '.join(others)} away or watched"
        self._sent = {n: at for n, at in self._sent.items() if now - at < SENT_S} | {node_id: now}
        return ""

    def _beside(self, node_id: str, names: Iterable[str]) -> list[str]:
        """Those of these workers that are others of its pool."""
        mine = self._fleet.member(node_id)
        found = {n: self._fleet.member(n) for n in names if n != node_id}
        return sorted(n for n, m in found.items() if m and mine and m.hello.node.pool == mine.hello.node.pool)

    async def _refuse_beside_a_policy(self) -> None:
        """Conflict while one is tried: whether it does worse could not be told from what a restart does."""
        if self.tried is None:
            return
        await self.tried.look()
        if (r := self.tried.live) is not None:
            words = f"rollout {r.rollout_id} of {r.author} lives ({r.stage}): wait for it, or end it"
            raise Conflict(f"{words} (trimtab rollout abort {r.rollout_id})", metadata={"rollout": r.rollout_id})

    def rollouts(self) -> list[admin_pb2.Rollout]:
        """All that are kept, newest first."""
        return [encode_restart(r) for r in self._driver.all]

    async def start(self, request: admin_pb2.StartRestartRequest) -> admin_pb2.StartRestartResponse:
        """InvalidRequest for what can't be begun, Conflict while another one or a policy's rollout lives; StoreUnavailable without the store."""
        order = self._order(request)
        sights = await self._look(frozenset())
        turns = self._turns(request, sights)
        last = [t.node_id for t in turns if alone(t.node_id, sights)]
        if request.dry_run:
            planned = Restart(new_id(), order, turns, unix_ms())
            return admin_pb2.StartRestartResponse(rollout=encode_restart(_warned(planned, last, sights)))
        if last and not order.force:
            raise InvalidRequest(
                _alone_words(last, sights), violations=(Violation("force", _alone_words(last, sights)),)
            )
        await self._refuse_beside_a_policy()
        begun = await self._driver.begin(order, turns)
        try:
            # Both may have begun at once.
            await self._refuse_beside_a_policy()
        except Conflict as e:
            await self._driver.end(begun.restart_id, Stage.ABORTED, e.message)
            raise
        return admin_pb2.StartRestartResponse(rollout=encode_restart(begun))

    async def end(self, request: admin_pb2.EndRolloutRequest) -> admin_pb2.Rollout:
        """It stops where it is. InvalidRequest where nobody knows it, or it is over."""
        author = _author(request.author)
        faults = who_and_why(author, request.reason)
        if request.promote:
            faults.append(Violation("promote", "a restart is no canary: there is nothing to promote"))
        refuse_if(faults)
        before = next((r for r in self._driver.all if r.restart_id == request.rollout_id), None)
        if before is not None and not before.live:
            raise InvalidRequest(f"{request.rollout_id} is over already: {before.stage.value}")
        why = f" ({request.reason})" if request.reason else ""
        ended = await self._driver.end(request.rollout_id, Stage.ABORTED, f"aborted by {author}{why}")
        if ended is None:
            raise InvalidRequest(f"no restart is called {request.rollout_id!r}; see `trimtab rollout list`")
        return encode_restart(ended)

    def _order(self, request: admin_pb2.StartRestartRequest) -> Order:
        author = _author(request.author)
        faults = who_and_why(author, request.reason)
        for name, ms in (("drain_ms", request.drain_ms), ("ready_ms", request.ready_ms), ("bake_ms", request.bake_ms)):
            if ms > MAX_DEADLINE_MS:
                faults.append(Violation(name, "at most a day"))
        if request.node_ids and request.pool:
            faults.append(Violation("pool", "name workers or a pool, not both"))
        if len(request.settings) > MAX_SETTINGS:
            faults.append(Violation("settings", f"at most {MAX_SETTINGS}"))
        for name, value in request.settings.items():
            # What they may be, the workers know.
            if wrong := fault_of(name[:MAX_SETTING_CHARS], value):
                faults.append(Violation("settings", wrong))
            if max(len(name), len(value)) > MAX_SETTING_CHARS or not (name + value).isprintable():
                faults.append(Violation("settings", f"at most {MAX_SETTING_CHARS} printable characters each"))
        refuse_if(faults)
        grace_s = self._heal_grace_s()
        return Order(
            author,
            request.reason,
            dict(request.settings),
            request.max_unavailable or 1,
            request.drain_ms or 1000 * grace_s,
            request.ready_ms or READY_MS,
            request.bake_ms,
            request.force,
            request.revert,
        )

    def _heal_grace_s(self) -> int:
        policies = self._loop.policies()
        if policies is None:
            raise StoreUnavailable(f"no policy is loaded yet: {self._replica.store.state.description}")
        return policies.spec(None).heal.grace_s

    def _turns(self, request: admin_pb2.StartRestartRequest, sights: Sights) -> tuple[Turn, ...]:
        """By pool and name. InvalidRequest for a worker that nobody knows, and where there is none."""
        for node_id in request.node_ids:
            if node_id not in sights:
                raise unknown_worker(node_id, sights)
        wanted = [s for s in sights.values() if (not request.pool or s.pool == request.pool)]
        wanted = [s for s in wanted if (s.node_id in request.node_ids if request.node_ids else s.connected)]
        if not wanted:
            where = f"pool {request.pool!r}" if request.pool else "the mesh"
            raise InvalidRequest(f"no worker of {where} is connected", violations=(Violation("pool", "no worker"),))
        return tuple(Turn(s.node_id, s.pool) for s in sorted(wanted, key=lambda s: (s.pool, s.node_id)))

    async def _look(self, names: frozenset[str]) -> Sights:
        now, policies = self._clock(), self._loop.policies()
        if policies is None:
            raise StoreUnavailable(f"no policy is loaded yet: {self._replica.store.state.description}")
        members = list(self._fleet)
        holds = await self._holds([m for m in members if m.node_id in names])
        seen = self._telemetry.seen(members, (), now)
        newest = self._replica.newest.value
        identity = newest.identity if newest is not None else Identity()
        return sights_of(members, seen.nodes, holds, identity, policies.spec, now, names, noticed=self._noticed)

    async def _holds(self, members: list[Member]) -> Holds:
        """Of workers elsewhere; their replicas know what they run by."""
        there = {m.replica for m in members if m.replica and m.connected and m.hello.role is NodeRole.WORKER}
        if not there:
            return {}
        asked = dict.fromkeys(there, admin_pb2.GetFleetRequest(local=True))
        answers = await self._peers.ask_each("GetFleet", asked)
        nodes = freshest(n for a in answers.values() if isinstance(a, admin_pb2.GetFleetResponse) for n in a.nodes)
        return {
            name: (
                decode_identity(n.policy.applied),
                f"{n.policy.refusal.reason}: {n.policy.refusal.message}" if n.policy.HasField("refusal") else "",
            )
            for name, n in nodes.items()
        }

    async def _tell(self, restart: Restart, ask: Ask) -> Answer:
        now = self._clock()
        sent = {n for n, at in self._sent.items() if now - at < SENT_S}
        if ask.node_id not in sent and (others := self._beside(ask.node_id, sent)):
            return Answer(False, "NOT_SENT", f"a controller has just sent {', '.join(others)} of its pool away")
        why = f"restart {restart.restart_id}" + (f": {restart.order.reason}" if restart.order.reason else "")
        request = admin_pb2.DrainNodeRequest(
            node_id=ask.node_id,
            deadline_ms=ask.deadline_ms,
            restart=True,
            settings=ask.settings,
            author=restart.order.author,
            reason=why,
        )
        try:
            response = await self._workers.drain(request)
        except TrimtabError as e:
            return Answer(False, e.reason, e.message)
        return Answer(response.done, response.reason, response.message)


def encode_restart(r: Restart) -> admin_pb2.Rollout:
    come = [t.node_id for t in r.turns if t.step not in (Step.PENDING, Step.LEFT_OUT)]
    return admin_pb2.Rollout(
        rollout_id=r.restart_id,
        kind=KIND,
        stage=r.stage.value,
        live=r.live,
        author=r.order.author,
        reason=r.order.reason,
        started_unix_ms=r.started_ms,
        ended_unix_ms=r.ended_ms,
        fields=r.order.settings,
        node_ids=come,
        pending_node_ids=[t.node_id for t in r.turns if t.step is Step.PENDING],
        bake_s=r.order.bake_ms // 1000,
        verdict=r.verdict or _where(r),
        lines=[_line(line) for line in r.lines],
    )


def _line(line: Line) -> admin_pb2.RolloutLine:
    return admin_pb2.RolloutLine(at_unix_ms=line.at_ms, text=line.text, evidence=line.evidence)


def _where(r: Restart) -> str:
    under_way = [f"{t.node_id} is {t.step.value}" for t in r.turns if t.node_id in r.under_way]
    left = sum(t.step in TO_COME for t in r.turns)
    return ", ".join([*under_way, f"{left} of {len(r.turns)} to go"])


def _warned(r: Restart, last: list[str], sights: Sights) -> Restart:
    for t in r.turns:
        r = r.said(r.started_ms, f"{t.node_id} of pool {t.pool}")
    for words in why_shut(sights.values()):
        r = r.said(r.started_ms, words)
    for node_id in last:
        r = r.said(r.started_ms, f"{node_id} is the only worker that serves its model: it goes with --force alone")
    return r


def _alone_words(last: list[str], sights: Sights) -> str:
    named = ", ".join(f"{node_id} ({sights[node_id].model})" for node_id in last[:5])
    models = {sights[node_id].model for node_id in last}
    shut = "".join(f" ({words})" for words in why_shut(s for s in sights.values() if s.model in models))
    return f"nobody else serves the model of {named}{shut}: its requests get NO_WORKER meanwhile; start another, or say --force"


def _author(said: str) -> str:
    """Whoever is no admin acts in his own name."""
    grant = granted()
    return said if grant.caller == PLAIN or grant.role >= Role.ADMIN else grant.caller.name
