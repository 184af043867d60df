"""Every name in a document that stands for something of ours: commands and options, make's targets, environment variables, fields of the
policy, metrics, files, and where links lead. `faults` says which of them are not there."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from controlplane.metrics import ControlMetrics
from services.gateway.metrics import GatewayMetrics
from tests.docs import commands, markdown
from tests.docs.expressions import ROOT, rules, selectors
from tests.docs.markdown import Code
from tests.worker.test_metrics import metrics_of
from trimtab.policy import FIELDS
from trimtab.scheduling import STATS
from trimtab_cli.config import OTHER_VARIABLES, SECTIONS

OBSERVABILITY = ROOT / "docs" / "observability.md"
VALUES = ROOT / "deploy" / "helm" / "trimtab" / "values.yaml"
CODE = ("trimtab", "services", "controlplane", "trimtab_cli", "tools")
TYPED = {"", "console", "bash", "sh", "shell"}
"""Languages of blocks whose lines are typed."""
PARTS = "|".join(sorted({path.split(".")[0] for path in FIELDS}))
FIELD = re.compile(rf"(?<![\w./*-])((?:{PARTS})\.[a-z_]+)(?![\w(/-]|\.[a-z])")
SETTING = re.compile(rf"(?<![\w./*-])((?:{'|'.join(SECTIONS)})\.[a-z_]+)(?![\w(/-]|\.[a-z])")
SECTION = rf"\[({'|'.join(SECTIONS)})\]"
OF_SECTION = (
    re.compile(rf"`(?P<key>[a-z_]+)[^`]*`\s+in\s+`{SECTION}`"),
    re.compile(rf"`{SECTION} (?P<key>[a-z_]+)[^`]*`"),
    re.compile(rf"`(?P<key>[a-z_]+)`[^`|.;]{{0,12}} of `{SECTION}`"),
)
"""How prose names a key of the settings file: "`key` in `[section]`", "`[section] key = …`", "`key` of `[section]`"."""
KEYS_TABLE = re.compile(rf"^\|[^|\n]*`{SECTION}`[^|\n]*\|.*\n\|[-|: ]+\n((?:\|.*\n)*)", re.MULTILINE)
"""A table whose first head names a section: each row begins with a key."""
VARIABLE = re.compile(r"(?<![\w$-])TRIMTAB_[A-Z0-9_]*(?![A-Za-z])")
METRIC = re.compile(r"(?<![\w/.:-])((?:[a-z_]+:)?trimtab_[a-z0-9_]+(?::[a-z0-9_]+)?|vllm:[a-z_]+)(?![\w.(]|\*)")
VALUE = re.compile(r"[a-z][A-Za-z]*(?:\.[A-Za-z]+)+")
PACKAGES = {"trimtab_cli"}
"""Names that look like metrics."""
OPTION = re.compile(r"--[a-z][a-z0-9-]*")
PATH = re.compile(r"[\w.@{}*,-]+(?:/[\w.@{}*,-]+)*/?")
OURS_ALWAYS = (".py", ".md", ".proto", ".service", ".target")
"""Endings of files that people do not make themselves."""
FILES = (*OURS_ALWAYS, ".crt", ".key", ".env", ".yaml", ".yml", ".json", ".toml", ".txt", ".sh")
OTHERS_OPTIONS = {"--client-cert-path", "--ca-cert-paths"}
"""Of other programs, where they stand alone: SMG's."""
MADE_BY_PEOPLE = {"deploy/prometheus/targets/"}
"""Places that we look into, and that are not there before somebody makes them."""


def documents() -> list[Path]:
    """What people read: markdown, and a chart's notes."""
    found = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")]
    return sorted([*found, *(ROOT / "deploy").rglob("NOTES.txt")])


def faults(text: str, at: Path) -> list[str]:
    """Each with its line. `at` is where the document lies."""
    code = markdown.code(text) if at.suffix == ".md" else markdown.plain(text)
    found: list[tuple[int, str]] = []
    for piece in code:
        found += [(piece.line, fault) for fault in _code_faults(piece)]
    for n, line in enumerate(text.splitlines(), 1):
        found += [(n, f"nobody reads {name}") for name in VARIABLE.findall(line) if not is_variable(name)]
    found += [
        (n, f"[{section}] has no setting {key}") for n, section, key in settings(text) if not _is_key(section, key)
    ]
    if at.suffix == ".md":
        found += [(n, fault) for n, target in markdown.links(text) for fault in _link(target, text, at)]
    return [f"{n}: {fault}" for n, fault in sorted(dict.fromkeys(found))]


def _code_faults(piece: Code) -> Iterator[str]:
    if piece.block is None or piece.block in TYPED:
        for fault in commands.faults(piece.text, whole=piece.block in ("console", "bash", "sh", "shell")):
            yield f"`{piece.text}`: {fault}"
    for name in METRIC.findall(piece.text):
        if name not in PACKAGES and name not in metrics():
            yield f"no process exports {name}"
    for path in FIELD.findall(piece.text):
        if path not in FIELDS and not path.endswith(FILES):
            yield f"the policy has no field {path}"
    for path in SETTING.findall(piece.text):
        section, _, key = path.partition(".")
        known = key in SECTIONS[section].__dataclass_fields__ or is_value(
            piece.text if VALUE.fullmatch(piece.text) else path
        )
        if not known and not path.endswith(FILES):
            yield f"[{section}] has no setting {key}, and the chart no such value"
    if piece.block is not None:
        return
    first = piece.text.partition(".")[0]
    of_chart = VALUE.fullmatch(piece.text) and first in values() and first not in SECTIONS
    if of_chart and not is_value(piece.text) and not piece.text.endswith(FILES):
        yield f"the chart has no value {piece.text}"
    if piece.text.startswith("--"):
        for option in OPTION.findall(piece.text.split()[0].partition("=")[0]):
            if option not in options() | OTHERS_OPTIONS:
                yield f"no command has the option {option}"
    elif PATH.fullmatch(piece.text) and not is_path(piece.text):
        yield f"there is no file {piece.text}"


@cache
def options() -> frozenset[str]:
    return frozenset(commands.options())


# ---- settings


def settings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, section, key) wherever one is named with its section, in prose, in tables and in files of TOML."""
    for form in OF_SECTION:
        for found in form.finditer(text):
            section = next(group for group in found.groups() if group in SECTIONS)
            yield text.count("\n", 0, found.start()) + 1, section, found["key"]
    for found in KEYS_TABLE.finditer(text):
        for n, key in enumerate(re.findall(r"^\| `([a-z_]+)`", found[2], re.MULTILINE)):
            yield text.count("\n", 0, found.start()) + 3 + n, found[1], key
    section = ""
    for piece in markdown.code(text):
        if piece.block == "toml":
            section = piece.text.strip("[]") if piece.text.startswith("[") else section
            if key := re.match(r"#?([a-z_]+) *=", piece.text):
                yield piece.line, section, key[1]


def _is_key(section: str, key: str) -> bool:
    return section not in SECTIONS or key in SECTIONS[section].__dataclass_fields__


# ---- environment variables


def is_variable(name: str) -> bool:
    """A setting's, or one that code reads; one that ends in an underscore stands for several."""
    return any(each.startswith(name) for each in variables()) if name.endswith("_") else name in variables()


@cache
def variables() -> frozenset[str]:
    settings = {f"TRIMTAB_{s.upper()}_{f.name.upper()}" for s, cls in SECTIONS.items() for f in dataclasses.fields(cls)}
    read: set[str] = set()
    for path in _sources():
        text = path.read_text()
        if path.parts[len(ROOT.parts)] == "tests":
            # Tests also hold names that are wrong on purpose.
            read |= set(re.findall(r"environ(?:\.get)?[\[(]\s*[\"'](TRIMTAB_[A-Z0-9_]+)", text))
        else:
            read |= set(re.findall(r"[\"']?\b(TRIMTAB_[A-Z0-9_]+[A-Z0-9])\b", text))
    prefixes = tuple(f"TRIMTAB_{section.upper()}_" for section in SECTIONS)
    return frozenset(settings | set(OTHER_VARIABLES) | {name for name in read if not name.startswith(prefixes)})


def _sources() -> Iterable[Path]:
    yield ROOT / "Makefile"
    for package in (*CODE, "tests"):
        yield from (ROOT / package).rglob("*.py")


# ---- metrics


@cache
def metrics() -> frozenset[str]:
    """What processes export, by their own registries; what the page of metrics has (a scraped mesh is held against it, in
    tests/e2e/test_metrics_scraped.py); and what the rules record."""
    control, gateway = ControlMetrics(CollectorRegistry()), GatewayMetrics()
    gateway.watch(lambda _: 0, lambda: 0, lambda: _Any())  # type: ignore[arg-type, return-value]
    worker, _ = metrics_of(lambda: dict.fromkeys(STATS, 1.0))
    found = {rule["record"] for rule in rules() if "record" in rule}
    for registry in (control.registry, gateway.registry, worker.registry):
        for family in registry.collect():
            ends = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
            found |= {family.name + end for end in ends}
    for line in OBSERVABILITY.read_text().splitlines():
        if line.startswith("| `"):
            found |= {s.name for s in selectors(line.split("`")[1])}
    return frozenset(found)


class _Any(dict[str, float]):
    """A gauge of any name."""

    def __missing__(self, _: str) -> float:
        return 0.0


# ---- the chart's values


@cache
def values() -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load(VALUES.read_text())
    return found


def is_value(path: str) -> bool:
    """Whether the chart has it; below an empty map, or beside what a list or nothing stands for, anything goes."""
    at: Any = values()
    for key in path.split("."):
        if not isinstance(at, Mapping) or not at:
            return at is None or isinstance(at, Mapping | list)
        if key not in at:
            return False
        at = at[key]
    return True


# ---- files and links


def is_path(said: str) -> bool:
    """Whether a span that could be a file's name is none, or is one that there is: whole, or as the end of one's path."""
    if "{" in said and "}" in said:
        head, _, rest = said.partition("{")
        inner, _, tail = rest.partition("}")
        return all(is_path(f"{head}{each}{tail}") for each in inner.split(","))
    first = said.partition("/")[0]
    rooted = "/" in said and first in _top()
    if not rooted and not said.endswith(OURS_ALWAYS):
        return True
    if said in MADE_BY_PEOPLE or "NNNN" in said or (rooted and (ROOT / said).exists()):
        return True
    return any(fnmatchcase(path, f"*/{said.rstrip('/')}") for path in _files())


@cache
def _top() -> frozenset[str]:
    """Directories of ours. One that is also a program's or a package's name is none unless something of ours begins so."""
    return frozenset(path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith("."))


@cache
def _files() -> tuple[str, ...]:
    return tuple(
        f"/{path.relative_to(ROOT)}"
        for top in _top()
        for path in (ROOT / top).rglob("*")
        if "__pycache__" not in path.parts
    ) + tuple(f"/{path.name}" for path in ROOT.iterdir() if path.is_file())


def _link(target: str, text: str, at: Path) -> Iterator[str]:
    """Addresses elsewhere are not looked at."""
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return
    place, _, anchor = target.partition("#")
    path = at.parent / place if place else at
    if place and not path.exists():
        yield f"a link leads to {place}, which is not there"
    elif anchor and path.suffix == ".md":
        there: Any = text if path == at else path.read_text()
        if anchor not in markdown.anchors(there):
            yield f"a link leads to #{anchor}, which {path.name} does not have"
