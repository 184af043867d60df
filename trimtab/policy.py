"""The policy tree: what may be steered, its defaults and bounds, and which part of it acts on a running engine.

A `Policy` is whole, frozen and valid. A `Partial` names only some fields, by dotted path ("batch.active"); it is what people write,
what overlays hold and what differs between two policies. The fields themselves are in `policy_tree`, their kinds in `policy_field`.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trimtab.errors import PolicyRefused
from trimtab.policy_field import Field, Kind, Value, text
from trimtab.policy_loops import Degraded, Loop
from trimtab.policy_rollouts import BlockChoice
from trimtab.policy_tree import Isolation, Mode, Policy, Preemption, Protect, Shed

__all__ = [
    "FIELDS", "POLICY_SCHEMA", "STATE_SCHEMA", "BlockChoice", "Change", "Degraded",
    "Field", "Isolation", "Kind", "Loop", "Mode", "Partial", "Policy", "Preemption", "Protect", "Shed", "Value",
    "check", "diff", "field", "flatten", "min_schema", "parse", "text", "with_fields",
]  # fmt: skip

Partial = Mapping[str, Value]


def _fields() -> Iterator[Field]:
    for part in dataclasses.fields(Policy):
        for f in dataclasses.fields(getattr(Policy(), part.name)):
            yield Field(
                path=f"{part.name}.{f.name}", default=getattr(getattr(Policy(), part.name), f.name), **f.metadata
            )


FIELDS: dict[str, Field] = {f.path: f for f in sorted(_fields(), key=lambda f: f.schema)}
"""By path, in the order in which they were added."""
STATE_SCHEMA = 32
"""Adjustments that hold a word: a node below this would not see them."""
POLICY_SCHEMA: int = max(STATE_SCHEMA, *(f.schema for f in FIELDS.values()))
"""The highest schema that this build understands."""


def field(path: str) -> Field:
    """The field at `path`; an unknown one is refused with the nearest known name."""
    known = FIELDS.get(path)
    if known is not None:
        return known
    near = difflib.get_close_matches(path, FIELDS, n=1, cutoff=0.4)
    parts = ", ".join(sorted({known.partition(".")[0] for known in FIELDS}))
    hint = (
        f"; did you mean {near[0]}?"
        if near
        else f"; fields are PART.NAME, of {parts} (trimtab policy get shows all of them)"
    )
    raise PolicyRefused(f"no policy field is called {path!r}{hint}", reason="UNKNOWN_FIELD", field=path)


def check(path: str, value: object) -> Value:
    """`value` if the field takes it, else PolicyRefused with the bound that it breaks."""
    return field(path).check(value)


def parse(path: str, typed: str) -> Value:
    """A field's value from what a person typed."""
    return field(path).parse(typed)


def flatten(policy: Policy) -> dict[str, Value]:
    """Every field by its dotted path."""
    return {path: getattr(getattr(policy, path.split(".")[0]), path.split(".")[1]) for path in FIELDS}


def with_fields(policy: Policy, partial: Partial) -> Policy:
    """`policy` with the fields of `partial` in place, each checked."""
    changed: dict[str, dict[str, Value]] = {}
    for path, value in partial.items():
        part, name = path.split(".") if path in FIELDS else ("", "")
        changed.setdefault(part, {})[name] = check(path, value)
    return dataclasses.replace(
        policy, **{part: dataclasses.replace(getattr(policy, part), **values) for part, values in changed.items()}
    )


@dataclass(frozen=True, slots=True)
class Change:
    """One field's value before and after; None where it was or is unset. `scope` is empty for the base, else whom it is for, in words."""

    field: str
    before: Value | None
    after: Value | None
    scope: str = ""


def diff(before: Partial, after: Partial, scope: str = "") -> tuple[Change, ...]:
    """What differs, in field order."""
    return tuple(
        Change(path, before.get(path), after.get(path), scope) for path in FIELDS if before.get(path) != after.get(path)
    )


def min_schema(*partials: Partial) -> int:
    """The highest schema among the fields that are set away from their default; 0 when none is."""
    away = (FIELDS[path].schema for partial in partials for path, v in partial.items() if v != FIELDS[path].default)
    return max(away, default=0)
