"""What the next step holds: who joins, and by which limits; cold prompts, memory, slots."""

import pytest

from tests.trimtab.scheduling_builders import BATCH, REALTIME, a_run, rules
from trimtab.engine import Costs

OPEN = {"memory__reserve_high_priority": 0.0, "paths__realtime_reserve": 0}
"""Nothing is kept for the protected."""


# Cold prompts.


def test_cold_prompts_share_a_step_fairly_and_no_more_than_so_many():
    run = a_run(prefill__concurrent=2, paths__hot_below=100, **OPEN)
    run.now = 10.0
    first, second, third = (run.batch(1000, arrival=float(n)) for n in range(3))
    assert run.step().ran == {first: 95, second: 95}
    run.step(3)
    assert third not in run.planner.running


def test_what_a_short_rest_leaves_of_its_share_goes_to_the_others():
    run = a_run(prefill__concurrent=2, paths__hot_below=50, clusters__spread_limit=1.0, **OPEN)
    run.now = 10.0
    first, second = run.batch(100, 50, arrival=0.0), run.batch(1000, arrival=1.0)
    run.step()
    assert run.step().ran == {first: 5, second: 185}


def test_hot_prompts_go_before_cold_ones():
    run = a_run(paths__hot_below=100, **OPEN)
    cold = run.batch(1000, arrival=0.0)
    hot = run.batch(50, arrival=1.0)
    assert run.step().ran == {cold: 140, hot: 50}


def test_cold_prompts_that_run_beyond_the_policys_number_wait_for_their_turn():
    run = a_run(prefill__concurrent=4, paths__hot_below=100, **OPEN)
    run.now = 10.0
    cold = [run.batch(1000, arrival=float(n)) for n in range(4)]
    run.step()
    run.engine.set_rules(rules(prefill__concurrent=1, paths__hot_below=100, **OPEN))
    assert run.step().ran == {cold[0]: 190}


def test_only_so_many_giants_prefill_at_a_time_and_others_pass_them():
    run = a_run(serial__above=500, paths__hot_below=100, prefill__concurrent=4, **OPEN)
    run.now = 10.0
    first, second, cold = (run.batch(n, 50, arrival=float(i)) for i, n in enumerate((1000, 900, 400)))
    run.step()
    assert set(run.planner.running) == {first, cold}
    while first in run.planner.prefilling:
        run.step()
        assert second not in run.planner.running
    run.step()
    assert second in run.planner.running


def test_giants_of_the_protected_are_serial_too():
    run = a_run(serial__above=100, **OPEN)
    run.realtime(150, 5)
    run.realtime(140, 5)
    run.step()
    assert len(run.planner.running) == 1


@pytest.mark.parametrize("workload", [REALTIME, BATCH])
@pytest.mark.parametrize("prompt", [50, 5000])
def test_isolated_requests_run_one_at_a_time_beside_others(workload, prompt):
    run = a_run(isolate__tenants=("acme",), prefill__concurrent=4, **OPEN)
    for _ in range(3):
        run.add(f"acme{len(run.planner.waiting)}", workload, prompt, 5, tenant="acme")
    other = run.add("other", workload, prompt, 5, tenant="other")
    while run.engine.busy:
        run.step()
        assert sum(i.alone for i in run.planner.running.values()) <= 1
    assert run.began(other) == 0.0


def test_alike_lengths_run_together_where_there_is_a_choice():
    run = a_run(paths__hot_below=100, prefill__concurrent=2, clusters__spread_limit=0.3, **OPEN)
    run.now = 10.0
    run.batch(1000, 5, arrival=0.0)
    run.batch(5000, 5, arrival=1.0)
    alike = run.batch(800, 5, arrival=2.0)
    run.step()
    assert set(run.planner.running) == {"b0", alike}


def test_hot_requests_that_run_do_not_decide_which_cold_ones_are_alike():
    run = a_run(paths__hot_below=100, prefill__concurrent=2, clusters__spread_limit=0.3, **OPEN)
    run.batch(10, 500)
    run.batch(1000, 500)
    run.step()
    run.batch(5000, 5, arrival=1.0)
    alike = run.batch(800, 5, arrival=2.0)
    run.step()
    assert alike in run.planner.running
    assert len(run.planner.running) == 3


def test_where_nobody_is_alike_the_first_goes():
    run = a_run(paths__hot_below=100, prefill__concurrent=2, clusters__spread_limit=0.3, **OPEN)
    run.now = 10.0
    run.batch(1000, 5, arrival=0.0)
    first = run.batch(5000, 5, arrival=1.0)
    run.batch(9000, 5, arrival=2.0)
    run.step()
    assert first in run.planner.running


def test_who_has_waited_half_the_bound_is_not_passed_by_alike_ones():
    fields = {"paths__hot_below": 100, "clusters__spread_limit": 0.3, "priority__max_overtake_ms": 1000}
    for waited, expected in ((400.0, "b2"), (600.0, "b1")):
        run = a_run(prefill__concurrent=2, **fields, **OPEN)
        run.now = 5000.0
        run.batch(1000, 5)
        run.step()
        run.batch(5000, 5, arrival=run.now - waited)
        run.batch(800, 5)
        assert run.step().started == (expected,)


def a_run_with_a_window(**fields):
    return a_run(paths__hot_below=100, paths__cold_window_ms=200, prefill__concurrent=2, **{**OPEN, **fields})


def test_a_cold_request_waits_its_window_for_others_like_it_beside_running_work():
    run = a_run_with_a_window()
    run.batch(50, 1000)
    run.step()
    cold = run.batch(500, 5)
    arrived = run.now
    while cold not in run.planner.running:
        run.step()
    assert 200.0 <= run.began(cold) - arrived < 200.0 + 12.0


def test_as_many_cold_requests_as_there_are_places_wait_for_nobody():
    run = a_run_with_a_window()
    run.batch(50, 1000)
    run.step()
    run.batch(500, 5)
    run.batch(500, 5)
    assert run.step().started == ("b1", "b2")


def test_beside_nothing_there_is_nothing_to_wait_for():
    run = a_run_with_a_window()
    assert run.batch(500, 5) in run.step().started


# Memory.


def test_above_the_pressure_threshold_no_cold_request_joins_but_hot_ones_do():
    run = a_run(blocks=100, paths__hot_below=100, memory__pressure_threshold=0.5, **OPEN)
    run.batch(16 * 52 - 20, 1000)
    run.step(10)
    assert run.engine.free_blocks < 50
    cold, hot = run.batch(200, 5), run.batch(20, 5)
    run.step(5)
    assert cold not in run.planner.running
    assert run.began(hot)


def test_the_reserve_is_for_the_protected():
    run = a_run(blocks=100, memory__reserve_high_priority=0.3, paths__realtime_reserve=0)
    run.batch(16 * 50, 1000)
    run.drain_until(lambda: run.planner.rest_decodes)
    other = run.batch(16 * 30, 5)
    run.step(3)
    assert other not in run.planner.running
    urgent = run.realtime(16 * 30, 5)
    assert run.step().started == (urgent,)


def test_blocks_that_a_prompt_was_promised_are_no_bodys_but_the_express():
    run = a_run(blocks=100, paths__hot_below=100, serial__above=100_000, **OPEN)
    run.batch(16 * 80, 5)
    run.step()
    # Twelve blocks are held, 81 are needed.
    other = run.batch(16 * 19, 5)
    run.step(2)
    assert other not in run.planner.running
    small = run.batch(16 * 18, 5)
    run.step()
    assert small in run.planner.running
    urgent = run.realtime(90, 5)
    assert urgent in run.step().started


def test_a_prompt_whose_blocks_an_express_request_took_gets_what_is_left_and_keeps_its_work():
    run = a_run(costs=Costs(10.0, 10.0), blocks=100, prefill__step_tokens=600, serial__above=100_000, **OPEN)
    long = run.batch(16 * 90)
    run.step()
    urgent = run.realtime(16 * 61 - 1)
    assert run.step().ran == {urgent: 600}
    # 23 blocks for the 375 tokens of the one leave a block and a half for the other.
    assert run.step().ran == {urgent: 375, long: 24}
    run.drain()
    assert run.counters.memory_preemptions == 0


def test_blocks_that_a_prompt_takes_in_a_step_are_no_longer_promised():
    run = a_run(costs=Costs(10.0, 10.0), blocks=100, prefill__step_tokens=1000, **OPEN)
    long = run.batch(16 * 80, 5)
    run.step()
    small = run.batch(16 * 19 - 1, 5)
    assert run.step().ran == {long: 280, small: 303}


def test_a_prompt_in_prefill_leaves_decodes_the_blocks_that_they_begin():
    run = a_run(costs=Costs(10.0, 10.0), blocks=30, **OPEN)
    for _ in range(3):
        run.batch(15, 1000)
    run.drain_until(lambda: len(run.planner.rest_decodes) == 3)
    run.engine.set_rules(rules(prefill__step_tokens=150, **OPEN))
    long = run.batch(16 * 26, 5)
    run.step()
    assert {s.computed for s in run.engine.running} == {16, 147}
    run.engine.free_blocks = 3
    # Each decode takes one of the three; what is left to the prompt is the rest of the block that it has.
    assert run.step().ran[long] == 13
    assert run.counters.memory_preemptions == 0


def test_an_admission_leaves_decodes_the_blocks_that_they_begin():
    run = a_run(blocks=40, **OPEN)
    for _ in range(4):
        run.batch(15, 1000)
    run.drain_until(lambda: all(s.computed == 15 for s in run.engine.running) and len(run.engine.running) == 4)
    run.step()
    assert [s.computed for s in run.engine.running] == [16] * 4
    free = run.engine.free_blocks
    too_long, fits = run.batch(16 * (free - 4)), run.batch(16 * (free - 5))
    run.step()
    assert too_long not in run.planner.running
    assert fits in run.planner.running
    assert run.counters.memory_preemptions == 0


# Slots.


def test_only_so_many_run_that_are_not_express():
    run = a_run(batch__hard_cap=3, prefill__concurrent=9, **OPEN)
    for n in range(5):
        run.batch(10 if n % 2 else 5000, 1000)
    run.realtime(5000, 1000)
    urgent = [run.realtime(10, 1000) for _ in range(4)]
    run.step(60)
    assert len(run.planner.running) == 7
    assert set(urgent) < set(run.planner.running)


def test_only_so_many_express_requests_run():
    run = a_run(paths__realtime_max_running=3)
    for _ in range(5):
        run.realtime(10, 1000)
    other = run.batch(10, 1000)
    run.step(10)
    assert len(run.planner.running) == 4
    assert other in run.planner.running


def test_a_slot_is_kept_for_the_protected():
    run = a_run(batch__active=3, paths__realtime_reserve=1, memory__reserve_high_priority=0.0)
    for _ in range(5):
        run.batch(10, 1000)
    run.step(5)
    assert len(run.planner.running) == 2
    assert run.realtime(10, 1000) in run.step().ran
    assert run.counters.preemptions == 0


def test_with_one_slot_both_workloads_run():
    run = a_run(batch__active=1)
    batch = run.batch(10, 5)
    run.drain()
    urgent = run.realtime(10, 5)
    run.drain()
    assert run.ended(batch) < run.ended(urgent)


@pytest.mark.parametrize("output", [1, 30])
def test_with_one_slot_a_flood_of_realtime_does_not_starve_batch(output):
    run = a_run(batch__active=1, priority__max_overtake_ms=2000)
    batch = run.batch(100, 50)
    run.realtime(10, 10)
    for _ in range(3000):
        if len(run.planner.waiting) < 3:
            run.realtime(20, output)
        run.step()
        if batch not in run.engine._sequences:
            break
    # Preempted three times at most, it waits no longer than the bound each time.
    assert run.ended(batch) < 4 * (2000 + 100 + 50 * 11 + 500)


# Realtime before batch.


def test_a_giant_of_batch_in_prefill_stops_no_giant_of_realtime():
    run = a_run(paths__hot_below=50, serial__above=100, prefill__step_tokens=64, prefill__itl_budget_ms=0)
    first = run.batch(1000, 5)
    run.step()
    urgent = run.realtime(300, 5)
    step = run.step()
    assert step.started == (urgent,)
    assert urgent in step.ran and first not in step.ran, "giants one by one, and realtime first"
    second = run.realtime(300, 5)
    while second not in (step := run.step()).started:
        assert first not in step.ran
    assert urgent not in run.planner.prefilling, "among themselves they go one by one too"


def test_realtime_prompts_take_what_batch_prompts_would_have_shared():
    run = a_run(paths__hot_below=50, prefill__concurrent=2, prefill__step_tokens=64, prefill__itl_budget_ms=0)
    run.batch(1000, 5)
    run.batch(1000, 5)
    run.step()
    urgent = run.realtime(100, 5)
    assert run.step().ran == {urgent: 64}
    assert run.step().ran[urgent] == 36
