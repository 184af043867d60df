"""Write Grafana's boards, `deploy/grafana/*.json`, from `deploy/grafana/sources/*.yml`; with `--check` say whether they are what these give.

A source says only what differs from board to board: rows of panels, and for each what it shows and how it is read. Layout, variables,
links, colours and all that Grafana (10 and later) wants besides comes from here. Run by `make boards`.

In expressions `{worker}`, `{pool}`, `{gateway}` and `{control}` stand for the board's filters on such a thing; matchers may follow, as in
`{worker,path="hot"}`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "deploy" / "grafana" / "sources"
BOARDS = ROOT / "deploy" / "grafana"
SCHEMA = 39
"""Of Grafana 10.4; later ones read it, and bring it up to theirs by themselves."""
COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
MESH = 'mesh=~"$mesh"'
POOL = f'{MESH},pool=~"$pool"'
WORKER = f'{POOL},instance=~"$instance"'
FILTERS = {"worker": WORKER, "pool": POOL, "gateway": MESH, "control": MESH}
KINDS = ("timeseries", "stat", "bargauge")


class SourceError(Exception):
    """A source that can't be read as a board; the message names it and what is wrong."""


@dataclass(frozen=True, slots=True)
class Series:
    """`legend` may have Grafana's `{{label}}`; `dashed` is for what is wanted, beside what is."""

    expr: str
    legend: str
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """`says` is how to read it. `width` is in Grafana's columns, of which a row has 24; `steps` are colours from a value on."""

    title: str
    says: str
    unit: str
    series: tuple[Series, ...]
    kind: str = "timeseries"
    width: int = 8
    height: int = 8
    low: float | None = 0
    high: float | None = None
    stacked: bool = False
    steps: Mapping[float, str] = field(default_factory=dict)
    words: Mapping[float, str] = field(default_factory=dict)
    """Shown instead of these values."""


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """`uid` is what links and bookmarks go by: it never changes."""

    uid: str
    title: str
    says: str
    rows: tuple[Row, ...]


def board_of(source: str, name: str) -> Board:
    """Raises SourceError, also for a key that nobody reads."""

    def made(kind: type[Any], raw: Any, where: str) -> Any:
        if not isinstance(raw, dict):
            raise SourceError(f"{name}: {where} must be a mapping")
        known = {f.name for f in fields(kind)}
        if unknown := sorted(set(raw) - known):
            raise SourceError(f"{name}: {where} has {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        nested = {"rows": Row, "panels": Panel, "series": Series}
        parts = {
            key: tuple(made(nested[key], item, f"{where}, {key} {i}") for i, item in enumerate(value, 1))
            if key in nested
            else value
            for key, value in raw.items()
        }
        try:
            return kind(**parts)
        except TypeError as wrong:
            raise SourceError(f"{name}: {where}: {wrong}") from wrong

    board: Board = made(Board, yaml.safe_load(source), "the board")
    for panel in panels_of(board):
        if panel.kind not in KINDS:
            raise SourceError(f"{name}: {panel.title} is a {panel.kind}; known are {', '.join(KINDS)}")
    return board


def panels_of(board: Board) -> Iterator[Panel]:
    for row in board.rows:
        yield from row.panels


def expanded(expr: str) -> str:
    """With the board's filters in place of their names, on one line."""
    one_line = " ".join(expr.split())
    return re.sub(r"\{(worker|pool|gateway|control)\b", lambda found: "{" + FILTERS[found[1]], one_line)


def rendered(board: Board) -> dict[str, Any]:
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.says,
        "tags": ["trimtab"],
        "schemaVersion": SCHEMA,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "",
        "fiscalYearStartMonth": 0,
        "annotations": {"list": [_policy_changes()]},
        "links": [_links()],
        "templating": {"list": _variables(any("{worker" in s.expr for p in panels_of(board) for s in p.series))},
        "panels": list(_placed(board.rows)),
    }


def _placed(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """Panels from left to right, and on where a line is full."""
    number, y = 0, 0
    for row in rows:
        number += 1
        yield {
            "type": "row",
            "id": number,
            "title": row.title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1},
            "panels": [],
        }
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            number += 1
            yield _panel(panel, number, {"x": x, "y": y, "w": panel.width, "h": panel.height})
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "id": number,
        "title": panel.title,
        "description": panel.says,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_dashes(panel))},
        "options": _options(panel),
        "targets": [
            {
                "refId": _letter(i),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": expanded(series.expr),
                "legendFormat": series.legend,
                "range": panel.kind == "timeseries",
                "instant": panel.kind != "timeseries",
            }
            for i, series in enumerate(panel.series)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    steps = [{"color": colour, "value": value} for value, colour in sorted(panel.steps.items())]
    first = {"color": steps.pop(0)["color"] if steps and steps[0]["value"] == 0 else "green", "value": None}
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "color": {"mode": "palette-classic" if panel.kind == "timeseries" else "thresholds"},
        "thresholds": {"mode": "absolute", "steps": [first, *steps]},
        "mappings": [_mapping(panel.words)] if panel.words else [],
    }
    defaults |= {key: value for key, value in (("min", panel.low), ("max", panel.high)) if value is not None}
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "drawStyle": "line",
            "lineWidth": 1,
            "fillOpacity": 30 if panel.stacked else 5,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
            "thresholdsStyle": {"mode": "dashed" if steps else "off"},
        }
    return defaults


def _mapping(words: Mapping[float, str]) -> dict[str, Any]:
    options = {f"{value:g}": {"text": word, "index": i} for i, (value, word) in enumerate(words.items())}
    return {"type": "value", "options": options}


def _dashes(panel: Panel) -> Iterator[dict[str, Any]]:
    for i, series in enumerate(panel.series):
        if series.dashed:
            look = {"custom.lineStyle": {"fill": "dash", "dash": [10, 10]}, "custom.fillOpacity": 0}
            yield {
                "matcher": {"id": "byFrameRefID", "options": _letter(i)},
                "properties": [{"id": what, "value": value} for what, value in look.items()],
            }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    reduced = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "stat":
        return {"reduceOptions": reduced, "colorMode": "value", "graphMode": "none", "textMode": "auto"}
    return {"reduceOptions": reduced, "orientation": "horizontal", "displayMode": "basic", "showUnfilled": True}


def _letter(i: int) -> str:
    return chr(ord("A") + i)


def _variables(workers: bool) -> list[dict[str, Any]]:
    """The data source and the mesh; pool and instance only where a panel is of workers."""
    source = {
        "type": "datasource",
        "name": "datasource",
        "label": "Data source",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "options": [],
    }
    mesh = _of_label("mesh", "trimtab_control_nodes", "Mesh")
    pool = _of_label("pool", 'trimtab_worker_serving{mesh=~"$mesh"}', "Pool")
    instance = _of_label("instance", 'trimtab_worker_serving{mesh=~"$mesh",pool=~"$pool"}', "Worker")
    return [source, mesh, *((pool, instance) if workers else ())]


def _of_label(name: str, of: str, label: str) -> dict[str, Any]:
    """All is `.*` and not a list of values, so that series without the label are among them."""
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "definition": f"label_values({of}, {name})",
        "query": {"query": f"label_values({of}, {name})", "refId": name},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
    }


def _policy_changes() -> dict[str, Any]:
    """A mark on every panel where the policy changed, so that cause and effect stand side by side."""
    return {
        "name": "Policy changes",
        "datasource": DATASOURCE,
        "enable": True,
        "hide": False,
        "iconColor": "purple",
        "expr": 'max by (mesh) (changes(trimtab_control_policy_revision{mesh=~"$mesh"}[1m])) > 0',
        "step": "60s",
        "titleFormat": "Policy changed",
        "textFormat": "`trimtab why` says what, by whom and on what evidence",
    }


def _links() -> dict[str, Any]:
    """To every board of this set, with the same time and the same choices."""
    return {
        "type": "dashboards",
        "title": "Trimtab",
        "tags": ["trimtab"],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }


def text_of(board: Board) -> str:
    return json.dumps(rendered(board), indent=1, ensure_ascii=False) + "\n"


def sources() -> dict[str, Board]:
    """By file name without its ending."""
    return {path.stem: board_of(path.read_text(), path.name) for path in sorted(SOURCES.glob("*.yml"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where a board is not what its source gives"
    )
    check = parser.parse_args().check
    try:
        wanted = {BOARDS / f"{name}.json": text_of(board) for name, board in sources().items()}
    except (SourceError, yaml.YAMLError) as wrong:
        print(f"boards: {wrong}", file=sys.stderr)
        return 2
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    gone = [path for path in BOARDS.glob("*.json") if path not in wanted]
    for path in [*stale, *gone]:
        print(f"boards: {path.relative_to(ROOT)} {'differs; run make boards' if check else 'written'}", file=sys.stderr)
        if not check:
            path.write_text(wanted[path]) if path in wanted else path.unlink()
    return int(check and bool(stale or gone))


if __name__ == "__main__":
    raise SystemExit(main())
