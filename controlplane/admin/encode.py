"""What the admin service says, in protobuf: changes, history, specs, nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

from google.protobuf.message import Message

from controlplane.fleet import Member
from controlplane.spec import Spec, parse_spec, shown, shown_fields
from controlplane.store import Action, Answer, Entry, Receipt, StoreState, WriteKind
from trimtab.codec import decode_scope, encode_hello, encode_identity, encode_report, encode_scope
from trimtab.kit.rpc import MAX_MESSAGE_BYTES
from trimtab.policy import Change, Partial
from trimtab.snapshot import Identity, Pin, Scope, parse_scope
from trimtab.v1 import admin_pb2, control_pb2, policy_pb2

T = TypeVar("T", bound=Message)
MAX_LIST_BYTES = MAX_MESSAGE_BYTES // 2
"""Of a list in an answer."""

KINDS = {
    WriteKind.PERSON: admin_pb2.HISTORY_KIND_PERSON,
    WriteKind.CONTROLLER: admin_pb2.HISTORY_KIND_CONTROLLER,
    WriteKind.RESEED: admin_pb2.HISTORY_KIND_RESEED,
    WriteKind.REFUSED: admin_pb2.HISTORY_KIND_REFUSED,
}


def fitting(rows: Iterable[T]) -> list[T]:
    """The first of them, as many as one message takes."""
    found: list[T] = []
    size = 0
    for row in rows:
        size += row.ByteSize()
        if size > MAX_LIST_BYTES:
            break
        found.append(row)
    return found


def encode_changes(changes: Iterable[Change]) -> list[admin_pb2.FieldChange]:
    return [
        admin_pb2.FieldChange(field=c.field, before=shown(c.before), after=shown(c.after), scope=c.scope)
        for c in changes
    ]


def encode_entry(e: Entry) -> admin_pb2.PolicyHistoryEntry:
    return admin_pb2.PolicyHistoryEntry(
        identity=encode_identity(e.identity),
        spec_version=e.spec_version,
        author=e.author,
        reason=e.reason,
        written_unix_ms=e.written_unix_ms,
        changes=encode_changes(e.changes),
        refused_because=e.refused_because,
        kind=KINDS[e.kind],
        term=e.term,
        evidence=e.evidence,
    )


def encode_spec(spec: Spec) -> admin_pb2.PolicySpec:
    """Such that `decode_spec` gives it back, to the last digit."""
    return admin_pb2.PolicySpec(
        fields=_exact(spec.base),
        overlays=[
            admin_pb2.SpecOverlay(scope=encode_scope(scope), fields=_exact(partial))
            for scope, partial in spec.overlays.items()
        ],
        pins=[policy_pb2.Pin(field=p.field, author=p.author, reason=p.reason) for p in spec.pins],
    )


def _exact(partial: Partial) -> dict[str, str]:
    return shown_fields(partial) | {path: repr(value) for path, value in partial.items() if isinstance(value, float)}


def decode_spec(pb: admin_pb2.PolicySpec, *, author: str, reason: str) -> Spec:
    """PolicyRefused for what no field takes. A pin without an author is the caller's."""
    overlays = [(checked_scope(o.scope), dict(o.fields)) for o in pb.overlays]
    pins = {p.field: Pin(p.field, p.author or author, p.reason or reason) for p in pb.pins}
    return parse_spec(dict(pb.fields), overlays, pins.values())


def checked_scope(pb: policy_pb2.Scope) -> Scope:
    """PolicyRefused for one that people can't write."""
    return parse_scope(str(decode_scope(pb)))


def encode_durability(receipt: Receipt | None) -> admin_pb2.Durability | None:
    if receipt is None:
        return None
    return admin_pb2.Durability(committed=receipt.committed, replicas=receipt.replicas, wanted=receipt.wanted)


def encode_store(state: StoreState) -> admin_pb2.StoreState:
    return admin_pb2.StoreState(
        connected=state.connected,
        description=state.description,
        writable=state.writable,
        replicas_wanted=state.wanted,
    )


def encode_answer(a: Answer) -> admin_pb2.PolicyAnswer:
    return admin_pb2.PolicyAnswer(
        node_id=a.node_id,
        incarnation=a.incarnation,
        identity=encode_identity(a.identity),
        result=a.result,
        at_unix_ms=a.at_unix_ms,
        apply_ms=a.apply_ms,
        reason=a.reason,
        message=a.message,
    )


def encode_action(a: Action) -> admin_pb2.NodeAction:
    return admin_pb2.NodeAction(
        node_id=a.node_id, what=a.what, author=a.author, reason=a.reason, at_unix_ms=a.at_unix_ms
    )


def encode_policy_state(m: Member) -> admin_pb2.NodePolicyState:
    r = m.refusal
    return admin_pb2.NodePolicyState(
        node_id=m.node_id,
        applied=encode_identity(m.applied) if m.applied > Identity() else None,
        apply_ms=m.apply_ms,
        refused=encode_identity(r.identity) if r else None,
        refusal=control_pb2.PolicyRefused(reason=r.reason, field=r.field, message=r.message) if r else None,
    )


def encode_member(m: Member, now: float) -> admin_pb2.FleetNode:
    """`now` in seconds of the fleet's clock. Without sketches: those of a large mesh are more than a message takes."""
    return admin_pb2.FleetNode(
        hello=encode_hello(m.hello),
        report=encode_report(dataclasses.replace(m.report, sketches={})) if m.report else None,
        policy=encode_policy_state(m),
        connected=m.connected,
        seconds_since_report=now - m.heard_at,
        seconds_connected=(m.lost_at or now) - m.joined_at,
        replica_id=m.replica,
    )


def freshest(nodes: Iterable[admin_pb2.FleetNode]) -> dict[str, admin_pb2.FleetNode]:
    """By node id. Of several replicas that know a node, the one that it is connected to, else the one that heard of it last."""
    found: dict[str, admin_pb2.FleetNode] = {}
    for node in nodes:
        had = found.get(node.hello.node_id)
        if had is None or _fresh(node) > _fresh(had):
            found[node.hello.node_id] = node
    return found


def one_leader(replicas: list[admin_pb2.ReplicaState]) -> list[admin_pb2.ReplicaState]:
    """Without the lead of those that were told of, and do not know that another was granted a newer term."""
    newest = max((r.term for r in replicas if r.leader), default=0)
    for r in replicas:
        r.leader = r.leader and r.term == newest
    return replicas


def _fresh(node: admin_pb2.FleetNode) -> tuple[bool, float]:
    return (node.connected, -node.seconds_since_report)
