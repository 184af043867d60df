"""The pace of pushes: a fleet at once, and no more than the rate for long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.pace import Pace


def test_a_rested_bucket_lets_a_fleet_through_at_once_and_then_holds_the_rate() -> None:
    pace = Pace(per_s=100, burst=50)
    assert pace.took(50, 10.0) == 0.0
    assert round(pace.took(10, 10.0), 9) == 0.1
    assert round(pace.took(10, 10.1), 9) == 0.1
    assert pace.took(10, 99.0) == 0.0


@given(st.lists(st.tuples(st.integers(1, 25), st.floats(0, 0.05)), min_size=1, max_size=200))
def test_never_more_than_the_burst_and_the_rate(batches: list[tuple[int, float]]) -> None:
    pace = Pace(per_s=100, burst=50)
    now, sent = 1.0, 0
    for pushes, rest in batches:
        wait = pace.took(pushes, now)
        sent += pushes
        now += wait + rest
        assert sent <= 50 + 100 * (now - 1.0) + 1e-6
