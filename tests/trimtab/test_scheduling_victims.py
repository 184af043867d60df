"""Who makes room: after his time slice, the cheapest first, only so often, and only where it helps."""

import pytest

from tests.trimtab.scheduling_builders import BATCH, REALTIME, a_run, an_item, rules
from trimtab.kv_shape import KvShape
from trimtab.scheduling import Memory, Planner
from trimtab.scheduling.victims import MOST_AT_ONCE


def preempted_in(run, request_id):
    """Steps in which the request was preempted."""
    return [n for n, (_, result) in enumerate(run.steps) if request_id in result.preempted]


def a_full_engine(*prompts, steps=20, **fields):
    """As many BATCH requests decode as may run."""
    fields = {"batch__active": len(prompts), "memory__reserve_high_priority": 0.0, **fields}
    run = a_run(paths__realtime_reserve=0, prefill__concurrent=len(prompts), **fields)
    for prompt in prompts:
        run.batch(prompt, 1000)
    run.step(steps)
    assert len(run.engine.running) == len(prompts)
    return run


def test_the_cheapest_to_recompute_makes_room():
    run = a_full_engine(300, 50, 200)
    urgent = run.realtime()
    assert run.step().preempted == ("b1",)
    assert urgent in run.steps[-1][1].ran
    assert run.counters.preemptions == 1


def test_as_many_make_room_as_wait_but_few_at_once():
    run = a_full_engine(10, 20, 30, 40, 50, 60)
    for _ in range(6):
        run.realtime(5, 100)
    assert run.step().preempted == ("b0", "b1", "b2", "b3")
    assert MOST_AT_ONCE == 4
    assert run.step().preempted == ("b4", "b5")


def test_nobody_makes_room_while_there_is_room():
    run = a_full_engine(50, 50, batch__active=3)
    run.realtime()
    assert run.step().preempted == ()


def test_realtime_is_never_preempted_by_choice():
    run = a_run(batch__active=1, paths__hot_below=200, preemption__mode="aggressive")
    run.realtime(1000, 50)
    run.step(30)
    run.realtime(10)
    run.drain()
    assert run.counters.preemptions == 0


def test_protection_by_length_lets_long_realtime_make_room_for_short_batch():
    run = a_run(batch__active=1, paths__hot_below=200, paths__protect="length")
    long = run.realtime(1000, 50)
    run.step(30)
    short = run.batch(10)
    assert run.step().preempted == (long,)
    assert short in run.steps[-1][1].ran


# The time slice.


def test_the_slice_is_kept_to_the_millisecond():
    run = a_run(batch__active=1, preemption__guaranteed_time_slice_ms=100, paths__realtime_reserve=0)
    run.batch(39, 1000)
    run.step()
    assert run.now == 49.0
    run.realtime()
    for _ in range(5):
        assert run.step().preempted == ()
    # 49 ms of prefill and five decodes of 11 ms.
    assert run.now == 104.0
    assert run.step().preempted == ("b0",)
    assert run.counters.slices_denied == 5


def test_time_in_which_a_request_was_held_back_is_none_of_its_slice():
    run = a_run(
        preemption__guaranteed_time_slice_ms=100, prefill__itl_budget_ms=12, prefill__max_suspend_ms=100_000,
        batch__active=3, paths__realtime_reserve=0,
    )  # fmt: skip
    held = run.batch(10, 1000)
    run.step()
    # Two protected decodes take all of the budget.
    run.realtime(10, 1000)
    run.realtime(10, 1000)
    run.step(10)
    item = run.planner.running[held]
    scheduled = sum(result.cost_ms for _, result in run.steps if held in result.ran)
    assert run.planner.executed_ms(item) == pytest.approx(scheduled)
    assert scheduled < run.planner.busy_ms - 50.0


def test_a_request_that_was_resumed_stays_until_it_has_produced_a_token():
    run = a_full_engine(600, preemption__guaranteed_time_slice_ms=1, prefill__max_step_ms=110)
    run.realtime()
    run.step()
    assert preempted_in(run, "b0") == [20]
    run.step(3)
    assert run.planner.running["b0"].fresh
    # Resumed, it needs seven steps for its tokens; its slice is over after the first.
    run.realtime()
    while run.planner.running["b0"].fresh:
        assert run.step().preempted == ()
    assert run.step().preempted == ("b0",)


def test_steps_that_were_under_way_at_its_admission_are_none_of_its_slice():
    """An engine that schedules a step while the one before it runs."""
    planner = Planner(rules())
    first, second = an_item("first", prompt=10), an_item("second", prompt=10)
    memory = Memory(1000, 1000, KvShape.of(16))

    def begin(item):
        planner.add(item)
        plan = planner.plan(0.0, memory, lambda _: True)
        planner.began(plan, 0.0, {item.request_id: 10}, 10, lambda _: 10)

    begin(first)
    begin(second)
    planner.ended(200.0)
    assert (planner.executed_ms(first), planner.executed_ms(second)) == (200.0, 0.0)
    planner.ended(30.0)
    assert planner.executed_ms(second) == 30.0


def test_no_more_than_so_many_preemptions_then_never_again():
    run = a_full_engine(20, preemption__max_preemptions=2)
    for _ in range(6):
        run.realtime(5, 3)
        run.step(12)
    run.drain()
    assert len(preempted_in(run, "b0")) == 2


def test_nobody_is_preempted_and_resumed_in_one_step():
    run = a_full_engine(20, 20, preemption__guaranteed_time_slice_ms=0)
    for _ in range(5):
        run.realtime(5, 2)
        run.step(3)
    for _, result in run.steps:
        assert not set(result.preempted) & set(result.ran)


def test_who_is_known_to_keep_his_slice_is_not_asked_again_but_counted():
    run = a_run(batch__active=2, preemption__guaranteed_time_slice_ms=500, paths__realtime_reserve=0)
    run.batch(10, 1000)
    run.step(3)
    run.batch(10, 1000)
    run.step(3)
    run.realtime()
    waited = 0
    while not run.step().preempted:
        waited += 1
    assert run.counters.slices_denied == waited
    assert run.steps[-1][1].preempted == ("b0",)
    assert run.planner.executed_ms(run.planner.running["b1"]) < 500


def test_a_shorter_slice_holds_from_the_next_step_on():
    run = a_full_engine(20, preemption__guaranteed_time_slice_ms=100_000)
    run.realtime()
    assert run.step().preempted == ()
    run.engine.set_rules(rules(batch__active=1, preemption__guaranteed_time_slice_ms=50))
    assert run.step().preempted == ("b0",)


# Modes.


def test_mode_none_preempts_nobody():
    run = a_full_engine(20, preemption__mode="none")
    run.realtime()
    assert run.step(5).preempted == ()


def test_aggressive_knows_neither_slice_nor_count():
    run = a_full_engine(
        20, steps=3, preemption__mode="aggressive", preemption__guaranteed_time_slice_ms=100_000,
        preemption__max_preemptions=0,
    )  # fmt: skip
    run.realtime()
    assert run.step().preempted == ("b0",)


def test_aggressive_lets_a_resumed_request_produce_a_token_first():
    run = a_full_engine(600, preemption__mode="aggressive", prefill__max_step_ms=110)
    run.realtime(5)
    run.step(3)
    assert run.planner.running["b0"].fresh
    run.realtime(5)
    assert run.step().preempted == ()
    run.drain(5000)
    assert len(preempted_in(run, "b0")) == 2


# Where it would not help.


def test_nobody_makes_room_for_who_may_not_run_anyway():
    run = a_full_engine(20, 20, paths__realtime_max_running=1)
    run.realtime(5, 500)
    run.step()
    run.realtime(5, 500)
    run.step(10)
    assert run.counters.preemptions == 1


def test_nobody_makes_room_for_a_second_isolated_request():
    run = a_full_engine(20, 20, isolate__tenants=("acme",))
    run.realtime(5, 500, tenant="acme")
    run.step()
    run.realtime(5, 500, tenant="acme")
    run.step(10)
    assert run.counters.preemptions == 1
    assert len(run.engine.running) == 2


def test_no_more_make_room_than_can_start_in_the_next_step():
    run = a_full_engine(20, 20, 20, prefill__itl_budget_ms=100, prefill__step_tokens=300)
    run.realtime(250, 5)
    run.realtime(250, 5)
    run.realtime(250, 5)
    # A step holds 190 prompt tokens within 200 ms, so one prompt and no other begins.
    assert len(run.step().preempted) == 1
    run.drain(5000)


def test_nobody_makes_room_while_the_step_has_no_token_left():
    run = a_full_engine(20, 20, 20)
    run.engine.set_rules(rules(batch__active=3, prefill__step_tokens=2))
    for _ in range(3):
        run.realtime(2, 400)
    run.step(20)
    # Two protected decodes are all that a step holds.
    assert run.counters.preemptions == 2


def test_nobody_makes_room_where_so_few_would_not_make_any():
    run = a_full_engine(*[20] * 10)
    run.engine.set_rules(rules(batch__active=2))
    run.realtime()
    run.step(5)
    assert run.counters.preemptions == 0
    assert len(run.engine.running) == 10


# Blocks.


def a_full_memory(*prompts, blocks, **fields):
    run = a_run(
        blocks=blocks, paths__realtime_reserve=0, prefill__concurrent=len(prompts), memory__reserve_high_priority=0.0,
        memory__pressure_threshold=1.0, **fields,
    )  # fmt: skip
    for prompt in prompts:
        run.batch(prompt, 1000)
    run.step(10)
    assert len(run.engine.running) == len(prompts)
    return run


def test_the_cheapest_few_that_free_enough_blocks_make_room():
    run = a_full_memory(100, 200, 300, blocks=45)
    free = run.engine.free_blocks
    urgent = run.realtime(16 * (free + 5))
    assert run.step().preempted == ("b0",)
    assert urgent in run.steps[-1][1].ran


def test_nobody_loses_his_work_whose_blocks_are_not_needed():
    run = a_full_memory(20, 20, 20, 400, blocks=36)
    free = run.engine.free_blocks
    run.realtime(16 * (free + 15))
    # The three small ones hold too little together, and the large one enough alone.
    assert run.step().preempted == ("b3",)


def test_large_ones_are_found_behind_many_small_ones():
    run = a_full_memory(*[20] * 6, 400, blocks=44)
    free = run.engine.free_blocks
    run.realtime(16 * (free + 20))
    assert run.step().preempted == ("b6",)


def test_nobody_makes_room_where_even_all_would_not_be_enough():
    run = a_run(blocks=40, paths__realtime_reserve=0, memory__reserve_high_priority=0.0)
    run.batch(100, 1000)
    run.realtime(400, 1000)
    run.step(10)
    run.realtime(16 * 20)
    assert run.step().preempted == ()
    assert len(run.engine.running) == 2


def test_room_is_made_for_the_blocks_that_decodes_begin_in_the_same_step_too():
    run = a_full_memory(30, 30, 30, blocks=20)
    run.drain_until(lambda: all(s.computed % 16 == 0 for s in run.engine.running))
    free = run.engine.free_blocks
    urgent = run.realtime(16 * free - 1)
    # It would fit, had not each of the three a block to begin.
    assert len(run.step().preempted) == 1
    assert urgent in run.steps[-1][1].ran
    assert run.counters.memory_preemptions == 0


# For want of memory.


def running(planner, *items):
    for item in items:
        planner.add(item)
    planner.plan(0.0, Memory(10_000, 10_000, KvShape.of(16)), lambda _: True)
    for item in items:
        planner.waiting.remove(item.request_id)
        planner.running[item.request_id] = planner.prefilling[item.request_id] = item
    return planner


def executed(item, ms, computed):
    item.busy_at_admission, item.computed = -ms, computed
    return item


def test_batch_goes_before_realtime_and_the_cheapest_batch_first():
    planner = running(
        Planner(rules()),
        executed(an_item("r", REALTIME, 500), 100.0, 1),
        *(executed(an_item(f"b{n}", BATCH, 500), 100.0, n) for n in (30, 10, 20)),
    )
    assert planner.memory_victim().request_id == "b10"
    assert (planner.counters.memory_preemptions, planner.counters.slices_broken) == (1, 0)


def test_who_had_his_slice_goes_before_who_is_cheaper():
    planner = running(
        Planner(rules()),
        executed(an_item("cheap", BATCH, 500), 49.0, 1),
        executed(an_item("dear", BATCH, 500), 50.0, 400),
    )
    assert planner.memory_victim().request_id == "dear"
    assert planner.counters.slices_broken == 0


def test_where_nobody_had_his_slice_the_cheapest_goes_and_it_is_counted():
    planner = running(
        Planner(rules()),
        executed(an_item("cheap", BATCH, 500), 10.0, 1),
        executed(an_item("dear", BATCH, 500), 20.0, 400),
    )
    assert planner.memory_victim().request_id == "cheap"
    assert planner.counters.slices_broken == 1


def test_of_realtime_the_last_arrived_goes():
    planner = running(
        Planner(rules()), *(executed(an_item(f"r{at}", REALTIME, 500, float(at)), 100.0, 400 - at) for at in (1, 3, 2))
    )
    assert planner.memory_victim().request_id == "r3"


@pytest.mark.parametrize(("mode", "expected"), [("fcfs", "r2"), ("priority", "b1")])
def test_vllms_own_ways_take_who_would_come_last(mode, expected):
    r = rules(scheduler__mode=mode)
    planner = running(
        Planner(r),
        executed(an_item("b0", BATCH, 500, 0.0, r), 100.0, 1),
        executed(an_item("b1", BATCH, 500, 1.0, r), 0.0, 400),
        executed(an_item("r2", REALTIME, 500, 2.0, r), 0.0, 400),
    )
    assert planner.memory_victim().request_id == expected
    assert planner.counters.slices_broken == 0


def test_there_is_no_victim_where_nobody_runs():
    assert Planner(rules()).memory_victim() is None
