"""Presets as pure choices: which fields, for which window, by which measurement, and over whose head never."""

from __future__ import annotations

import pytest

from trimtab.policy import FIELDS, parse
from trimtab.presets import (
    BUDGET,
    ITL,
    SMALL,
    THRESHOLDS,
    TTFT,
    decided,
    in_place,
    itl_budget_ms,
    small,
    steady,
    suits,
    ttft_objective_ms,
)


def test_small_sets_three_thresholds_and_what_is_known_of_budget_and_objectives() -> None:
    thresholds = {"paths.hot_below": "1024", "serial.above": "3072", "isolate.from_tokens": "6144"}
    assert small(None) == thresholds
    assert small(99) == {**thresholds, "prefill.itl_budget_ms": "99", "objectives.itl_p99_ms": "198"}
    assert small(None, 200.0) == {**thresholds, "objectives.ttft_p99_ms": "800"}
    assert tuple(small(1, 1.0)) == SMALL


def test_objectives_stand_to_the_budget_as_the_defaults_do() -> None:
    assert FIELDS[ITL].default == int(small(int(FIELDS[BUDGET].default))[ITL])
    assert FIELDS[TTFT].default == ttft_objective_ms(0.0)


@pytest.mark.parametrize(("ttft_ms", "objective"), [(1.0, 500), (125.0, 500), (125.1, 501), (300.0, 1200)])
def test_the_objective_of_ttft_is_four_times_that_of_one_stream_and_500_at_least(
    ttft_ms: float, objective: int
) -> None:
    assert ttft_objective_ms(ttft_ms) == objective


def test_every_field_of_small_takes_its_value_and_is_not_the_default() -> None:
    for path, typed in small(99, 200.0).items():
        assert parse(path, typed) != FIELDS[path].default


@pytest.mark.parametrize(("window", "fits"), [(0, False), (1, True), (8192, True), (16_384, True), (16_385, False)])
def test_small_is_for_windows_up_to_16384(window: int, fits: bool) -> None:
    assert suits(window) is fits


@pytest.mark.parametrize(("token_ms", "budget"), [(24.61, 99), (25.0, 100), (1.01, 5), (0.0, 1)])
def test_the_budget_is_four_tokens_rounded_up(token_ms: float, budget: int) -> None:
    assert itl_budget_ms(token_ms) == budget


@pytest.mark.parametrize(
    ("medians", "agree"),
    [
        ([], False),
        ([10.0], False),
        ([10.0, 10.5], True),
        ([10.0, 10.6], False),
        ([30.0, 10.0, 12.0, 10.2], True),
        ([1.0, 1.25], True),
        ([1.0, 1.26], False),
    ],
)
def test_the_two_fastest_streams_agree_within_five_percent_or_a_millisecond_of_budget(
    medians: list[float], agree: bool
) -> None:
    assert steady(medians) is agree


def test_a_field_that_is_set_or_was_changed_before_is_decided() -> None:
    assert decided(dict.fromkeys(FIELDS, "default")) == ()
    assert decided({"serial.above": "spec", "batch.active": "spec"}) == ("serial.above",)
    assert decided({}, {"paths.hot_below", "batch.active"}) == ("paths.hot_below",)


def test_small_is_in_place_when_its_thresholds_hold_and_some_budget_is_set() -> None:
    spec = dict.fromkeys(SMALL, "spec")
    assert in_place({**THRESHOLDS, BUDGET: 40}, spec)
    assert not in_place({**THRESHOLDS, BUDGET: 100}, {**spec, BUDGET: "default"})
    assert not in_place({**THRESHOLDS, BUDGET: 40, "serial.above": 3073}, spec)
