"""What people and tools ask of the control plane. Reads are answered from memory while the store is away, and say so.

Every write goes through `Replica.change`. A refused attempt writes nothing but a line in the history, so that `policy history` shows who
tried what and why it did not happen.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterable
from typing import Any

import structlog

from controlplane.admin.checks import refuse_if, unfit, who_and_why
from controlplane.admin.steering import AskWorkers, steer
from controlplane.fleet import Fleet, Member
from controlplane.metrics import ControlMetrics
from controlplane.replica import Outcome, Replica, unix_ms
from controlplane.spec import shown
from controlplane.store import Entry, Stored
from trimtab.codec import (
    decode_document,
    encode_hello,
    encode_identity,
    encode_partial,
    encode_report,
    encode_snapshot,
)
from trimtab.errors import Conflict, InvalidRequest, PolicyRefused, StoreUnavailable, Violation
from trimtab.kit.rpc import guarded
from trimtab.kit.telemetry import fail, parse_traceparent, traceparent, tracer
from trimtab.kit.watch import Watch
from trimtab.messages import Role
from trimtab.policy import FIELDS, Change, Kind, flatten
from trimtab.snapshot import Identity, Limits, Node, resolve
from trimtab.v1 import admin_pb2, admin_pb2_grpc, control_pb2

log = structlog.get_logger(__name__)

HISTORY_DEFAULT = 20
MAX_FIELDS = 64
MAX_FIELD_CHARS = 100
MAX_NAMES_CHARS = 10_000
"""Of a field that holds a list of names."""
MAX_WAIT_MS = 60_000


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`answers` is set whenever a node answers a push, joins or is lost; `ask` puts a command to every worker."""

    def __init__(
        self, replica: Replica, fleet: Fleet, answers: Watch[None], metrics: ControlMetrics, ask: AskWorkers
    ) -> None:
        self._replica = replica
        self._ask = ask
        self._fleet = fleet
        self._answers = answers
        self._metrics = metrics

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
            try:
                _check(request)
            except InvalidRequest:
                self._metrics.puts.labels("invalid").inc()
                raise
            caller = dict(context.invocation_metadata() or ()).get("traceparent", "")
            attributes = {
                "trimtab.author": request.author,
                "trimtab.reason": request.reason,
                **{f"trimtab.field.{path}": text for path, text in request.fields.items()},
            }
            with tracer().start_as_current_span(
                "policy.put", context=parse_traceparent(caller), attributes=attributes
            ) as span:
                parent = traceparent(span)
                try:
                    outcome = await self._change(request, parent)
                except (PolicyRefused, Conflict, StoreUnavailable) as e:
                    fail(span, e, e.reason)
                    raise
                span.set_attribute("trimtab.policy", str(outcome.stored.identity))
            waits = outcome.written and request.wait_ms > 0
            nodes = await self._wait(outcome.stored.identity, min(request.wait_ms, MAX_WAIT_MS)) if waits else ()
            return admin_pb2.SetPolicyResponse(
                identity=encode_identity(outcome.stored.identity),
                spec_version=outcome.stored.spec_version,
                changes=_encode_changes(outcome.changes),
                nodes=[_encode_policy_state(m) for m in nodes],
                trace_id=parent[3:35],
            )

    async def _change(self, request: admin_pb2.SetPolicyRequest, parent: str) -> Outcome:
        """The change, counted by outcome; a refused attempt goes into the history."""
        count = self._metrics.puts.labels
        try:
            outcome = await self._replica.change(
                dict(request.fields),
                lambda: [m.hello.node for m in self._fleet.connected()],
                author=request.author,
                reason=request.reason,
                expect_version=request.expect_version if request.HasField("expect_version") else None,
                dry_run=request.dry_run,
                traceparent=parent,
            )
        except PolicyRefused as e:
            count("refused").inc()
            log.info(
                "policy refused", author=request.author, fields=dict(request.fields), cause=e.cause, because=e.message
            )
            if not request.dry_run:
                await self._record_refused(request, e)
            raise
        except Conflict:
            count("conflict").inc()
            raise
        except StoreUnavailable:
            count("unavailable").inc()
            raise
        count("written" if outcome.written else "dry_run" if request.dry_run else "unchanged").inc()
        return outcome

    async def _record_refused(self, request: admin_pb2.SetPolicyRequest, error: PolicyRefused) -> None:
        stored = self._newest()
        tried = ", ".join(f"{path}={text}" for path, text in request.fields.items())
        because = f"{tried}: {error.message}"
        entry = Entry(
            stored.identity, stored.spec_version, request.author, request.reason, unix_ms(), refused_because=because
        )
        try:
            await self._replica.store.record_refused(entry)
        except StoreUnavailable as e:
            log.warning("refused attempt not recorded", because=e.message)

    async def _wait(self, identity: Identity, wait_ms: int) -> list[Member]:
        """Connected workers, once all have answered or the time is over. A worker that is lost meanwhile is not waited for."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                while True:
                    version = self._answers.version
                    if all(m.answered(identity) for m in self._fleet.connected(Role.WORKER)):
                        break
                    await self._answers.until(version)
        return self._fleet.connected(Role.WORKER)

    async def ListPolicyHistory(
        self, request: admin_pb2.ListPolicyHistoryRequest, context: Any
    ) -> admin_pb2.ListPolicyHistoryResponse:
        async with guarded(context):
            entries = await self._replica.store.history(request.limit or HISTORY_DEFAULT)
            return admin_pb2.ListPolicyHistoryResponse(entries=[_encode_entry(e) for e in entries])

    async def GetFleet(self, request: admin_pb2.GetFleetRequest, context: Any) -> admin_pb2.GetFleetResponse:
        async with guarded(context):
            newest, now = self._replica.newest.value, time.monotonic()
            return admin_pb2.GetFleetResponse(
                desired=encode_identity(newest.identity) if newest else None,
                nodes=[_encode_member(m, now) for m in self._fleet],
                store=self._store_state(),
                last_refused=await self._last_refused(),
            )

    async def _last_refused(self) -> admin_pb2.PolicyHistoryEntry | None:
        """The newest entry of the log when it is a refusal; the fleet is shown without it while the store is away."""
        with contextlib.suppress(StoreUnavailable):
            newest = await self._replica.store.history(1)
            if newest and newest[0].refused_because:
                return _encode_entry(newest[0])
        return None

    async def SteerRequests(
        self, request: admin_pb2.SteerRequestsRequest, context: Any
    ) -> admin_pb2.SteerRequestsResponse:
        async with guarded(context):
            return await steer(request, self._ask, self._fleet)

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
        state = self._replica.store.state
        return admin_pb2.StoreState(connected=state.connected, description=state.description)


def _check(request: admin_pb2.SetPolicyRequest) -> None:
    """Every fault of the request itself, before anything is looked up."""
    faults = who_and_why(request.author, request.reason)
    if not request.fields:
        faults.append(Violation("fields", "name at least one field to set"))
    if len(request.fields) > MAX_FIELDS:
        faults.append(Violation("fields", f"at most {MAX_FIELDS} at once"))
    words = []
    for path, text in request.fields.items():
        lists = path in FIELDS and FIELDS[path].kind is Kind.NAMES
        words += [("fields", path, MAX_FIELD_CHARS), ("fields", text, MAX_NAMES_CHARS if lists else MAX_FIELD_CHARS)]
    refuse_if(faults + unfit(words))


def _encode_changes(changes: Iterable[Change]) -> list[admin_pb2.FieldChange]:
    return [admin_pb2.FieldChange(field=c.field, before=shown(c.before), after=shown(c.after)) for c in changes]


def _encode_entry(e: Entry) -> admin_pb2.PolicyHistoryEntry:
    return admin_pb2.PolicyHistoryEntry(
        identity=encode_identity(e.identity),
        spec_version=e.spec_version,
        author=e.author,
        reason=e.reason,
        written_unix_ms=e.written_unix_ms,
        changes=_encode_changes(e.changes),
        refused_because=e.refused_because,
    )


def _encode_policy_state(m: Member) -> admin_pb2.NodePolicyState:
    r = m.refusal
    return admin_pb2.NodePolicyState(
        node_id=m.node_id,
        applied=encode_identity(m.applied) if m.applied > Identity() else None,
        apply_ms=m.apply_ms,
        refused=encode_identity(r.identity) if r else None,
        refusal=control_pb2.PolicyRefused(reason=r.reason, field=r.field, message=r.message) if r else None,
    )


def _encode_member(m: Member, now: float) -> admin_pb2.FleetNode:
    return admin_pb2.FleetNode(
        hello=encode_hello(m.hello),
        report=encode_report(m.report) if m.report else None,
        policy=_encode_policy_state(m),
        connected=m.connected,
        seconds_since_report=now - m.heard_at,
        seconds_connected=(m.lost_at or now) - m.joined_at,
    )
