"""The seeded load."""

from __future__ import annotations

import itertools
import math

import pytest

from services.bench.mixed import workload
from services.bench.mixed.workload import Lengths, arrivals, backlog, busy_share, prompt, rate_for


def test_a_seed_gives_the_same_load_again() -> None:
    assert arrivals("1/0", 0.3, 120) == arrivals("1/0", 0.3, 120) != arrivals("1/1", 0.3, 120)
    assert list(itertools.islice(backlog("1/0"), 40)) == list(itertools.islice(backlog("1/0"), 40))
    assert prompt("a", 50) == prompt("a", 50) != prompt("b", 50)


def test_another_rate_stretches_the_same_sequence() -> None:
    slow, fast = arrivals("1", 0.2, 100), arrivals("1", 0.4, 50)
    assert [a.at_s for a in slow] == pytest.approx([2 * a.at_s for a in fast])
    assert [a.lengths for a in slow] == [a.lengths for a in fast]


def test_arrivals_come_at_their_rate_within_their_lengths() -> None:
    found = arrivals("seed", 2.0, 5000.0)
    assert len(found) == pytest.approx(10_000, rel=0.05)
    gaps = [b.at_s - a.at_s for a, b in itertools.pairwise(found)]
    mean = sum(gaps) / len(gaps)
    assert math.sqrt(sum((g - mean) ** 2 for g in gaps) / len(gaps)) == pytest.approx(mean, rel=0.05)
    assert {a.lengths.prompt for a in found} == set(range(20, 121))
    assert {a.lengths.output for a in found} == set(range(8, 25))


def test_the_rate_keeps_realtime_there_for_the_wanted_share_of_time() -> None:
    """M/G/∞: simulated with requests that take as long as they take alone."""
    rate = rate_for(0.2, 0.7)
    found = arrivals("seed", rate, 50_000.0)
    spans = [(a.at_s, a.at_s + 0.7 * a.lengths.output / 16) for a in found]
    assert busy_share(spans, 0.0, 50_000.0) == pytest.approx(0.2, abs=0.01)


def test_a_backlog_opens_in_the_middle_of_its_outputs_and_goes_on_with_whole_prompts() -> None:
    lengths = list(itertools.islice(backlog("1"), 5000))
    opening, rest = lengths[: workload.OUTSTANDING], lengths[workload.OUTSTANDING :]
    assert all(20 <= x.prompt <= 120 and 1 <= x.output <= 128 for x in opening)
    assert all(500 <= x.prompt <= 4000 and 32 <= x.output <= 128 for x in rest)
    assert rest[0] != rest[1]
    assert isinstance(rest[0], Lengths)


def test_prompts_stay_within_a_small_vocabulary() -> None:
    assert max(prompt("x", 1000, 200)) < 200
    assert min(prompt("x", 1000, 49_152)) >= 256


@pytest.mark.parametrize(
    ("spans", "share"),
    [([], 0.0), ([(0, 5)], 0.5), ([(0, 5), (3, 6)], 0.6), ([(-5, 1), (9, 20)], 0.2), ([(2, 3), (2, 8), (4, 5)], 0.6)],
)
def test_the_busy_share_counts_no_moment_twice(spans: list[tuple[float, float]], share: float) -> None:
    assert busy_share(spans, 0.0, 10.0) == pytest.approx(share)
