"""The policy tree: what may be steered, its defaults and bounds, and which part of it acts on a running engine.

A `Policy` is whole, frozen and valid. A `Partial` names only some fields, by dotted path ("batch.active"); it is what people write,
what overlays hold and what differs between two policies. Defaults come from the field guides, for a 128K window (DESIGN §4).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.errors import PolicyRefused

Value = int
Partial = Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class Field:
    """What is known of one policy field. `hot` fields act at the next scheduler step; cold ones need a rollout.

    `schema` numbers fields in the order in which they were added; a snapshot that sets a field needs nodes of that schema.
    `limit` names the engine limit that bounds the field on a node, beside `maximum`.
    """

    path: str
    default: Value
    minimum: Value
    maximum: Value
    hot: bool
    schema: int
    unit: str
    doc: str
    limit: str | None = None


def _field(
    default: Value,
    *,
    low: Value,
    high: Value,
    schema: int,
    unit: str,
    doc: str,
    hot: bool = True,
    limit: str | None = None,
) -> Any:
    facts = {"low": low, "high": high, "schema": schema, "unit": unit, "doc": doc, "hot": hot, "limit": limit}
    return dataclasses.field(default=default, metadata=facts)


@dataclass(frozen=True, slots=True)
class Batch:
    """The engine's running set."""

    # 32 REALTIME+hot beside 16 of the rest: the bounds of guides A and B together (DESIGN §4 `batch`).
    active: int = _field(
        48,
        low=1,
        high=4096,
        schema=1,
        unit="requests",
        limit="max_num_seqs",
        doc="running requests at most, all workloads",
    )


@dataclass(frozen=True, slots=True)
class Prefill:
    """How much prompt an engine step may take."""

    step_tokens: int = _field(
        2048,
        low=1,
        high=1 << 20,
        schema=2,
        unit="tokens",
        limit="max_step_tokens",
        doc="tokens per engine step at most",
    )


@dataclass(frozen=True, slots=True)
class Admission:
    """Queue bounds, each per process."""

    realtime_queue: int = _field(
        256, low=0, high=1 << 20, schema=3, unit="requests", doc="REALTIME requests waiting in one process at most"
    )
    batch_queue: int = _field(
        4096, low=0, high=1 << 20, schema=4, unit="requests", doc="BATCH requests waiting in one process at most"
    )
    engine_queue: int = _field(
        8,
        low=0,
        high=4096,
        schema=5,
        unit="requests",
        doc="requests that the engine holds beyond its running set at most",
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """The whole tree. `Policy()` is the default."""

    batch: Batch = dataclasses.field(default_factory=Batch)
    prefill: Prefill = dataclasses.field(default_factory=Prefill)
    admission: Admission = dataclasses.field(default_factory=Admission)


def _fields() -> Iterator[Field]:
    for part in dataclasses.fields(Policy):
        for f in dataclasses.fields(getattr(Policy(), part.name)):
            m = f.metadata
            yield Field(
                path=f"{part.name}.{f.name}",
                default=getattr(getattr(Policy(), part.name), f.name),
                minimum=m["low"],
                maximum=m["high"],
                hot=m["hot"],
                schema=m["schema"],
                unit=m["unit"],
                doc=m["doc"],
                limit=m["limit"],
            )


FIELDS: dict[str, Field] = {f.path: f for f in _fields()}
POLICY_SCHEMA: int = max(f.schema for f in FIELDS.values())
"""The highest field schema that this build understands."""


def field(path: str) -> Field:
    """The field at `path`; an unknown one is refused with the nearest known name."""
    known = FIELDS.get(path)
    if known is not None:
        return known
    near = difflib.get_close_matches(path, FIELDS, n=1, cutoff=0.4)
    hint = f"; did you mean {near[0]}?" if near else f"; known fields: {', '.join(sorted(FIELDS))}"
    raise PolicyRefused(f"no policy field is called {path!r}{hint}", reason="UNKNOWN_FIELD", field=path)


def check(path: str, value: object) -> Value:
    """`value` if the field takes it, else PolicyRefused with the bound that it breaks."""
    f = field(path)
    if isinstance(value, bool) or not isinstance(value, int):
        raise PolicyRefused(
            f"{path} must be a whole number of {f.unit}, not {value!r}", reason="WRONG_TYPE", field=path
        )
    if not f.minimum <= value <= f.maximum:
        raise PolicyRefused(
            f"{path} must be between {f.minimum} and {f.maximum} {f.unit}, not {value}",
            reason="OUT_OF_RANGE",
            field=path,
        )
    return value


def parse(path: str, text: str) -> Value:
    """A field's value from what a person typed."""
    f = field(path)
    try:
        value = int(text.strip().replace("_", ""))
    except ValueError:
        raise PolicyRefused(
            f"{path} must be a whole number of {f.unit}, not {text!r}", reason="WRONG_TYPE", field=path
        ) from None
    return check(path, value)


def flatten(policy: Policy) -> dict[str, Value]:
    """Every field by its dotted path."""
    return {path: getattr(getattr(policy, path.split(".")[0]), path.split(".")[1]) for path in FIELDS}


def with_fields(policy: Policy, partial: Partial) -> Policy:
    """`policy` with the fields of `partial` in place, each checked."""
    changed: dict[str, dict[str, Value]] = {}
    for path, value in partial.items():
        check(path, value)
        part, name = path.split(".")
        changed.setdefault(part, {})[name] = value
    return dataclasses.replace(
        policy, **{part: dataclasses.replace(getattr(policy, part), **values) for part, values in changed.items()}
    )


@dataclass(frozen=True, slots=True)
class Change:
    """One field's value before and after; None where it was or is unset."""

    field: str
    before: Value | None
    after: Value | None


def diff(before: Partial, after: Partial) -> tuple[Change, ...]:
    """What differs, in field order."""
    return tuple(
        Change(path, before.get(path), after.get(path)) for path in FIELDS if before.get(path) != after.get(path)
    )


def min_schema(*partials: Partial) -> int:
    """The highest schema among the fields that are set away from their default; 0 when none is."""
    away = (FIELDS[path].schema for partial in partials for path, v in partial.items() if v != FIELDS[path].default)
    return max(away, default=0)
