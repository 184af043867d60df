"""KV use some minutes ahead."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from controlplane.controllers.forecast import Book, Course, course, growth, weighed
from tests.controlplane.controllers.builders import NOW, a_node, a_seen, policy_of, sketch_of, some_lengths
from tests.trimtab.test_kv_shape import V4
from trimtab.messages import NodeState
from trimtab.snapshot import Limits


def samples(*loads: float) -> tuple[tuple[float, float], ...]:
    return tuple((NOW + 5.0 * i, x) for i, x in enumerate(loads))


def noted(uses: list[float], *, workers: int = 1) -> Book:
    book = Book()
    for i, use in enumerate(uses):
        now = NOW + 5.0 * i
        nodes = [a_node(f"w{j}", kv_used=use, reported_at=now) for j in range(workers)]
        book = book.noted(a_seen(*nodes, now=now), policy_of(), now)
    return book


def test_without_a_sure_trend_the_mean_of_five_minutes_is_foretold() -> None:
    rng = random.Random(1)
    c = course(samples(*(0.5 + rng.gauss(0, 0.05) for _ in range(61))))
    assert c.slope == 0.0
    assert replace(c, grows_to=1.0).ahead(300, 1) == pytest.approx(0.5, abs=0.02)


def test_a_steady_rise_is_carried_on() -> None:
    c = course(samples(*(0.2 + 0.005 * i for i in range(61))))
    assert c.slope == pytest.approx(0.001)
    assert replace(c, grows_to=1.0).ahead(300, 1) == pytest.approx(0.8)


def test_a_trend_is_carried_on_for_no_longer_than_it_was_seen() -> None:
    c = course(samples(*(0.2 + 0.005 * i for i in range(13))))
    assert replace(c, grows_to=1.0).ahead(300, 1) == pytest.approx(0.26 + 0.06)


def test_a_rise_ends_where_all_requests_that_are_here_are_at_their_full_length() -> None:
    c = course(samples(*(0.2 + 0.005 * i for i in range(61))))
    assert replace(c, grows_to=0.6).ahead(300, 1) == pytest.approx(0.6)
    assert replace(c, grows_to=0.1).ahead(300, 1) == pytest.approx(0.5), "never below what is used now"


def test_a_fall_is_not_carried_on() -> None:
    c = course(samples(*(0.8 - 0.005 * i for i in range(61))))
    assert (c.slope, replace(c, grows_to=1.0).ahead(300, 1)) == (0.0, pytest.approx(c.mean))


def test_without_lengths_there_is_no_trend() -> None:
    c = course(samples(*(0.2 + 0.005 * i for i in range(61))))
    assert replace(c, grows_to=None).ahead(300, 1) == pytest.approx(c.mean)


def test_a_random_walk_is_seldom_taken_for_a_trend() -> None:
    def slope(seed: int) -> float:
        rng, x, walk = random.Random(seed), 0.5, []
        for _ in range(61):
            x += 0.5 * (0.5 - x) + rng.gauss(0, 0.05)
            walk.append(x)
        return course(samples(*walk)).slope

    assert sum(slope(seed) != 0.0 for seed in range(200)) <= 8


def test_a_worker_that_joins_shares_the_load() -> None:
    c = Course(1.8, 1.8, 0.0, 300)
    assert [replace(c, grows_to=2.0).ahead(300, n) for n in (2, 3, 4)] == pytest.approx([0.9, 0.6, 0.45])
    assert replace(c, grows_to=2.0).ahead(300, 1) == 1.0, "a cache is never more than full"


def test_less_than_a_minute_foretells_nothing() -> None:
    assert noted([0.5] * 12).courses == {}
    assert noted([0.5] * 13).courses["default"].mean == pytest.approx(0.5)


def test_only_five_minutes_are_kept() -> None:
    book = noted([0.9] * 60 + [0.1] * 61)
    assert (len(book.samples["default"]), book.courses["default"].mean) == (61, pytest.approx(0.1))


def test_between_two_samples_nothing_is_looked_at() -> None:
    book = noted([0.5])
    assert book.noted(a_seen(), policy_of(), NOW + 4.9) is book


def test_after_a_silence_it_begins_anew() -> None:
    book = noted([0.5] * 20)
    later = NOW + 200
    book = book.noted(a_seen(a_node(kv_used=0.9, reported_at=later), now=later), policy_of(), later)
    assert (book.samples["default"], book.courses) == (((later, 0.9),), {})


def test_a_silent_worker_counts_as_the_mean_of_the_others_and_half_of_them_as_none() -> None:
    def load(*silent: bool) -> object:
        nodes = [a_node(f"w{i}", kv_used=0.4, reported_at=None if s else NOW) for i, s in enumerate(silent)]
        return dict(Book().noted(a_seen(*nodes), policy_of(), NOW).samples).get("default")

    assert load(False, False, True) == ((NOW, pytest.approx(1.2)),)
    assert load(False, True) is None


def test_a_worker_that_starts_has_no_cache_yet() -> None:
    nodes = [a_node("w0", kv_used=0.8), a_node("w1", kv_used=0.0, state=NodeState.STARTING)]
    assert Book().noted(a_seen(*nodes), policy_of(), NOW).samples["default"] == ((NOW, 0.8),)


def test_growth_is_the_full_length_of_those_that_are_here_within_what_may_run() -> None:
    seen = a_seen(lengths={"m": some_lengths(totals=[1600.0] * 50)})
    one = a_node(running=10, waiting=10, limits=Limits(block_size=16, total_blocks=10_000))
    assert growth([one], seen, policy_of()) == pytest.approx(20 * 1600 / 160_000)
    assert growth([one], seen, policy_of({"batch.active": 5})) == pytest.approx(5 * 1600 / 160_000)
    assert growth([one], a_seen(), policy_of()) is None
    assert growth([a_node(limits=Limits())], seen, policy_of()) is None
    several = a_node(running=4, limits=Limits(block_size=256, total_blocks=10_000, kv_groups=V4.groups))
    assert growth([several], seen, policy_of()) == pytest.approx(4 * V4.most(1600) / 10_000, rel=0.02)


def test_a_running_request_is_more_likely_a_long_one() -> None:
    found = weighed(sketch_of([100.0] * 500 + [1000.0] * 500))
    assert found is not None and math.isclose(found, (100**2 + 1000**2) / 1100, rel_tol=0.03)
    assert weighed(sketch_of([])) is None
