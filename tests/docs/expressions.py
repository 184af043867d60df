"""What a PromQL expression asks for: metrics by name, and the labels that it matches or groups by. By regular expressions, without a parser;
what is no PromQL at all, `promtool` finds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "trimtab.rules.yml"
NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
WORDS = {
    "and",
    "or",
    "unless",
    "bool",
    "offset",
    "by",
    "without",
    "on",
    "ignoring",
    "group_left",
    "group_right",
    "inf",
    "nan",
}
LISTS = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class Selector:
    """One metric in an expression, with the labels that it is matched by and their operators and values."""

    name: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expr: str) -> list[Selector]:
    found = []
    plain = LISTS.sub(" ", expr)
    for part in re.finditer(rf'({NAME})\s*(?:\{{((?:[^}}"]|"[^"]*")*)\}})?(?=(\s*\()?)|\[[^\]]*\]|"[^"]*"', plain):
        name, matchers, called = part.group(1), part.group(2), part.group(3)
        inside_a_number = part.start() > 0 and plain[part.start() - 1].isdigit()
        if name is None or called or name.lower() in WORDS or inside_a_number:
            continue
        found.append(Selector(name, tuple(re.findall(rf'({NAME})\s*(=~|!~|!=|=)\s*"([^"]*)"', matchers or ""))))
    return found


def grouped_by(expr: str) -> set[str]:
    """The labels that it keeps or joins on."""
    return {label.strip() for _, labels in LISTS.findall(expr) for label in labels.split(",") if label.strip()}


def rules() -> list[dict[str, Any]]:
    """Of the file that Prometheus loads, recorded ones and alerts."""
    return [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def board_expressions(board: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Where it stands, and the expression."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield f"{board['title']} / {panel['title']}", target["expr"]
    for annotation in board["annotations"]["list"]:
        yield f"{board['title']} / {annotation['name']}", annotation["expr"]
