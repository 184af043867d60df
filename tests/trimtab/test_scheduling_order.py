"""One order for every queue: classes and deltas move a request, age bounds by how much."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trimtab.scheduling_builders import BATCH, REALTIME, a_policy, an_item, rules
from trimtab.messages import Workload
from trimtab.scheduling import handover_bound, order_ms, queue_bound

deltas = st.integers(-9, 9)
steered = st.builds(
    lambda overtake, diff, realtime, batch: rules(
        priority__max_overtake_ms=overtake,
        priority__max_priority_diff=diff,
        priority__realtime_delta=realtime,
        priority__batch_delta=batch,
    ),
    st.integers(1, 100_000), st.integers(0, 2), st.integers(-2, 2), st.integers(-2, 2),
)  # fmt: skip


def test_realtime_goes_first_and_equals_go_by_arrival():
    queue = [(BATCH, 1.0), (REALTIME, 3.0), (BATCH, 2.0), (REALTIME, 4.0)]
    assert sorted(queue, key=lambda x: order_ms(rules(), *x)) == [
        (REALTIME, 3.0), (REALTIME, 4.0), (BATCH, 1.0), (BATCH, 2.0),
    ]  # fmt: skip


@given(steered, deltas, deltas, st.sampled_from(Workload), st.floats(0, 1e9), st.floats(0.01, 1e6))
def test_whoever_arrived_more_than_the_bound_after_a_batch_request_goes_after_it(r, delta, other, workload, at, more):
    earlier = order_ms(r, BATCH, at, delta)
    assert order_ms(r, workload, at + r.max_overtake_ms + more, other) > earlier


@given(steered, deltas, st.sampled_from(Workload), st.floats(0, 1e9), st.floats(0, 1e6))
def test_a_request_keeps_its_distance_to_others_of_its_kind_whenever_it_is_asked(r, delta, workload, at, later):
    apart = order_ms(r, workload, at + later, delta) - order_ms(r, workload, at, delta)
    assert apart == pytest.approx(later, abs=1e-3)


@given(steered, st.integers(-2, 1), st.sampled_from(Workload))
def test_a_higher_delta_never_goes_later(r, delta, workload):
    assert order_ms(r, workload, 0.0, delta + 1) <= order_ms(r, workload, 0.0, delta)


def test_a_level_is_a_fourteenth_of_the_bound():
    r = rules(priority__max_overtake_ms=14_000)
    assert order_ms(r, REALTIME, 0.0) == 2000.0
    assert order_ms(r, BATCH, 0.0) == 12_000.0
    assert order_ms(r, BATCH, 0.0, delta=2) == 10_000.0
    assert order_ms(r, BATCH, 0.0, delta=-2) == 14_000.0


def test_a_delta_moves_by_the_policys_difference_at_most_together_with_the_workloads():
    r = rules(priority__max_overtake_ms=14_000, priority__max_priority_diff=1, priority__realtime_delta=1)
    assert order_ms(r, REALTIME, 0.0, delta=2) == order_ms(r, REALTIME, 0.0) == 1000.0


def test_fcfs_is_arrival_alone():
    r = rules(scheduler__mode="fcfs", priority__realtime_delta=2)
    assert order_ms(r, REALTIME, 5.0, delta=2) == order_ms(r, BATCH, 5.0, delta=-2) == 5.0


def test_fixed_priority_puts_batch_behind_realtime_however_old_it_is():
    r = rules(scheduler__mode="priority")
    assert order_ms(r, BATCH, 0.0) > order_ms(r, REALTIME, 1e9)
    assert order_ms(r, BATCH, 0.0) < order_ms(r, BATCH, 1.0)


def test_the_order_of_an_item_is_that_of_its_request():
    r = rules(priority__batch_delta=1)
    assert an_item("a", BATCH, arrival=7.0, delta=1, r=r).order == order_ms(r, BATCH, 7.0, 1)


def test_the_engine_holds_its_running_set_and_its_queue():
    policy = a_policy(batch__active=3, batch__hard_cap=16, admission__engine_queue=2)
    assert handover_bound(policy, REALTIME) == handover_bound(policy, BATCH) == 5


def test_the_engine_holds_no_more_batch_than_its_cap_lets_run():
    fields = {"batch__active": 48, "batch__hard_cap": 16, "admission__engine_queue": 8}
    assert handover_bound(a_policy(**fields), BATCH) == 24
    assert handover_bound(a_policy(**fields), REALTIME) == 56
    assert handover_bound(a_policy(**fields, scheduler__mode="fcfs"), BATCH) == 56


def test_each_workload_has_its_own_queue_bound():
    policy = a_policy(admission__realtime_queue=7, admission__batch_queue=9)
    assert queue_bound(policy, REALTIME) == 7
    assert queue_bound(policy, BATCH) == 9
