"""What the next step holds: who would be overtaken by too much goes first, past the soft limits."""

from tests.trimtab.scheduling_builders import BATCH, a_run
from trimtab.scheduling.step import MIN_CHUNK

OPEN = {"memory__reserve_high_priority": 0.0, "paths__realtime_reserve": 0}
"""Nothing is kept for the protected."""


def test_who_was_preempted_waits_no_longer_than_the_bound_behind_a_backlog():
    run = a_run(batch__active=1, priority__max_overtake_ms=1000)
    batch = run.batch(20, 300)
    run.step(20)
    for _ in range(200):
        run.realtime(20, 10)
    run.step(150)
    resumed = next(at for at, result in run.steps[20:] if batch in result.started)
    assert 1000.0 < resumed - 230.0 < 1000.0 + 150.0


# Overtaking.


def test_who_would_be_overtaken_by_too_much_goes_first_but_with_a_small_chunk():
    run = a_run(priority__max_overtake_ms=1000, batch__hard_cap=1, **OPEN)
    run.batch(10, 100)
    run.step()
    old = run.batch(3000, 5, arrival=run.now)
    run.now += 5000.0
    run.engine.remove("b0")
    urgent = run.realtime(100, 5)
    ran = run.step().ran
    assert next(iter(ran)) == old
    assert ran[urgent] == 100
    # What the budget leaves is his: ten milliseconds and 100 tokens are more than it has.
    assert ran[old] == MIN_CHUNK
    assert run.counters.forced == 1


def test_an_overdue_request_takes_the_rest_of_the_step_too():
    run = a_run(priority__max_overtake_ms=1000, **OPEN)
    old = run.batch(3000, 5, arrival=0.0)
    run.now = 5000.0
    urgent = run.realtime(20, 5)
    assert run.step().ran == {old: 70, urgent: 20}


def test_soft_limits_give_way_to_who_is_overdue():
    fields = {"batch__active": 2, "paths__realtime_reserve": 0, "paths__cold_window_ms": 500, "paths__hot_below": 50}
    run = a_run(priority__max_overtake_ms=400, preemption__mode="none", **fields)
    run.batch(10, 1000)
    run.step(10)
    old = run.batch(100, 5)
    run.step()
    assert old not in run.planner.running
    run.batch(100, 5, arrival=run.now + 1000)
    assert run.step().started == (old,)


def test_a_kept_slot_is_kept_from_who_is_overdue_too_but_never_the_only_one_he_could_have():
    fields = {"batch__active": 3, "paths__realtime_reserve": 1, "preemption__mode": "none"}
    run = a_run(priority__max_overtake_ms=400, **fields)
    run.batch(10, 1000)
    run.batch(10, 1000)
    run.step(10)
    old = run.batch(10, 5)
    run.now += 5000.0
    urgent = run.realtime(10, 5)
    assert run.step().started == (urgent,)
    run.engine.remove("b0")
    assert old not in run.step().started, "one of the others runs, and the last slot is the protected's"
    run.engine.remove("b1")
    assert run.step().started == (old,)


def test_who_came_last_is_not_who_stands_last():
    fields = {"paths__realtime_reserve": 0, "paths__hot_below": 50, "prefill__concurrent": 1}
    run = a_run(priority__max_overtake_ms=1400, memory__reserve_high_priority=0.0, **fields)
    run.batch(3000, 5)
    run.step()
    run.now = 2000.0
    old = run.batch(100, 5, arrival=0.0)
    late = run.realtime(60, 5, arrival=1500.0)
    run.batch(60, 5, arrival=600.0)
    assert [i.request_id for i in run.planner.waiting][-1] == "b3"
    # 1500 ms are too much, and other prompts in prefill are no reason.
    # A protected prompt joins whatever the others have in prefill, and 900 ms are not too much.
    assert run.step().started == (old, late)


def test_a_flood_never_overtakes_by_more_than_the_bound():
    run = a_run(priority__max_overtake_ms=3000, batch__active=4, batch__hard_cap=4, **OPEN)
    for n in range(800):
        if n % 4 == 0:
            run.realtime(40, 12)
            run.realtime(30, 5)
        if n % 40 == 0:
            run.batch(60, 30)
        run.step()
    assert run.counters.waits[BATCH].count >= 5
    assert run.counters.max_overtake_ms <= 3000.0 + 200.0
