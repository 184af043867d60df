"""A snapshot of the policy: its identity, what it holds, and what one node makes of it.

Everybody gets the same bytes; each node resolves its own policy from them, here, so that the control plane shows exactly what the node
does. Invariant: resolving never half-applies; it gives a whole Policy or one refusal.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from trimtab.errors import PolicyRefused
from trimtab.kv_shape import KvGroup, KvShape
from trimtab.policy import (
    FIELDS,
    POLICY_SCHEMA,
    STATE_SCHEMA,
    Field,
    Partial,
    Policy,
    Value,
    check,
    min_schema,
    text,
    with_fields,
)
from trimtab.policy_field import MAX_NAME


@dataclass(frozen=True, slots=True, order=True)
class Identity:
    """(epoch, revision) orders snapshots; the digest tells apart two that claim the same place. `Identity()` is "none"."""

    epoch: int = 0
    revision: int = 0
    sha256: bytes = field(default=b"", compare=False)

    def __str__(self) -> str:
        return f"{self.epoch}.{self.revision}"


class Verdict(enum.Enum):
    """What a node does with a pushed snapshot."""

    TAKE = "take"
    SAME = "same"
    OLDER = "older"
    CLASH = "clash"


def judge(held: Identity, pushed: Identity) -> Verdict:
    """DESIGN §3: greater is taken, smaller is ignored, equal with another digest is an error."""
    if pushed > held:
        return Verdict.TAKE
    if pushed < held:
        return Verdict.OLDER
    return Verdict.SAME if pushed.sha256 == held.sha256 else Verdict.CLASH


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Opaque bytes and their identity."""

    identity: Identity
    document: bytes


class ScopeKind(enum.IntEnum):
    """Weakest first (DESIGN §4)."""

    MESH = 0
    POOL = 1
    LABEL = 2
    NODE = 3
    ROLLOUT = 4


@dataclass(frozen=True, slots=True)
class Scope:
    """Whom an overlay or adjustment is for. `names` is one pool, one "key=value", one node id, or a rollout's node ids."""

    kind: ScopeKind = ScopeKind.MESH
    names: tuple[str, ...] = ()

    def covers(self, node: Node) -> bool:
        match self.kind:
            case ScopeKind.MESH:
                return True
            case ScopeKind.POOL:
                return node.pool in self.names
            case ScopeKind.LABEL:
                return any(f"{k}={v}" in self.names for k, v in node.labels.items())
            case ScopeKind.NODE | ScopeKind.ROLLOUT:
                return node.node_id in self.names

    def __str__(self) -> str:
        """As people write it: pool/NAME, label/KEY=VALUE, node/ID; empty for the whole mesh."""
        return "" if self.kind is ScopeKind.MESH else f"{self.kind.name.lower()}/{','.join(self.names)}"


def parse_scope(said: str) -> Scope:
    """A scope as people write it. PolicyRefused for what is none; a rollout's is not theirs to write."""
    kind, sign, name = said.partition("/")
    kinds = {"pool": ScopeKind.POOL, "label": ScopeKind.LABEL, "node": ScopeKind.NODE}
    if said in ("", "mesh"):
        return Scope()
    if not sign or kind not in kinds or not _fit(name) or (kind == "label" and not name.partition("=")[0].strip()):
        raise PolicyRefused(
            f"{said[:80]!r} is no scope; write pool/NAME, label/KEY=VALUE or node/ID", reason="UNKNOWN_SCOPE"
        )
    if kind == "label" and "=" not in name:
        raise PolicyRefused(f"a label is KEY=VALUE, not {name[:80]!r}", reason="UNKNOWN_SCOPE")
    return Scope(kinds[kind], (name,))


def _fit(name: str) -> bool:
    return 0 < len(name) <= MAX_NAME and name == name.strip() and name.isprintable()


class Owner(enum.IntEnum):
    """Who wrote an overlay."""

    SPEC = 1
    CONTROLLER = 2
    ROLLOUT = 3


@dataclass(frozen=True, slots=True)
class Overlay:
    """A partial policy for a part of the mesh."""

    name: str
    scope: Scope
    policy: Partial
    owner: Owner = Owner.SPEC


@dataclass(frozen=True, slots=True)
class Adjustment:
    """A controller's change to one field on top of the spec: a factor in [0.1, 1], a word, or a delta when there is neither."""

    controller: str
    field: str
    scope: Scope
    reason: str
    expires_unix_ms: int
    factor: float | None = None
    delta: int = 0
    evidence: str = ""
    state: str | None = None

    def __str__(self) -> str:
        """What it does to the field."""
        if self.state is not None:
            return f"={self.state}"
        return f"×{self.factor:g}" if self.factor is not None else f"{self.delta:+d}"


@dataclass(frozen=True, slots=True)
class Pin:
    """A field that adjustments leave alone."""

    field: str
    author: str
    reason: str


@dataclass(frozen=True, slots=True)
class Document:
    """What a snapshot's bytes decode to. `needs_schema` is what the writer asked for; a node below it refuses."""

    base: Partial = field(default_factory=dict)
    overlays: tuple[Overlay, ...] = ()
    adjustments: tuple[Adjustment, ...] = ()
    pins: tuple[Pin, ...] = ()
    written_unix_ms: int = 0
    needs_schema: int = 0

    def own_schema(self) -> int:
        """The schema that what is set here needs."""
        words = STATE_SCHEMA if any(a.state is not None for a in self.adjustments) else 0
        # A node that does not know a field would pass over what a controller does to it.
        moved = max((FIELDS[a.field].schema for a in self.adjustments if a.field in FIELDS), default=0)
        return max(words, moved, min_schema(self.base, *(o.policy for o in self.overlays)))


@dataclass(frozen=True, slots=True)
class Limits:
    """What an engine can do at most. 0 means unknown, and bounds nothing. `max_model_len` in tokens."""

    max_num_seqs: int = 0
    max_step_tokens: int = 0
    max_model_len: int = 0
    block_size: int = 0
    total_blocks: int = 0
    engine: str = ""
    block_sizes: tuple[int, ...] = ()
    """KV block sizes that it accepts, of those that `trimtab.blocks` asks for; it may accept others too."""
    live_blocks: bool = False
    """It changes to another of them while it runs."""
    kv_groups: tuple[KvGroup, ...] = ()
    """Of its layers, where they don't all keep all tokens in blocks of `block_size`."""
    carries_blocks: bool = False
    """Such a change carries KV over to all of `block_sizes`, where requests find room."""

    @property
    def kv(self) -> KvShape:
        """What a request takes of its KV cache."""
        return KvShape(self.kv_groups or (KvGroup(self.block_size or 1),))

    def of(self, name: str | None) -> int | None:
        return (getattr(self, name) or None) if name else None


@dataclass(frozen=True, slots=True)
class Node:
    """What resolving needs to know of a node."""

    node_id: str
    pool: str = "default"
    labels: Mapping[str, str] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    policy_schema: int = POLICY_SCHEMA


@dataclass(frozen=True, slots=True)
class Resolved:
    """A node's own policy, and for each field where its value comes from. `inactive` are thresholds that no request on the node reaches."""

    policy: Policy
    sources: Mapping[str, str]
    inactive: tuple[str, ...] = ()


def resolve(document: Document, node: Node, *, now_unix_ms: int) -> Resolved:
    """The node's policy, or PolicyRefused. `now_unix_ms` is on the clock of `document.written_unix_ms`.

    A value that a person set beyond the engine's limit is refused; a default beyond it is clamped, since nobody asked for it.
    """
    if document.needs_schema > node.policy_schema:
        raise PolicyRefused(
            f"the policy needs schema {document.needs_schema}, {node.node_id} understands {node.policy_schema}: "
            "upgrade the node, or set the newer fields back to their defaults",
            reason="SCHEMA_TOO_OLD",
            node=node.node_id,
        )
    values: dict[str, Value] = {}
    sources: dict[str, str] = {}
    layers = [("spec", document.base)]
    ranked = sorted((o for o in document.overlays if o.scope.covers(node)), key=lambda o: o.scope.kind)
    layers += [(f"overlay {o.name} ({o.scope.kind.name.lower()})", o.policy) for o in ranked]
    for source, partial in layers:
        for path, value in partial.items():
            values[path] = check(path, value)
            sources[path] = source
    for path, value in values.items():
        limit = node.limits.of(FIELDS[path].limit)
        if limit is not None and isinstance(value, int | float) and value > limit:
            raise PolicyRefused(
                f"{path} = {value} is above what the engine of {node.node_id} can do "
                f"({FIELDS[path].limit} = {limit}); set it to {limit} or less, or start the worker with a higher limit",
                reason="ABOVE_ENGINE_LIMIT",
                field=path,
                node=node.node_id,
            )
    pinned = {p.field for p in document.pins}
    live = [a for a in document.adjustments if a.expires_unix_ms > now_unix_ms and a.scope.covers(node)]
    moves = {a.field for a in live} - pinned
    # A mesh sets a few fields of many; the rest is what an engine with these limits has anyway.
    unset = _unset(node.limits)
    found: dict[str, Value] = {}
    for path in (*values, *(path for path in FIELDS if path in moves and path not in values)):
        f = FIELDS[path]
        mine = [a for a in live if a.field == path] if path in moves else []
        found[path], said = _effective(f, values.get(path, f.default), mine, node.limits)
        sources[path] = sources.get(path, DEFAULT) + said
    policy = with_fields(unset.policy, found) if found else unset.policy
    if policy.prefill.step_tokens < policy.batch.active:
        raise PolicyRefused(
            f"prefill.step_tokens = {policy.prefill.step_tokens} is less than batch.active = {policy.batch.active}: each running "
            "request takes one token of a step, so some would starve; lower batch.active first, or raise prefill.step_tokens",
            reason="STARVES_DECODES",
            field="prefill.step_tokens",
            node=node.node_id,
        )
    inactive = unset.inactive
    if any(FIELDS[path].inactive_from for path in found):
        was = set(unset.inactive) - found.keys()
        is_now = {path for path, value in found.items() if _is_inactive(FIELDS[path], value, node.limits)}
        inactive = tuple(path for path in FIELDS if path in was or path in is_now)
    return Resolved(policy, {**unset.sources, **sources}, inactive)


DEFAULT = "default"
"""Where a value comes from that nobody set."""


def _effective(f: Field, spec: Value, mine: Iterable[Adjustment], limits: Limits) -> tuple[Value, str]:
    """The field's value after adjustments and the engine's limit, and what to say of that beside where the spec comes from."""
    # Numbers take factors and deltas, words that are ranked take words; all else is passed over.
    moved = [a for a in mine if (a.state is None if f.numeric else a.state in f.restrictive)]
    limit = limits.of(f.limit)
    effective: Value = spec
    if isinstance(spec, int | float):
        # What an engine can't do is nothing to take a share of: a factor starts from what there is.
        there = spec if limit is None else type(spec)(min(spec, limit))
        effective = fold(there, moved, f.minimum, f.maximum if limit is None else min(f.maximum, limit))
    elif isinstance(spec, str):
        effective = fold_state(spec, (a.state for a in moved), f.restrictive)
    if moved:
        who = ", ".join(f"{a.controller} ({a.reason})" for a in moved)
        return effective, f", {text(spec)} → {text(effective)} by {who}"
    return effective, f", clamped to the engine's {f.limit}" if effective != spec else ""


@functools.lru_cache(maxsize=1024)
def _unset(limits: Limits) -> Resolved:
    """What an engine with these limits has where nobody sets anything. Whether it starves decodes is for the caller to see."""
    found = {path: _effective(f, f.default, (), limits) for path, f in FIELDS.items()}
    policy = with_fields(Policy(), {path: value for path, (value, _) in found.items()})
    inactive = tuple(path for path, (value, _) in found.items() if _is_inactive(FIELDS[path], value, limits))
    return Resolved(policy, {path: DEFAULT + said for path, (_, said) in found.items()}, inactive)


def _is_inactive(f: Field, value: Value, limits: Limits) -> bool:
    limit = limits.of(f.inactive_from)
    return limit is not None and isinstance(value, int) and value >= limit


def fold(spec: float, adjustments: Iterable[Adjustment], low: float, high: float) -> int | float:
    """clamp(spec × Π factor + Σ delta, low, high) (DESIGN §4); rounded where the spec is a whole number."""
    moves = list(adjustments)
    factor = math.prod(min(1.0, max(0.1, a.factor)) for a in moves if a.factor is not None)
    delta = sum(a.delta for a in moves if a.factor is None)
    folded = max(low, min(high, spec * factor + delta))
    return round(folded) if isinstance(spec, int) else folded


def fold_state(spec: str, states: Iterable[str | None], restrictive: Sequence[str]) -> str:
    """The most restrictive of the spec's word and those of adjustments; words that `restrictive` does not rank are passed over."""
    known = [word for word in (spec, *states) if word is not None and word in restrictive]
    return max(known, key=restrictive.index, default=spec)
