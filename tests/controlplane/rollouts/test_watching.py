"""What a leader makes of canaries that are away, of those that come back, and of what happened to them between two bakes. Virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from controlplane.rollouts.state import Stage
from controlplane.rollouts.steps import EXTENSIONS
from tests.controlplane.rollouts.watched import BAKE_S, Watched, a_rollout
from trimtab.messages import NodeState

TWO_MODELS = {"a0": "a", "a1": "a", "b0": "b", "b1": "b"}


def test_all_that_serve_and_do_no_worse_get_it() -> None:
    run = Watched()
    assert run.until(BAKE_S - 1).stage is Stage.BAKING
    assert run.until(BAKE_S).stage is Stage.WIDENING


def test_while_a_canary_is_dead_nobody_else_gets_it() -> None:
    run = Watched()
    run.until(BAKE_S - 5)
    run.dies("w0")
    held = run.until(BAKE_S + 5)
    assert (held.stage, held.canaries, held.verdict) == (Stage.BAKING, ("w0",), "waits: w0 not serving")
    assert [x.text for x in held.lines] == ["waits: w0 not serving"]
    run.comes_back("w0")
    assert run.tick().stage is Stage.WIDENING


def test_samples_that_an_earlier_leader_saw_do_not_count_for_a_canary_that_is_not_there() -> None:
    run = Watched(a_rollout(samples=(500, 500), looked_unix_ms=1000 * BAKE_S))
    run.now = BAKE_S + 1.0
    run.dies("w0")
    assert run.tick().live and run.r.samples == (0, 0)
    run.until(BAKE_S + 20)
    assert run.r.stage is Stage.BAKING
    # It is compared from its return on, and what it did then is what counts.
    run.comes_back("w0")
    assert run.tick().verdict.startswith(f"watched for {BAKE_S} s more: too few requests")
    assert run.until(2 * BAKE_S).stage is Stage.WIDENING


def test_a_canary_of_two_that_was_away_is_compared_from_its_return_on() -> None:
    run = Watched(a_rollout("a0", "b0"), TWO_MODELS)
    run.dies("b0")
    run.until(10)
    run.comes_back("b0")
    before = run.r.samples[0]
    run.tick()
    assert before > 0 and run.r.samples[0] == 0
    run.until(15)
    # Both canaries are counted, ten a second each.
    assert run.r.samples[0] == 20 * 4


@pytest.mark.parametrize("anew", [lambda run: None, Watched.new_leader], ids=["the same leader", "a new one"])
def test_a_rollout_whose_only_canary_is_away_at_the_end_of_its_bake_is_taken_back(
    anew: Callable[[Watched], None],
) -> None:
    run = Watched(a_rollout(samples=(500, 500)))
    run.until(BAKE_S - 2)
    run.dies("w0")
    anew(run)
    over = run.until(BAKE_S + 60)
    assert over.stage is Stage.ROLLED_BACK and "lost its canaries: w0 gone for 3" in over.verdict


def test_how_long_canaries_are_away_goes_on_through_a_lengthened_bake() -> None:
    run = Watched()
    run.until(20)
    run.dies("w0")
    run.until(40)
    run.r = a_rollout(extended=1)
    over = run.until(60)
    assert over.stage is Stage.ROLLED_BACK and run.now == 50.0


def test_one_of_two_of_a_model_that_is_gone_for_good_is_not_waited_for() -> None:
    run = Watched(a_rollout("w0", "w1"))
    run.until(BAKE_S - 10)
    run.dies("w1")
    assert run.until(BAKE_S + 15).verdict == "waits: w1 not serving"
    assert run.until(BAKE_S + 25).stage is Stage.WIDENING


def test_the_only_one_of_its_model_is_waited_for_until_it_is_taken_back() -> None:
    run = Watched(a_rollout("a0", "b0"), TWO_MODELS)
    run.until(10)
    run.dies("b0")
    over = run.until(BAKE_S * (EXTENSIONS + 2))
    assert (over.stage, over.verdict) == (Stage.ROLLED_BACK, "undecided: b0 not serving")
    assert run.now == 11 + EXTENSIONS * BAKE_S


def test_a_canary_that_nobody_stands_beside_is_not_promoted() -> None:
    run = Watched(a_rollout("a0", "b0", samples=(500, 500)), TWO_MODELS)
    run.nodes["b1"].state = NodeState.DRAINING
    held = run.until(BAKE_S + 10)
    assert held.live and held.verdict == "waits: b0 without anybody to compare with"


def test_an_engine_that_runs_out_of_memory_between_two_bakes_is_seen() -> None:
    run = Watched()
    run.until(30)
    run.r = a_rollout(extended=1)
    run.nodes["w0"].out_of_memory_at = run.ahead + 30.5
    assert run.tick().verdict == "out of memory: the engine of w0"


def test_a_new_leader_measures_from_when_the_stage_began() -> None:
    run = Watched(a_rollout("w0", "w1", began_unix_ms=20_000))
    run.now = 40.0
    run.nodes["w0"].out_of_memory_at = run.ahead + 10.0
    assert run.tick().live
    run.new_leader()
    run.nodes["w0"].out_of_memory_at = run.ahead + 30.0
    assert run.tick().verdict == "out of memory: the engine of w0"

    run = Watched(a_rollout("w0", "w1", began_unix_ms=20_000))
    run.now = 19.0
    run.comes_back("w0", "w1")
    run.now = 40.0
    assert run.tick().live
    run.new_leader()
    run.now = 30.0
    run.comes_back("w0", "w1")
    assert run.tick().verdict == "its canaries' processes ended 2 times, nobody else's did"


@pytest.mark.parametrize("away_s", [BAKE_S, 86_400])
@pytest.mark.parametrize("anew", [lambda run: None, Watched.new_leader], ids=["the same leader", "a new one"])
def test_what_nobody_watched_is_no_bake_however_long_it_was(anew: Callable[[Watched], None], away_s: int) -> None:
    run = Watched()
    assert run.until(40).live
    run.now += away_s
    anew(run)
    # Whatever was seen before is enough for a promotion.
    run.r = replace(run.r, samples=(500, 500))
    first = run.tick()
    assert (first.stage, first.verdict) == (
        Stage.BAKING,
        f"nobody watched for {away_s + 1} s: it bakes for so much longer",
    )
    assert run.until(away_s + BAKE_S).stage is Stage.BAKING
    assert run.tick().stage is Stage.WIDENING
    assert [x.text for x in run.r.lines[:-1]] == [first.verdict]
    # The next bake begins with nothing that was missed.
    run.until(away_s + 2 * BAKE_S)
    assert run.r.stage is Stage.WIDENING and run.r.canaries == ("w0", "w1", "w2")
    assert run.tick().stage is Stage.PROMOTED


def test_a_rollout_that_nobody_has_looked_at_yet_bakes_from_the_first_look_on() -> None:
    run = Watched()
    run.now = 3600.0
    assert run.until(3600 + BAKE_S).stage is Stage.BAKING
    assert run.tick().stage is Stage.WIDENING


def test_a_leader_that_follows_a_dead_one_soon_goes_on_with_its_bake() -> None:
    run = Watched()
    run.until(40)
    run.now += 10
    run.new_leader()
    run.r = replace(run.r, samples=(500, 500))
    assert run.until(BAKE_S).stage is Stage.WIDENING and run.r.unwatched_ms == 0


def test_a_clock_that_leaps_ahead_or_back_bakes_for_as_long_as_was_watched() -> None:
    run = Watched()
    watched = 0
    for leap_s in (0, 7200, -86_400 * 365, 86_400 * 366):
        run.wall_ahead_ms += 1000 * leap_s
        for _ in range(14):
            assert run.tick().stage is Stage.BAKING
            watched += 1
    while run.tick().stage is Stage.BAKING and watched < 2 * BAKE_S:
        watched += 1
    # A second goes with each leap, in which nobody knows what was.
    assert BAKE_S <= watched <= BAKE_S + 3


def test_ends_of_processes_add_up_through_a_lengthened_bake() -> None:
    run = Watched()
    run.until(10)
    run.comes_back("w0")
    run.until(20)
    run.r = a_rollout(extended=1)
    run.comes_back("w0")
    assert run.tick().verdict == "its canaries' processes ended 2 times, nobody else's did"


def test_what_a_worker_did_before_it_was_a_canary_is_not_held_against_it() -> None:
    run = Watched()
    run.until(10)
    run.comes_back("w1", "w2")
    run.nodes["w1"].out_of_memory_at = run.ahead + run.now
    run.until(20)
    run.r = a_rollout("w0", "w1", "w2", stage=Stage.WIDENING, widened=1, began_unix_ms=20_000)
    assert run.until(30).live


def test_workers_of_a_rolling_restart_are_neither_lost_nor_have_they_died() -> None:
    run = Watched()
    run.until(5)
    run.restarting = frozenset({"w0"})
    run.dies("w0")
    held = run.until(BAKE_S * (EXTENSIONS + 2))
    assert (held.stage, held.verdict) == (Stage.BAKING, "waits: w0 not serving")
    for _ in range(2):
        run.comes_back("w0")
        run.tick()
    run.restarting = frozenset()
    assert run.tick().stage is Stage.WIDENING


EIGHT = {f"w{i}": "m" for i in range(8)}


@pytest.mark.parametrize("seen", [0, 1], ids=["nobody", "one of seven"])
def test_a_rest_that_is_not_seen_for_a_moment_is_waited_for_and_then_widened_to(seen: int) -> None:
    watched = Watched(models=EIGHT)
    watched.until(BAKE_S - 1)
    away = [f"w{i}" for i in range(1, 8 - seen)]
    watched.dies(*away)
    for _ in range(5):
        watched.tick()
    assert watched.r.stage is Stage.BAKING and watched.r.verdict.startswith("waits: w1, w2, w3")
    watched.comes_back(*away)
    watched.tick()
    assert (watched.r.stage, watched.r.widened, len(watched.r.canaries)) == (Stage.WIDENING, 1, 5)


def test_a_worker_of_the_rest_that_is_gone_for_good_is_not_waited_for_where_another_serves() -> None:
    watched = Watched(models={f"w{i}": "m" for i in range(3)})
    watched.until(10)
    watched.dies("w2")
    watched.until(BAKE_S)
    assert watched.r.stage is Stage.PROMOTED and watched.r.widened == 0


def test_where_nobody_of_the_rest_comes_back_it_is_taken_back_in_the_end() -> None:
    watched = Watched(models=EIGHT)
    watched.until(BAKE_S - 1)
    watched.dies(*(f"w{i}" for i in range(1, 8)))
    watched.until(BAKE_S + 3 * BAKE_S - 1)
    assert watched.r.live
    watched.until(BAKE_S + 3 * BAKE_S + 1)
    assert watched.r.stage is Stage.ROLLED_BACK and watched.r.verdict.startswith("undecided: w1, w2")


def test_a_pool_that_nobody_tries_it_in_is_not_waited_for_when_it_has_gone() -> None:
    watched = Watched(a_rollout("a0", pending=("a1", "b0")), {"a0": "a", "a1": "a", "b0": "b"})
    watched.until(10)
    watched.dies("b0")
    watched.until(BAKE_S)
    assert watched.r.stage is Stage.PROMOTED
