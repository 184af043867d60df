"""How the store's values lie in Redis: fields of hashes and of stream entries, in bytes, and back.

What this build can't read in the history a newer one has written, or an older: the entry is passed over, and never ends who follows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controlplane.store import Action, Answer, Damaged, Entry, Mark, Stored, WriteKind
from trimtab.policy import Change, Value
from trimtab.snapshot import Identity, Snapshot


def encode_changes(changes: Sequence[Change]) -> str:
    return json.dumps([[c.field, c.before, c.after, c.scope] for c in changes])


def decode_changes(data: bytes) -> tuple[Change, ...]:
    def value(x: Any) -> Value | None:
        # JSON has no tuples; a list of names is one everywhere else.
        return tuple(x) if isinstance(x, list) else x

    # Without a scope in what the first builds wrote.
    return tuple(Change(path, value(before), value(after), *scope) for path, before, after, *scope in json.loads(data))


def encode_answers(answers: Sequence[Answer]) -> bytes:
    rows = [
        [a.node_id, a.incarnation, a.identity.epoch, a.identity.revision, a.identity.sha256.hex(), *said(a)]
        for a in answers
    ]
    return zlib.compress(json.dumps(rows).encode(), 1)


def said(a: Answer) -> tuple[str, int, float, str, str]:
    return (a.result, a.at_unix_ms, round(a.apply_ms, 3), a.reason, a.message)


def decode_answers(data: bytes) -> list[Answer]:
    return [
        Answer(node_id, incarnation, Identity(epoch, revision, bytes.fromhex(sha256)), *rest)
        for node_id, incarnation, epoch, revision, sha256, *rest in json.loads(zlib.decompress(data))
    ]


def decode_marks(rows: Mapping[bytes, bytes]) -> list[Mark]:
    found = []
    for key, value in rows.items():
        stamp, _, data = value.partition(b" ")
        with contextlib.suppress(ValueError):
            found.append(Mark(key.decode(), int(stamp), data))
    return found


def encode_action(a: Action) -> dict[str, str | int]:
    return {"node_id": a.node_id, "what": a.what, "author": a.author, "reason": a.reason, "at_unix_ms": a.at_unix_ms}


def decode_actions(rows: Iterable[Mapping[bytes, bytes]]) -> list[Action]:
    found = []
    for row in rows:
        with contextlib.suppress(KeyError, ValueError):
            node_id, what, author, reason = (row[name].decode() for name in (b"node_id", b"what", b"author", b"reason"))
            found.append(Action(node_id, what, author, reason, int(row[b"at_unix_ms"])))
    return found


def encode_entry(x: Entry) -> dict[str, str | int]:
    return {
        "epoch": x.identity.epoch,
        "revision": x.identity.revision,
        "sha256": x.identity.sha256.hex(),
        "spec_version": x.spec_version,
        "author": x.author,
        "reason": x.reason,
        "written_unix_ms": x.written_unix_ms,
        "changes": encode_changes(x.changes),
        "refused_because": x.refused_because,
        "kind": x.kind.value,
        "term": x.term,
        "evidence": x.evidence,
    }


def decode_entry(fields: dict[bytes, bytes], held: Identity | None = None, version: int | None = None) -> Entry:
    """KeyError or ValueError for what is none. `held` and `version` are for an entry of a build that kept these elsewhere."""

    def said(name: str, default: str = "") -> str:
        return fields.get(name.encode(), default.encode()).decode()

    digest = bytes.fromhex(fields[b"sha256"].decode())
    if b"epoch" in fields:
        held = Identity(int(fields[b"epoch"]), int(fields[b"revision"]))
    if held is None:
        raise KeyError("epoch")
    term, refused = int(said("term", "0")), said("refused_because")
    try:
        kind = WriteKind(said("kind", WriteKind.REFUSED if refused else WriteKind.PERSON))
    except ValueError:
        # A newer build's; whoever has a term is no person.
        kind = WriteKind.CONTROLLER if term else WriteKind.PERSON
    return Entry(
        Identity(held.epoch, held.revision, digest),
        int(fields[b"spec_version"]) if b"spec_version" in fields else version or 0,
        fields[b"author"].decode(),
        fields[b"reason"].decode(),
        int(fields[b"written_unix_ms"]),
        decode_changes(fields[b"changes"]),
        refused,
        kind,
        term,
        said("evidence"),
    )


def decode_entries(rows: Iterable[dict[bytes, bytes]]) -> list[Entry]:
    found = []
    for fields in rows:
        with contextlib.suppress(KeyError, ValueError, TypeError):
            found.append(decode_entry(fields))
    return found


def decode_stored(meta: dict[bytes, bytes], policy: dict[bytes, bytes]) -> Stored:
    """Damaged when the bytes do not match their digest: a store that lost half of it must not steer anything. So is what nobody can read."""
    try:
        held, version = Identity(int(meta[b"epoch"]), int(meta[b"revision"])), int(meta[b"spec_version"])
    except (KeyError, ValueError) as e:
        raise Damaged(Identity()) from e
    document = policy.get(b"document", b"")
    if hashlib.sha256(document).hexdigest() != policy.get(b"sha256", b"").decode():
        raise Damaged(held)
    try:
        entry = decode_entry(policy, held, version)
    except (KeyError, ValueError, TypeError) as e:
        raise Damaged(held) from e
    if entry.identity != held:
        raise Damaged(held)
    x = entry
    return Stored(
        Snapshot(x.identity, document),
        x.spec_version,
        x.author,
        x.reason,
        x.written_unix_ms,
        x.changes,
        policy.get(b"traceparent", b"").decode(),
        x.kind,
        x.term,
        x.evidence,
    )
