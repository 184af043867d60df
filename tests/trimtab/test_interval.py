"""An interval's figures: each goes into one report, and none is lost with one that never left."""

import random

import pytest

from trimtab.interval import MAX_INTERVAL_MS, WORST, Intervals
from trimtab.messages import Outlier, Workload
from trimtab.sketch import Sketch


def an_outlier(name):
    return Outlier(name, Workload.REALTIME, 10)


def counts(taken):
    return {name: Sketch.from_bytes(data).count for name, data in taken.sketches.items()}


def test_what_is_taken_is_gone_and_empty_sketches_are_left_out():
    intervals = Intervals(10.0)
    for value in (1.0, 2.0, 3.0):
        intervals.add("a", value)
    intervals.add("b", 4.0)
    taken = intervals.take(12.5)
    assert (counts(taken), taken.interval_ms) == ({"a": 3, "b": 1}, 2500)
    assert Sketch.from_bytes(taken.sketches["a"]).sum == 6.0
    again = intervals.take(13.0)
    assert (again.sketches, again.outliers, again.interval_ms) == ({}, (), 500)


def test_what_is_given_back_goes_into_the_next_report_once():
    intervals = Intervals(0.0)
    intervals.add("a", 1.0)
    intervals.add("only before", 5.0)
    intervals.keep(2.0, an_outlier("old"))
    intervals.take(1.0)
    intervals.add("a", 3.0)
    intervals.keep(4.0, an_outlier("new"))
    intervals.give_back()
    intervals.give_back()
    taken = intervals.take(3.0)
    assert (counts(taken), taken.interval_ms) == ({"a": 2, "only before": 1}, 3000)
    assert Sketch.from_bytes(taken.sketches["a"]).sum == 4.0
    assert [o.request_id for o in taken.outliers] == ["new", "old"]


def test_what_has_left_is_not_given_back():
    intervals = Intervals(0.0)
    intervals.add("a", 1.0)
    intervals.take(1.0)
    intervals.take(2.0)
    intervals.give_back()
    assert intervals.take(3.0).sketches == {}


def test_however_often_reports_fail_each_value_arrives_once():
    rng = random.Random(3)
    intervals, sent, arrived = Intervals(0.0), 0, 0
    for second in range(1, 200):
        for _ in range(rng.randrange(5)):
            intervals.add("a", 1.0)
            sent += 1
        taken = intervals.take(float(second))
        if rng.random() < 0.5:
            intervals.give_back()
        else:
            arrived += counts(taken).get("a", 0)
    assert arrived + counts(intervals.take(200.0)).get("a", 0) == sent


def test_only_the_worst_are_kept_worst_first():
    intervals = Intervals(0.0)
    order = list(range(3 * WORST))
    random.Random(1).shuffle(order)
    for n in order:
        if intervals.keeps(float(n)):
            intervals.keep(float(n), an_outlier(str(n)))
    worst = [str(n) for n in range(3 * WORST - 1, 2 * WORST - 1, -1)]
    assert [o.request_id for o in intervals.take(1.0).outliers] == worst
    for n in range(WORST):
        intervals.keep(0.5, an_outlier(f"mild {n}"))
    intervals.give_back()
    assert [o.request_id for o in intervals.take(2.0).outliers] == worst


def test_of_equals_the_first_to_come_stay():
    intervals = Intervals(0.0)
    for n in range(WORST + 3):
        intervals.keep(2.0, an_outlier(str(n)))
    assert [o.request_id for o in intervals.take(1.0).outliers] == [str(n) for n in range(WORST)]


@pytest.mark.parametrize(("ended", "expected"), [(1e9, MAX_INTERVAL_MS), (-5.0, 0)])
def test_an_interval_fits_the_wire(ended, expected):
    assert Intervals(0.0).take(ended).interval_ms == expected
