"""The figures of `reblock`: which gaps are pauses, what is wrong and lost, what growth is, and that each bad measurement turns its goal red."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from services.bench.reblock import figures, tables
from services.bench.reblock.figures import Found

STREAMS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def a_change(**fields: Any) -> dict[str, Any]:
    known = {
        "before": 128, "after": 64, "change_ms": 5.0, "call_ms": 60.0, "requests": 2, "carried_tokens": 0,
        "predicted_tokens": 1000, "measured_tokens": 1050, "pauses_ms": [900.0, 1100.0],
    }  # fmt: skip
    return {**known, **fields}


def a_carried_change(**fields: Any) -> dict[str, Any]:
    return a_change(
        **{"carried_tokens": 1000, "predicted_tokens": 0, "measured_tokens": 0, "pauses_ms": [90.0, 110.0], **fields}
    )


def a_part(kind: str, tokens: list[list[int]] | None = None, **fields: Any) -> dict[str, Any]:
    streams = [{"tokens": t, "error": ""} for t in (tokens or STREAMS)]
    return {
        "kind": kind,
        "number": 0,
        "streams": streams,
        "leaked": 0,
        "output": 4,
        "median_gaps_ms": [40.0, None],
        **fields,
    }


def a_bout(*changes: dict[str, Any], **fields: Any) -> dict[str, Any]:
    known = {"kind": "bout", "changes": list(changes or [a_change()] * 20), "cut_short": ""}
    return a_part(**{**known, **fields})


def a_refusal(size: int = 16, **fields: Any) -> dict[str, Any]:
    return {"size": size, "cause": "SIZE", "ms": 50.0, "unchanged": True, **fields}


def a_soak(resident_kb: list[float] | None = None, **fields: Any) -> dict[str, Any]:
    known = {
        "kind": "soak", "number": 0, "change_ms": {"idle": [4.0] * 100, "busy": [6.0] * 100}, "leaked": [0] * 20,
        "resident_kb": resident_kb or [900_000.0 + 40 * (i % 3) for i in range(20)], "errors": [],
    }  # fmt: skip
    return {**known, **fields}


def good_parts() -> dict[str, dict[str, Any]]:
    return {
        "reference": a_part("reference"),
        "control": a_part("reference", number=1),
        "bout": a_bout(),
        "carried": a_bout(*[a_carried_change()] * 20, kind="carried"),
        "refusals": a_part("refusals", tried=[a_refusal(s) for s in (16, 24, 48, 0, -1, 10**9)]),
        "soak": a_soak(),
        "restart": {"kind": "restart", "number": 0, "stop_s": 4.0, "start_s": 20.0},
    }


def met(parts: dict[str, dict[str, Any]], *, quick: bool = False) -> dict[str, bool | None]:
    return {g.name: g.met for g in figures.goals(Found.of(list(parts.values())), quick=quick)}


# Pauses.


@pytest.mark.parametrize(
    ("put_s", "until_s", "wanted"),
    [
        (0.25, 0.26, 0.0),  # nothing but usual gaps
        (0.35, 1.5, 900.0),  # begun before the change was put, and ended after
        (0.35, 0.5, 900.0),  # not over when the watch ends
        (1.35, 2.0, 0.0),  # the long gap was over by then
        (5.0, 6.0, None),
    ],
)
def test_a_pause_is_the_longest_gap_around_a_change_less_the_streams_usual_one(
    put_s: float, until_s: float, wanted: float | None
) -> None:
    times = [0.0, 0.1, 0.2, 0.3, 1.3, 1.4, 1.5, 1.6]
    assert figures.pause_ms(times, put_s, until_s) == (None if wanted is None else pytest.approx(wanted))


def test_a_stream_of_one_token_has_no_gap_and_no_pause() -> None:
    assert figures.median_gap_ms([1.0]) is None
    assert figures.pause_ms([1.0], 0.0, 2.0) is None


# Which sizes.


def test_changes_go_over_all_sizes_and_never_to_the_one_that_is_there() -> None:
    sizes = [32, 64, 96, 128, 192]
    found = figures.order(sizes, 20, 128, "seed")
    assert len(found) == 20 and set(found) == set(sizes)
    assert all(a != b for a, b in pairwise([128, *found]))
    assert {found.count(s) for s in sizes} <= {3, 4, 5}
    assert found == figures.order(sizes, 20, 128, "seed") != figures.order(sizes, 20, 128, "another")


def test_sizes_that_had_their_turn_in_an_earlier_bout_wait_for_the_others() -> None:
    assert set(figures.order([32, 64, 96, 128], 2, 64, "seed", used=[32, 64])) == {96, 128}


def test_a_size_that_the_engine_takes_is_not_among_those_it_must_refuse() -> None:
    assert figures.refused_sizes([32, 64]) == [16, 24, 48, 0, -1, 10**9]
    assert figures.refused_sizes([16, 32]) == [24, 48, 0, -1, 10**9]


# Tokens.


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (STREAMS, (0, 0)),
        ([[1, 2, 9, 4], [5, 6, 7, 8]], (1, 0)),
        ([[1, 2, 3, 4], [5, 6]], (0, 2)),
        ([[1, 2, 3, 4]], (0, 4)),
        ([[1, 2, 3, 4, 5], [5, 6, 7, 8]], (1, 0)),
        ([[2, 3, 4], [5, 6, 7, 8]], (3, 1)),  # one that is left out moves all after it
    ],
)
def test_wrong_and_lost_tokens_are_counted_at_their_place(found: list[list[int]], wanted: tuple[int, int]) -> None:
    assert figures.compare(STREAMS, found) == wanted


def test_a_longer_stream_is_held_against_as_much_as_the_reference_has() -> None:
    parts = good_parts()
    parts["served"] = a_part("served", [[1, 2, 3, 4, 9], [5, 6, 7, 8, 9]], output=5, changes=[a_change()], cut_short="")
    assert figures.against_reference(Found.of(list(parts.values()))) == (0, 0)
    parts["served"]["streams"][0]["tokens"] = [1, 2, 4]
    assert figures.against_reference(Found.of(list(parts.values()))) == (1, 2)


# Memory.


def test_steady_growth_is_not_taken_for_noise() -> None:
    grown = figures.growth_kb([900_000.0 + 500.0 * i for i in range(20)])
    assert grown == (pytest.approx(5000.0), pytest.approx(2000.0))


def test_a_jump_at_the_beginning_and_a_sawtooth_are_no_growth() -> None:
    growth, noise = figures.growth_kb([800_000.0] * 4 + [900_000.0, 901_500.0] * 8) or (0.0, 0.0)
    assert (growth, noise) == (0.0, 1500.0)
    assert figures.growth_kb([1.0] * 7) is None


# Goals.


def test_a_good_run_meets_every_goal() -> None:
    assert all(value is True for value in met(good_parts()).values())


def test_nothing_measured_decides_nothing() -> None:
    undecided = {name for name, value in met({}).items() if value is None}
    assert undecided == set(met({})) - {"changes_under_load"}


def _slow(parts: dict[str, dict[str, Any]]) -> None:
    parts["bout"] = a_bout(*[a_change()] * 19, a_change(change_ms=25.0))


def _too_slow(parts: dict[str, dict[str, Any]]) -> None:
    parts["bout"] = a_bout(*[a_change(change_ms=12.0)] * 20)


def _predicts_too_little(parts: dict[str, dict[str, Any]]) -> None:
    parts["bout"] = a_bout(*[a_change()] * 19, a_change(predicted_tokens=500))


def _predicts_what_never_comes(parts: dict[str, dict[str, Any]]) -> None:
    parts["bout"] = a_bout(*[a_change()] * 19, a_change(measured_tokens=0))


def _carries_nothing(parts: dict[str, dict[str, Any]]) -> None:
    parts["carried"] = a_bout(*[a_carried_change()] * 19, a_carried_change(measured_tokens=7), kind="carried")


def _wrong(parts: dict[str, dict[str, Any]]) -> None:
    parts["bout"] = a_bout(tokens=[[1, 2, 3, 5], [5, 6, 7, 8]])


def _lost_beside_refusals(parts: dict[str, dict[str, Any]]) -> None:
    parts["refusals"]["streams"][1]["tokens"] = [5, 6, 7]


def _not_the_same_twice(parts: dict[str, dict[str, Any]]) -> None:
    parts["control"] = a_part("reference", [[1, 2, 3, 4], [5, 6, 7, 9]])


def _taken(parts: dict[str, dict[str, Any]]) -> None:
    parts["refusals"]["tried"][0] = a_refusal(cause="", unchanged=False)


def _refused_and_changed(parts: dict[str, dict[str, Any]]) -> None:
    parts["refusals"]["tried"][3] = a_refusal(0, unchanged=False)


def _leak(parts: dict[str, dict[str, Any]]) -> None:
    parts["soak"] = a_soak(leaked=[0] * 19 + [1])


def _freed_twice(parts: dict[str, dict[str, Any]]) -> None:
    parts["bout"] = a_bout(leaked=-1)


def _grows(parts: dict[str, dict[str, Any]]) -> None:
    parts["soak"] = a_soak([900_000.0 + 500.0 * i for i in range(20)])


def _fails_in_a_row(parts: dict[str, dict[str, Any]]) -> None:
    parts["soak"] = a_soak(errors=["EngineFault: it ended"])


def _cut_short(parts: dict[str, dict[str, Any]]) -> None:
    parts["bout"] = a_bout(*[a_change()] * 19)


def _few_in_a_row(parts: dict[str, dict[str, Any]]) -> None:
    parts["soak"] = a_soak(change_ms={"idle": [4.0] * 99, "busy": [6.0] * 100})


@pytest.mark.parametrize(
    ("spoil", "missed"),
    [
        (_slow, {"change_max_ms"}),
        (_too_slow, {"change_p50_ms", "change_max_ms"}),
        (_predicts_too_little, {"predicted_to_measured_lowest"}),
        (_predicts_what_never_comes, {"predicted_to_measured_highest"}),
        (_wrong, {"wrong_tokens"}),
        (_lost_beside_refusals, {"lost_tokens"}),
        (_not_the_same_twice, {"control_differing_tokens"}),
        (_taken, {"refusals_not_kept"}),
        (_refused_and_changed, {"refusals_not_kept"}),
        (_leak, {"leaked_blocks"}),
        (_freed_twice, {"leaked_blocks"}),
        (_grows, {"memory_growth_kb"}),
        (_fails_in_a_row, {"errors_in_a_row"}),
        (_carries_nothing, {"carried_yet_recomputed_tokens"}),
        (_cut_short, {"changes_under_load"}),
        (_few_in_a_row, {"changes_in_a_row"}),
    ],
)
def test_what_is_bad_misses_its_goal_and_no_other(
    spoil: Callable[[dict[str, dict[str, Any]]], None], missed: set[str]
) -> None:
    parts = good_parts()
    spoil(parts)
    assert {name for name, value in met(parts).items() if value is False} == missed


@pytest.mark.parametrize("spoil", [_slow, _wrong, _leak, _taken, _grows])
def test_a_quick_run_decides_what_is_missed_and_nothing_else(
    spoil: Callable[[dict[str, dict[str, Any]]], None],
) -> None:
    parts = good_parts()
    assert set(met(parts, quick=True).values()) == {None}
    spoil(parts)
    assert set(met(parts, quick=True).values()) == {None, False}


def test_time_for_carrying_kv_over_is_not_held_against_the_goal() -> None:
    parts = good_parts()
    parts["carried"] = a_bout(*[a_carried_change(change_ms=300.0)] * 20, kind="carried")
    assert met(parts)["change_max_ms"] is True and met(parts)["carried_yet_recomputed_tokens"] is True


def test_how_much_shorter_pauses_are_where_kv_is_carried_over_is_told() -> None:
    parts = good_parts()
    arms = {a["arm"]: a for a in figures.arms(Found.of(list(parts.values())))}
    assert arms["carried over"]["pause_anew_over_carried"] == pytest.approx(10.0)
    text = "\n".join(body for _, body in tables.sections(list(arms.values())))
    assert "carried over: 10" in text and "1000" in text


# What is shown.


def test_a_restart_is_compared_with_the_engines_time_and_with_what_readers_see() -> None:
    found = figures.restart_over_pause(Found.of(list(good_parts().values())))
    assert found == {"restart_ms": 24_000.0, "over_change": pytest.approx(4800.0), "over_pause": pytest.approx(24.0)}
    assert figures.restart_over_pause(Found()) is None


def test_the_report_shows_each_change_each_refusal_and_the_restart() -> None:
    text = "\n".join(body for _, body in tables.sections(figures.arms(Found.of(list(good_parts().values())))))
    for words in (
        "128 → 64",
        "1000000000",
        "without a change tokens are 40.0 ms apart",
        "median pause of a stream",
        "growth",
    ):
        assert words in text
    assert "NOT REFUSED" not in text
    assert tables.sections([]) == []
