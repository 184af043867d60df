"""How much the time of decode steps varies: found where it does, in no other length class, and not where steps differ as predicted."""

from __future__ import annotations

import math
import random

import pytest

from tests.trimtab.scheduling_builders import a_run, rules
from trimtab.engine import Costs
from trimtab.scheduling import NOW, STATS, LengthClass, Planner
from trimtab.scheduling.counters import ENOUGH_STEPS, OLD_STEPS, Steadiness

SHORT, GIANT = LengthClass.SHORT, LengthClass.GIANT


def test_steps_that_take_what_was_predicted_do_not_vary_however_they_differ() -> None:
    s = Steadiness()
    for n in range(200):
        s.add(SHORT, 2.0 * (1 + n % 7), 1.0 + n % 7)
    assert s.deviation == pytest.approx(0.0, abs=1e-9), "wrong by the same factor each time is right"


def test_the_figure_is_the_deviation_as_a_share_of_the_mean() -> None:
    rng, s = random.Random(3), Steadiness()
    found = []
    for _ in range(4000):
        s.add(SHORT, 10.0 * rng.gauss(1.0, 0.3), 10.0)
        found.append(s.deviation)
    assert sum(found[100:]) / len(found[100:]) == pytest.approx(0.3, rel=0.05)


def test_the_first_figure_is_that_of_all_steps_so_far() -> None:
    s = Steadiness()
    values = [1.0 + n % 3 for n in range(ENOUGH_STEPS)]
    for value in values[:-1]:
        s.add(SHORT, value, 1.0)
    assert s.deviation == 0.0, "too few to say"
    s.add(SHORT, values[-1], 1.0)
    mean = sum(values) / len(values)
    assert s.deviation == pytest.approx(math.sqrt(sum((v - mean) ** 2 for v in values) / len(values)) / mean, rel=0.05)


def test_the_largest_of_the_classes_counts_until_it_is_of_another_time() -> None:
    s = Steadiness()
    for n in range(100):
        s.add(GIANT, 1.0 + n % 2, 1.0)
    for _ in range(100):
        s.add(SHORT, 1.0, 1.0)
    assert s.deviation > 0.3
    for _ in range(OLD_STEPS):
        s.add(SHORT, 1.0, 1.0)
    assert s.deviation == pytest.approx(0.0, abs=1e-9)


def test_what_was_long_ago_is_forgotten() -> None:
    s = Steadiness()
    for n in range(200):
        s.add(SHORT, 1.0 + 3.0 * (n % 2), 1.0)
    assert s.deviation > 0.5
    for _ in range(700):
        s.add(SHORT, 2.5, 1.0)
    assert s.deviation < 0.01


def deviation(planner: Planner) -> float:
    return dict(zip(STATS, planner.stats(), strict=True))["decode_deviation"]


def test_steps_of_an_engine_are_counted_by_the_longest_that_runs_and_those_with_prompts_are_not() -> None:
    run = a_run(prefill__itl_budget_ms=1000, prefill__max_step_ms=1000)
    for n in range(3):
        run.realtime(100 * (n + 1), output=400)
    run.realtime(600, output=120)
    run.step(60)
    spreads = run.counters.steadiness.spreads
    assert spreads[SHORT].count == 0 and spreads[LengthClass.STANDARD].count == run.counters.steadiness.steps > 50
    while run.engine.busy:
        run.step()
    assert spreads[SHORT].count > 100, "once the longest has gone"
    with_prompts = sum(1 for _, result in run.steps if result.tokens > len(result.ran))
    assert run.counters.steadiness.steps <= len(run.steps) - with_prompts
    assert deviation(run.planner) == pytest.approx(0.0, abs=1e-6)
    assert set(run.planner.running_lengths.values()) == {0}


def test_an_engine_whose_steps_jump_is_seen_to() -> None:
    run = a_run(prefill__itl_budget_ms=1000, prefill__max_step_ms=1000)
    run.realtime(100, output=300)
    steady = run.engine.costs
    for n in range(200):
        run.engine.costs = Costs(steady.step_ms * (1 + 2 * (n % 2)), steady.token_us)
        run.step()
    assert deviation(run.planner) > 0.3


def test_classes_of_those_who_run_follow_the_edges_of_the_policy() -> None:
    run = a_run(prefill__itl_budget_ms=1000, prefill__max_step_ms=1000)
    run.realtime(300, output=50)
    run.step(3)
    assert run.planner.running_lengths[SHORT] == 1
    run.engine.set_rules(rules(clusters__short_to=200))
    assert (run.planner.running_lengths[SHORT], run.planner.running_lengths[LengthClass.STANDARD]) == (0, 1)
    while run.engine.busy:
        run.step()
    assert set(run.planner.running_lengths.values()) == {0}


def test_it_is_reported_as_of_now() -> None:
    assert "decode_deviation" in NOW
