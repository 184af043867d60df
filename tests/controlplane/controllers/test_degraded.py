"""The degraded controller: a full cache together with engine faults."""

from __future__ import annotations

import pytest

from controlplane.controllers import degraded
from controlplane.controllers.decision import Severity
from controlplane.seen import Window
from tests.controlplane.controllers.builders import NOW, a_node, a_window, an_adjustment, policy_of
from tests.controlplane.controllers.run import Hour, Run, say
from trimtab.measures import ERRORS, KV_USED, REQUESTS
from trimtab.messages import Role
from trimtab.snapshot import Scope


def faults(errors: int, requests: int, ended: float = NOW) -> list[Window]:
    return [a_window(7, ended=ended, counters={ERRORS: errors, REQUESTS: requests})]


def test_a_full_cache_together_with_faults_degrades_the_mesh_and_says_by_how_much() -> None:
    run = Run(degraded, [a_node("w0", kv_used=0.95, windows=faults(3, 20)), a_node("w1", kv_used=0.93)])
    d = run.tick()
    (move,) = d.moves
    assert (move.field, move.scope, move.state) == ("degraded.state", Scope(), "degraded")
    assert "94%" in move.evidence and "3 of 20" in move.evidence
    assert [(a.key, a.severity) for a in d.alerts] == [("degraded", Severity.CRITICAL)]


@pytest.mark.parametrize(
    ("use", "errors", "requests"), [(0.9, 20, 20), (0.95, 2, 20), (0.95, 0, 20), (0.5, 20, 20)], ids=str
)
def test_either_alone_and_the_very_limits_do_nothing(use: float, errors: int, requests: int) -> None:
    d = Run(degraded, [a_node(kv_used=use, windows=faults(errors, requests))]).tick()
    assert (d.moves, d.alerts, d.holds) == ((), (), ())


def test_nine_requests_make_no_rate_and_that_is_said() -> None:
    d = Run(degraded, [a_node(kv_used=0.95, windows=faults(9, 9))]).tick()
    assert d.moves == ()
    assert d.holds == ("only 9 requests ended within 30 s: no rate of faults is known",)


def test_faults_older_than_30_s_do_not_count() -> None:
    d = Run(degraded, [a_node(kv_used=0.95, windows=faults(9, 20, NOW - 30))]).tick()
    assert d.moves == ()


def test_what_a_process_counted_before_anybody_listened_does_not_count() -> None:
    first = a_window(1, ended=NOW, counters={ERRORS: 900, REQUESTS: 1000})
    assert Run(degraded, [a_node(kv_used=0.95, windows=[first])]).tick().moves == ()


def test_faults_of_engines_that_died_are_those_that_gateways_saw() -> None:
    gateway = a_node("g0", role=Role.GATEWAY, windows=faults(5, 20))
    assert Run(degraded, [a_node(kv_used=0.95), gateway]).tick().moves


def test_it_leaves_below_70_percent_and_not_before() -> None:
    run = Run(degraded, [a_node(kv_used=0.95, windows=faults(3, 20))])
    run.tick()
    run.of("w0").windows.clear()
    say(run.of("w0"), **{KV_USED: 0.7})
    assert run.tick(60).moves
    say(run.of("w0"), **{KV_USED: 0.69})
    d = run.tick()
    assert (d.moves, d.alerts) == ((), ())


def test_it_enters_once_however_use_swings_about_the_limit() -> None:
    run = Run(degraded, [a_node(kv_used=0.95, windows=faults(3, 20))])
    states = []
    for i in range(100):
        say(run.of("w0"), **{KV_USED: 0.95 if i % 2 else 0.75})
        states.append(bool(run.tick().moves))
    assert states == [False] + [True] * 99


def test_without_a_fresh_worker_it_holds_what_it_held_and_says_so() -> None:
    run = Run(degraded, [a_node(kv_used=0.95, windows=faults(3, 20))])
    before = run.tick().moves
    run.silent.add("w0")
    d = run.tick(10)
    assert (d.moves, d.holds) == (before, ("no worker says how full its KV cache is",))
    d = Run(degraded, [a_node(gauges={KV_USED: None})]).tick()
    assert (d.moves, len(d.holds)) == ((), 1)


def test_a_new_leader_goes_on_where_the_old_one_was() -> None:
    live = [an_adjustment("degraded", "degraded.state", state="degraded", evidence="figures")]
    run = Run(degraded, [a_node(kv_used=0.8)], live=live)
    (move,) = run.tick().moves
    assert (move.state, move.evidence) == ("degraded", "figures")
    say(run.of("w0"), **{KV_USED: 0.5})
    assert run.tick().moves == ()


def test_the_limits_are_the_policys() -> None:
    policy = policy_of({"degraded.enter_use": 0.5, "degraded.enter_errors": 0.02})
    assert Run(degraded, [a_node(kv_used=0.6, windows=faults(1, 20))], policy).tick().moves


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "healthy"])
def test_an_hour_without_trouble_changes_nothing(idle: bool) -> None:
    hour = Hour(degraded, idle=idle).pass_by()
    assert (hour.moves, hour.alerts, hour.run.commands) == ([], [], [])
