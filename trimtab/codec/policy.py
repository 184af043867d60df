"""Policies, snapshots and documents ⇄ values."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from trimtab import policy as p
from trimtab import snapshot as s
from trimtab.errors import PolicyRefused
from trimtab.v1 import policy_pb2


def encode_identity(identity: s.Identity) -> policy_pb2.SnapshotIdentity:
    return policy_pb2.SnapshotIdentity(epoch=identity.epoch, revision=identity.revision, sha256=identity.sha256)


def decode_identity(pb: policy_pb2.SnapshotIdentity) -> s.Identity:
    return s.Identity(pb.epoch, pb.revision, pb.sha256)


def encode_snapshot(snapshot: s.Snapshot) -> policy_pb2.PolicySnapshot:
    return policy_pb2.PolicySnapshot(identity=encode_identity(snapshot.identity), document=snapshot.document)


def decode_snapshot(pb: policy_pb2.PolicySnapshot) -> s.Snapshot:
    """Checks the digest: bytes that do not match it are refused."""
    if hashlib.sha256(pb.document).digest() != pb.identity.sha256:
        raise PolicyRefused("the snapshot's bytes do not match its digest", reason="DIGEST_MISMATCH")
    return s.Snapshot(decode_identity(pb.identity), pb.document)


def encode_partial(partial: p.Partial) -> policy_pb2.Policy:
    pb = policy_pb2.Policy()
    for path, value in partial.items():
        part, name = path.split(".")
        message = getattr(pb, part)
        match p.FIELDS[path].kind:
            case p.Kind.CHOICE:
                setattr(message, name, _words(path)[str(value)])
            case p.Kind.NAMES:
                assert isinstance(value, tuple)
                getattr(message, name).CopyFrom(policy_pb2.NameList(names=value))
            case _:
                setattr(message, name, value)
    return pb


def decode_partial(pb: policy_pb2.Policy) -> dict[str, p.Value]:
    """The fields that are set and known to this build; `min_policy_schema` guards the ones that it does not know."""
    said: dict[str, p.Value] = {}
    # What is set is little of what could be.
    for part, message in pb.ListFields():
        for name, value in message.ListFields():
            path = f"{part.name}.{name.name}"
            if path in p.FIELDS:
                said[path] = _decode_value(path, value)
    return {path: said[path] for path in p.FIELDS if path in said} if len(said) > 1 else said


def _decode_value(path: str, value: Any) -> p.Value:
    match p.FIELDS[path].kind:
        case p.Kind.CHOICE:
            word = {number: word for word, number in _words(path).items()}.get(value)
            if word is None:
                raise PolicyRefused(
                    f"{path} holds a word that this build does not know (number {value})",
                    reason="UNKNOWN_WORD",
                    field=path,
                )
            return word
        case p.Kind.NAMES:
            return tuple(value.names)
        case _:
            number: int | float = value
            return number


@functools.cache
def _words(path: str) -> dict[str, int]:
    """A choice's words and their numbers; on the wire a word is in capitals and carries its enum's name before it."""
    part, name = path.split(".")
    message = policy_pb2.Policy.DESCRIPTOR.fields_by_name[part].message_type
    enum = message.fields_by_name[name].enum_type if message else None
    assert enum is not None, path
    prefix = len(enum.values[0].name) - len("UNSPECIFIED")
    return {v.name[prefix:].lower(): v.number for v in enum.values if v.number}


def encode_scope(scope: s.Scope) -> policy_pb2.Scope:
    match scope.kind:
        case s.ScopeKind.MESH:
            return policy_pb2.Scope(mesh=True)
        case s.ScopeKind.POOL:
            return policy_pb2.Scope(pool=scope.names[0])
        case s.ScopeKind.LABEL:
            return policy_pb2.Scope(label=scope.names[0])
        case s.ScopeKind.NODE:
            return policy_pb2.Scope(node_id=scope.names[0])
        case s.ScopeKind.ROLLOUT:
            return policy_pb2.Scope(rollout=policy_pb2.NodeList(node_ids=scope.names))


def decode_scope(pb: policy_pb2.Scope) -> s.Scope:
    match pb.WhichOneof("scope"):
        case "mesh":
            return s.Scope()
        case "pool":
            return s.Scope(s.ScopeKind.POOL, (pb.pool,))
        case "label":
            return s.Scope(s.ScopeKind.LABEL, (pb.label,))
        case "node_id":
            return s.Scope(s.ScopeKind.NODE, (pb.node_id,))
        case "rollout":
            return s.Scope(s.ScopeKind.ROLLOUT, tuple(pb.rollout.node_ids))
        case _:
            raise PolicyRefused("an overlay or adjustment names no scope that this build knows", reason="UNKNOWN_SCOPE")


def _encode_adjustment(a: s.Adjustment) -> policy_pb2.Adjustment:
    pb = policy_pb2.Adjustment(
        controller=a.controller,
        field=a.field,
        scope=encode_scope(a.scope),
        reason=a.reason,
        evidence=a.evidence,
        expires_unix_ms=a.expires_unix_ms,
    )
    if a.state is not None:
        pb.state = a.state
    elif a.factor is not None:
        pb.factor = a.factor
    else:
        pb.delta = a.delta
    return pb


def _decode_adjustment(pb: policy_pb2.Adjustment) -> s.Adjustment:
    return s.Adjustment(
        controller=pb.controller,
        field=pb.field,
        scope=decode_scope(pb.scope),
        reason=pb.reason,
        evidence=pb.evidence,
        expires_unix_ms=pb.expires_unix_ms,
        factor=pb.factor if pb.WhichOneof("change") == "factor" else None,
        delta=pb.delta,
        state=pb.state if pb.WhichOneof("change") == "state" else None,
    )


_OWNER = {
    s.Owner.SPEC: policy_pb2.OVERLAY_OWNER_SPEC,
    s.Owner.CONTROLLER: policy_pb2.OVERLAY_OWNER_CONTROLLER,
    s.Owner.ROLLOUT: policy_pb2.OVERLAY_OWNER_ROLLOUT,
}
_OWNER_BACK = {v: k for k, v in _OWNER.items()}


def _encode_overlay(o: s.Overlay) -> policy_pb2.Overlay:
    return policy_pb2.Overlay(
        name=o.name, scope=encode_scope(o.scope), owner=_OWNER[o.owner], policy=encode_partial(o.policy)
    )


def encode_document(document: s.Document) -> bytes:
    """Deterministic bytes: equal documents give equal digests."""
    pb = policy_pb2.PolicyDocument(
        min_policy_schema=document.needs_schema,
        written_unix_ms=document.written_unix_ms,
        base=encode_partial(document.base),
        overlays=[_encode_overlay(o) for o in document.overlays],
        adjustments=[_encode_adjustment(a) for a in document.adjustments],
        pins=[policy_pb2.Pin(field=x.field, author=x.author, reason=x.reason) for x in document.pins],
    )
    return pb.SerializeToString(deterministic=True)


def decode_document(data: bytes) -> s.Document:
    pb = policy_pb2.PolicyDocument()
    try:
        pb.ParseFromString(data)
    except Exception as e:  # protobuf's DecodeError has no stable public home
        raise PolicyRefused(f"the snapshot is not a policy document: {e}", reason="MALFORMED") from e
    return s.Document(
        base=decode_partial(pb.base),
        overlays=tuple(
            s.Overlay(
                name=o.name,
                scope=decode_scope(o.scope),
                policy=decode_partial(o.policy),
                owner=_OWNER_BACK.get(o.owner, s.Owner.SPEC),
            )
            for o in pb.overlays
        ),
        adjustments=tuple(_decode_adjustment(a) for a in pb.adjustments),
        pins=tuple(s.Pin(x.field, x.author, x.reason) for x in pb.pins),
        written_unix_ms=pb.written_unix_ms,
        needs_schema=pb.min_policy_schema,
    )


def seal(document: s.Document, *, epoch: int, revision: int) -> s.Snapshot:
    """A document as a snapshot."""
    data = encode_document(document)
    return s.Snapshot(s.Identity(epoch, revision, hashlib.sha256(data).digest()), data)
