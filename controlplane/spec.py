"""What a person's change makes of the policy document: pure, so that a dry run answers exactly what a write would.

Refused here, before any write: what no field takes, and what a connected node can't do. A node that already refused the document for
another reason does not stand in the way of a change that is not to blame for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab.errors import PolicyRefused
from trimtab.policy import FIELDS, Change, Value, diff, field, parse, text
from trimtab.snapshot import Document, Node, resolve

RESET = "default"
"""Set to this word, a field leaves the spec and is what the guides say again."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The next document and how it differs. No changes: the document is the one that there was, and nothing needs writing."""

    document: Document
    changes: tuple[Change, ...]


def change(document: Document, fields: Mapping[str, str], nodes: Iterable[Node], *, now_unix_ms: int) -> Draft:
    """`document` with `fields` as a person typed them; PolicyRefused names the field, the limit and the node that are to blame."""
    base: dict[str, Value] = dict(document.base)
    for path, typed in fields.items():
        if typed.strip().lower() == RESET:
            base.pop(field(path).path, None)
        else:
            base[path] = parse(path, typed)
    changes = diff(document.base, base)
    if not changes:
        return Draft(document, ())
    ordered = {path: base[path] for path in FIELDS if path in base}
    drafted = dataclasses.replace(document, base=ordered, written_unix_ms=now_unix_ms)
    drafted = dataclasses.replace(drafted, needs_schema=drafted.own_schema())
    changed = {c.field for c in changes}
    for node in nodes:
        _check(document, drafted, node, changed, now_unix_ms)
    return Draft(drafted, changes)


def _check(before: Document, after: Document, node: Node, changed: set[str], now_unix_ms: int) -> None:
    try:
        resolve(after, node, now_unix_ms=now_unix_ms)
    except PolicyRefused as refusal:
        too_new = [path for path in after.base if path in changed and FIELDS[path].schema > node.policy_schema]
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
