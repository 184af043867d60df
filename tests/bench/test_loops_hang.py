"""`bench loops --scenario hang`: a load for two workers that is too much for one, and what is made of restarts. The mesh is run by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from services.bench.cli import bench
from services.bench.loops import course, figures, hang
from services.bench.loops.block import Block, Request, Written, of_json, turns_per_minute
from services.bench.loops.plan import FOUR, arrivals
from services.bench.options import Options
from services.bench.report import Report
from trimtab.messages import Workload


def a_block(arm: str, over: int, *restarts: float) -> Block:
    realtime = tuple(Request(5.0, 900.0 if i < over else 100.0, 10.0, 1000.0) for i in range(10))
    return Block(arm, 0, realtime, ((10.0, 1000),), 0, (), 60.0, restarts)


@pytest.mark.parametrize("plan", [hang.REAL, hang.FAST, hang.QUICK])
def test_realtime_alone_is_more_than_one_worker_can_do_and_all_of_it_less_than_two(plan: hang.Plan) -> None:
    one = 0.5
    for phase_s in (0.0, plan.course.before_s, plan.course.whole_s - 1.0):
        load = plan.course.load(phase_s)
        assert one < load * plan.course.realtime_share < load < 1.0


def test_the_load_has_its_own_share_of_realtime() -> None:
    long = replace(hang.REAL.course, before_s=1000.0)
    mine = arrivals(long, 1000.0, "s")
    tokens = {w: sum(a.prompt + a.output for a in mine if a.workload is w) for w in Workload}
    assert tokens[Workload.REALTIME] / sum(tokens.values()) == pytest.approx(long.realtime_share, abs=0.03)
    assert sum(tokens.values()) == pytest.approx(long.low * 1000.0 * long.whole_s, rel=0.1)


def test_restarts_are_told_and_come_back_from_the_disk() -> None:
    block = a_block("both", 2, 11.5)
    assert of_json(block.as_json()) == block
    old = block.as_json()
    del old["restarts"]
    assert of_json(old).restarts == ()
    found = course.Found(1000.0, 100.0, 20.0)
    blocks = [a_block("scheduler", 8), block]
    report = figures.report(FOUR, blocks, found, hang.FAST.course, {}, "typed", Path("raw"), True, ["two workers"])
    assert {f["arm"]: (f["violations"], f["restarts"]) for f in report.arms} == {
        "scheduler": (0.8, 0),
        "both": (0.2, 1),
    }
    assert "two workers" in report.notes
    assert {g.name: g.value for g in report.goals}["both_less_scheduler_violations"] == pytest.approx(-0.6)


def test_a_turn_of_less_than_a_minute_is_not_made_more_of() -> None:
    moves = tuple(Written(float(i), "batch", "node/w0: batch.active", v) for i, v in enumerate((0.8, None)))
    assert turns_per_minute(replace(a_block("both", 0), written=moves, drained_s=30.0)) == 1.0


def test_the_scenario_is_another_course(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []

    async def run(options: Options) -> Report:
        asked.append(options)
        return Report("loops", [], [], [], [], True, {}, "typed")

    monkeypatch.setattr(hang, "run", run)
    options = Options(scenario="hang", model=hang.SIMULATED)
    assert asyncio.run(course.run(options)).bench == "loops"
    assert asked == [options]


def test_no_other_bench_has_scenarios() -> None:
    result = CliRunner().invoke(bench, ["push", "--scenario", "hang"])
    assert result.exit_code == 2
    assert "no option --scenario" in result.output
