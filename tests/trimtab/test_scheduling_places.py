"""A protected request with a cold prompt takes a place below `batch.hard_cap` from BATCH, by the rules by which an express one takes a slot."""

import pytest

from tests.trimtab.scheduling_builders import BATCH, a_run, rules

COLD, HOT = 200, 20
"""Prompts, where `paths.hot_below` is 100."""


def a_full_cap(*prompts, steps=20, **fields):
    """As many BATCH requests decode as have places; there are slots beside them."""
    defaults = {
        "batch__active": len(prompts) + 4, "batch__hard_cap": len(prompts), "paths__hot_below": 100, "prefill__concurrent": 4,
        "paths__realtime_reserve": 0, "memory__reserve_high_priority": 0.0,
    }  # fmt: skip
    run = a_run(**{**defaults, **fields})
    for prompt in prompts:
        run.batch(prompt, 1000)
    run.step(steps)
    assert len(run.engine.running) == len(prompts)
    return run


def others_of(run):
    return sum(not i.express for i in run.planner.running.values())


def test_the_cheapest_to_recompute_gives_its_place():
    run = a_full_cap(60, 20, 40)
    long = run.realtime(COLD)
    result = run.step()
    assert result.preempted == ("b1",)
    assert result.started == (long,)
    assert others_of(run) == 3
    assert run.counters.preemptions == 1


def test_who_gave_his_place_goes_on_when_there_is_one_again():
    run = a_full_cap(60, 20)
    long = run.realtime(COLD, 3)
    run.drain()
    assert run.ended(long) < run.ended("b1")
    assert run.counters.recomputed_tokens > 0


def test_nobody_makes_room_while_there_is_a_place():
    run = a_full_cap(60, 20)
    run.engine.set_rules(rules(batch__hard_cap=3, paths__hot_below=100, paths__realtime_reserve=0))
    long = run.realtime(COLD)
    result = run.step()
    assert (result.preempted, result.started) == ((), (long,))


def test_it_takes_a_slot_too_where_there_is_none():
    run = a_full_cap(60, 20, batch__active=2, batch__hard_cap=8)
    long = run.realtime(COLD)
    result = run.step()
    assert (result.preempted, result.started) == (("b1",), (long,))


def test_as_many_make_room_as_may_prefill_at_once():
    run = a_full_cap(60, 20, 40, 50, prefill__concurrent=2, clusters__spread_limit=1.0)
    for _ in range(3):
        run.realtime(COLD, 500)
    assert run.step().preempted == ("b1", "b2")
    assert len([i for i in run.planner.prefilling.values() if i.protected]) == 2
    run.step()
    assert run.counters.preemptions == 2


# As conservative as for a slot.


def test_it_waits_for_the_end_of_a_slice():
    run = a_full_cap(20, steps=1, preemption__guaranteed_time_slice_ms=100)
    long = run.realtime(COLD)
    # 30 ms of prefill and seven decodes of 11 ms.
    for _ in range(7):
        assert run.step().preempted == ()
    result = run.step()
    assert (result.preempted, result.started) == (("b0",), (long,))
    assert run.counters.slices_denied == 7


def test_one_request_makes_room_so_often_and_never_again():
    run = a_full_cap(20, preemption__max_preemptions=2)
    for _ in range(4):
        run.realtime(COLD, 2)
        run.step(40)
    run.drain()
    assert sum("b0" in result.preempted for _, result in run.steps) == 2


def test_mode_none_lets_it_wait():
    run = a_full_cap(20, preemption__mode="none")
    long = run.realtime(COLD)
    run.drain()
    assert run.counters.preemptions == 0
    assert run.began(long) >= run.ended("b0")


def test_aggressive_takes_the_place_at_once():
    run = a_full_cap(20, steps=2, preemption__mode="aggressive", preemption__guaranteed_time_slice_ms=100_000)
    run.realtime(COLD)
    assert run.step().preempted == ("b0",)


def test_cold_realtime_never_makes_room_for_its_like():
    run = a_full_cap(20)
    run.realtime(COLD, 500)
    run.step(20)
    assert run.counters.preemptions == 1
    run.realtime(COLD)
    run.step(20)
    assert run.counters.preemptions == 1


def test_batch_with_a_cold_prompt_takes_nobodys_place():
    run = a_full_cap(20)
    run.batch(COLD)
    run.step(20)
    assert run.counters.preemptions == 0


# The place is theirs for whom it was made.


def test_batch_that_waits_does_not_take_the_place_that_was_made():
    run = a_full_cap(60, 20, priority__max_overtake_ms=1000)
    overdue = run.batch(10, 1)
    run.now += 5000
    hot, long = run.batch(HOT, 1), run.realtime(COLD, 500)
    result = run.step()
    assert (result.preempted, result.started) == (("b1",), (long,))
    run.step(20)
    assert overdue in run.planner.waiting and hot in run.planner.waiting


def test_a_place_that_comes_free_by_itself_is_first_of_all_for_who_is_overdue():
    run = a_full_cap(60, priority__max_overtake_ms=1000, preemption__mode="none")
    overdue = run.batch(10, 1)
    run.now += 5000
    long = run.realtime(COLD)
    run.drain()
    assert run.began(overdue) < run.began(long)


def test_express_requests_come_first():
    run = a_full_cap(60, 20, batch__active=2)
    urgent, long = run.realtime(HOT), run.realtime(COLD)
    result = run.step()
    assert (result.preempted, result.started) == (("b1",), (urgent,))
    # The slot that the first one gives back is not for BATCH that waits.
    assert run.step().started == (long,)


def test_a_flood_of_cold_realtime_starves_no_batch():
    run = a_full_cap(20, 30, preemption__guaranteed_time_slice_ms=0)
    batch = ["b0", "b1", *(run.batch(40, 20) for _ in range(4))]
    for _ in range(200):
        run.realtime(COLD, 5)
        run.step(4)
        assert others_of(run) <= 2
    started_among = [b for b in batch if b in {r for _, result in run.steps for r in result.ran}]
    assert started_among
    run.drain(20_000)
    for request_id in batch:
        assert sum(request_id in result.preempted for _, result in run.steps) <= 3
        assert run.ended(request_id)


# Where it would not help.


def test_nobody_makes_room_above_the_pressure_threshold():
    run = a_full_cap(16 * 5, blocks=10, memory__pressure_threshold=0.5)
    run.realtime(100)
    run.step(10)
    assert run.counters.preemptions == 0


def test_nobody_makes_room_for_blocks_that_are_not_there():
    run = a_full_cap(20, 20, blocks=40, memory__pressure_threshold=1.0)
    run.realtime(90, 1000)
    run.step(3)
    # Both of BATCH hold less than it needs.
    run.realtime(16 * 36)
    run.step(10)
    assert run.counters.preemptions == 0


def test_nobody_makes_room_while_the_step_has_no_room_for_a_chunk():
    run = a_full_cap(20, 20, prefill__itl_budget_ms=12, prefill__max_suspend_ms=100_000)
    run.realtime(10, 1000)
    run.step(2)
    run.realtime(COLD)
    run.step(20)
    # A decode takes a millisecond of the two that the budget leaves.
    assert run.counters.preemptions == 0


def test_nobody_makes_room_for_a_second_giant():
    run = a_full_cap(20, 20, serial__above=150, prefill__step_tokens=64)
    for _ in range(2):
        run.realtime(2 * COLD, 500)
    run.step(3)
    assert run.counters.preemptions == 1


def test_nobody_makes_room_for_a_second_isolated_request():
    run = a_full_cap(20, 20, isolate__tenants=("acme",))
    for _ in range(2):
        run.realtime(COLD, 500, tenant="acme")
    run.step(30)
    assert run.counters.preemptions == 1


def test_nobody_makes_room_before_the_window_of_a_cold_request_is_over():
    run = a_full_cap(20, 20, paths__cold_window_ms=400, prefill__concurrent=4)
    arrived = run.now
    long = run.realtime(COLD)
    run.drain_until(lambda: run.counters.preemptions)
    assert run.began(long) - arrived >= 400


def test_nobody_makes_room_where_a_lowered_cap_would_need_more_than_go_at_once():
    run = a_full_cap(*[20] * 8)
    run.engine.set_rules(rules(batch__hard_cap=3, paths__hot_below=100))
    run.realtime(COLD)
    run.step(5)
    assert run.counters.preemptions == 0


@pytest.mark.parametrize("mode", ["fcfs", "priority"])
def test_vllms_own_ways_know_no_places(mode):
    run = a_full_cap(20, batch__active=1, scheduler__mode=mode)
    run.realtime(COLD)
    run.step(5)
    assert run.counters.preemptions == 0


def test_protection_by_length_makes_no_place_for_what_is_cold():
    run = a_full_cap(COLD, paths__protect="length", serial__above=100_000)
    run.add("r", BATCH, COLD)
    run.realtime(COLD)
    run.step(10)
    assert run.counters.preemptions == 0
    assert not run.planner.waiting.cold_protected
