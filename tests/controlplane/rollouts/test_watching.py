"""What a leader makes of canaries that are away, of those that come back, and of what happened to them between two bakes. Virtual time."""

from __future__ import annotations

from collections.abc import Callable

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
    run = Watched(a_rollout(samples=(500, 500)))
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
