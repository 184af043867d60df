"""Writes that people ask for: checked, counted, traced, and waited for. `set`, `apply` and `pin` differ only in what they build.

A refused attempt writes nothing but a line in the history, so that `policy history` shows who tried what and why it did not happen.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import structlog

from controlplane import spec
from controlplane.access import Role
from controlplane.admin.checks import refuse_if, unfit, who_and_why
from controlplane.admin.encode import checked_scope, decode_spec, encode_changes, encode_durability, encode_policy_state
from controlplane.fleet import Fleet, Member
from controlplane.gatekeeper import granted
from controlplane.metrics import ControlMetrics
from controlplane.peers import ASK_S, Peers
from controlplane.replica import Outcome, Replica, unix_ms
from controlplane.store import Entry, WriteKind
from trimtab.codec import decode_document, encode_identity
from trimtab.errors import Conflict, InvalidRequest, PolicyRefused, StoreUnavailable, Violation
from trimtab.kit.rpc import cancel_and_wait
from trimtab.kit.telemetry import fail, parse_traceparent, traceparent, tracer
from trimtab.kit.tls import PLAIN
from trimtab.kit.watch import Watch
from trimtab.policy import FIELDS, Kind
from trimtab.snapshot import Identity, Scope, parse_scope
from trimtab.v1 import admin_pb2

log = structlog.get_logger(__name__)

MAX_FIELDS = 256
MAX_SPEC_FIELDS = 20_000
"""Of a whole spec, all its overlays together."""
MAX_FIELD_CHARS = 100
MAX_NAMES_CHARS = 10_000
"""Of a field that holds a list of names."""
MAX_WAIT_MS = 60_000


class Asked(Protocol):
    """What every write says, whatever it writes."""

    author: str
    reason: str
    expect_version: int
    dry_run: bool
    wait_ms: int

    def HasField(self, name: Any) -> bool: ...


@dataclass(frozen=True, slots=True)
class Work:
    """What a request comes to. `tried` is what the history says of an attempt that was refused; `facts` go into the trace."""

    build: spec.Build
    tried: str
    facts: Mapping[str, str] = field(default_factory=dict)


def set_work(request: admin_pb2.SetPolicyRequest) -> Work:
    """InvalidRequest with every fault of the request itself."""
    faults = who_and_why(request.author, request.reason)
    if not request.fields:
        faults.append(Violation("fields", "name at least one field to set"))
    if len(request.fields) > MAX_FIELDS:
        faults.append(Violation("fields", f"at most {MAX_FIELDS} at once"))
    refuse_if(faults + unfit_fields("fields", request.fields))
    scope = checked_scope(request.scope) if request.HasField("scope") else Scope()
    tried = ", ".join(f"{path}={text}" for path, text in request.fields.items()) + (
        f" for {scope}" if scope.kind else ""
    )
    facts = {f"trimtab.field.{path}": text for path, text in request.fields.items()}
    return Work(spec.set_fields(dict(request.fields), scope), tried, {**facts, "trimtab.scope": str(scope)})


def apply_work(request: admin_pb2.ApplyPolicyRequest) -> Work:
    faults = who_and_why(request.author, request.reason)
    asked = request.spec
    if len(asked.fields) + sum(len(o.fields) for o in asked.overlays) + len(asked.pins) > MAX_SPEC_FIELDS:
        faults.append(Violation("spec", f"at most {MAX_SPEC_FIELDS} fields in all"))
    faults += unfit_fields("spec.fields", asked.fields)
    for overlay in asked.overlays:
        faults += unfit_fields("spec.overlays.fields", overlay.fields)
    for pin in asked.pins:
        faults += unfit([("spec.pins", text, MAX_NAMES_CHARS) for text in (pin.field, pin.author, pin.reason)])
    refuse_if(faults)
    whole = decode_spec(asked, author=request.author, reason=request.reason)
    return Work(spec.apply(whole), "a whole spec")


def pin_work(request: admin_pb2.PinPolicyRequest) -> Work:
    faults = who_and_why(request.author, request.reason)
    if not request.fields:
        faults.append(Violation("fields", "name at least one field"))
    if len(request.fields) > MAX_FIELDS:
        faults.append(Violation("fields", f"at most {MAX_FIELDS} at once"))
    refuse_if(faults + unfit([("fields", path, MAX_FIELD_CHARS) for path in request.fields]))
    build = spec.pin(list(request.fields), request.pinned, author=request.author, reason=request.reason)
    return Work(build, f"{'pin' if request.pinned else 'unpin'} {', '.join(request.fields)}")


def unfit_fields(name: str, fields: Mapping[str, str]) -> list[Violation]:
    words = []
    for path, text in fields.items():
        lists = path in FIELDS and FIELDS[path].kind is Kind.NAMES
        words += [(name, path, MAX_FIELD_CHARS), (name, text, MAX_NAMES_CHARS if lists else MAX_FIELD_CHARS)]
    return unfit(words)


class Writer:
    """`answers` is set whenever a node answers a push, joins or is lost."""

    def __init__(
        self, replica: Replica, fleet: Fleet, answers: Watch[None], metrics: ControlMetrics, peers: Peers
    ) -> None:
        self._replica = replica
        self._fleet = fleet
        self._answers = answers
        self._metrics = metrics
        self._peers = peers

    async def write(self, request: Any, work_of: Any, caller: str) -> dict[str, Any]:
        """What a Set-, Apply- or PinPolicyResponse holds. `caller` is the caller's traceparent."""
        grant = granted()
        if grant.caller != PLAIN and grant.role < Role.ADMIN:
            # Whoever is known writes in that name; only an admin may write in another's.
            request.author = grant.caller.name
            if isinstance(request, admin_pb2.ApplyPolicyRequest):
                self._own_pins(request, grant.caller.name)
        asked: Asked = request
        try:
            work: Work = work_of(request)
        except InvalidRequest:
            self._metrics.puts.labels("invalid").inc()
            raise
        except PolicyRefused as e:
            self._metrics.puts.labels("refused").inc()
            if not asked.dry_run:
                await self._record_refused(asked, "a whole spec", e)
            raise
        attributes = {"trimtab.author": asked.author, "trimtab.reason": asked.reason, **work.facts}
        at = parse_traceparent(caller)
        with tracer().start_as_current_span("policy.put", context=at, attributes=attributes) as span:
            parent = traceparent(span)
            try:
                outcome = await self._change(asked, work, parent)
            except (PolicyRefused, Conflict, StoreUnavailable) as e:
                fail(span, e, e.reason)
                raise
            span.set_attribute("trimtab.policy", str(outcome.stored.identity))
        waits = outcome.written and asked.wait_ms > 0
        wait_ms = min(asked.wait_ms, MAX_WAIT_MS)
        nodes = await self.answers(outcome.stored.identity, wait_ms, local=False) if waits else ()
        return {
            "identity": encode_identity(outcome.stored.identity),
            "spec_version": outcome.stored.spec_version,
            "changes": encode_changes(outcome.changes),
            "nodes": nodes,
            "trace_id": parent[3:35],
            "durability": encode_durability(outcome.receipt),
            "unmatched_scopes": self._unmatched(outcome),
        }

    def _unmatched(self, outcome: Outcome) -> list[str]:
        """A typing error in a name looks like this; so does a pool whose nodes are yet to come."""
        nodes, found = [m.hello.node for m in self._fleet.connected()], []
        for said in sorted({c.scope for c in outcome.changes if c.after is not None}):
            # Pins and controllers' adjustments have words of their own.
            with contextlib.suppress(PolicyRefused):
                scope = parse_scope(said)
                if scope.kind and not any(map(scope.covers, nodes)):
                    found.append(said)
        return found

    def _own_pins(self, request: admin_pb2.ApplyPolicyRequest, author: str) -> None:
        """A pin that is there already stays whose it is; any other is his who writes it."""
        stored = self._replica.newest.value
        pins = decode_document(stored.snapshot.document).pins if stored is not None else ()
        known = {(p.field, p.author, p.reason) for p in pins}
        for pin in request.spec.pins:
            if (pin.field, pin.author, pin.reason) not in known:
                pin.author = author

    async def _change(self, asked: Asked, work: Work, parent: str) -> Outcome:
        """The change, counted by outcome; a refused attempt goes into the history."""
        count = self._metrics.puts.labels
        try:
            outcome = await self._replica.write(
                work.build,
                lambda: [m.hello.node for m in self._fleet.connected()],
                author=asked.author,
                reason=asked.reason,
                expect_version=asked.expect_version if asked.HasField("expect_version") else None,
                dry_run=asked.dry_run,
                traceparent=parent,
            )
        except PolicyRefused as e:
            count("refused").inc()
            if not asked.dry_run:
                await self._record_refused(asked, work.tried, e)
            raise
        except Conflict:
            count("conflict").inc()
            raise
        except StoreUnavailable:
            count("unavailable").inc()
            raise
        count("written" if outcome.written else "dry_run" if asked.dry_run else "unchanged").inc()
        return outcome

    async def _record_refused(self, asked: Asked, tried: str, error: PolicyRefused) -> None:
        log.info("policy refused", author=asked.author, tried=tried, cause=error.cause, because=error.message)
        stored = self._replica.newest.value
        if stored is None:
            return
        because = f"{tried}: {error.message}"
        entry = Entry(
            stored.identity,
            stored.spec_version,
            asked.author,
            asked.reason,
            unix_ms(),
            refused_because=because,
            kind=WriteKind.REFUSED,
        )
        try:
            await self._replica.store.record_refused(entry)
        except StoreUnavailable as e:
            log.warning("refused attempt not recorded", because=e.message)

    async def answers(self, identity: Identity, wait_ms: int, *, local: bool) -> list[admin_pb2.NodePolicyState]:
        """Connected nodes' answers, workers' and gateways', those of the other replicas too unless `local`, once all are there or time is up."""
        ask = admin_pb2.AwaitPolicyRequest(identity=encode_identity(identity), wait_ms=wait_ms, local=True)
        within_s = wait_ms / 1000 + ASK_S
        asked = asyncio.create_task(self._peers.ask("AwaitPolicy", ask, within_s=within_s)) if not local else None
        try:
            nodes = {m.node_id: encode_policy_state(m) for m in await self._wait(identity, wait_ms)}
            for answer in (await asked if asked is not None else {}).values():
                if isinstance(answer, admin_pb2.AwaitPolicyResponse):
                    nodes.update({n.node_id: n for n in answer.nodes if n.node_id not in nodes})
        finally:
            if asked is not None:
                await cancel_and_wait(asked)
        return [nodes[name] for name in sorted(nodes)]

    async def _wait(self, identity: Identity, wait_ms: int) -> list[Member]:
        """This replica's nodes, once all have answered or the time is over. One that is lost meanwhile is not waited for."""
        # Each is looked at until it has answered and never again: a thousand answers must not cost a million looks.
        pending = [m.node_id for m in self._here()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_ms / 1000):
                while True:
                    version = self._answers.version
                    while pending and self._is_over(pending[-1], identity):
                        pending.pop()
                    if not pending:
                        break
                    await self._answers.until(version)
        return self._here()

    def _is_over(self, node_id: str, identity: Identity) -> bool:
        m = self._fleet.member(node_id)
        return m is None or not m.connected or bool(m.replica) or m.answered(identity)

    def _here(self) -> list[Member]:
        return [m for m in self._fleet.local() if m.connected]
