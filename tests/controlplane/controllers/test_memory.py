"""The memory controller: a cache that will be nearly full."""

from __future__ import annotations

import pytest

from controlplane.controllers import memory
from controlplane.controllers.decision import Severity
from tests.controlplane.controllers.builders import a_node, an_adjustment, on_node, on_pool, policy_of, some_lengths
from tests.controlplane.controllers.run import Hour, Run, say
from trimtab.measures import KV_USED
from trimtab.messages import Load

LENGTHS = {"m": some_lengths(totals=[8000.0] * 100)}


def test_a_pool_that_stays_nearly_full_gets_its_pressure_line_lowered() -> None:
    run = Run(memory, [a_node(kv_used=0.95), a_node("w1", pool="other", kv_used=0.5)])
    d = run.tick(120)
    (move,) = d.moves
    assert (move.field, move.scope, move.factor) == ("memory.pressure_threshold", on_pool(), 0.9)
    assert "95%" in move.evidence and "limit 90%" in move.evidence
    assert [(a.key, a.severity) for a in d.alerts] == [("memory/default", Severity.WARNING)]


def test_a_forecast_that_is_high_for_less_than_three_samples_does_nothing() -> None:
    run = Run(memory, [a_node(kv_used=0.95)])
    assert run.tick(75).moves == ()
    assert run.tick().moves


def test_a_rise_is_seen_before_the_cache_is_full() -> None:
    run = Run(memory, [a_node(kv_used=0.1)], lengths=LENGTHS)
    run.of("w0").load = Load(30, 0, 0, 5000, 10_000)
    for _ in range(240):
        say(run.of("w0"), **{KV_USED: run.of("w0").gauges[KV_USED] + 0.002})
        run.tick()
    assert run.of("w0").gauges[KV_USED] < 0.6
    assert run.move is not None and "a minute" in run.move.evidence


def test_a_rise_that_the_requests_here_can_not_make_is_not_believed() -> None:
    run = Run(memory, [a_node(kv_used=0.1)], lengths=LENGTHS)
    run.of("w0").load = Load(12, 0, 0, 5000, 10_000)
    for _ in range(240):
        say(run.of("w0"), **{KV_USED: run.of("w0").gauges[KV_USED] + 0.002})
        run.tick()
    assert run.move is None


def test_less_than_a_minute_of_samples_holds_and_says_so() -> None:
    run = Run(memory, [a_node(kv_used=0.99)])
    d = run.tick(60)
    assert (d.moves, d.alerts) == ((), ())
    assert d.holds == ("pool default: too little is known of its KV use yet to foretell it",)


def test_a_pool_that_does_not_say_its_use_holds_what_it_held() -> None:
    run = Run(memory, [a_node(kv_used=0.95)])
    before = run.tick(120).moves
    run.silent.add("w0")
    d = run.tick(60)
    assert (d.moves, len(d.holds)) == (before, 1)


def test_it_is_over_only_well_below_the_line() -> None:
    run = Run(memory, [a_node(kv_used=0.95)])
    run.tick(120)
    say(run.of("w0"), **{KV_USED: 0.87})
    assert run.tick(400).moves
    say(run.of("w0"), **{KV_USED: 0.8})
    d = run.tick(400)
    assert (d.moves, d.alerts) == ((), ())


def test_a_new_leader_keeps_what_the_old_one_held_until_it_knows_enough() -> None:
    live = [
        an_adjustment("memory", "memory.pressure_threshold", on_pool(), factor=0.9),
        an_adjustment("memory", "memory.pressure_threshold", on_node("w0"), factor=0.9),
    ]
    run = Run(memory, [], live=live, started_at=1000.0)
    assert [m.scope for m in run.tick(10).moves] == [on_pool()]
    run.nodes.append(a_node(kv_used=0.5))
    assert run.tick(40).moves
    assert run.tick(40).moves == ()


def test_what_was_held_for_a_pool_that_never_comes_back_is_given_up() -> None:
    live = [an_adjustment("memory", "memory.pressure_threshold", on_pool(), factor=0.9)]
    run = Run(memory, [], live=live, started_at=1000.0)
    assert run.tick(31).moves == ()


def test_the_line_is_the_policys() -> None:
    run = Run(memory, [a_node(kv_used=0.5)], policy_of({"memory.forecast_above": 0.4}))
    assert run.tick(120).moves


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "healthy"])
def test_an_hour_without_trouble_changes_nothing(idle: bool) -> None:
    hour = Hour(memory, idle=idle).pass_by()
    assert (hour.moves, hour.alerts, hour.run.commands) == ([], [], [])
