"""The report as text, as JSON and as an exit code."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.bench import report
from services.bench.goals import Goal
from services.bench.report import Report
from services.bench.stats import Bound, Estimate


def a_goal(met: bool | None, name: str = "speed") -> Goal:
    return Goal(name, 0.93, Bound.AT_LEAST, 0.95, met, Estimate(0.97, 0.95, 0.99, 6))


def a_report(*goals: Goal, **fields: Any) -> Report:
    return Report(
        "overhead", [{"arm": "mesh"}], list(goals), machine={"words": "a machine", "versions": {"x": "1"}}, **fields
    )


@pytest.mark.parametrize(
    ("met", "check", "code"),
    [(True, True, 0), (None, True, 0), (False, True, 1), (False, False, 0)],
)
def test_only_a_missed_goal_fails_a_check(met: bool | None, check: bool, code: int) -> None:
    assert a_report(a_goal(True), a_goal(met)).exit_code(check=check) == code


def test_a_run_that_was_cut_short_ends_as_the_shell_expects() -> None:
    assert a_report(a_goal(True), whole=False).exit_code(check=True) == 130


def test_a_check_lists_what_is_undecided() -> None:
    said = a_report(a_goal(None, "speed"), a_goal(True, "cpu")).verdict()
    assert said == "check: no goal is missed; undecided: speed"
    assert a_report(a_goal(False, "speed")).verdict() == "check: missed: speed"


def test_the_json_has_arms_and_goals() -> None:
    facts = json.loads(json.dumps(a_report(a_goal(None)).as_json()))
    assert list(facts) == ["bench", "date", "machine", "command", "whole", "notes", "arms", "goals"]
    assert facts["goals"] == [
        {"name": "speed", "goal": 0.93, "bound": "at_least", "value": 0.95, "met": None, "estimate": 0.97,
         "interval": [0.95, 0.99], "n": 6}
    ]  # fmt: skip
    assert facts["arms"] == [{"arm": "mesh"}]


def test_the_text_has_the_goal_beside_its_figure() -> None:
    text = a_report(a_goal(False), notes=["noisy"]).text()
    line = next(line for line in text.splitlines() if line.startswith("speed"))
    assert line.split() == ["speed", "≥", "0.93", "0.95", "NO", "6", "0.97", "[0.95,", "0.99]"]
    assert "a machine" in text
    assert "note: noisy" in text


def test_this_machine_has_words() -> None:
    facts = report.machine()
    assert f"of {facts['cpu']}" in facts["words"]
    assert "load average" in facts["words"]
    assert facts["versions"]["trimtab"]
