"""Length classes: where they end, who joins whom in prefill, and what is counted by them."""

import random

import pytest

from tests.trimtab.scheduling_builders import BATCH, a_policy, a_run, an_item, rules
from trimtab.policy import Policy
from trimtab.scheduling import BY_LENGTH, NOW, STATS, LengthClass, edges_of
from trimtab.scheduling.lengths import LONGEST

SHORT, STANDARD, MEDIUM, LONG, GIANT = LengthClass


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (1, SHORT), (511, SHORT), (512, STANDARD), (1024, STANDARD), (1025, MEDIUM), (4095, MEDIUM), (4096, LONG), (8192, LONG),
        (8193, GIANT), (10**9, GIANT),
    ],
)  # fmt: skip
def test_classes_meet_without_gap(tokens, expected):
    assert LengthClass.of(tokens) is expected
    assert an_item(prompt=tokens).length is expected


def test_a_giant_is_what_goes_one_after_another_by_default():
    assert LONGEST[-1] == Policy().serial.above
    assert an_item(prompt=8193).serial and not an_item(prompt=8192).serial


def test_the_default_policy_has_the_default_edges():
    assert edges_of(Policy()) == rules().length_edges == LONGEST


def test_edges_that_do_not_ascend_are_sorted():
    edges = edges_of(a_policy(clusters__short_to=9000, clusters__long_to=100))
    assert edges == (100, 1024, 4095, 9000)
    assert [LengthClass.of(n, edges) for n in (100, 101, 9000, 9001)] == [SHORT, STANDARD, LONG, GIANT]


def test_a_class_between_equal_edges_is_empty():
    edges = edges_of(a_policy(clusters__short_to=1024))
    assert edges == (1024, 1024, 4095, 8192)
    assert [LengthClass.of(n, edges) for n in (1024, 1025)] == [SHORT, MEDIUM]


# Who joins. Two cold prompts may prefill at a time, and one of them does.


def a_run_with_a_place(**fields):
    usual = {
        "paths__hot_below": 100, "prefill__concurrent": 2, "clusters__spread_limit": 0.3,
        "memory__reserve_high_priority": 0.0, "paths__realtime_reserve": 0,
    }  # fmt: skip
    run = a_run(**{**usual, **fields})
    run.now = 10.0
    return run


def who_joins(run, *prompts):
    """The prompt lengths of those who start in the next step, when these wait in this order."""
    of = {run.batch(prompt, 5, arrival=run.now - 1.0 + n / 1000.0): prompt for n, prompt in enumerate(prompts)}
    return [of[request_id] for request_id in run.step().started]


def test_one_of_the_same_class_within_the_spread_limit_joins():
    run = a_run_with_a_place()
    run.batch(1000, 5)
    run.step()
    assert who_joins(run, 5000, 300, 800, 900) == [800]


def test_close_in_length_is_not_enough_across_classes():
    run = a_run_with_a_place()
    run.batch(1000, 5)
    run.step()
    assert who_joins(run, 1100, 900) == [900]


def test_of_one_class_is_not_enough_beyond_the_spread_limit():
    run = a_run_with_a_place()
    run.batch(1100, 5)
    run.step()
    assert who_joins(run, 4000, 1500) == [1500]


def test_prompts_that_are_through_decide_no_more_who_is_alike():
    run = a_run_with_a_place()
    run.batch(5000, 1000)
    run.drain_until(lambda: run.planner.rest_decodes)
    run.batch(1000, 5)
    run.step()
    assert who_joins(run, 5000, 900) == [900]


def test_where_nobody_prefills_the_first_leads_and_the_next_is_like_it():
    run = a_run_with_a_place()
    assert who_joins(run, 2000, 800, 1900) == [2000, 1900]


def test_beside_two_of_different_classes_nobody_is_alike_and_the_first_goes():
    run = a_run_with_a_place(prefill__concurrent=3)
    assert who_joins(run, 1000, 5000) == [1000, 5000]
    assert who_joins(run, 2000, 900, 4500) == [2000]


def test_a_spread_limit_of_one_leaves_the_order_alone():
    run = a_run_with_a_place(clusters__spread_limit=1.0)
    run.batch(1000, 5)
    run.step()
    assert who_joins(run, 5000, 900) == [5000]


def test_who_is_never_alike_waits_for_half_the_bound_at_most():
    run = a_run_with_a_place(priority__max_overtake_ms=2000)
    run.batch(1000, 5)
    run.step()
    other, arrived = run.batch(5000, 5), run.now
    for _ in range(300):
        if len(run.planner.waiting.cold) < 4:
            run.batch(900, 5)
        run.step()
    # Then he is the next to join; until a place is free pass two prompts of 900 ms each at most.
    assert 1000.0 <= run.began(other) - arrived < 1000.0 + 2000.0


# What is counted.


def test_waits_are_counted_by_class_too_and_add_up():
    rng = random.Random(5)
    run = a_run(batch__active=4, paths__hot_below=1000)
    lengths = (100, 600, 2000, 5000, 9000)
    total = 0
    for _ in range(60):
        (run.batch if rng.random() < 0.5 else run.realtime)(rng.choice(lengths), rng.randrange(1, 9))
        total += 1
        run.step(3)
        counted = dict(zip(STATS, run.planner.stats(), strict=True))
        waits = list(run.planner.waiting)
        assert {c: counted[f"{c}_waiting"] for c in LengthClass} == {
            c: sum(i.length is c for i in waits) for c in LengthClass
        }
    run.drain()
    counted = dict(zip(STATS, run.planner.stats(), strict=True))
    assert sum(counted[f"{c}_waits"] for c in LengthClass) == total
    assert sum(counted[f"{c}_wait_ms"] for c in LengthClass) == pytest.approx(
        counted["batch_wait_ms"] + counted["realtime_wait_ms"]
    )
    assert max(counted[f"{c}_max_wait_ms"] for c in LengthClass) == max(
        counted["batch_max_wait_ms"], counted["realtime_max_wait_ms"]
    )
    assert all(counted[f"{c}_waits"] and not counted[f"{c}_waiting"] for c in LengthClass)


def test_a_wait_counts_once_and_one_that_was_preempted_waits_again():
    run = a_run(batch__active=1, paths__realtime_reserve=0)
    run.batch(600, 1000)
    run.step(20)
    run.realtime(10, 5)
    run.step()
    assert run.counters.preemptions == 1
    counted = dict(zip(STATS, run.planner.stats(), strict=True))
    assert [counted[f"standard_{what}"] for what in BY_LENGTH] == [1, 0.0, 0.0, 1]
    assert [counted[f"short_{what}"] for what in BY_LENGTH] == [1, 0.0, 0.0, 0]
    run.drain()
    assert run.counters.waits_by_length[STANDARD].count == run.counters.waits[BATCH].count == 1


def test_a_re_cut_moves_those_who_are_here_and_what_was_counted_stays():
    run = a_run(batch__active=2, batch__hard_cap=2, paths__realtime_reserve=0)
    run.batch(600, 50)
    run.step()
    running = run.planner.running["b0"]
    run.batch(300, 5)
    for _ in range(4):
        run.batch(600, 5)
    before = dict(zip(STATS, run.planner.stats(), strict=True))
    assert (before["standard_waits"], before["standard_waiting"], before["short_waiting"]) == (1, 4, 1)
    run.engine.set_rules(rules(batch__active=2, batch__hard_cap=2, paths__realtime_reserve=0, clusters__short_to=700))
    after = dict(zip(STATS, run.planner.stats(), strict=True))
    assert (after["standard_waits"], after["standard_waiting"], after["short_waiting"]) == (1, 0, 5)
    assert running.length is SHORT
    run.drain()
    counted = dict(zip(STATS, run.planner.stats(), strict=True))
    assert {c: (counted[f"{c}_waits"], counted[f"{c}_waiting"]) for c in LengthClass} == {
        SHORT: (5, 0), STANDARD: (1, 0), MEDIUM: (0, 0), LONG: (0, 0), GIANT: (0, 0),
    }  # fmt: skip


def test_a_re_cut_decides_who_is_alike_from_the_next_step_on():
    run = a_run_with_a_place()
    run.batch(1000, 5)
    run.step()
    wide = {"paths__hot_below": 100, "prefill__concurrent": 2, "memory__reserve_high_priority": 0.0}
    run.engine.set_rules(rules(**wide, paths__realtime_reserve=0, clusters__standard_to=1200))
    assert who_joins(run, 1100, 900) == [1100]


# What is said of now.


def test_what_is_not_of_now_never_falls():
    rng = random.Random(8)
    run = a_run(batch__active=4, paths__hot_below=1000, blocks=2000)
    before = dict.fromkeys(STATS, 0.0)
    for _ in range(80):
        (run.batch if rng.random() < 0.5 else run.realtime)(rng.choice((100, 600, 5000)), rng.randrange(1, 30))
        if rng.random() < 0.2 and run.planner.running:
            run.engine.remove(rng.choice(list(run.planner.running)))
        run.step(3)
        counted = dict(zip(STATS, run.planner.stats(), strict=True))
        assert [name for name in STATS if name not in NOW and counted[name] < before[name]] == []
        before = counted
    assert before["busy_ms"] == pytest.approx(run.now)


def test_who_runs_and_waits_is_said_by_workload_and_what_is_stored_by_tokens():
    run = a_run(batch__active=2, paths__realtime_reserve=0, paths__hot_below=1000, preemption__mode="none")
    run.realtime(100, 50)
    run.batch(2000, 50)
    run.drain_until(lambda: len(run.planner.running) == 2)
    for prompt in (50, 60):
        run.realtime(prompt, 5)
    for prompt in (70, 3000, 4000):
        run.batch(prompt, 5)
    said = dict(zip(STATS, run.planner.stats(), strict=True))
    names = ("realtime_running", "batch_running", "realtime_waiting", "batch_waiting", "cold_waiting")
    assert [said[name] for name in names] == [1, 1, 2, 3, 2]
    assert said["stored_tokens"] == sum(s.computed for s in run.engine.running) > 0
    assert said["longest_prefill"] == 2000
    run.drain()
    said = dict(zip(STATS, run.planner.stats(), strict=True))
    assert [said[name] for name in (*names, "stored_tokens", "longest_prefill")] == [0] * 7
