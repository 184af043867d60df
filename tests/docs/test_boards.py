"""Grafana's boards and Prometheus' rules: whole, at one with each other and with the documents; PromQL where promtool is there to say so."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import boards
import platformdirs
import pytest
import yaml

from tests.docs.expressions import ROOT, RULES, board_expressions, grouped_by, rules, selectors

DEPLOY = ROOT / "deploy"
RULE_TESTS = RULES.with_name("trimtab.rules.test.yml")
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))}
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
RECORDS = {rule["record"]: rule for rule in rules() if "record" in rule}
SHOWN = [(where, expr) for board in BOARDS.values() for where, expr in board_expressions(board)]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
SECTION = OPERATIONS.partition("\n## What each alert means\n")[2].partition("\n## ")[0]
OURS = ("trimtab_", "vllm:")
PROMETHEUS_OWN = {"ALERTS", "up"}
SEVERITIES = {"critical", "warning", "{{ $labels.severity }}"}


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def promtool() -> str:
    """On PATH, or where `make promtool` puts it; the test is skipped where it is in neither."""
    cache = os.environ.get("TRIMTAB_CACHE_DIR") or platformdirs.user_cache_dir("trimtab")
    found = shutil.which("promtool") or shutil.which("promtool", path=str(Path(cache) / "prometheus"))
    if found is None:
        pytest.skip("no promtool; `make promtool` fetches it")
    return found


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_board_is_what_its_source_gives():
    wanted = {name: boards.text_of(board) for name, board in boards.sources().items()}
    written = {path.stem: path.read_text() for path in (DEPLOY / "grafana").glob("*.json")}
    assert written == wanted, "run `make boards`"
    assert len(wanted) == 5


def test_a_source_with_a_key_that_nobody_reads_is_refused():
    panel = {"title": "t", "says": "s", "unit": "s", "series": [{"expr": "up", "legend": "l", "colour": "red"}]}
    source = {"uid": "u", "title": "t", "says": "s", "rows": [{"title": "r", "panels": [panel]}]}
    with pytest.raises(boards.SourceError, match=r"x\.yml: the board, rows 1, panels 1, series 1 has colour"):
        boards.board_of(yaml.safe_dump(source), "x.yml")
    del panel["series"][0]["colour"]
    assert boards.board_of(yaml.safe_dump(source), "x.yml").rows[0].panels[0].series[0].expr == "up"
    del panel["says"]
    with pytest.raises(boards.SourceError, match="says"):
        boards.board_of(yaml.safe_dump(source), "x.yml")


def test_filters_stand_for_the_boards_choices_and_matchers_may_follow():
    assert boards.expanded('sum(a{gateway,b="c"})\n  / b{worker}') == (
        'sum(a{mesh=~"$mesh",b="c"}) / b{mesh=~"$mesh",pool=~"$pool",instance=~"$instance"}'
    )


def test_boards_have_names_that_last_and_links_to_each_other():
    uids = [board["uid"] for board in BOARDS.values()]
    assert sorted(uids) == ["trimtab-batch", "trimtab-memory", "trimtab-paths", "trimtab-policy", "trimtab-scheduler"]
    for board in BOARDS.values():
        (link,) = board["links"]
        assert (link["type"], link["tags"], link["includeVars"], link["keepTime"]) == (
            "dashboards",
            ["trimtab"],
            True,
            True,
        )
        assert "trimtab" in board["tags"], "it is found by that"


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_says_how_it_is_read_and_in_what_unit(name):
    for panel in panels(BOARDS[name]):
        assert len(panel["description"]) > 40, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_lie_side_by_side(name):
    taken = Counter[tuple[int, int]]()
    for panel in BOARDS[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= boards.COLUMNS, panel["title"]
        taken.update(
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        )
    assert taken.most_common(1)[0][1] == 1
    ids = [panel["id"] for panel in BOARDS[name]["panels"]]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", BOARDS)
def test_a_board_takes_its_data_from_wherever_it_is_told(name):
    board = BOARDS[name]
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert {"datasource", "mesh"} <= variables
    sources = [panel["datasource"] for panel in panels(board)]
    sources += [target["datasource"] for panel in panels(board) for target in panel["targets"]]
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    text = json.dumps(board)
    assert re.findall(r"https?://|localhost|\b\d+\.\d+\.\d+\.\d+\b", text) == []
    used = set(re.findall(r"\$\{?([a-z_]+)", text)) - {"__all"}
    assert used == variables, "every variable is used, and each that is used is there"


@pytest.mark.parametrize(("where", "expr"), SHOWN, ids=[where for where, _ in SHOWN])
def test_a_panel_shows_the_mesh_that_was_chosen(where, expr):
    first, *_ = selectors(expr)
    assert ("mesh", "=~", "$mesh") in first.matchers, where


@pytest.mark.parametrize(("where", "expr"), [*SHOWN, *((n, r["expr"]) for n, r in (RECORDS | ALERTS).items())])
def test_an_expression_names_metrics_of_ours_or_what_the_rules_record(where, expr):
    names = {s.name for s in selectors(expr)}
    assert names, where
    assert [n for n in names if not n.startswith(OURS) and n not in RECORDS and n not in PROMETHEUS_OWN] == []
    for opening, closing in ("()", "{}", "[]"):
        assert expr.count(opening) == expr.count(closing), where


@pytest.mark.parametrize("name", RECORDS)
def test_what_is_recorded_is_used_and_named_after_what_it_keeps(name):
    users = [expr for _, expr in SHOWN] + [rule["expr"] for rule in (RECORDS | ALERTS).values()]
    assert any(name in {s.name for s in selectors(expr)} for expr in users)
    assert re.fullmatch(r"(mesh|pool|instance)(_workload)?:trimtab_[a-z_]+:[a-z0-9_]+", name)
    if level := {"mesh": {"mesh"}, "pool": {"mesh", "pool"}}.get(re.split("[:_]", name)[0]):
        kept = grouped_by(RECORDS[name]["expr"]) - {"le"}
        assert kept == level | ({"workload"} if "_workload:" in name else set())


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_how_bad_it_is_with_figures_and_where_to_read_on(name):
    alert = ALERTS[name]
    assert re.fullmatch(r"[1-9]\d*[smh]", alert["for"])
    assert alert["labels"]["severity"] in SEVERITIES
    assert alert["labels"]["product"] == "trimtab"
    assert re.search(r"\{\{[^}]*\$(value|labels)\b", alert["annotations"]["summary"])
    assert alert["annotations"]["runbook_url"] == f"docs/operations.md#{name.lower()}"


def test_every_alert_has_its_page_and_every_page_its_alert():
    pages = dict(re.findall(r"^### (\w+)\n(.*?)(?=^### |\Z)", SECTION, re.MULTILINE | re.DOTALL))
    assert list(pages) == list(ALERTS), "in the order of the rules"
    for name, page in pages.items():
        assert re.findall(r"^- \*\*(\w+)\*\*: ", page, re.MULTILINE) == ["Says", "Look", "Do", "Undo"], name


def test_every_alert_is_tried_where_it_must_fire_and_where_it_must_not():
    tried = Counter[tuple[str, bool]]()
    for group in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for case in group["alert_rule_test"]:
            tried[case["alertname"], bool(case.get("exp_alerts"))] += 1
    assert {name for name, _ in tried} == set(ALERTS)
    assert [name for name in ALERTS if not (tried[name, True] and tried[name, False])] == []


def test_prometheus_takes_the_rules_and_they_fire_as_they_should():
    tool = promtool()
    run(tool, "check", "config", "scrape.yml", cwd=RULES.parent)
    run(tool, "check", "rules", RULES.name, cwd=RULES.parent)
    run(tool, "test", "rules", RULE_TESTS.name, cwd=RULES.parent)


def test_every_expression_of_a_board_is_promql(tmp_path):
    tool = promtool()
    as_rules = [
        {"record": f"shown:{i}", "expr": expr, "labels": {"at": where}} for i, (where, expr) in enumerate(SHOWN)
    ]
    (tmp_path / "shown.yml").write_text(yaml.safe_dump({"groups": [{"name": "shown", "rules": as_rules}]}))
    run(tool, "check", "rules", "shown.yml", cwd=tmp_path)
