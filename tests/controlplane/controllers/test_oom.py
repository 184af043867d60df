"""The oom controller: what is done about a worker that ran out of memory."""

from __future__ import annotations

import pytest

from controlplane.controllers import oom
from controlplane.controllers.decision import Release, Severity
from tests.controlplane.controllers.builders import a_node, an_adjustment, on_node, policy_of
from tests.controlplane.controllers.run import Hour, Run, restarted
from trimtab.measures import OUT_OF_MEMORY
from trimtab.messages import RequestMatch, Workload


def an_accident(run: Run, node_id: str = "w0") -> None:
    run.of(node_id).out_of_memory_at = run.now + 0.5


def struck(**policy: float) -> Run:
    """One of two workers has run out of memory just now."""
    run = Run(oom, [a_node("w0"), a_node("w1")], policy_of(policy))
    run.tick()
    an_accident(run)
    run.tick()
    return run


def test_long_batch_requests_there_are_released_once() -> None:
    run = struck()
    (release,) = run.commands
    assert isinstance(release, Release)
    assert (release.node_id, release.match) == ("w0", RequestMatch(workload=Workload.BATCH, min_age_ms=60_000))
    run.tick(60)
    assert len(run.commands) == 1


def test_the_running_set_is_halved_on_that_node_and_people_are_told() -> None:
    run = struck()
    move = run.move
    assert move is not None
    assert (move.field, move.scope, move.factor) == ("batch.active", on_node(), 0.5)
    assert [(a.key, a.severity) for a in run.decision.alerts] == [("oom/w0", Severity.CRITICAL)]


def test_it_holds_for_five_minutes_and_doubles_each_minute_after() -> None:
    run = struck(**{"oom.decrease": 0.25})
    factors = [run.move.factor if run.move else 1.0]
    for _ in range(420):
        run.tick()
        factors.append(run.move.factor if run.move else 1.0)
    assert factors[299] == 0.25
    assert factors[300] == factors[359] == 0.5
    assert factors[360:] == [1.0] * 61
    assert run.decision.alerts == ()


def test_a_counter_that_rises_is_an_accident_too() -> None:
    run = Run(oom, [a_node("w0", counters={OUT_OF_MEMORY: 7})])
    run.tick()
    run.of("w0").totals[OUT_OF_MEMORY] = 8
    run.tick()
    assert (len(run.commands), run.move is not None) == (1, True)


def test_two_signs_of_one_accident_count_once() -> None:
    run = struck()
    run.of("w0").totals[OUT_OF_MEMORY] = 3
    run.tick(5)
    assert (len(run.commands), run.move and run.move.factor) == (1, 0.5)


def test_another_accident_halves_again_and_never_below_a_tenth() -> None:
    run = struck()
    factors = []
    for _ in range(4):
        run.tick(30)
        an_accident(run)
        run.tick()
        factors.append(run.move.factor if run.move else 1.0)
    assert factors == [0.25, 0.125, 0.1, 0.1]
    assert len(run.commands) == 5


def test_it_holds_for_the_node_when_another_process_runs_there() -> None:
    run = struck()
    run.of("w0").connected = False
    assert run.tick(20).moves
    restarted(run.of("w0"), run.now)
    assert run.tick(20).moves
    assert len(run.commands) == 1


def test_a_worker_that_died_of_it_has_nothing_to_release() -> None:
    run = Run(oom, [a_node("w0")])
    run.tick()
    an_accident(run)
    run.of("w0").connected = False
    run.tick()
    assert (run.commands, run.move is not None) == ([], True)


def test_a_new_leader_goes_on_with_the_cut_and_does_not_act_on_old_accidents() -> None:
    live = [an_adjustment("oom", "batch.active", on_node(), factor=0.5, evidence="figures")]
    nodes = [
        a_node("w0", counters={OUT_OF_MEMORY: 3}, out_of_memory_at=990.0),
        a_node("w1", counters={OUT_OF_MEMORY: 3}, out_of_memory_at=900.0),
    ]
    run = Run(oom, nodes, live=live)
    run.tick(300)
    assert (run.commands, run.move and (run.move.scope, run.move.factor, run.move.evidence)) == (
        [],
        (on_node(), 0.5, "figures"),
    )
    run.tick()
    assert run.move is None


def test_an_accident_just_before_a_leader_began_is_news_to_it() -> None:
    run = Run(oom, [a_node("w0", out_of_memory_at=995.0)])
    run.tick()
    assert (len(run.commands), run.move is not None) == (1, True)


def test_what_a_process_counted_before_anybody_listened_is_no_accident() -> None:
    run = Run(oom, [a_node("w0", reported_at=None)], silent={"w0"})
    run.tick(3)
    run.silent.clear()
    run.of("w0").totals[OUT_OF_MEMORY] = 4
    run.of("w0").reported_at = run.now
    run.tick(3)
    assert (run.commands, run.move) == ([], None)


def test_where_the_policy_cuts_nothing_requests_are_released_and_people_told_all_the_same() -> None:
    run = struck(**{"oom.decrease": 1.0})
    assert (run.move, len(run.commands), len(run.decision.alerts)) == (None, 1, 1)
    assert run.tick(60).alerts == ()


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "healthy"])
def test_an_hour_without_trouble_changes_nothing(idle: bool) -> None:
    hour = Hour(oom, idle=idle).pass_by()
    assert (hour.moves, hour.alerts, hour.run.commands) == ([], [], [])
