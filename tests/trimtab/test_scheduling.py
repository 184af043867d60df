"""Order, caps and bounds, as the worker's queue, vLLM and the simulated engine all use them."""

import pytest

from trimtab import scheduling
from trimtab.errors import PolicyRefused
from trimtab.messages import Workload
from trimtab.policy import Policy, with_fields
from trimtab.snapshot import Limits

LIMITS = Limits(max_num_seqs=64, max_step_tokens=2048)


def a_policy(**fields):
    return with_fields(Policy(), {k.replace("__", "."): v for k, v in fields.items()})


def test_realtime_goes_first_and_equals_go_by_arrival():
    queue = [(Workload.BATCH, 1), (Workload.REALTIME, 3), (Workload.BATCH, 2), (Workload.REALTIME, 4)]
    assert sorted(queue, key=lambda x: scheduling.key(*x)) == [
        (Workload.REALTIME, 3),
        (Workload.REALTIME, 4),
        (Workload.BATCH, 1),
        (Workload.BATCH, 2),
    ]


def test_caps_are_the_policys():
    caps = scheduling.step_caps(a_policy(batch__active=5, prefill__step_tokens=100), LIMITS)
    assert (caps.active, caps.step_tokens) == (5, 100)


@pytest.mark.parametrize("field", ["batch.active", "prefill.step_tokens"])
def test_caps_above_the_engine_are_refused(field):
    with pytest.raises(PolicyRefused) as e:
        scheduling.step_caps(with_fields(Policy(), {field: 4096}), LIMITS)
    assert e.value.field == field


def test_the_engine_holds_its_running_set_and_its_queue():
    assert scheduling.handover_bound(a_policy(batch__active=3, admission__engine_queue=2)) == 5


def test_each_workload_has_its_own_queue_bound():
    policy = a_policy(admission__realtime_queue=7, admission__batch_queue=9)
    assert scheduling.queue_bound(policy, Workload.REALTIME) == 7
    assert scheduling.queue_bound(policy, Workload.BATCH) == 9
