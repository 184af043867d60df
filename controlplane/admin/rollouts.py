"""Rollouts as people ask for them: begun, shown, ended. The leader carries on what was begun here, whichever replica that was.

A rollout is kept before its policy is written, so that canaries get less of new work first. What is refused leaves nothing behind. None begins
while a rolling restart is on its way, and the other way round: processes that people end can't be told from those that a policy ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Iterable

from controlplane.access import Role
from controlplane.admin.checks import refuse_if, unfit, who_and_why
from controlplane.admin.encode import checked_scope
from controlplane.admin.writing import MAX_FIELDS, unfit_fields
from controlplane.controllers.decision import Propose
from controlplane.fleet import Fleet
from controlplane.gatekeeper import granted
from controlplane.leader import Leader
from controlplane.replica import Replica, unix_ms
from controlplane.rollouts import builds
from controlplane.rollouts.choose import Wanted, Worker, choose
from controlplane.rollouts.driver import apply, document_of
from controlplane.rollouts.keeper import Keeper
from controlplane.rollouts.state import Rollout, Stage
from controlplane.spec import promote
from trimtab.codec import encode_scope
from trimtab.errors import Conflict, InvalidRequest, PolicyRefused, StoreUnavailable, TrimtabError, Violation
from trimtab.kit.tls import PLAIN
from trimtab.messages import NodeState
from trimtab.messages import Role as NodeRole
from trimtab.policy import field as field_of
from trimtab.snapshot import Document, Limits, Node, Scope, resolve
from trimtab.v1 import admin_pb2

LISTED = 20
MAX_BAKE_S = 86_400
MAX_CHARS = 200
ATTEMPTS = 8
"""Times that an end is written anew because the leader came between."""


class Rollouts:
    """What AdminService does with rollouts of policies."""

    def __init__(
        self,
        keeper: Keeper,
        replica: Replica,
        fleet: Fleet,
        leader: Leader,
        restarts: Callable[[], Iterable[admin_pb2.Rollout]],
    ) -> None:
        self._keeper = keeper
        self._restarts = restarts
        self._replica = replica
        self._fleet = fleet
        self._leader = leader
        self._beginning = asyncio.Lock()

    async def start(self, request: admin_pb2.StartRolloutRequest) -> Rollout:
        """Checked, with canaries chosen, and begun unless `dry_run`. InvalidRequest, PolicyRefused and Conflict begin nothing."""
        faults = _signed(request) + unfit_fields("fields", request.fields)
        if not request.fields or len(request.fields) > MAX_FIELDS:
            faults.append(Violation("fields", f"name from 1 to {MAX_FIELDS} fields to set"))
        faults += _unfit_canaries(request)
        refuse_if(faults)
        scope = checked_scope(request.scope) if request.HasField("scope") else Scope()
        wanted = Wanted(
            request.canary_count, request.canary_share, request.canary_label, tuple(request.canary_node_ids)
        )
        expect = request.expect_version if request.HasField("expect_version") else None
        weight = request.weight if request.HasField("weight") else None
        return await self._start(
            dict(request.fields), scope, wanted, request.author, request.reason,
            bake_s=request.bake_s, weight=weight, expect_version=expect, dry_run=request.dry_run,
        )  # fmt: skip

    async def propose(self, author: str, proposed: Propose) -> str:
        """A controller's; why it was not begun, or nothing."""
        try:
            reason = f"{proposed.reason}; {proposed.evidence}" if proposed.evidence else proposed.reason
            await self._start(dict(proposed.fields), proposed.scope, Wanted(), author, reason)
        except TrimtabError as e:
            return e.message
        return ""

    async def _start(
        self,
        fields: dict[str, str],
        scope: Scope,
        wanted: Wanted,
        author: str,
        reason: str,
        *,
        bake_s: int = 0,
        weight: float | None = None,
        expect_version: int | None = None,
        dry_run: bool = False,
    ) -> Rollout:
        async with self._beginning:
            await self._keeper.look()
            if (other := self._keeper.live) is not None:
                words = f"rollout {other.rollout_id} of {other.author} lives ({other.stage}); one at a time: wait for it, or end it"
                raise Conflict(
                    f"{words} (trimtab rollout abort {other.rollout_id})", metadata={"rollout": other.rollout_id}
                )
            self._refuse_beside_a_restart()
            fields = {field_of(path).path: typed for path, typed in fields.items()}
            document = document_of(self._replica)
            rules = resolve(document, Node("", limits=Limits()), now_unix_ms=0).policy.rollout
            workers = self._workers(document, fields, scope)
            # What the whole scope could not have in the end is refused before anybody is asked to try it.
            promote("", fields, scope)(document, self._nodes(), unix_ms())
            canaries = choose(workers, wanted)
            now, rollout_id = unix_ms(), f"r-{uuid.uuid4().hex[:8]}"
            share = rules.weight if weight is None else weight
            if share <= 0.0:
                raise PolicyRefused(
                    "a canary without work shows nothing: the weight is above 0",
                    reason="NO_WEIGHT",
                    field="rollout.weight",
                )
            r = Rollout(
                rollout_id, author, reason, fields, builds.set_now(document, fields, scope), scope, canaries,
                tuple(sorted(w.node_id for w in workers if w.node_id not in canaries)), share,
                bake_s or rules.bake_s, now, now,
            ).told(now, f"canaries: {', '.join(canaries)}")  # fmt: skip
            begin = builds.begin(rollout_id, fields, scope, canaries)
            # Nobody hears of what would be refused.
            await self._replica.write(
                begin, self._nodes, author=author, reason=reason, expect_version=expect_version, dry_run=True
            )
            if dry_run:
                return r
            kept = await self._keeper.save(r)
            assert kept is not None
            try:
                # Both may have begun at once.
                self._refuse_beside_a_restart()
                words = f"rollout {rollout_id} to {', '.join(canaries)}" + (f": {reason}" if reason else "")
                await self._replica.write(
                    begin, self._nodes, author=author, reason=words[:500], expect_version=expect_version
                )
            except TrimtabError:
                # With the store away it stays until the leader finds nothing of it in the policy.
                with contextlib.suppress(StoreUnavailable):
                    await self._keeper.undo(kept, unix_ms())
                raise
            return kept

    def _refuse_beside_a_restart(self) -> None:
        r = next((x for x in self._restarts() if x.live), None)
        if r is not None:
            words = f"restart {r.rollout_id} of {r.author} is on its way: wait for it, or abort it"
            raise Conflict(f"{words} (trimtab rollout abort {r.rollout_id})", metadata={"rollout": r.rollout_id})

    async def end(self, request: admin_pb2.EndRolloutRequest) -> Rollout:
        """By a person, now: everybody has it, or nobody. InvalidRequest for one that is not there, Conflict for one that has ended."""
        refuse_if(_signed(request))
        await self._keeper.look()
        stage = Stage.PROMOTED if request.promote else Stage.ABORTED
        for _ in range(ATTEMPTS):
            r = self._find(request.rollout_id)
            if not r.live:
                raise Conflict(f"rollout {r.rollout_id} has ended: {r.verdict}")
            words = f"{'promoted' if request.promote else 'aborted'} by {request.author}"
            words += f": {request.reason}" if request.reason else ""
            after = r.ended(stage, unix_ms(), words)
            reason = f"rollout {r.rollout_id} {words}"[:500]
            await apply(self._replica, self._nodes, after, author=request.author, reason=reason)
            kept = await self._keeper.save(after)
            if kept is not None:
                return kept
        raise Conflict("the leader kept carrying it on in between; try again")

    async def listed(self, request: admin_pb2.ListRolloutsRequest) -> list[admin_pb2.Rollout]:
        """Newest first; as far as is known here while the store is away."""
        with contextlib.suppress(StoreUnavailable):
            await self._keeper.look()
        if request.rollout_id:
            return [encode_rollout(self._find(request.rollout_id))]
        return [encode_rollout(r) for r in self._keeper.all()[: request.limit or LISTED]]

    @property
    def leader_id(self) -> str:
        """As this replica knows it; empty while nobody leads."""
        led = self._leader.newest
        return led.holder.partition("/")[0] if led is not None else ""

    def _find(self, rollout_id: str) -> Rollout:
        found = next((r for r in self._keeper.all() if r.rollout_id == rollout_id), None)
        if found is None:
            known = ", ".join(r.rollout_id for r in self._keeper.all()[:5]) or "none"
            message = f"no rollout is called {rollout_id[:80]!r}; the newest: {known}"
            raise InvalidRequest(message, violations=(Violation("rollout_id", message),))
        return found

    def _workers(self, document: Document, fields: Iterable[str], scope: Scope) -> list[Worker]:
        return [
            Worker(m.hello.node, m.hello.model)
            for m in self._fleet.connected(NodeRole.WORKER)
            if m.report is not None
            and m.report.state is NodeState.SERVING
            and scope.covers(m.hello.node)
            and not builds.shadowed(document, fields, scope, m.hello.node)
        ]

    def _nodes(self) -> list[Node]:
        return [m.hello.node for m in self._fleet.connected()]


def encode_rollout(r: Rollout) -> admin_pb2.Rollout:
    return admin_pb2.Rollout(
        rollout_id=r.rollout_id,
        kind="policy",
        stage=r.stage.value,
        live=r.live,
        author=r.author,
        reason=r.reason,
        started_unix_ms=r.started_unix_ms,
        ended_unix_ms=r.ended_unix_ms,
        fields=r.fields,
        scope=encode_scope(r.scope),
        node_ids=r.canaries,
        pending_node_ids=r.pending if r.live else (),
        weight=r.weight,
        bake_s=r.bake_s,
        verdict=r.verdict,
        lines=[admin_pb2.RolloutLine(at_unix_ms=x.at_unix_ms, text=x.text, evidence=x.evidence) for x in r.lines],
        measures=[
            admin_pb2.RolloutMeasure(
                name=m.name, canary=m.canary, rest=m.rest, canary_n=m.canary_n, rest_n=m.rest_n, verdict=m.verdict.value
            )
            for m in r.measures
        ],
    )


def _unfit_canaries(request: admin_pb2.StartRolloutRequest) -> list[Violation]:
    ways = (request.canary_count, request.canary_share, request.canary_label, len(request.canary_node_ids))
    faults = []
    if sum(map(bool, ways)) > 1:
        faults.append(Violation("canary", "a number, a share, a label or ids: one of them"))
    if not 0.0 <= request.canary_share < 1.0:
        faults.append(Violation("canary_share", "above 0 and below 1"))
    if request.canary_label and "=" not in request.canary_label:
        faults.append(Violation("canary_label", "KEY=VALUE"))
    if request.HasField("weight") and not 0.0 < request.weight <= 1.0:
        faults.append(Violation("weight", "above 0 and at most 1: a canary without work shows nothing"))
    if request.bake_s > MAX_BAKE_S:
        faults.append(Violation("bake_s", f"at most {MAX_BAKE_S} seconds"))
    words = [("canary_node_ids", name, MAX_CHARS) for name in request.canary_node_ids]
    return faults + unfit([*words, ("canary_label", request.canary_label, MAX_CHARS)])


def _signed(request: admin_pb2.StartRolloutRequest | admin_pb2.EndRolloutRequest) -> list[Violation]:
    """Whoever is no admin acts in his own name."""
    grant = granted()
    if grant.caller != PLAIN and grant.role < Role.ADMIN:
        request.author = grant.caller.name
    return who_and_why(request.author, request.reason)
