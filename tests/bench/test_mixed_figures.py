"""From raw blocks to figures and goals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import pytest

from services.bench.goals import Goal
from services.bench.mixed import figures, goals
from services.bench.mixed.arms import ABLATIONS, BATCH_ALONE, FCFS, REALTIME_ALONE, ours
from services.bench.mixed.block import Block
from services.bench.stats import Estimate, nested_bootstrap
from tests.bench.mixed_builders import a_block, good_blocks, rounds


@pytest.fixture(autouse=True)
def _few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        figures, "nested_bootstrap", lambda *a, seed, **_: nested_bootstrap(*a, seed=seed, resamples=60)
    )
    monkeypatch.setattr(figures, "bootstrap", partial(figures.bootstrap, resamples=60))


def judged(blocks: list[Block], *, quick: bool = False) -> dict[str, Goal]:
    found, _ = goals.goals(figures.by_arm(blocks), 1, quick=quick)
    return {g.name: g for g in found}


def test_good_figures_meet_every_goal() -> None:
    found = judged(good_blocks())
    assert {name: g.met for name, g in found.items()} == {
        "p1_realtime_e2e_p95_over_realtime_alone": True,
        "p1_tokens_per_s_over_fcfs": True,
        "p2_realtime_e2e_p95_fcfs_over_ours": True,
        "p2_realtime_e2e_p95_priority_over_ours": True,
        "p2_tokens_per_s_over_fcfs": True,
        "p2b_our_points_dominated_by_fcfs_or_priority": True,
        "p2b_steps_against_the_order_of_budgets": True,
        "tokens_per_s_over_batch_alone_in_time_left_at_50_ms": True,
        "tokens_per_s_over_batch_alone_in_time_left_at_100_ms": True,
        "tokens_per_s_over_batch_alone_in_time_left_at_200_ms": True,
        "max_overtake_ms": True,
    }


def test_each_of_the_points_is_judged_where_its_weakest_condition_is_best() -> None:
    found, notes = goals.goals(figures.by_arm(good_blocks()), 1, quick=False)
    values = {g.name: g.value for g in found}
    assert [n.split(",")[0] for n in notes] == ["P1 is judged at ours-50", "P2 is judged at ours-200"]
    assert values["p1_realtime_e2e_p95_over_realtime_alone"] == pytest.approx(1.2)
    assert values["p2_realtime_e2e_p95_priority_over_ours"] == pytest.approx(20 / 3)
    assert values["tokens_per_s_over_batch_alone_in_time_left_at_50_ms"] == pytest.approx(370 / (405 * 0.8))


def test_bad_figures_miss_what_they_miss() -> None:
    slow = {
        name: {"e2e_ms": 45_000.0, "tokens_per_s": 250.0, "max_overtake_ms": 31_000.0}
        for name in ("ours-50", "ours-100", "ours-200")
    }
    assert {g.met for g in judged(good_blocks(**slow)).values()} == {False, True}
    assert {name for name, g in judged(good_blocks(**slow)).items() if g.met} == {
        "p2b_steps_against_the_order_of_budgets"
    }


def test_a_larger_budget_that_is_faster_for_realtime_is_out_of_order() -> None:
    found = judged(good_blocks(**{"ours-200": {"e2e_ms": 900.0, "tokens_per_s": 300.0}}))
    assert (
        found["p2b_steps_against_the_order_of_budgets"].value,
        found["p2b_steps_against_the_order_of_budgets"].met,
    ) == (2.0, False)


def test_too_few_requests_or_rounds_decide_nothing_of_the_tail() -> None:
    few_requests = [replace(b, realtime=b.realtime[:20]) for b in good_blocks()]
    few_rounds = good_blocks(5)
    for blocks in (few_requests, few_rounds):
        found = judged(blocks)
        tails = [g for name, g in found.items() if "p95" in name or "p2b" in name]
        assert [g.met for g in tails] == [None] * 5
        assert all(g.value is not None for g in tails)


def test_quick_leaves_the_tail_out_and_shows_the_rest() -> None:
    blocks = [b for b in good_blocks(1) if b.arm in ("fcfs", "ours-100")]
    found = judged(blocks, quick=True)
    assert {name: g.met for name, g in found.items() if g.met is not None} == {"max_overtake_ms": True}
    assert found["p1_realtime_e2e_p95_over_realtime_alone"].value is None
    assert found["p1_tokens_per_s_over_fcfs"].value == pytest.approx(385 / 400)


def test_nothing_measured_leaves_every_goal_open() -> None:
    assert {g.met for g in judged([]).values()} == {None}


def test_ratios_are_taken_request_by_request_within_rounds() -> None:
    """A machine that slows down between rounds changes both sides of each pair, and so nothing."""
    blocks = [
        b
        for r in range(6)
        for b in (a_block("fcfs", r, e2e_ms=8000.0 * (r + 1)), a_block("ours-50", r, e2e_ms=1000.0 * (r + 1)))
    ]
    e = figures.e2e_ratio(figures.by_arm(blocks), "fcfs", "ours-50", ["p95"], 1)["p95"]
    assert (e.value, e.low, e.high, e.n) == (pytest.approx(8.0), pytest.approx(8.0), pytest.approx(8.0), 240)
    assert figures.e2e_ratio(figures.by_arm(blocks), "fcfs", "priority", ["p95"], 1) == {}


def test_tokens_are_compared_by_sums_over_shared_rounds() -> None:
    blocks = [*rounds("fcfs", 6), *rounds("ours-50", 3, tokens_per_s=200.0), a_block("ours-50", 9, tokens_per_s=9.0)]
    e = figures.tokens_ratio(figures.by_arm(blocks), "ours-50", "fcfs", 1)
    assert e is not None
    assert (e.value, e.n) == (0.5, 3)


@pytest.mark.parametrize(
    ("requests", "quick", "expected"),
    [(3, False, []), (4, False, ["p50"]), (40, False, ["p50", "p90", "p95"]), (200, False, ["p50", "p90", "p95", "p99"]),
     (200, True, ["p50"])],
)  # fmt: skip
def test_a_quantile_needs_requests_beyond_it(requests: int, quick: bool, expected: list[str]) -> None:
    assert figures.names(FCFS, requests, quick=quick) == expected
    assert figures.names(ABLATIONS[0], requests, quick=quick) == expected[:2]


def test_there_is_one_object_for_an_arm_and_it_is_json() -> None:
    found = figures.by_arm(good_blocks())
    arm = json.loads(json.dumps(figures.arm_figures(ours(100), found, 1, quick=False)))
    assert (arm["arm"], arm["rounds"], arm["requests"], arm["unfinished"]) == ("ours-100", 6, 240, 0)
    assert arm["policy"] == {
        "scheduler.mode": "trimtab", "prefill.itl_budget_ms": 100, "prefill.max_step_ms": 1000,
    }  # fmt: skip
    assert arm["tokens_per_s"]["value"] == 385.0
    assert arm["batch_tokens_per_s"]["value"] == 360.0
    assert arm["recomputed_tokens"] == 600.0
    assert arm["hook_us_per_step"] == 1.0
    assert list(arm["e2e_ms"]) == ["p50", "p90", "p95", "p99"]
    assert arm["e2e_ms"]["p50"]["n"] == 240
    assert arm["ratios"]["e2e_p95_fcfs_over_this"]["value"] == pytest.approx(40 / 1.8)
    assert arm["ratios"]["tokens_over_batch_alone_in_time_left"]["value"] == pytest.approx(385 / (405 * 0.8))


def test_an_arm_of_one_source_says_nothing_of_the_other() -> None:
    found = figures.by_arm(good_blocks())
    batch = figures.arm_figures(BATCH_ALONE, found, 1, quick=False)
    alone = figures.arm_figures(REALTIME_ALONE, found, 1, quick=False)
    assert "e2e_ms" not in batch
    assert "batch_tokens_per_s" not in alone
    assert alone["ratios"] == {}


def test_a_nested_interval_allows_for_both_few_rounds_and_few_requests() -> None:
    def mean(values: object) -> list[float]:
        seen = list(values)  # type: ignore[call-overload]
        return [sum(seen) / len(seen)]

    (alike,) = nested_bootstrap([[1.0, 2.0, 3.0]] * 6, mean, seed=1, resamples=300)
    (apart,) = nested_bootstrap([[float(r)] * 3 for r in range(6)], mean, seed=1, resamples=300)
    assert alike.low < 2.0 < alike.high
    assert apart.low < 1.5 and apart.high > 3.5
    assert (alike.n, apart.n) == (18, 18)
    assert nested_bootstrap([[], [5.0]], mean, seed=1) == [Estimate(5.0, 5.0, 5.0, 1)]
    with pytest.raises(ValueError, match="at least one group with a member"):
        nested_bootstrap([[]], mean, seed=1)
