"""Quantiles, intervals and verdicts."""

from __future__ import annotations

import pytest

from services.bench.stats import Bound, Estimate, Spread, bootstrap, median, quantile, spread, verdict


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([3.0], 0.95, 3.0), ([1.0, 2.0], 0.5, 1.5), ([4.0, 1.0, 3.0, 2.0], 0.0, 1.0), ([4.0, 1.0, 3.0, 2.0], 1.0, 4.0),
     (list(map(float, range(101))), 0.95, 95.0), ([1.0, 2.0, 3.0, 4.0], 0.25, 1.75)],
)  # fmt: skip
def test_a_quantile_lies_between_the_nearest_two(values: list[float], q: float, expected: float) -> None:
    assert quantile(values, q) == pytest.approx(expected)


def test_nothing_has_no_quantile() -> None:
    with pytest.raises(ValueError, match="at least one value"):
        quantile([], 0.5)
    with pytest.raises(ValueError, match="at least one group"):
        bootstrap([], median, seed=1)


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)


def test_a_seed_gives_the_same_interval_again() -> None:
    values = [1.0, 1.1, 0.9, 1.2, 0.8, 1.05]
    one, again, other = (bootstrap(values, median, seed=s) for s in (1, 1, 2))
    assert one == again
    assert one.value == other.value == pytest.approx(1.025)
    assert 0.8 <= one.low < one.value < one.high <= 1.2


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    import random

    rng = random.Random(7)
    hits = 0
    for i in range(100):
        e = bootstrap([rng.gauss(10, 2) for _ in range(20)], median, seed=i, resamples=300)
        hits += e.low <= 10 <= e.high
    assert 88 <= hits <= 100


def test_whole_groups_are_resampled() -> None:
    """Values of one group are as good as one value: the interval must not shrink with their number."""

    def pooled(groups: object) -> float:
        return median([v for g in groups for v in g])  # type: ignore[attr-defined]

    few = bootstrap([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]], pooled, seed=1)
    many = bootstrap([[v] * 100 for v in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)], pooled, seed=1)
    assert (few.low, few.high) == (many.low, many.high)


@pytest.mark.parametrize(
    ("low", "high", "n", "bound", "expected"),
    [
        (0.2, 0.4, 6, Bound.AT_MOST, True),
        (0.2, 0.5, 6, Bound.AT_MOST, True),
        (0.6, 0.9, 6, Bound.AT_MOST, False),
        (0.4, 0.6, 6, Bound.AT_MOST, None),
        (0.2, 0.4, 5, Bound.AT_MOST, None),
        (0.93, 1.0, 6, Bound.AT_LEAST, True),
        (0.8, 0.92, 6, Bound.AT_LEAST, False),
        (0.9, 0.95, 6, Bound.AT_LEAST, None),
    ],
)
def test_a_verdict_needs_the_whole_interval_on_one_side(
    low: float, high: float, n: int, bound: Bound, expected: bool | None
) -> None:
    goal = 0.5 if bound is Bound.AT_MOST else 0.93
    assert verdict(Estimate((low + high) / 2, low, high, n), goal, bound) is expected
