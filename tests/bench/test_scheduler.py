"""The bench of the scheduler's own cost: what it makes of figures, and that what it measures is the state that it names."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest

from services.bench import scheduler
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.queue_cost import GateCost, PlannerCost
from services.bench.scheduler import Found
from services.bench.scheduler_cost import SCENARIOS, Scenario
from services.bench.stats import bootstrap

NAMES = [s.name for s in SCENARIOS]


class FakePair:
    """Ours takes 50 µs more, and each step a little longer than the one before."""

    opened = closed = 0
    on_rounds: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self, scenario: Scenario, clock: object, seed: int) -> None:
        self.scenario = scenario
        FakePair.opened += 1

    def rounds(self, steps: int) -> list[tuple[float, float]]:
        FakePair.on_rounds()
        return [(1050.0 + i, 1000.0 + i) for i in range(steps)]

    def tokens(self) -> tuple[int, int]:
        return 256, 256

    def close(self) -> None:
        FakePair.closed += 1


class FakeQueue:
    def __init__(self, name: str, us_each: float, waiting: int, seed: int) -> None:
        self.name, self.us = name, us_each * waiting

    def step(self) -> float:
        return self.us


@pytest.fixture(autouse=True)
def _figures(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePair.opened = FakePair.closed = 0
    FakePair.on_rounds = staticmethod(lambda: None)
    monkeypatch.setattr(scheduler, "bootstrap", partial(bootstrap, resamples=50))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_load", lambda: None)
    monkeypatch.setattr(scheduler, "virtual_time", nullcontext)
    monkeypatch.setattr(scheduler, "Pair", FakePair)
    kinds: list[Any] = [partial(FakeQueue, "gate", 0.01), partial(FakeQueue, "planner", 0.2)]
    for kind, name in zip(kinds, ("gate", "planner"), strict=True):
        kind.name = name
    monkeypatch.setattr(scheduler, "QUEUES", tuple(kinds))


@pytest.mark.usefixtures("fakes")
async def test_every_scenario_and_every_size_has_its_figure_and_its_goal() -> None:
    report = await scheduler.run(Options())
    assert [(a["scenario"], a["arm"]) for a in report.arms if "scenario" in a] == [
        (n, a) for n in NAMES for a in ("ours", "stock")
    ]
    assert {a["added_us"] for a in report.arms if a["arm"] == "ours"} == {50.0}
    assert [a["waiting"] for a in report.arms if a["arm"] == "gate"] == [250, 500, 1000, 2000]
    assert {g.name: (g.value, g.met) for g in report.goals} == {
        **{f"added_us_per_step_{n}": (50.0, True) for n in NAMES},
        "gate_us_per_step_at_1000": (10.0, True),
        "gate_growth_exponent": (pytest.approx(1.0), True),
        "planner_us_per_step_at_1000": (200.0, False),
        "planner_growth_exponent": (pytest.approx(1.0), True),
    }
    assert report.exit_code(check=True) == 1
    assert "ADDED" in report.text() and "2,000" in report.text()
    assert (FakePair.opened, FakePair.closed) == (len(SCENARIOS), len(SCENARIOS))


@pytest.mark.usefixtures("fakes")
async def test_quick_is_shorter_and_says_so() -> None:
    report = await scheduler.run(Options(quick=True))
    assert {a["rounds"] for a in report.arms} == {scheduler.QUICK.rounds}
    assert "--quick: 8 shorter rounds instead of 20" in report.notes
    assert scheduler.QUICK.expected_s() < scheduler.FULL.expected_s() < 180


@pytest.mark.usefixtures("fakes")
async def test_an_interrupted_run_reports_what_it_has_and_leaves_nothing_behind() -> None:
    calls = 0

    def on_rounds() -> None:
        nonlocal calls
        calls += 1
        if calls == 3 * len(SCENARIOS) + 2:
            run.cancel()

    FakePair.on_rounds = staticmethod(on_rounds)
    run = asyncio.ensure_future(scheduler.run(Options()))
    report = await run
    assert (report.whole, report.exit_code(check=True)) == (False, 130)
    assert [a["rounds"] for a in report.arms if a["arm"] == "ours"] == [4, 4, 3, 3, 3]
    assert FakePair.closed == FakePair.opened


async def test_there_is_nothing_to_resume(tmp_path: Any) -> None:
    with pytest.raises(BenchError, match="keeps nothing that could be resumed"):
        await scheduler.run(Options(resume=tmp_path))


async def test_without_vllm_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(BenchError, match="needs vLLM"):
        await scheduler.run(Options())


def test_what_was_not_measured_is_not_judged() -> None:
    assert {g.met for g in scheduler._goals(Found(), 1)} == {None}


@pytest.mark.parametrize(("at_2000", "exponent"), [(80.0, 1.0), (640.0, 2.0), (10.0, 0.0)])
def test_growth_is_the_exponent_of_cost_over_number(at_2000: float, exponent: float) -> None:
    found = Found(queues={("gate", 250): [[10.0]] * 6, ("gate", 2000): [[at_2000]] * 6})
    growth = scheduler.growth(found, "gate", 1)
    assert growth is not None
    assert growth.value == pytest.approx(exponent)


async def test_the_queue_stays_as_long_as_it_is_said_to_be() -> None:
    cost = GateCost(40, 1)
    assert all(cost.step() > 0 for _ in range(200))
    assert cost._gate.waiting == 40


def test_the_planner_goes_on_with_as_many_that_wait() -> None:
    cost = PlannerCost(40, 1)
    assert all(cost.step() > 0 for _ in range(200))
    planner = cost._planner
    assert len(planner.waiting) + len(planner.running) in range(40, 40 + 49)
    assert planner.counters.waits and len(planner.running) > 30
