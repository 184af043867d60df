"""Who is compared, and how often and in which order."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from services.bench.mixed import arms
from services.bench.mixed.plan import Plan
from services.bench.mixed.workload import arrivals, counted
from services.bench.options import Options
from trimtab.policy import Policy, check, parse, with_fields

RATE = 0.32


def test_every_arm_is_a_policy_that_the_schema_takes() -> None:
    for arm in arms.every((50, 100, 200)):
        with_fields(Policy(), {**arms.COMMON, **arm.policy})


def test_every_arm_says_something_of_every_field_that_any_arm_sets() -> None:
    """Else what one arm has set would still be there in the next."""
    every = [arms.fields(arm) for arm in arms.every((50,))]
    assert len({frozenset(f) for f in every}) == 1
    ours = arms.fields(arms.ours(70))
    assert (ours["prefill.itl_budget_ms"], ours["scheduler.mode"], ours["preemption.mode"]) == (
        "70",
        "trimtab",
        "default",
    )
    for fields in every:
        assert all(check(path, parse(path, text)) is not None for path, text in fields.items() if text != "default")


def test_an_ablation_sets_one_thing_apart_from_all_off() -> None:
    """But for preemption and the reserve, which need slots to be short, and suspension, which needs a budget."""
    for arm in arms.ABLATIONS:
        if arm.name.startswith("only-"):
            differing = {k for k, v in arm.policy.items() if arms.OFF.get(k) != v}
            assert len(differing) <= 3, arm.name


def test_arms_are_chosen_by_name_by_group_and_by_budget() -> None:
    assert [a.name for a in arms.chosen((), (50,))][:5] == [
        "fcfs",
        "priority",
        "ours-50",
        "realtime-alone",
        "batch-alone",
    ]
    assert [a.name for a in arms.chosen(("main",), (50, 100))] == [
        "fcfs", "priority", "ours-50", "ours-100", "realtime-alone", "batch-alone",
    ]  # fmt: skip
    assert [a.name for a in arms.chosen(("ours-70", "fcfs"), (50,))] == ["fcfs", "ours-70"]
    with pytest.raises(ValueError, match=r"no arm is called 'prority'; did you mean priority\?"):
        arms.chosen(("prority",), (50,))


def test_a_full_run_has_requests_and_rounds_enough_for_every_goal() -> None:
    plan = Plan.of(Options())
    for arm in plan.arms:
        rounds, t = plan.rounds_of(arm, RATE, 1), plan.timing
        requests = sum(counted(arrivals(f"1/{r}", RATE, t.block_s), t.warm_up_s, t.block_s) for r in range(rounds))
        assert (rounds >= 6 and requests >= 200) or (arm.ablation and rounds >= 2 and requests >= 60)
    assert plan.rounds_of(arms.FCFS, 10.0, 1) == 6


def test_every_round_has_every_arm_once_and_each_its_own_order() -> None:
    plan = replace(Plan.of(Options(arms=("main",))), rounds=6)
    order = list(plan.order(RATE, 1))
    assert Counter(arm.name for _, arm in order) == dict.fromkeys((a.name for a in plan.arms), 6)
    assert [r for r, _ in order] == sorted(r for r, _ in order)
    orders = {tuple(a.name for r, a in order if r == round_) for round_ in range(6)}
    assert len(orders) > 3
    assert order == list(plan.order(RATE, 1))


def test_quick_ends_within_three_minutes_however_slowly_the_engine_starts() -> None:
    plan = Plan.of(Options(quick=True))
    assert [a.name for a in plan.arms] == ["fcfs", "ours-100"]
    assert plan.budget_s is not None and plan.budget_s < 180
    assert plan.fitted(1000.0) == plan.timing.block_s == 60.0
    assert plan.fitted(100.0) == 39.0
    assert plan.timed(39.0).timing.warm_up_s == 6.5
