"""What a step holds: the protected within their budget, the others beside them and never held back for ever."""

import pytest

from tests.trimtab.scheduling_builders import a_run, rules
from trimtab.engine import Costs
from trimtab.scheduling.step import MIN_CHUNK

OPEN = {"memory__reserve_high_priority": 0.0, "paths__realtime_reserve": 0}
"""Nothing is kept for the protected."""


def costs_of(run, start=0):
    return [result.cost_ms for _, result in run.steps[start:]]


# The budget. A step costs 10 ms and a millisecond a token.


def test_a_prompt_beside_a_protected_decode_gets_what_the_budget_leaves():
    run = a_run()
    run.realtime(10, 100)
    run.step()
    long = run.batch(1000)
    assert run.step().ran[long] == 100 - 10 - 1
    assert run.steps[-1][1].cost_ms == 100.0


def test_without_anybody_protected_a_step_may_last_twice_as_long():
    run = a_run()
    long = run.batch(1000)
    assert run.step().ran == {long: 190}


def test_the_longest_step_is_the_policys():
    run = a_run(prefill__max_step_ms=150)
    long = run.batch(1000)
    assert run.step().ran == {long: 140}


def test_an_express_prompt_that_nobody_protected_runs_beside_may_take_the_longest_step():
    run = a_run(prefill__max_step_ms=150)
    urgent = run.realtime(1000)
    assert run.step().ran == {urgent: 140}


def test_while_an_express_request_waits_steps_stay_short():
    run = a_run(paths__realtime_max_running=1)
    run.realtime(10, 50)
    run.step()
    run.realtime(10)
    run.batch(3000)
    run.step(20)
    assert max(costs_of(run)) <= 100.0


def test_unbounded_steps_take_all_their_tokens():
    run = a_run(prefill__itl_budget_ms=0, prefill__step_tokens=600)
    run.realtime(10, 100)
    run.step()
    long = run.batch(1000)
    assert run.step().ran[long] == 599


def test_a_learned_budget_holds_once_the_machine_is_known():
    run = a_run(costs=Costs(10.0, 500.0, 50.0), learns=True)
    for n in range(40):
        run.realtime(300 + n, 60)
        run.batch(2000, 20)
        run.step(12)
    late = costs_of(run, 100)
    assert sum(ms > 103.0 for ms in late) <= len(late) // 50
    assert max(late) < 130.0


def test_decodes_of_others_that_do_not_fit_sit_out_in_turns():
    run = a_run(prefill__itl_budget_ms=16, prefill__max_step_ms=200, prefill__max_suspend_ms=60_000, **OPEN)
    others = [run.batch(10, 1000) for _ in range(10)]
    run.step(30)
    run.realtime(5, 1000)
    run.step()
    before = len(run.steps)
    run.step(40)
    turns = [sum(map(bool, run.tokens_of(b)[before:])) for b in others]
    # Five of ten fit beside the protected one.
    assert set(turns) == {20}
    assert max(costs_of(run, before)) == 16.0
    assert run.counters.held_decodes >= 200


def test_protected_decodes_beyond_the_tokens_of_a_step_take_turns():
    run = a_run(**OPEN)
    urgent = [run.realtime(10, 1000) for _ in range(6)]
    other = run.batch(10, 1000)
    run.step(8)
    run.engine.set_rules(rules(prefill__step_tokens=4, prefill__max_suspend_ms=60_000, **OPEN))
    before = len(run.steps)
    run.step(30)
    assert [sum(run.tokens_of(r)[before:]) for r in urgent] == [20] * 6
    assert sum(run.tokens_of(other)[before:]) == 0


# Suspension.


def flood(run, *, output, rounds, suspended):
    """Express requests keep coming so that some always wait; the longest time in which none of the suspended got a token."""
    last, longest = run.now, 0.0
    for _ in range(rounds):
        while sum(i.express for i in run.planner.waiting) < 4:
            run.realtime(400, output)
        result = run.step()
        if set(result.ran) & set(suspended):
            longest, last = max(longest, run.now - last), run.now
    return max(longest, run.now - last)


@pytest.mark.parametrize("output", [1, 40], ids=["prompts only", "decodes too"])
@pytest.mark.parametrize("step_tokens", [2048, 64])
def test_decodes_and_prompts_of_others_are_held_back_only_so_long(output, step_tokens):
    fields = {"prefill__step_tokens": step_tokens, "prefill__max_suspend_ms": 1000, "preemption__mode": "none", **OPEN}
    for kind in ("decode", "prompt"):
        run = a_run(**fields)
        decode = run.batch(20, 100_000)
        run.step(3)
        hot, cold = run.batch(2000, 10), run.batch(5000, 10)
        run.step(1)
        longest = flood(run, output=output, rounds=300, suspended=[decode] if kind == "decode" else [hot, cold])
        assert longest <= 1000.0 + 2 * 210.0


def test_the_end_of_a_suspension_gives_a_prompt_its_least_chunk():
    run = a_run(prefill__max_suspend_ms=1000, preemption__mode="none", **OPEN)
    cold = run.batch(5000, 10)
    run.step()
    flood(run, output=1, rounds=100, suspended=[cold])
    chunks = [n for n in run.tokens_of(cold)[2:] if n]
    assert min(chunks) >= MIN_CHUNK
    assert run.counters.forced >= 5


def test_a_suspension_is_counted_from_when_there_was_something_to_suspend():
    run = a_run(prefill__max_suspend_ms=1000)
    run.now = 1e6
    run.realtime(10, 100)
    run.step()
    long = run.batch(1000)
    # The budget, and not the longest step.
    assert run.step().ran[long] == 89


def test_however_small_the_steps_what_ends_suspensions_leaves_tokens_to_the_protected():
    run = a_run(prefill__step_tokens=5, prefill__max_suspend_ms=0, **OPEN)
    urgent = run.realtime(10, 50)
    run.drain_until(lambda: run.planner.protected_decodes)
    run.batch(10, 100)
    run.drain_until(lambda: run.planner.rest_decodes)
    run.batch(500)
    before = len(run.steps)
    run.step(20)
    assert run.tokens_of(urgent)[before:] == [1] * 20


# Express first.


def test_every_waiting_express_request_joins_at_once_where_the_budget_allows_it():
    run = a_run()
    urgent = [run.realtime(20) for _ in range(5)]
    assert run.step().ran == dict.fromkeys(urgent, 20)


def test_express_prompts_come_one_after_another_where_the_budget_is_short():
    run = a_run()
    run.realtime(10, 100)
    run.step()
    first, second, third = (run.realtime(60, arrival=float(n)) for n in range(3))
    assert run.step().ran == {"r0": 1, first: 60, second: 29}
    assert run.step().ran == {"r0": 1, second: 31, third: 58}


def test_an_express_prompt_makes_progress_past_the_budget_but_only_one():
    run = a_run(prefill__itl_budget_ms=12)
    run.realtime(5, 100)
    run.step()
    first, second = run.realtime(100, arrival=0.0), run.realtime(100, arrival=1.0)
    assert run.step().ran == {"r0": 1, first: MIN_CHUNK}
    run.step(6)
    assert run.began(second) == run.ended(first) - run.steps[-1][1].cost_ms or run.tokens_of(second)[-1]
    assert max(costs_of(run)) <= 10 + 1 + 1 + MIN_CHUNK


def test_prompts_of_express_requests_do_not_wait_for_decodes_of_others():
    run = a_run(prefill__max_step_ms=100, batch__hard_cap=60, batch__active=70, **OPEN)
    for _ in range(50):
        run.batch(5, 1000)
    run.step(60)
    assert len(run.planner.rest_decodes) == 50
    urgent = run.realtime(80)
    assert run.step().ran[urgent] == 80
    assert run.steps[-1][1].cost_ms <= 100.0


def test_what_the_decodes_of_others_read_is_no_part_of_the_protecteds_budget():
    run = a_run(costs=Costs(10.0, 100.0, 20_000.0), prefill__max_step_ms=10_000, **OPEN)
    long = run.batch(3000, 1000)
    run.drain_until(lambda: run.planner.rest_decodes)
    run.realtime(10, 100)
    run.step()
    urgent = run.realtime(50)
    ran = run.step().ran
    # To read 3000 tokens takes 60 ms, a prompt of 50 takes 30.
    assert ran[urgent] == 50
    assert long not in ran


# No step is empty while somebody could run, and steps are what they were predicted to be.


def test_a_budget_that_nothing_fits_into_still_lets_everybody_through():
    run = a_run(prefill__itl_budget_ms=1, prefill__max_step_ms=1, prefill__max_suspend_ms=100)
    for n in range(4):
        run.batch(50 * (n + 1), 5)
        run.realtime(50, 5)
    while run.engine.busy:
        assert run.step().tokens > 0


@pytest.mark.parametrize(("prompt", "output"), [(159, 2), (160, 1), (50, 111)])
def test_a_request_as_large_as_the_memory_runs_when_it_is_alone(prompt, output):
    run = a_run(blocks=10)
    run.realtime(50, 40)
    large = run.batch(prompt, output)
    run.drain(400)
    assert run.ended(large)


def test_the_prediction_is_what_the_step_then_costs():
    run = a_run(costs=Costs(10.0, 100.0, 20.0), **OPEN)
    planner, predicted = run.planner, []
    plan = planner.plan
    planner.plan = lambda *args: predicted.append(plan(*args)) or predicted[-1]
    for n in range(60):
        if n % 5 == 0:
            run.batch(700 + n, 20)
            run.realtime(50 + n, 20)
        result = run.step()
        assert not predicted[-1].held
        assert planner.model.predict(predicted[-1].shape) == pytest.approx(result.cost_ms)


# Rules change while it runs.


def test_a_lowered_cap_evicts_nobody():
    run = a_run(prefill__concurrent=9, **OPEN)
    for _ in range(6):
        run.batch(10, 100)
    run.step(4)
    run.engine.set_rules(rules(batch__active=2, batch__hard_cap=2))
    run.realtime(10, 10)
    run.step(3)
    assert len(run.engine.running) == 6


def test_who_becomes_protected_while_he_decodes_is_treated_so_from_the_next_step_on():
    run = a_run(paths__protect="length", paths__hot_below=50, **OPEN)
    run.batch(60, 100)
    run.step(3)
    long = run.batch(4000)
    assert run.step().ran[long] == 189
    run.engine.set_rules(rules(paths__protect="length", paths__hot_below=100, **OPEN))
    assert run.planner.express_running == 1
    assert run.step().ran[long] == 89


def test_a_new_order_holds_for_those_who_wait():
    run = a_run(batch__active=1, preemption__mode="none")
    run.batch(10, 20)
    run.step()
    run.batch(10, arrival=1.0)
    run.realtime(10, arrival=2.0)
    run.engine.set_rules(rules(batch__active=1, scheduler__mode="fcfs"))
    run.drain()
    assert run.ended("b1") < run.ended("r2")


# vLLM's own ways.


@pytest.mark.parametrize(
    ("mode", "expected"), [("fcfs", ["b0", "r1", "b2", "r3"]), ("priority", ["r1", "r3", "b0", "b2"])]
)
def test_the_baselines_go_by_arrival_or_by_fixed_priority(mode, expected):
    run = a_run(scheduler__mode=mode, batch__active=1)
    for n in range(4):
        (run.realtime if n % 2 else run.batch)(10, 5, arrival=float(n))
    run.drain()
    assert sorted(expected, key=run.ended) == expected


def test_the_baselines_bound_steps_by_tokens_alone_and_preempt_nobody():
    run = a_run(scheduler__mode="fcfs", prefill__step_tokens=500, batch__active=2)
    run.realtime(10, 50)
    run.step()
    run.batch(5000, 1)
    assert run.step().tokens == 500
    run.realtime(10)
    run.step(5)
    assert run.counters.preemptions == 0
