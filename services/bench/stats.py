"""The statistics of a report: quantiles, quartiles, seeded bootstrap intervals, and whether a goal is met. Pure.

Invariant: the same values and the same seed give the same answer, so a report can be made again from its raw rounds.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

RESAMPLES = 2000
LEVEL = 0.95
MIN_GROUPS = 6
"""Below this no verdict: the whole range of n values covers the true median with probability 1 − 2^(1−n), 94 % at n = 5."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True, slots=True)
class Estimate:
    """A statistic with its bootstrap interval. `n` counts the groups that were resampled."""

    value: float
    low: float
    high: float
    n: int


class Bound(enum.Enum):
    """Which side of a goal is the good one."""

    AT_MOST = "at_most"
    AT_LEAST = "at_least"


def quantile(values: Sequence[float], q: float) -> float:
    """By linear interpolation between the nearest two of the sorted values; `q` in [0, 1]. ValueError when there are none."""
    if not values:
        raise ValueError("a quantile needs at least one value")
    ranked = sorted(values)
    place = q * (len(ranked) - 1)
    below = int(place)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (place - below)


def quantiles(values: Sequence[float], qs: Sequence[float]) -> list[float]:
    """Several of them, for one sorting."""
    ranked = sorted(values)
    return [quantile(ranked, q) for q in qs]  # sorting what is sorted costs next to nothing


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), quantile(values, 0.25), quantile(values, 0.75), len(values))


def bootstrap(
    groups: Sequence[T], statistic: Callable[[Sequence[T]], float], *, seed: int, resamples: int = RESAMPLES
) -> Estimate:
    """The percentile interval of `statistic`, resampling whole groups: a round's values share its noise, and so stay together."""
    if not groups:
        raise ValueError("a bootstrap needs at least one group")
    rng = random.Random(seed)
    seen = [statistic(rng.choices(groups, k=len(groups))) for _ in range(resamples)]
    tail = (1.0 - LEVEL) / 2.0
    return Estimate(statistic(groups), quantile(seen, tail), quantile(seen, 1.0 - tail), len(groups))


def nested_bootstrap(
    groups: Sequence[Sequence[T]],
    statistics: Callable[[Sequence[T]], Sequence[float]],
    *,
    seed: int,
    resamples: int = 1000,
) -> list[Estimate]:
    """Percentile intervals of several statistics of all members, resampling whole groups and then the members of each group drawn.

    So few groups as there are do not stand for all that could have been, and members of a group share its noise: this allows for both.
    Each estimate's `n` counts members. Empty groups say nothing and are left out.
    """
    groups = [g for g in groups if g]
    if not groups:
        raise ValueError("a bootstrap needs at least one group with a member")
    rng = random.Random(seed)
    seen = []
    for _ in range(resamples):
        drawn = rng.choices(groups, k=len(groups))
        seen.append(statistics([member for group in drawn for member in rng.choices(group, k=len(group))]))
    tail, everybody = (1.0 - LEVEL) / 2.0, [member for group in groups for member in group]
    return [
        Estimate(value, quantile(column, tail), quantile(column, 1.0 - tail), len(everybody))
        for value, column in zip(statistics(everybody), zip(*seen, strict=True), strict=True)
    ]


def verdict(estimate: Estimate, goal: float, bound: Bound) -> bool | None:
    """True or False where the whole interval lies on one side of the goal; None where this sample can't decide."""
    if estimate.n < MIN_GROUPS:
        return None
    if bound is Bound.AT_MOST:
        return True if estimate.high <= goal else False if estimate.low > goal else None
    return True if estimate.low >= goal else False if estimate.high < goal else None
