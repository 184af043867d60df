"""What a rollout makes of the policy document: an overlay for its canaries, and nothing of it afterwards. Pure; builds as `spec` has them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from controlplane.spec import RESET, Build, Draft, Spec, finished, promote, shown, spec_of
from trimtab.errors import Conflict, PolicyRefused
from trimtab.policy import FIELDS, Partial, Value, parse
from trimtab.policy import field as field_of
from trimtab.snapshot import Document, Node, Overlay, Owner, Scope, ScopeKind


def overlay_of(document: Document, rollout_id: str = "") -> Overlay | None:
    """That of this rollout; of any where none is named."""
    mine = (o for o in document.overlays if o.owner is Owner.ROLLOUT and rollout_id in ("", o.name))
    return next(mine, None)


def begin(rollout_id: str, fields: Mapping[str, str], scope: Scope, canaries: tuple[str, ...]) -> Build:
    """Canaries get `fields`. Refused where another rollout lives, where a field is pinned, and for all that the whole scope could not have
    in the end.
    """

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
        other = overlay_of(document)
        if other is not None:
            raise Conflict(
                f"rollout {other.name} lives; one at a time: wait for it, or end it (trimtab rollout abort {other.name})",
                metadata={"rollout": other.name},
            )
        pinned = {p.field: p for p in document.pins}
        partial = tried(fields)
        for path in partial:
            if (pin := pinned.get(path)) is not None:
                raise PolicyRefused(
                    f"{path} is pinned by {pin.author} ({pin.reason}); unpin it first (trimtab policy unpin {path})",
                    reason="PINNED",
                    field=path,
                )
        known = list(nodes)
        if not promote("", fields, scope)(document, known, now_unix_ms).changes:
            raise PolicyRefused("nothing would change: it is set so already", reason="NOTHING_CHANGES")
        return _with_overlay(document, rollout_id, partial, canaries, known, now_unix_ms)

    return build


def widen(rollout_id: str, canaries: tuple[str, ...]) -> Build:
    """The same for more of them."""

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
        mine = overlay_of(document, rollout_id)
        if mine is None:
            raise Conflict(f"rollout {rollout_id} is no longer in the policy")
        return _with_overlay(document, rollout_id, mine.policy, canaries, nodes, now_unix_ms)

    return build


def drop(rollout_id: str) -> Build:
    """Canaries have what they had before. No node is asked: one that can't do what it goes back to refuses that itself, and what was tried
    must not stay for it.
    """

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
        return finished(document, _without(document, rollout_id), (), now_unix_ms)

    return build


def tried(fields: Mapping[str, str]) -> dict[str, Value]:
    """As an overlay has them: a field that is to go back to its default has that default."""
    found: dict[str, Value] = {}
    for path, typed in fields.items():
        f = field_of(path)
        found[f.path] = f.default if typed.strip().lower() == RESET else parse(path, typed)
    return {path: found[path] for path in FIELDS if path in found}


def set_now(document: Document, fields: Iterable[str], scope: Scope) -> dict[str, str]:
    """What people have set of these fields for the scope, as they type it."""
    partial = _of_scope(spec_of(document), scope)
    return {path: shown(partial.get(path)) for path in fields}


def shadowed(document: Document, fields: Iterable[str], scope: Scope, node: Node) -> bool:
    """A narrower overlay of people has one of the fields on this node: what the scope gets in the end would not be what it has."""
    paths = set(fields)
    narrower = (o for o in document.overlays if o.owner is Owner.SPEC and o.scope.kind > scope.kind)
    return any(o.scope.covers(node) and paths & o.policy.keys() for o in narrower)


def _of_scope(spec: Spec, scope: Scope) -> Partial:
    return spec.overlays.get(scope, {}) if scope.kind is not ScopeKind.MESH else spec.base


def _without(document: Document, rollout_id: str) -> Document:
    kept = tuple(o for o in document.overlays if not (o.owner is Owner.ROLLOUT and o.name == rollout_id))
    return dataclasses.replace(document, overlays=kept)


def _with_overlay(
    document: Document,
    rollout_id: str,
    partial: Partial,
    canaries: tuple[str, ...],
    nodes: Iterable[Node],
    now_unix_ms: int,
) -> Draft:
    mine = Overlay(rollout_id, Scope(ScopeKind.ROLLOUT, canaries), partial, Owner.ROLLOUT)
    kept = _without(document, rollout_id)
    after = dataclasses.replace(kept, overlays=(*kept.overlays, mine))
    return finished(document, after, nodes, now_unix_ms)
