"""The spec as a YAML file: what `trimtab policy apply -f` reads and `trimtab policy show --yaml` writes, and its JSON schema.

    expect_version: 12                # optional: refuse when somebody else has changed the policy since
    fields:
      batch: {active: 8}              # or batch.active: 8
    overlays:
      - pool: slow                    # or label: gpu=h200, or node: worker-1
        fields: {batch: {active: 4}}
    pins:
      - {field: batch.active, reason: the vendor is looking at it}

What the file does not say goes back to the default. Pure: text in, values out; every fault of a file is named at once.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.spec import Spec, parse_spec, spec_of
from trimtab.errors import InvalidRequest, PolicyRefused, Violation
from trimtab.policy import FIELDS, Field, Kind, Partial, Value, text
from trimtab.policy import field as field_of
from trimtab.snapshot import Document, Pin, ScopeKind, parse_scope

SCHEMA_ID = "https://json-schema.org/draft/2020-12/schema"
TOP = ("expect_version", "fields", "overlays", "pins")
OVERLAY = ("pool", "label", "node", "fields")
PIN = ("field", "reason", "author")
SCOPES = {"pool": ScopeKind.POOL, "label": ScopeKind.LABEL, "node": ScopeKind.NODE}
MAX_FILE_BYTES = 1 << 20
MAX_VERSION = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class SpecFile:
    """What a file says. `expect_version` is None where it does not matter what was there. Pins without an author have an empty one."""

    spec: Spec
    expect_version: int | None = None


def read(data: str) -> SpecFile:
    """InvalidRequest with every fault, each at its place in the file."""
    import yaml

    if len(data) > MAX_FILE_BYTES:
        raise _invalid([Violation("file", f"at most {MAX_FILE_BYTES >> 20} MiB")])
    try:
        said = yaml.load(data, Loader=_loader())
    except (yaml.YAMLError, ValueError, RecursionError) as e:
        # PyYAML lets through what Python says of a date or a number that is none, and of what is nested too deep.
        raise _invalid([Violation("file", f"is not YAML: {' '.join(str(e).split())}")]) from e
    faults: list[Violation] = []
    top = _mapping(said if said is not None else {}, "file", TOP, faults)
    version = top.get("expect_version")
    if version is not None and (type(version) is not int or not 0 <= version <= MAX_VERSION):
        faults.append(Violation("expect_version", f"a whole number from 0 to {MAX_VERSION}"))
        version = None
    fields = _fields(top.get("fields"), "fields", faults)
    overlays = []
    for i, each in enumerate(_list(top.get("overlays"), "overlays", faults)):
        at = f"overlays[{i}]"
        overlay = _mapping(each, at, OVERLAY, faults)
        named = [(kind, overlay[kind]) for kind in SCOPES if kind in overlay]
        typed = _fields(overlay.get("fields"), f"{at}.fields", faults)
        if len(named) != 1 or not isinstance(named[0][1], str):
            faults.append(Violation(at, "names one pool, label or node"))
            continue
        try:
            overlays.append((parse_scope(f"{named[0][0]}/{named[0][1]}"), typed))
        except PolicyRefused as e:
            faults.append(Violation(at, e.message))
    pins: list[Pin] = []
    for i, each in enumerate(_list(top.get("pins"), "pins", faults)):
        at = f"pins[{i}]"
        pin = _mapping({"field": each} if isinstance(each, str) else each, at, PIN, faults)
        words = {key: pin.get(key) or "" for key in PIN}
        wrong = [key for key, said in words.items() if not (isinstance(said, str) and said.isprintable())]
        if wrong:
            faults += [Violation(f"{at}.{key}", "one line of text") for key in wrong]
            continue
        try:
            made = Pin(field_of(words["field"]).path, words["author"], words["reason"])
        except PolicyRefused as e:
            faults.append(Violation(at, e.message))
            continue
        if any(p.field == made.field for p in pins):
            faults.append(Violation(at, f"{made.field} comes twice"))
        pins.append(made)
    if not faults:
        try:
            return SpecFile(parse_spec(fields, overlays, pins), version)
        except PolicyRefused as e:
            faults.append(Violation(e.field or "overlays", e.message))
    raise _invalid(faults)


def write(document: Document, version: int | None) -> str:
    """The spec of a document, such that `read` gives it back."""
    import yaml

    spec = spec_of(document)
    said: dict[str, Any] = {} if version is None else {"expect_version": version}
    said["fields"] = _nested(spec.base)
    if spec.overlays:
        said["overlays"] = [
            {scope.kind.name.lower(): scope.names[0], "fields": _nested(partial)}
            for scope, partial in spec.overlays.items()
        ]
    if spec.pins:
        said["pins"] = [
            {key: value for key, value in (("field", p.field), ("reason", p.reason), ("author", p.author)) if value}
            for p in spec.pins
        ]
    dumped: str = yaml.safe_dump(said, sort_keys=False, allow_unicode=True)
    return dumped


def schema() -> dict[str, Any]:
    """The file's JSON schema (2020-12), for editors and for other tools. Parts may be nested or dotted."""
    parts: dict[str, dict[str, Any]] = {}
    for f in FIELDS.values():
        part, name = f.path.split(".")
        parts.setdefault(part, {"type": "object", "additionalProperties": False, "properties": {}})
        parts[part]["properties"][name] = _field_schema(f)
    dotted = {f.path: _field_schema(f) for f in FIELDS.values()}
    fields = {"type": ["object", "null"], "additionalProperties": False, "properties": {**parts, **dotted}}
    named: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": 200}
    label: dict[str, Any] = {**named, "pattern": "^[^=]*[^=\\s][^=]*="}
    overlay = {
        "type": "object",
        "additionalProperties": False,
        "properties": {"pool": named, "label": label, "node": named, "fields": {"$ref": "#/$defs/fields"}},
        "oneOf": [{"required": [kind]} for kind in SCOPES],
    }
    words = {"type": ["string", "null"]}
    pinned = {"enum": list(FIELDS)}
    pin = {
        "type": "object",
        "additionalProperties": False,
        "required": ["field"],
        "properties": {"field": pinned, "reason": words, "author": words},
    }
    return {
        "$schema": SCHEMA_ID,
        "title": "Trimtab policy spec",
        "description": "What `trimtab policy apply -f FILE` takes. What it does not say goes back to the default.",
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {
            "expect_version": {"type": ["integer", "null"], "minimum": 0},
            "fields": {"$ref": "#/$defs/fields"},
            "overlays": {"type": ["array", "null"], "items": overlay},
            "pins": {"type": ["array", "null"], "items": {"anyOf": [pinned, pin]}},
        },
        "$defs": {"fields": fields},
    }


def _field_schema(f: Field) -> dict[str, Any]:
    about = {"description": f.doc, "default": list(f.default) if isinstance(f.default, tuple) else f.default}
    reset = {"const": "default"}
    match f.kind:
        case Kind.WHOLE | Kind.FRACTION:
            number = "integer" if f.kind is Kind.WHOLE else "number"
            return {"anyOf": [{"type": number, "minimum": f.minimum, "maximum": f.maximum}, reset], **about}
        case Kind.CHOICE:
            return {"enum": [*f.choices, "default"], **about}
        case Kind.NAMES:
            return {"anyOf": [{"type": "array", "items": {"type": "string"}}, reset], **about}


def _nested(partial: Partial) -> dict[str, Any]:
    nested: dict[str, dict[str, Any]] = {}
    for path, value in partial.items():
        part, name = path.split(".")
        nested.setdefault(part, {})[name] = list(value) if isinstance(value, tuple) else value
    return nested


def _fields(said: Any, at: str, faults: list[Violation]) -> dict[str, str]:
    """Nested or dotted fields as text, as the server takes them."""
    typed: dict[str, str] = {}
    for key, value in _pairs(said, at, faults):
        if key in FIELDS or "." in key:
            _put(typed, key, value, at, faults)
            continue
        parts = {path.split(".")[0] for path in FIELDS}
        if key not in parts:
            faults.append(Violation(f"{at}.{key}", f"no part of the policy is called {key!r}{_near(key, parts)}"))
            continue
        for field_name, inner in _pairs(value, f"{at}.{key}", faults):
            _put(typed, f"{key}.{field_name}", inner, at, faults)
    return typed


def _put(typed: dict[str, str], path: str, value: Any, at: str, faults: list[Violation]) -> None:
    place = f"{at}.{path}"
    try:
        f = field_of(path)
        if path in typed:
            faults.append(Violation(place, "is said twice"))
        elif value == "default":
            typed[path] = "default"
        else:
            # Typed as YAML has it: text that looks like a number is not one.
            checked: Value = f.check(_plain(value))
            typed[path] = _as_typed(checked)
    except PolicyRefused as e:
        faults.append(Violation(place, e.message))


def _plain(value: Any) -> Any:
    """Names as a tuple; what is nested by its kind alone, since no field takes it and a few lines of YAML can make it endless to show."""
    if isinstance(value, list) and all(isinstance(x, str) for x in value):
        return tuple(value)
    return type(value).__name__ if isinstance(value, list | Mapping | set) else value


def _as_typed(value: Value) -> str:
    said = repr(value) if isinstance(value, float) else text(value)
    return f"{said}," if said.lower() == "default" else said


def _pairs(said: Any, at: str, faults: list[Violation]) -> Iterable[tuple[str, Any]]:
    if said is None:
        return ()
    if not isinstance(said, Mapping):
        faults.append(Violation(at, f"names and values, not {type(said).__name__}"))
        return ()
    return [(str(key), value) for key, value in said.items()]


def _mapping(said: Any, at: str, known: tuple[str, ...], faults: list[Violation]) -> dict[str, Any]:
    found = dict(_pairs(said, at, faults))
    faults += [
        Violation(key if at == "file" else f"{at}.{key}", f"is unknown{_near(key, known)}")
        for key in found
        if key not in known
    ]
    return found


def _list(said: Any, at: str, faults: list[Violation]) -> list[Any]:
    if said is None:
        return []
    if not isinstance(said, list):
        faults.append(Violation(at, f"a list, not {type(said).__name__}"))
        return []
    return said


def _near(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.5)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(names)}"


def _invalid(faults: list[Violation]) -> InvalidRequest:
    return InvalidRequest("the policy file can't be used", violations=tuple(faults))


def _loader() -> Any:
    """PyYAML's safe one, and a key that comes twice is an error: YAML says so, and one of the two would be lost."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                name = str(key.value) if isinstance(key, yaml.ScalarNode) else ""
                if name and name in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{name!r} comes twice", key.start_mark)
                seen.add(name)
            whole: dict[Any, Any] = super().construct_mapping(node, deep)
            return whole

    return Loader
