"""A policy as plain numbers: what the engine can't do is refused whole, and a zero stands for no bound."""

import pytest

from tests.trimtab.scheduling_builders import a_policy, rules
from trimtab.errors import PolicyRefused
from trimtab.policy import Policy, with_fields
from trimtab.scheduling import Rules
from trimtab.snapshot import Limits

LIMITS = Limits(max_num_seqs=64, max_step_tokens=2048)
INFINITE = float("inf")


def test_caps_are_the_policys():
    r = Rules.of(a_policy(batch__active=5, prefill__step_tokens=100), LIMITS)
    assert (r.active, r.step_tokens) == (5, 100)


@pytest.mark.parametrize("field", ["batch.active", "prefill.step_tokens"])
def test_caps_above_the_engine_are_refused(field):
    with pytest.raises(PolicyRefused) as e:
        Rules.of(with_fields(Policy(), {field: 4096}), LIMITS)
    assert (e.value.field, e.value.cause) == (field, "ABOVE_ENGINE_LIMIT")


def test_an_engine_of_unknown_limits_bounds_nothing():
    assert Rules.of(a_policy(batch__active=4096), Limits()).active == 4096


@pytest.mark.parametrize(
    ("budget", "longest", "expected"),
    [(100, 0, (100, 200)), (100, 150, (100, 150)), (0, 0, (INFINITE, INFINITE)), (0, 150, (INFINITE, 150))],
)
def test_a_zero_budget_leaves_steps_unbounded(budget, longest, expected):
    r = rules(prefill__itl_budget_ms=budget, prefill__max_step_ms=longest)
    assert (r.itl_budget_ms, r.max_step_ms) == expected


@pytest.mark.parametrize(("active", "reserve", "expected"), [(1, 1, 0), (2, 1, 1), (4, 9, 3), (48, 0, 0)])
def test_one_slot_always_stays_for_the_others(active, reserve, expected):
    assert rules(batch__active=active, paths__realtime_reserve=reserve).realtime_reserve == expected


def test_isolation_goes_by_length_or_tenant():
    r = rules(isolate__from_tokens=1000, isolate__tenants=("acme",))
    assert r.isolates(1000, "")
    assert r.isolates(1, "acme")
    assert not r.isolates(999, "other")
