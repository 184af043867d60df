"""`trimtab simulate`: the step that is judged, what a tick costs, and what is shown of it."""

from __future__ import annotations

import dataclasses
import json
import time
from dataclasses import replace

import pytest
from click.testing import CliRunner

from controlplane import bench_loops, bench_tick, scenarios
from controlplane.bench_loops import Arm, Course, Goal, Row
from controlplane.controllers.roster import CONTROLLERS
from tests.loops.builders import NAMES, a_fleet, people
from trimtab.policy_loops import LoopsPart
from trimtab.simulation import Hang, Mesh
from trimtab.workload import arrivals, mixed
from trimtab_cli.__main__ import cli


def row_of(scenario: scenarios.Scenario, arm: Arm) -> Row:
    courses = [c for c in bench_loops.course(scenario, arm, 1, CONTROLLERS) if isinstance(c, Course)]
    assert courses[0].rehearsal.failures == []
    return bench_loops.row(scenario, arm, courses)


def test_the_roster_has_every_controller_that_a_policy_knows() -> None:
    assert sorted(NAMES) == sorted(f.name for f in dataclasses.fields(LoopsPart))


@pytest.mark.slow
def test_a_worker_does_what_the_scenarios_take_for_its_capacity() -> None:
    rate = 2 * scenarios.CAPACITY
    mesh = Mesh(scenarios.healthy().fleet, arrivals(mixed(2 * rate), 60, 1), seed=1)
    mesh.run(20)
    before = mesh.total_tokens()[0]
    mesh.run(60)
    each = [a.prompt + a.output for a in arrivals(mixed(200.0), 50, 1)]
    requests_s = (mesh.total_tokens()[0] - before) / 40 / (sum(each) / len(each))
    assert requests_s == pytest.approx(rate, rel=0.1)


@pytest.fixture(scope="module")
def goals() -> dict[str, Goal]:
    """Of the step of load that is judged, loops off and on."""
    scenario = scenarios.step(30, 50, 92)
    return {g.name: g for g in bench_loops.goals([row_of(scenario, Arm("trimtab", on)) for on in (False, True)])}


@pytest.mark.slow
def test_after_a_step_of_load_realtime_is_inside_within_six_windows_and_batch_back_within_twelve(
    goals: dict[str, Goal],
) -> None:
    assert len(goals) == 5
    assert "step: REALTIME P99 from window 6 on, ms" in goals
    assert {name: g.met for name, g in goals.items()} == dict.fromkeys(goals, True)


def test_an_arm_without_loops_is_one_in_which_nobody_does_anything() -> None:
    document = bench_loops.document_of(scenarios.idle(), Arm("fcfs", False), NAMES)
    assert document.base == {"scheduler.mode": "fcfs", **{f"loops.{n}": "off" for n in NAMES}}
    one = bench_loops.document_of(scenarios.idle(), Arm("trimtab", True, "heal"), NAMES)
    assert one.base == {"scheduler.mode": "trimtab", "loops.heal": "off"}


@pytest.mark.slow
def test_only_controllers_that_acted_are_left_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    hang = scenarios.Scenario("hang", "", (people((0, 3)),), 60, a_fleet(2), (Hang(20, "default-1"),))
    monkeypatch.setattr(scenarios, "all_of", lambda *, quick: (hang,))
    result = CliRunner().invoke(cli, ["simulate", "loops", "--quick", "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    arms = {a["arm"]: a for a in answer["arms"]}
    assert list(arms) == [
        "fcfs, no loops",
        "fcfs, loops",
        "trimtab, no loops",
        "trimtab, loops",
        "trimtab, every loop",
        "trimtab, loops without heal",
    ]
    assert [arms[name]["commands"] for name in arms] == [0, 1, 0, 1, 1, 0]
    assert {"name", "goal", "bound", "value", "met"} == set(answer["goals"][0])
    text = CliRunner().invoke(cli, ["simulate", "loops", "--quick"])
    assert "hang: " in text.stdout and "trimtab, loops without heal" in text.stdout


def test_a_scenario_that_is_not_there_names_those_that_are() -> None:
    result = CliRunner().invoke(cli, ["simulate", "loops", "--scenario", "steps"])
    assert result.exit_code == 2
    assert "step" in result.output and "flood" in result.output


def test_check_fails_on_a_missed_goal_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, code in ((100.0, 1), (1.0, 0), (None, 0)):
        monkeypatch.setattr(bench_loops, "goals", lambda rows, value=value: [Goal("g", 50.0, True, value)])
        monkeypatch.setattr(scenarios, "all_of", lambda *, quick: (scenarios.idle(5.0),))
        result = CliRunner().invoke(cli, ["simulate", "loops", "--quick", "--check"])
        assert result.exit_code == code, result.output


@pytest.mark.parametrize("healthy", [True, False])
def test_the_tick_is_measured_on_nodes_that_report(healthy: bool) -> None:
    steps = list(bench_tick.measure(20, CONTROLLERS, time.process_time, healthy=healthy, seconds=40))
    cost = steps[-1]
    assert isinstance(cost, bench_tick.Cost)
    assert (cost.nodes, cost.ticks) == (20, 30)
    assert 0.0 < cost.median_ms <= cost.p99_ms <= cost.max_ms
    assert cost.report_us > 0.0
    # Whoever is well is left alone, and a mesh in trouble is not: else the cost of neither was measured.
    assert (cost.adjustments == 0) is healthy


def test_a_goal_that_was_not_measured_is_neither_met_nor_missed() -> None:
    assert [Goal("g", 1.0, True, v).met for v in (0.5, 2.0, None)] == [True, False, None]
    assert [Goal("g", 1.0, False, v).met for v in (0.5, 2.0, None)] == [False, True, None]


def test_scenarios_have_names_of_their_own() -> None:
    for quick in (True, False):
        keys = [s.name for s in scenarios.all_of(quick=quick)]
        assert len(set(keys)) == len(keys)
    assert replace(scenarios.step(), name="x").step_s == (60.0, 150.0)
