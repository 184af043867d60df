"""Quantiles of windows taken together, against the merge of their sketches."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable

import pytest

from controlplane.quantiles import mixed, share_of_sum_above
from trimtab.sketch import Quantiles, Sketch


def sketch_of(values: list[float]) -> Sketch:
    found = Sketch()
    for value in values:
        found.add(value)
    return found


def test_one_part_is_itself_and_none_is_empty() -> None:
    only = Quantiles(10, 1.0, 2.0, 3.0, 4.0)
    assert mixed([Quantiles(), only]) == only
    assert mixed([]) == Quantiles()


def off(found: float, exact: float) -> float:
    return abs(found / exact - 1)


def draw_latency(draw: random.Random, scale: float) -> float:
    return draw.lognormvariate(math.log(scale), 0.5)


def draw_wait(draw: random.Random, scale: float) -> float:
    return draw.expovariate(1 / scale)


def draw_length(draw: random.Random, scale: float) -> float:
    return draw.uniform(10, scale + 20)


@pytest.mark.parametrize("draws", [draw_latency, draw_wait, draw_length])
def test_several_are_near_what_their_sketches_give_together(draws: Callable[[random.Random, float], float]) -> None:
    """Windows of six workers that differ by up to twenty times."""
    errors = []
    for seed in range(60):
        draw = random.Random(seed)
        scales = [math.exp(draw.uniform(3, 6)) for _ in range(6)]
        parts = [sketch_of([draws(draw, scale) for _ in range(draw.randint(50, 1000))]) for scale in scales]
        found, exact = mixed(s.quantiles() for s in parts), Sketch.merged(parts).quantiles()
        assert (found.count, found.max) == (exact.count, exact.max)
        assert found.p50 <= found.p95 <= found.p99 <= found.max
        errors.append((off(found.p50, exact.p50), off(found.p95, exact.p95), off(found.p99, exact.p99)))
    p50, p95, p99 = zip(*errors, strict=True)
    assert statistics.fmean(p50) < 0.2 and max(p50) < 1.0
    assert statistics.fmean(p95) < 0.15 and max(p95) < 0.35
    assert statistics.fmean(p99) < 0.1 and max(p99) < 0.3


def test_the_result_never_leaves_the_range_of_its_parts() -> None:
    low, high = Quantiles(1000, 10.0, 20.0, 30.0, 31.0), Quantiles(10, 500.0, 900.0, 990.0, 1000.0)
    found = mixed([low, high])
    assert 20.0 <= found.p95 <= 900.0 and 30.0 <= found.p99 <= 990.0 and found.count == 1010


def test_the_share_of_giants_in_all_tokens_is_theirs() -> None:
    draw = random.Random(1)
    lengths = [float(draw.randint(100, 900)) for _ in range(970)] + [50_000.0] * 30
    q = sketch_of(lengths).quantiles()
    exact = sum(v for v in lengths if v > 10_000) / sum(lengths)
    assert share_of_sum_above(q, 10_000) == pytest.approx(exact, abs=0.25)
    assert share_of_sum_above(q, 60_000) == 0.0
