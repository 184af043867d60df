"""The classes that a request falls into."""

import pytest

from tests.trimtab.scheduling_builders import BATCH, REALTIME, an_item, rules
from trimtab.kv_shape import KvShape


@pytest.mark.parametrize(
    ("protect", "workload", "prompt", "expected"),
    [
        ("workload", REALTIME, 10, (True, True)),
        ("workload", REALTIME, 100, (True, False)),
        ("workload", BATCH, 10, (False, False)),
        ("length", REALTIME, 10, (True, True)),
        ("length", REALTIME, 100, (False, False)),
        ("length", BATCH, 10, (True, True)),
    ],
)
def test_who_is_protected_and_who_is_express(protect, workload, prompt, expected):
    item = an_item("a", workload, prompt, r=rules(paths__protect=protect, paths__hot_below=100))
    assert (item.protected, item.express) == expected


def test_isolation_by_command_outlasts_the_rules():
    item = an_item(isolated=True)
    item.classify(rules(isolate__action="refuse"))
    assert item.alone


def test_isolation_rules_apply_only_where_isolated_means_alone():
    named = {"isolate__from_tokens": 50}
    assert an_item(prompt=50, r=rules(**named)).alone
    assert not an_item(prompt=49, r=rules(**named)).alone
    assert not an_item(prompt=50, r=rules(**named, isolate__action="pool")).alone


def test_a_giant_is_longer_than_the_bound():
    r = rules(serial__above=100)
    assert not an_item(prompt=100, r=r).serial
    assert an_item(prompt=101, r=r).serial


@pytest.mark.parametrize(("goal", "expected"), [(1, 1), (15, 1), (16, 2), (31, 2), (32, 3)])
def test_a_request_needs_blocks_for_its_goal_and_the_token_after_it(goal, expected):
    assert an_item(prompt=goal).blocks(KvShape.of(16)) == expected
