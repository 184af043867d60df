"""What is known of one policy field, and which values it takes: a whole number, a fraction, a choice, or a list of names."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import PolicyRefused

Value = int | float | str | tuple[str, ...]

MAX_NAMES = 1000
MAX_NAME = 200


class Kind(enum.StrEnum):
    """How a field's values look; numbers alone can be adjusted by controllers."""

    WHOLE = "whole"
    FRACTION = "fraction"
    CHOICE = "choice"
    NAMES = "names"


@dataclass(frozen=True, slots=True)
class Field:
    """`hot` fields act at the next scheduler step; cold ones need a rollout.

    `schema` numbers fields in the order in which they were added; a snapshot that sets a field needs nodes of that schema.
    `limit` names the engine limit that bounds the field on a node, beside `maximum`; `inactive_from` the one from which on a threshold does
    nothing, since no request gets there. `choices` are the words of a CHOICE; `restrictive` the same from the least restrictive on, where
    controllers may choose: of several words the most restrictive holds.
    """

    path: str
    kind: Kind
    default: Value
    hot: bool
    schema: int
    unit: str
    doc: str
    minimum: float = 0
    maximum: float = 0
    choices: tuple[str, ...] = ()
    restrictive: tuple[str, ...] = ()
    limit: str | None = None
    inactive_from: str | None = None

    @property
    def numeric(self) -> bool:
        return self.kind in (Kind.WHOLE, Kind.FRACTION)

    def check(self, value: object) -> Value:
        """`value` if the field takes it, else PolicyRefused with the bound that it breaks."""
        match self.kind:
            case Kind.WHOLE:
                if isinstance(value, bool) or not isinstance(value, int):
                    raise self._wrong_type(value)
                return int(self._bounded(value))
            case Kind.FRACTION:
                if isinstance(value, bool) or not isinstance(value, int | float):
                    raise self._wrong_type(value)
                if isinstance(value, float) and not math.isfinite(value):
                    raise self._wrong_type(value)
                return float(self._bounded(value))
            case Kind.CHOICE:
                if not isinstance(value, str):
                    raise self._wrong_type(value)
                if value not in self.choices:
                    near = difflib.get_close_matches(value, self.choices, n=1)
                    hint = f"; did you mean {near[0]}?" if near else ""
                    raise self._refused(f"{self._wanted}, not {_short(str(value))!r}{hint}")
                return str(value)
            case Kind.NAMES:
                if not isinstance(value, tuple | list) or not all(isinstance(x, str) for x in value):
                    raise self._wrong_type(value)
                if len(value) > MAX_NAMES:
                    raise self._refused(f"at most {MAX_NAMES} names, not {len(value)}")
                bad = next((x for x in value if not _is_name(x)), None)
                if bad is not None:
                    shape = f"names of 1 to {MAX_NAME} printable characters without a comma or blanks around them"
                    raise self._refused(f"{shape}, not {_short(bad)!r}")
                return tuple(dict.fromkeys(value))

    def parse(self, text: str) -> Value:
        """A value from what a person typed."""
        clean = text.strip()
        try:
            match self.kind:
                case Kind.WHOLE:
                    return self.check(int(clean.replace("_", "")))
                case Kind.FRACTION:
                    return self.check(float(clean))
                case Kind.CHOICE:
                    return self.check(clean.lower())
                case Kind.NAMES:
                    return self.check(tuple(x.strip() for x in clean.split(",") if x.strip()))
        except ValueError:
            raise self._wrong_type(text) from None

    def _bounded(self, value: float) -> float:
        if not self.minimum <= value <= self.maximum:
            raise self._refused(
                f"between {self.minimum:.12g} and {self.maximum:.12g} {self.unit}, not {_short(text(value))}"
            )
        return value

    @property
    def _wanted(self) -> str:
        match self.kind:
            case Kind.WHOLE:
                return f"a whole number of {self.unit}"
            case Kind.FRACTION:
                return f"a number from {self.minimum:g} to {self.maximum:g} {self.unit}"
            case Kind.CHOICE:
                return f"one of {', '.join(self.choices)}"
            case Kind.NAMES:
                return "a list of names"

    def _wrong_type(self, value: object) -> PolicyRefused:
        return self._refused(f"{self._wanted}, not {_short(repr(value))}", reason="WRONG_TYPE")

    def _refused(self, must_be: str, *, reason: str = "OUT_OF_RANGE") -> PolicyRefused:
        return PolicyRefused(f"{self.path} must be {must_be}", reason=reason, field=self.path)


def _is_name(x: str) -> bool:
    """What comes back unchanged from the text that people type."""
    return 0 < len(x) <= MAX_NAME and x == x.strip() and x.isprintable() and "," not in x


def _short(shown: str) -> str:
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def text(value: Value) -> str:
    """As a person would type it."""
    if isinstance(value, tuple):
        return ",".join(value)
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def whole(default: int, *, low: int, high: int, schema: int, unit: str, doc: str, **facts: str) -> Any:
    """A dataclass field that holds a whole number; `facts` are a Field's `limit` and `inactive_from`."""
    return _described(default, Kind.WHOLE, schema=schema, unit=unit, doc=doc, minimum=low, maximum=high, **facts)


def fraction(default: float, *, low: float, high: float, schema: int, unit: str, doc: str) -> Any:
    """A dataclass field that holds a real number."""
    return _described(default, Kind.FRACTION, schema=schema, unit=unit, doc=doc, minimum=low, maximum=high)


def choice(
    words: type[enum.StrEnum],
    default: enum.StrEnum,
    *,
    schema: int,
    doc: str,
    restrictive: Sequence[enum.StrEnum] = (),
) -> Any:
    """A dataclass field that holds one of `words`."""
    names = tuple(str(w) for w in words)
    order = tuple(str(w) for w in restrictive)
    return _described(str(default), Kind.CHOICE, schema=schema, unit="", doc=doc, choices=names, restrictive=order)


def names(*, schema: int, unit: str, doc: str) -> Any:
    """A dataclass field that holds names; none by default."""
    return _described((), Kind.NAMES, schema=schema, unit=unit, doc=doc)


def _described(default: Value, kind: Kind, **facts: Any) -> Any:
    # Every field so far acts at the next scheduler step.
    return dataclasses.field(default=default, metadata={"kind": kind, "hot": True, **facts})
