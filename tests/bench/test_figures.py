"""From raw blocks to figures and goals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from services.bench import figures
from services.bench.figures import Block, Lone
from services.bench.goals import Goal
from tests.bench.builders import a_block, a_cell, blocks


def goal(name: str, found: list[Goal]) -> Goal:
    return next(g for g in found if g.name == name)


def all_blocks(**cells: Any) -> list[Block]:
    return [b for c in (1, 8, 32) for b in blocks(concurrency=c, **cells)]


def lone(mesh_ms: float, http_ms: float, rounds: int = 8) -> list[Lone]:
    """A machine whose speed changes from round to round; the ratio within each does not."""
    return [Lone(r, {"mesh": (mesh_ms * (1 + r),) * 4, "http": (http_ms * (1 + r),) * 4}) for r in range(rounds)]


PAIRS = [(6.0 + i % 5 / 10, 5.0 + i % 5 / 10) for i in range(200)]


def test_a_block_survives_its_json() -> None:
    assert Block.from_json(json.loads(json.dumps(a_block().as_json()))) == a_block()


def test_lone_rounds_survive_their_json_and_a_slower_machine_changes_no_ratio() -> None:
    rounds = lone(40, 50)
    assert [Lone.from_json(json.loads(json.dumps(r.as_json()))) for r in rounds] == rounds
    assert figures.ttft_ratio(rounds, "mesh", "http", 1).value == pytest.approx(0.8)
    mesh, http = figures.lone_arms(rounds)
    assert (mesh["arm"], http["arm"], mesh["ttft_samples"]) == ("lone mesh", "lone http", 32)


def test_every_goal_is_met_by_good_figures() -> None:
    found = figures.goals(all_blocks(mesh=a_cell("mesh", tokens_per_s=97, ttft_ms=40)), PAIRS, lone(40, 45), 1)
    assert [(g.name, g.goal, round(g.value or 0, 6), g.met) for g in found] == [
        ("cpu_s_per_1000_tokens_outside_engine_at_32", 0.5, 0.3, True),
        ("tokens_per_s_ratio_to_bare_lower_at_1", 0.93, 0.97, True),
        ("tokens_per_s_ratio_to_bare_lower_at_8", 0.93, 0.97, True),
        ("tokens_per_s_ratio_to_bare_lower_at_32", 0.93, 0.97, True),
        ("added_ttft_p50_ms_at_1", 2.0, 1.0, True),
        ("ttft_p50_ratio_to_vllm_http_upper_at_1", 1.05, round(40 / 45, 6), True),
    ]


def test_goals_are_missed_by_bad_figures() -> None:
    slow = all_blocks(mesh=a_cell("mesh", tokens_per_s=80, ttft_ms=70, cpu_s=0.2))
    found = figures.goals(slow, [(9.0, 5.0)] * 60, lone(70, 50), 1)
    assert {g.name: g.met for g in found} == dict.fromkeys((g.name for g in found), False)


def test_too_few_rounds_decide_nothing_and_still_show_their_figure() -> None:
    found = figures.goals(blocks(2, mesh=a_cell("mesh", cpu_s=5.0)), [], [], 1)
    cpu = goal("cpu_s_per_1000_tokens_outside_engine_at_32", found)
    assert (cpu.value, cpu.met) == (15.0, None)
    assert goal("added_ttft_p50_ms_at_1", found) == Goal("added_ttft_p50_ms_at_1", 2.0, cpu.bound)


def test_a_straddling_interval_is_undecided() -> None:
    speeds = [90, 91, 92, 98, 99, 100, 101]
    mixed = [a_block(r, 8, mesh=a_cell("mesh", tokens_per_s=s)) for r, s in enumerate(speeds)]
    found = goal("tokens_per_s_ratio_to_bare_lower_at_8", figures.goals(mixed, [], [], 1))
    assert found.estimate is not None
    assert found.estimate.value == pytest.approx(0.98)
    assert (found.value, found.met) == (found.estimate.low, None)


@pytest.mark.parametrize(("https", "met"), [((50, 51, 49), True), ((49, 46, 52), None), ((46, 47, 45), False)])
def test_not_behind_vllms_server_is_what_is_surely_no_slower_by_a_margin(
    https: Sequence[float], met: bool | None
) -> None:
    rounds = [Lone(r, {"mesh": (50.0,) * 4, "http": (float(https[r % 3]),) * 4}) for r in range(9)]
    found = goal("ttft_p50_ratio_to_vllm_http_upper_at_1", figures.goals([], [], rounds, 1))
    assert found.estimate is not None and (found.value, found.met) == (found.estimate.high, met)


def test_ratios_are_taken_within_rounds() -> None:
    """A machine that slows down between rounds changes both sides of each pair, and so nothing."""
    slowing = [
        a_block(r, 32, mesh=a_cell("mesh", tokens_per_s=95 / (r + 1)), bare=a_cell("bare", tokens_per_s=100 / (r + 1)))
        for r in range(6)
    ]
    e = figures.ratio(slowing, "mesh", 1)
    assert (e.value, e.low, e.high) == pytest.approx((0.95, 0.95, 0.95))


def test_the_engine_and_the_load_generator_are_not_outside_the_engine() -> None:
    (mesh, *_) = figures.arms(blocks(1), 1)
    assert mesh["cpu_s_per_1000_tokens"] == pytest.approx(
        {"gateway": 0.1, "worker": 0.1, "control": 0.1, "engine": 9.0, "client": 0.2}
    )
    assert mesh["cpu_s_per_1000_tokens_outside_engine"]["median"] == pytest.approx(0.3)


def test_there_is_one_object_for_each_arm_and_concurrency() -> None:
    arms = figures.arms(all_blocks(), 1)
    assert [(a["arm"], a["concurrency"]) for a in arms] == [(arm, c) for c in (1, 8, 32) for arm in figures.ARMS]
    assert {(a["rounds"], a["ttft_samples"], a["tokens"]) for a in arms} == {(6, 12, 6000)}
