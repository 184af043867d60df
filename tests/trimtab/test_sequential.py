"""Tests that may be looked at at any time: how rarely they err, and how soon they see."""

from __future__ import annotations

import math
import random

import pytest

from trimtab.sequential import Block, Odds, Sign

ALARM = math.log(100.0)


def looked(rng: random.Random, blocks: int, here: float, there: float, most: float = 1.2) -> int | None:
    """The block after which it alarms, looked at after each; one request here and four there."""
    odds = Odds()
    for i in range(blocks):
        block = Block(rng.random() < here, 1, sum(rng.random() < there for _ in range(4)), 4)
        odds = odds.after(block, most)
        if odds.log >= ALARM:
            return i + 1
    return None


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.01, 0.2, 0.7])
def test_sides_that_are_alike_are_rarely_told_apart_however_often_one_looks(share: float) -> None:
    alarms = sum(looked(random.Random(seed), 300, share, share) is not None for seed in range(400))
    # Of 400 at one in a hundred: 4 are expected at most, and 12 would come once in a thousand times.
    assert alarms <= 12


def test_a_load_that_is_slow_for_everybody_is_no_evidence() -> None:
    alarms = 0
    for seed in range(200):
        rng, odds, alarmed = random.Random(seed), Odds(), False
        for i in range(200):
            share = 0.9 if i % 40 >= 20 else 0.01
            there = sum(rng.random() < share for _ in range(4))
            odds = odds.after(Block(rng.random() < share, 1, there, 4), 1.2)
            alarmed = alarmed or odds.log >= ALARM
        alarms += alarmed
    assert alarms <= 8


def test_a_side_on_which_all_is_late_is_seen_after_a_handful() -> None:
    found = [looked(random.Random(seed), 50, 1.0, 0.001) for seed in range(50)]
    assert all(n is not None and n <= 8 for n in found)


def test_what_is_better_is_never_called_worse() -> None:
    assert all(looked(random.Random(seed), 300, 0.05, 0.3) is None for seed in range(100))


def test_a_block_with_one_side_alone_or_in_which_all_are_alike_says_nothing() -> None:
    for block in (Block(3, 3, 0, 0), Block(0, 0, 2, 4), Block(0, 2, 0, 5), Block(2, 2, 5, 5)):
        assert Odds().after(block, 1.2) == Odds()


def test_the_evidence_of_a_block_averages_to_one_where_the_odds_are_as_allowed() -> None:
    # Given three late of two here and six there, all that can be, weighted as a hypergeometric at odds of 1.2 has it.
    weights = {x: math.comb(2, x) * math.comb(6, 3 - x) * 1.2**x for x in range(3)}
    mean = sum(w * math.exp(Odds().after(Block(x, 2, 3 - x, 6), 1.2).log) for x, w in weights.items())
    assert mean / sum(weights.values()) == pytest.approx(1.0)


def test_signs_that_fall_either_way_are_no_evidence_and_ten_of_one_kind_are() -> None:
    alarms = 0
    for seed in range(400):
        rng, sign, alarmed = random.Random(seed), Sign(), False
        for _ in range(200):
            sign = sign.after(rng.random() < 0.5)
            alarmed = alarmed or sign.log >= ALARM
        alarms += alarmed
    assert alarms <= 12
    sign = Sign()
    for _ in range(10):
        sign = sign.after(True)
    assert sign.log >= ALARM
