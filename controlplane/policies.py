"""What people have set for each node, without controllers' adjustments, and what it has with them. Pure; one for each document.

Nodes that no scope tells apart and whose engines can do the same have the same policy: it is resolved once for all of them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from controlplane.spec import LIMITS, ByScope
from trimtab.errors import PolicyRefused
from trimtab.policy import Policy
from trimtab.snapshot import Document, Node, ScopeKind, resolve

NOBODY = Node("a node without overlays", pool="")


class Policies:
    """`now_unix_ms` is when adjustments are looked at: those that have expired by then are none."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._spec = ByScope(dataclasses.replace(document, adjustments=()))
        self._whole = ByScope(document)
        self._named = _named(document)
        self._found: dict[Any, Policy] = {}

    def spec(self, node: Node | None) -> Policy:
        """Without adjustments; None asks for what a node without overlays has. A node that refuses the policy counts as one with none."""
        whom = node or NOBODY
        key = self._kind(whom)
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = _resolved(self._spec.of(whom), whom, 0)
        return found

    def effective(self, node: Node, now_unix_ms: int) -> Policy:
        """With the adjustments that live."""
        return _resolved(self._whole.of(node), node, now_unix_ms)

    def _kind(self, node: Node) -> Any:
        alone = node.node_id if node.node_id in self._named else ""
        limits = tuple(node.limits.of(name) for name in LIMITS)
        return (alone, node.pool, frozenset(node.labels.items()), limits, node.policy_schema)


def _named(document: Document) -> set[str]:
    return {
        name for o in document.overlays if o.scope.kind in (ScopeKind.NODE, ScopeKind.ROLLOUT) for name in o.scope.names
    }


def _resolved(document: Document, node: Node, now_unix_ms: int) -> Policy:
    try:
        return resolve(document, node, now_unix_ms=now_unix_ms).policy
    except PolicyRefused:
        return resolve(Document(), node, now_unix_ms=now_unix_ms).policy
