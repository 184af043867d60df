"""What a write makes of the policy document: pure, so that a dry run answers exactly what a write would.

People own the spec: the base, an overlay for each pool, label and node, and pins. Controllers own adjustments on top of it, one live for
each (controller, field, scope), and never touch the spec. Refused here, before any write: what no field takes, and what a connected node
can't do. A node that already refused the document for another reason does not stand in the way of a change that is not to blame for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trimtab.errors import Conflict, PolicyRefused
from trimtab.policy import FIELDS, Change, Partial, Value, diff, parse, text
from trimtab.policy import field as field_of
from trimtab.snapshot import Adjustment, Document, Node, Overlay, Owner, Pin, Scope, ScopeKind, resolve

RESET = "default"
"""Set to this word, a field leaves the spec and is what the guides say again."""
PINNED, FREE = "pinned", "free"
ADJUSTED = "adjustment/"
"""What a change's scope begins with that is a controller's."""
FACTOR = (0.1, 1.0)
MAX_OVERLAYS = 1000
MAX_ADJUSTMENTS = 4096
TOO_MANY = "TOO_MANY"
Key = tuple[str, str, Scope]


@dataclass(frozen=True, slots=True)
class Spec:
    """What people own of a document. `overlays` holds each scope but the mesh once, never empty."""

    base: Partial = field(default_factory=dict)
    overlays: Mapping[Scope, Partial] = field(default_factory=dict)
    pins: tuple[Pin, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """The next document and how it differs. No changes: the document is the one that there was, and nothing needs writing."""

    document: Document
    changes: tuple[Change, ...]


Build = Callable[[Document, Iterable[Node], int], Draft]
"""A change that waits for the document it is built on: (document, connected nodes, now in unix ms)."""


def spec_of(document: Document) -> Spec:
    own = {o.scope: o.policy for o in document.overlays if o.owner is Owner.SPEC}
    return Spec(document.base, own, document.pins)


def set_fields(fields: Mapping[str, str], scope: Scope | None = None) -> Build:
    """Sets `fields`, as a person typed them, for `scope`. PolicyRefused names the field, the limit and the node that are to blame."""
    whom = scope or Scope()

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
        spec = spec_of(document)
        before = spec.overlays.get(whom, {}) if whom.kind else spec.base
        after: dict[str, Value] = dict(before)
        for path, typed in fields.items():
            if typed.strip().lower() == RESET:
                after.pop(field_of(path).path, None)
            else:
                after[path] = parse(path, typed)
        if whom.kind:
            return _drafted(document, _with_overlay(spec, whom, after), nodes, now_unix_ms)
        return _drafted(document, dataclasses.replace(spec, base=after), nodes, now_unix_ms)

    return build


def promote(name: str, fields: Mapping[str, str], scope: Scope) -> Build:
    """What a rollout of this name has tried holds for `scope`, and its canaries have it from there: one change.

    Conflict where the document no longer has its overlay: then it was ended. Without a name nothing is asked: what would the whole scope get?
    """

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
        kept = tuple(o for o in document.overlays if not (o.owner is Owner.ROLLOUT and o.name == name))
        if name and len(kept) == len(document.overlays):
            raise Conflict(
                f"rollout {name} has ended: the policy no longer holds what it tried", metadata={"rollout": name}
            )
        # Checked once, as a whole, below.
        tried = set_fields(fields, scope)(dataclasses.replace(document, overlays=kept), (), now_unix_ms)
        return finished(document, tried.document, nodes, now_unix_ms)

    return build


def apply(spec: Spec) -> Build:
    """The whole spec at once; what it does not set goes back to the default, and a pin that it does not hold is gone."""
    return lambda document, nodes, now_unix_ms: _drafted(document, spec, nodes, now_unix_ms)


def pin(fields: Sequence[str], pinned: bool, *, author: str, reason: str) -> Build:
    """Pins fields, which drops their live adjustments, or takes pins away. A field that is pinned already keeps its pin."""

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
        named = dict.fromkeys(field_of(path).path for path in fields)
        had = {p.field for p in document.pins}
        if pinned:
            pins = document.pins + tuple(Pin(path, author, reason) for path in named if path not in had)
        else:
            pins = tuple(p for p in document.pins if p.field not in named)
        return _drafted(document, dataclasses.replace(spec_of(document), pins=pins), nodes, now_unix_ms)

    return build


def parse_spec(
    fields: Mapping[str, str], overlays: Iterable[tuple[Scope, Mapping[str, str]]], pins: Iterable[Pin]
) -> Spec:
    """A spec from text. PolicyRefused for a field that is unknown or does not take its value, and for a scope that comes twice."""
    whole: dict[Scope, Partial] = {}
    for scope, typed in overlays:
        if not scope.kind or scope in whole:
            words = f"{scope} comes twice" if scope.kind else "an overlay needs a pool, a label or a node"
            raise PolicyRefused(words, reason="UNKNOWN_SCOPE")
        whole[scope] = parse_fields(typed)
    return Spec(parse_fields(fields), whole, tuple(dataclasses.replace(p, field=field_of(p.field).path) for p in pins))


def parse_fields(typed: Mapping[str, str]) -> dict[str, Value]:
    """Fields from text, without those that are the word `default`."""
    known = {field_of(path).path: said for path, said in typed.items()}
    return {path: parse(path, said) for path, said in known.items() if said.strip().lower() != RESET}


def key_of(a: Adjustment) -> Key:
    return (a.controller, a.field, a.scope)


def adjust(moves: Iterable[Adjustment], drop: Iterable[Key] = ()) -> Build:
    """Puts `moves` in place of what the same controllers had for the same fields and scopes, and takes `drop` away.

    One on a pinned field is left out: the pin wins. PolicyRefused for a move that the field can't take, and for one that is new or another and
    that a node can't; what holds already is renewed unasked, since a node that can't take it would let all the others' expire.
    """

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
        pinned = {p.field for p in document.pins}
        kept = {key_of(a): a for a in document.adjustments}
        for key in drop:
            kept.pop(key, None)
        for move in moves:
            _check_move(move, now_unix_ms)
            if move.field not in pinned:
                kept[key_of(move)] = move
        after = dataclasses.replace(document, adjustments=tuple(kept.values()))
        return finished(document, after, nodes, now_unix_ms)

    return build


def _check_move(move: Adjustment, now_unix_ms: int) -> None:
    f = field_of(move.field)
    wrong = ""
    if move.state is not None:
        if move.state not in f.restrictive:
            wrong = (
                f"{f.path} takes no word from a controller"
                if not f.restrictive
                else f"{move.state!r} is no word of {f.path}"
            )
    elif not f.numeric:
        wrong = f"{f.path} is no number; it takes no factor and no delta"
    elif move.factor is not None and not FACTOR[0] <= move.factor <= FACTOR[1]:
        wrong = f"a factor is between {FACTOR[0]} and {FACTOR[1]:g}, not {move.factor:g}"
    if not wrong and move.expires_unix_ms <= now_unix_ms:
        wrong = "an adjustment needs an expiry that is still to come"
    if not wrong and not (move.controller and move.reason):
        wrong = "an adjustment needs its controller and a reason"
    if wrong:
        raise PolicyRefused(f"{move.controller or 'a controller'}: {wrong}", reason="BAD_ADJUSTMENT", field=f.path)


def _with_overlay(spec: Spec, scope: Scope, partial: Partial) -> Spec:
    others = {s: p for s, p in spec.overlays.items() if s != scope}
    return dataclasses.replace(spec, overlays={**others, scope: partial})


def _drafted(document: Document, spec: Spec, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
    """`document` with another spec; whatever others own in it stays, but for adjustments of fields that are pinned now."""
    own = [
        Overlay(str(scope), scope, _ordered(partial))
        for scope, partial in sorted(spec.overlays.items(), key=lambda x: (x[0].kind, x[0].names))
        if partial
    ]
    if len(own) > MAX_OVERLAYS:
        raise PolicyRefused(
            f"at most {MAX_OVERLAYS} pools, labels and nodes can have fields of their own", reason=TOO_MANY
        )
    for overlay in own:
        if overlay.scope.kind is ScopeKind.ROLLOUT:
            raise PolicyRefused("a rollout's fields are not set by hand", reason="UNKNOWN_SCOPE")
    others = tuple(o for o in document.overlays if o.owner is not Owner.SPEC)
    pinned = {p.field for p in spec.pins}
    after = dataclasses.replace(
        document,
        base=_ordered(spec.base),
        overlays=(*own, *others),
        pins=spec.pins,
        adjustments=tuple(a for a in document.adjustments if a.field not in pinned),
    )
    return finished(document, after, nodes, now_unix_ms)


def _ordered(partial: Partial) -> dict[str, Value]:
    return {path: partial[path] for path in FIELDS if path in partial}


def finished(before: Document, after: Document, nodes: Iterable[Node], now_unix_ms: int) -> Draft:
    """Checked against the nodes, without what has expired, and stamped. Expiry alone is no change: nodes do that by themselves."""
    changes = differences(before, after)
    if not changes:
        return Draft(before, ())
    live = tuple(sorted((a for a in after.adjustments if a.expires_unix_ms > now_unix_ms), key=_place))
    if len(live) > MAX_ADJUSTMENTS:
        raise PolicyRefused(f"at most {MAX_ADJUSTMENTS} adjustments can live at a time", reason=TOO_MANY)
    after = dataclasses.replace(after, adjustments=live, written_unix_ms=now_unix_ms)
    after = dataclasses.replace(after, needs_schema=after.own_schema())
    # What a node can't do for what people have set is no fault of a controller's move.
    changed = {c.field for c in changes if not c.scope.startswith(ADJUSTED)}
    touched = _touched(before, after, now_unix_ms)
    # A controller may touch a thousand nodes one by one: each node is looked up, not compared with all of them.
    named = {name for s in touched if s.kind in (ScopeKind.NODE, ScopeKind.ROLLOUT) for name in s.names}
    wide = [s for s in touched if s.kind not in (ScopeKind.NODE, ScopeKind.ROLLOUT)]
    kinds = _kinds((n for n in nodes if n.node_id in named or any(s.covers(n) for s in wide)), before, after)
    was, will_be = ByScope(before), ByScope(after)
    for node in kinds:
        _check(was.of(node), will_be.of(node), node, changed, now_unix_ms)
    return Draft(after, changes)


def _touched(before: Document, after: Document, now_unix_ms: int) -> list[Scope]:
    """Whom a change concerns; the mesh alone where it concerns everyone. An adjustment that only lives longer concerns nobody, and neither does
    one that is taken back: it would have expired unasked."""
    if before.base != after.base or before.pins != after.pins:
        return [Scope()]
    overlays = {(o.owner, o.scope, tuple(o.policy.items())) for o in before.overlays}
    overlays ^= {(o.owner, o.scope, tuple(o.policy.items())) for o in after.overlays}
    had = {(key_of(a), str(a)) for a in before.adjustments if a.expires_unix_ms > now_unix_ms}
    scopes = {scope for _, scope, _ in overlays} | {
        a.scope for a in after.adjustments if (key_of(a), str(a)) not in had
    }
    return [Scope()] if Scope() in scopes else list(scopes)


class ByScope:
    """A document's overlays and adjustments by whom they are for, so that a node's own are found without a look at all others."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._items: dict[tuple[ScopeKind, str], list[tuple[int, Overlay | Adjustment]]] = {}
        items: list[Overlay | Adjustment] = [*document.overlays, *document.adjustments]
        for place, item in enumerate(items):
            for name in item.scope.names or ("",):
                self._items.setdefault((item.scope.kind, name), []).append((place, item))

    def of(self, node: Node) -> Document:
        """What concerns the node, in the document's order."""
        labels = [(ScopeKind.LABEL, f"{k}={v}") for k, v in node.labels.items()]
        ids = [(ScopeKind.NODE, node.node_id), (ScopeKind.ROLLOUT, node.node_id)]
        keys = ((ScopeKind.MESH, ""), (ScopeKind.POOL, node.pool), *labels, *ids)
        found = sorted({place: item for key in keys for place, item in self._items.get(key, ())}.items())
        overlays = tuple(item for _, item in found if isinstance(item, Overlay))
        adjustments = tuple(item for _, item in found if isinstance(item, Adjustment))
        return dataclasses.replace(self._document, overlays=overlays, adjustments=adjustments)


LIMITS = sorted({name for f in FIELDS.values() for name in (f.limit, f.inactive_from) if name})
"""Of an engine, what bounds some field."""


def _kinds(nodes: Iterable[Node], *documents: Document) -> Iterable[Node]:
    """One node of each kind: nodes that no scope tells apart and whose engines can do the same resolve alike."""
    scopes = [o.scope for d in documents for o in d.overlays]
    scopes += [a.scope for d in documents for a in d.adjustments]
    named = {name for s in scopes if s.kind in (ScopeKind.NODE, ScopeKind.ROLLOUT) for name in s.names}
    kinds: dict[Any, Node] = {}
    for node in nodes:
        limits = tuple(node.limits.of(name) for name in LIMITS)
        alone = node.node_id if node.node_id in named else ""
        kinds.setdefault((alone, node.pool, frozenset(node.labels.items()), limits, node.policy_schema), node)
    return kinds.values()


def _place(a: Adjustment) -> tuple[str, str, int, tuple[str, ...]]:
    return (a.controller, a.field, a.scope.kind, a.scope.names)


def differences(before: Document, after: Document) -> tuple[Change, ...]:
    """What differs, the base first, then overlays, pins and adjustments. An adjustment that only lives longer differs too: nodes count."""
    found = list(diff(before.base, after.base))
    a, b = ({(o.owner, o.scope): o.policy for o in x.overlays} for x in (before, after))
    for key in dict.fromkeys((*a, *b)):
        found += diff(a.get(key, {}), b.get(key, {}), str(key[1]))
    had, has = ({p.field: p for p in x.pins} for x in (before, after))
    for path in FIELDS:
        if (path in had) != (path in has):
            found.append(Change(path, *((FREE, PINNED) if path in has else (PINNED, FREE)), "pin"))
        elif had.get(path) != has.get(path):
            pins = [f"{PINNED} by {x[path].author}: {x[path].reason}" for x in (had, has)]
            found.append(Change(path, pins[0], pins[1], "pin"))
    moved, moves = ({key_of(m): m for m in x.adjustments} for x in (before, after))
    for who in dict.fromkeys((*moved, *moves)):
        old, new = moved.get(who), moves.get(who)
        if old is None or new is None or (str(old), old.expires_unix_ms) != (str(new), new.expires_unix_ms):
            words = ADJUSTED + who[0] + (f" {who[2]}" if who[2].kind else "")
            found.append(Change(who[1], str(old) if old else None, str(new) if new else None, words))
    return tuple(found)


def _check(before: Document, after: Document, node: Node, changed: set[str], now_unix_ms: int) -> None:
    try:
        resolve(after, node, now_unix_ms=now_unix_ms)
    except PolicyRefused as refusal:
        partials = (after.base, *(o.policy for o in after.overlays))
        too_new = any(path in changed and FIELDS[path].schema > node.policy_schema for p in partials for path in p)
        if refusal.field in changed or too_new or _takes(before, node, now_unix_ms):
            raise


def _takes(document: Document, node: Node, now_unix_ms: int) -> bool:
    try:
        resolve(document, node, now_unix_ms=now_unix_ms)
    except PolicyRefused:
        return False
    return True


def shown(value: Value | None) -> str:
    """A field's value as a person would type it; one that is not set is the default."""
    if value is None:
        return RESET
    # A comma after it tells a list of this one name from the word.
    return f"{text(value)}," if text(value).lower() == RESET else text(value)


def shown_fields(partial: Partial) -> dict[str, str]:
    """As people type them."""
    return {path: shown(value) for path, value in partial.items()}
