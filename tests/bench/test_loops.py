"""`bench loops`: its load, its arms, and what is made of what was seen. The mesh itself is run by hand and by `make bench-loops`."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from services.bench.loops import figures
from services.bench.loops.block import Block, Request, Written, batch_speed, of_json, turns_per_minute, violations
from services.bench.loops.course import Found, chosen, written
from services.bench.loops.plan import CONTROLLERS, DEFAULT, FOUR, WITH, WITHOUT, Course, arrivals, mean
from services.bench.processes import BenchError
from trimtab.messages import Workload
from trimtab.policy import FIELDS

COURSE = Course(before_s=100.0, step_s=100.0, after_s=100.0)


def a_block(
    arm: str = "both", number: int = 0, over: int = 1, of: int = 10, batch: int = 1000, *written: Written
) -> Block:
    realtime = tuple(Request(150.0, 900.0 if i < over else 100.0, 10.0, 1000.0) for i in range(of))
    return Block(arm, number, realtime, ((10.0, batch), (999.0, 5)), 0, written, 120.0)


def test_the_load_is_the_share_of_capacity_that_each_phase_asks_for() -> None:
    mine = arrivals(COURSE, 5000.0, "s")
    for phase, load in (("before", 0.5), ("step", 1.5), ("after", 0.5)):
        tokens = {
            w: sum(a.prompt + a.output for a in mine if COURSE.phase(a.at_s) == phase and a.workload is w)
            for w in Workload
        }
        assert tokens[Workload.REALTIME] == pytest.approx(0.3 * load * 5000 * 100, rel=0.1)
        assert tokens[Workload.BATCH] == pytest.approx(0.7 * load * 5000 * 100, rel=0.15)
    assert mine == arrivals(COURSE, 5000.0, "s")
    assert mine != arrivals(COURSE, 5000.0, "t")
    assert mean((2, 4)) == 3.0


def test_every_arm_says_of_every_loop_whether_it_acts() -> None:
    assert {f"loops.{name}" for name in CONTROLLERS} == {path for path in FIELDS if path.startswith("loops.")}
    for arm in (*FOUR, *WITHOUT, *WITH):
        assert arm.policy.keys() == {"scheduler.mode"} | {f"loops.{name}" for name in CONTROLLERS}
    assert [a.name for a in FOUR] == ["neither", "loops", "scheduler", "both"]
    assert FOUR[3].loops == DEFAULT
    assert {a.name.partition(" ")[2] for a in WITHOUT} == DEFAULT
    assert {a.name.partition(" ")[2] for a in WITH} == set(CONTROLLERS) - DEFAULT


def test_arms_are_chosen_by_name() -> None:
    assert chosen((), FOUR) == FOUR
    assert chosen(("ablations",), FOUR) == (FOUR[2], FOUR[3], *WITHOUT, *WITH)
    assert chosen(("both",), FOUR) == (FOUR[3],)
    with pytest.raises(BenchError, match="no arm is called 'nobody'"):
        chosen(("nobody",), FOUR)


def test_a_request_without_a_token_or_with_an_error_missed_its_objective() -> None:
    assert Request(0.0, None, 0.0, None).over(500, 200)
    assert Request(0.0, 10.0, 0.0, 20.0, "DEADLINE").over(500, 200)
    assert Request(0.0, 10.0, 201.0, 20.0).over(500, 200)
    assert not Request(0.0, 500.0, 200.0, 9000.0).over(500, 200)


def test_batch_counts_what_ended_while_the_load_lasted() -> None:
    assert batch_speed([a_block(batch=3000)], COURSE) == pytest.approx(10.0)
    assert violations([a_block(over=2)], 500, 200, COURSE) == 0.2
    assert violations([a_block(over=2)], 500, 200, COURSE, "before") == 0.0


def test_a_knob_that_goes_down_and_comes_back_has_turned_once() -> None:
    def knob(*values: float | None) -> Block:
        return a_block(
            "both", 0, 0, 1, 1, *(Written(float(i), "batch", "node/w0: batch.active", v) for i, v in enumerate(values))
        )

    assert turns_per_minute(knob(0.8, 0.64, 0.7, 0.8, None)) == pytest.approx(0.5)
    assert turns_per_minute(knob(0.8, None, 0.8, None)) == pytest.approx(1.5)
    assert turns_per_minute(knob(0.8, 0.64)) == 0.0


def test_what_controllers_wrote_is_read_from_the_history() -> None:
    def entry(author: str, at_ms: int, before: str | None, after: str | None) -> dict[str, object]:
        change = {"field": "batch.active", "scope": "adjustment/batch node/w0", "before": before, "after": after}
        return {"author": author, "written_unix_ms": at_ms, "changes": [change]}

    entries = [
        entry("controller/batch", 4000, "×0.8", None),
        entry("controller/batch", 3500, "×0.8", "×0.8"),
        entry("controller/batch", 3000, None, "×0.8"),
        entry("ada", 2500, None, "×0.1"),
        entry("controller/batch", 1000, None, "×0.5"),
    ]
    assert [(w.at_s, w.controller, w.what, w.value) for w in written(entries, 2000.0)] == [
        (1.0, "batch", "batch node/w0: batch.active", 0.8),
        (2.0, "batch", "batch node/w0: batch.active", None),
    ]


def test_a_turn_comes_back_from_the_disk_as_it_was() -> None:
    block = a_block("both", 2, 1, 3, 10, Written(1.0, "batch", "x", None))
    assert of_json(block.as_json()) == block


def test_goals_compare_the_rounds_that_both_arms_have() -> None:
    found = Found(5000.0, 100.0, 25.0)
    assert found.objectives == (400, 100)
    blocks = [
        a_block(arm, i, over, batch=batch)
        for i in range(6)
        for arm, over, batch in (("both", 1, 990), ("scheduler", 3, 1000))
    ]
    report = figures.report(FOUR, blocks, found, COURSE, {}, "trimtab bench loops", Path("raw"), True)
    goals = {g.name: g for g in report.goals}
    assert goals["both_less_scheduler_violations"].value == pytest.approx(-0.2)
    assert goals["both_less_scheduler_violations"].met is True
    assert goals["both_to_scheduler_batch"].value == pytest.approx(0.99)
    assert goals["both_turns_per_min"].met is True
    assert "loops_less_neither_violations" not in goals
    worse = [dataclasses.replace(b, batch_tokens=((10.0, 800),)) if b.arm == "both" else b for b in blocks]
    bad = figures.report(FOUR, worse, found, COURSE, {}, "", Path("raw"), True)
    assert {g.name: g.met for g in bad.goals}["both_to_scheduler_batch"] is False
