"""What a tenant may, of which each gateway of a mesh lets through its part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.tenant import BURST_S, Bucket, queue_part, slots_part, spend


def passed(gateways: int, rate: float, cost: float, seconds: int) -> int:
    """Requests that a tenant gets through in so many seconds, who asks every gateway for one a hundred times a second."""
    buckets: list[Bucket | None] = [None] * gateways
    n = 0
    for tick in range(seconds * 100):
        for i in range(gateways):
            buckets[i], wait_s = spend(buckets[i], rate / gateways, cost, tick / 100)
            n += wait_s == 0.0
    return n


@pytest.mark.parametrize("gateways", [1, 2, 4, 5])
def test_several_gateways_let_through_what_one_does(gateways: int) -> None:
    assert passed(gateways, 20.0, 1.0, 10) == pytest.approx(20 * 10 + 20 * BURST_S, abs=gateways)


def test_what_costs_more_than_a_gateways_part_passes_when_the_bucket_is_full_and_leaves_a_debt() -> None:
    rate = 100.0 / 4
    bucket, wait_s = spend(None, rate, 150.0, 0.0)
    assert (bucket.left, wait_s) == (-100.0, 0.0)
    bucket, wait_s = spend(bucket, rate, 150.0, 1.0)
    assert (bucket.left, wait_s) == (-75.0, 5.0)
    assert spend(bucket, rate, 150.0, 1.0 + wait_s)[1] == 0.0


def test_a_bucket_whose_rate_changes_keeps_what_it_has_as_far_as_the_new_one_holds_it() -> None:
    full = Bucket(20.0, 0.0)
    assert spend(full, 10.0 / 4, 1.0, 0.0)[0].left == 4.0
    assert spend(Bucket(3.0, 0.0), 10.0 / 4, 1.0, 0.0)[0].left == 2.0
    assert spend(Bucket(3.0, 0.0), 10.0, 1.0, 0.0)[0].left == 2.0
    assert spend(Bucket(-40.0, 0.0), 10.0 / 4, 1.0, 0.0)[0].left == -40.0


@given(st.floats(0.01, 1.0), st.integers(0, 10_000), st.integers(1, 50))
def test_parts_of_a_share_are_no_more_than_the_share_but_one_each(share: float, slots: int, gateways: int) -> None:
    part = slots_part(share, slots, gateways)
    assert part >= 1
    assert part == 1 or part * gateways <= share * slots + 1e-9


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_parts_of_a_queue_are_no_more_than_the_queue_but_one_each(queue: int, gateways: int) -> None:
    part = queue_part(queue, gateways)
    assert (part >= 1) == (queue >= 1)
    assert part <= 1 or part * gateways <= queue
    assert queue_part(queue, 1) == queue
