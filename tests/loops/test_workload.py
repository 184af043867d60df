"""Seeded arrivals: as many as the rate says, as long as the traces say, and the same for the same seed."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean, median, pstdev

import pytest

from trimtab.messages import Workload
from trimtab.workload import CHAT, CODE, DOCUMENTS, GIANTS, SUMMARIES, Kind, Phase, Source, arrivals, mixed


def a_source(*phases: tuple[float, float], name: str = "s", cv: float = 1.0, kind: Kind = CHAT) -> Source:
    return Source(name, Workload.REALTIME, kind, tuple(Phase(*p) for p in phases), cv)


def test_the_same_seed_gives_the_same_workload_and_another_one_another() -> None:
    first, again, other = (list(arrivals(mixed(5.0), 60, seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_what_one_source_sends_does_not_depend_on_the_others() -> None:
    alone = list(arrivals([a_source((0, 5))], 60, 1))
    beside = [a for a in arrivals([a_source((0, 5)), a_source((0, 9), name="other")], 60, 1) if a.source == "s"]
    assert alone == beside


def test_requests_come_in_order_and_before_the_end() -> None:
    times = [a.at_s for a in arrivals(mixed(20.0), 60, 3)]
    assert times == sorted(times)
    assert times[0] > 0.0 and times[-1] < 60.0


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_the_rate_and_the_burstiness_are_those_asked_for(cv: float) -> None:
    times = [a.at_s for a in arrivals([a_source((0, 10), cv=cv)], 4000, 5)]
    gaps = [b - a for a, b in pairwise(times)]
    assert len(times) / 4000 == pytest.approx(10, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(cv, rel=0.1)


def test_a_change_of_rate_holds_at_once_and_a_rate_of_nothing_sends_nothing() -> None:
    times = [a.at_s for a in arrivals([a_source((0, 0), (100, 20), (200, 0), (300, 5))], 400, 1)]
    counts = [sum(low <= t < low + 100 for t in times) for low in (0, 100, 200, 300)]
    assert counts[0] == counts[2] == 0
    assert counts[1] == pytest.approx(2000, rel=0.1)
    assert counts[3] == pytest.approx(500, rel=0.2)


@pytest.mark.parametrize("kind", [CHAT, CODE, DOCUMENTS, SUMMARIES, GIANTS])
def test_lengths_have_the_medians_of_the_trace_and_never_more_than_its_longest(kind: Kind) -> None:
    found = list(arrivals([a_source((0, 50), kind=kind)], 200, 1))
    assert median(a.prompt for a in found) == pytest.approx(kind.prompt.p50, rel=0.1)
    assert median(a.output for a in found) == pytest.approx(kind.output.p50, rel=0.1)
    assert max(a.prompt for a in found) <= kind.prompt.longest
    assert min(a.output for a in found) >= 1


def test_a_mix_is_three_tenths_realtime() -> None:
    found = list(arrivals(mixed(20.0), 500, 1))
    assert sum(a.workload is Workload.REALTIME for a in found) / len(found) == pytest.approx(0.3, abs=0.02)
