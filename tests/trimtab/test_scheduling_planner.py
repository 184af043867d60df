"""The state from step to step: what is counted agrees with what ran, whoever comes and goes, and however the engine overlaps its steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trimtab.scheduling_builders import BATCH, REALTIME, Knowing, a_run, an_item, rules
from trimtab.engine import Costs
from trimtab.kv_shape import KvShape
from trimtab.scheduling import Memory, Planner, Shape

MEMORY = Memory(1000, 1000, KvShape.of(16))


def always(item):
    return True


def a_planner(*items, learns=False, **fields):
    planner = Planner(rules(**fields), None if learns else Knowing(Costs(0.0, 0.0)))
    for item in items:
        planner.add(item)
    return planner


def carry_out(planner, ran, now=0.0, memory=MEMORY):
    """A step that gives each its tokens, as an engine that follows the plan."""
    plan = planner.plan(now, memory, always)
    reached = {i: planner.find(i).computed + n for i, n in ran.items()}
    return planner.began(plan, now, ran, sum(ran.values()), lambda item: reached[item.request_id])


def test_the_life_of_a_request():
    planner = a_planner(an_item("a", prompt=100))
    assert (len(planner.waiting), planner.queued_prefill_tokens) == (1, 100)
    carry_out(planner, {"a": 60})
    item = planner.find("a")
    assert (list(planner.prefilling), planner.queued_prefill_tokens, planner.computed(item)) == (["a"], 40, 60)
    carry_out(planner, {"a": 40})
    assert (list(planner.protected_decodes), planner.queued_prefill_tokens, planner.computed(item)) == (["a"], 0, 100)
    carry_out(planner, {"a": 1})
    assert (planner.computed(item), planner.kv_tokens, planner.express_running) == (101, 101, 1)
    assert planner.remove("a") is item
    assert (planner.find("a"), planner.running, planner.kv_tokens, planner.express_running) == (None, {}, 0, 0)
    assert planner.remove("a") is None


def test_a_hit_in_the_prefix_cache_is_computed_though_it_never_ran():
    planner = a_planner(an_item("a", prompt=100))
    plan = planner.plan(0.0, MEMORY, always)
    shape = planner.began(plan, 0.0, {"a": 20}, 20, lambda _: 84)
    assert planner.queued_prefill_tokens == 16
    assert (shape.prefill_tokens, shape.prefill_context) == (20, 20 * (64 + 10))


def test_a_plan_changes_nothing_until_it_is_carried_out():
    run = a_run(
        prefill__itl_budget_ms=16, prefill__max_step_ms=16, prefill__max_suspend_ms=0, memory__reserve_high_priority=0.0
    )  # fmt: skip
    for n in range(10):
        run.batch(10 + n, 1000)
    run.step(60)
    run.realtime(10, 100)
    run.step()
    planner, memory = run.planner, run.engine._memory()
    before = (list(planner.rest_decodes), planner.counters.forced, planner.counters.held_decodes, planner.rest_ran_ms)
    first = planner.plan(run.now, memory, always)
    second = planner.plan(run.now, memory, always)
    assert first.held and first.forced
    assert (first.held, first.allowance) == (second.held, second.allowance)
    assert before == (
        list(planner.rest_decodes), planner.counters.forced, planner.counters.held_decodes, planner.rest_ran_ms,
    )  # fmt: skip


def test_decodes_that_found_no_token_are_where_they_were():
    """An engine in its own order gives all of a step to a prompt that runs before a decode."""
    planner = a_planner(an_item("a", prompt=10), an_item("b", prompt=10), scheduler__mode="fcfs")
    carry_out(planner, {"a": 10, "b": 10})
    shape = carry_out(planner, {"a": 1})
    assert (shape.decodes, shape.kv_tokens) == (1, 10)
    assert planner.computed(planner.find("a")) == 11
    assert planner.computed(planner.find("b")) == 10
    assert planner.kv_tokens == 21


def a_full_house():
    """Eight unprotected decodes, of which a few sit each step out for the sake of two protected ones."""
    items = [*(an_item(f"r{n}", REALTIME, 10) for n in range(2)), *(an_item(f"b{n}", BATCH, 10 + n) for n in range(8))]
    planner = Planner(rules(prefill__itl_budget_ms=0), Knowing(Costs(10.0, 1000.0)))
    for item in items:
        planner.add(item)
    carry_out(planner, {item.request_id: item.goal for item in items})
    planner.ended(1.0)
    planner.set_rules(rules(prefill__itl_budget_ms=16, prefill__max_suspend_ms=60_000))
    assert len(planner.plan(0.0, MEMORY, always).held) == 4
    return planner


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9), max_size=2), st.booleans()),
        min_size=1, max_size=6,
    )
)  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_whatever_the_engine_makes_of_a_plan_it_is_counted_as_it_was(steps):
    """vLLM may preempt by itself, and leave out whom it finds no block for."""
    planner = a_full_house()
    for left_out, preempted, as_planned in steps:
        plan = planner.plan(0.0, MEMORY, always)
        decodes = [planner.find(i) for i in (*planner.protected_decodes, *planner.rest_decodes)]
        for n in [] if as_planned else preempted:
            if n < len(decodes) and decodes[n].request_id in planner.running:
                planner.preempted(decodes[n].request_id, goal=30)
        there = [i for i in decodes if i.request_id in planner.running]
        before = {i.request_id: (planner.computed(i), planner.executed_ms(i)) for i in there}
        turns = [list(planner.protected_decodes), list(planner.rest_decodes)]
        out = plan.held if as_planned else {i.request_id for n, i in enumerate(there) if n in left_out}
        ran = {i.request_id: 1 for i in there if i.request_id not in out}
        held = planner.counters.held_decodes
        shape = planner.began(plan, 0.0, ran, len(ran), lambda item: item.goal)
        if not ran:
            assert {i.request_id: (planner.computed(i), planner.executed_ms(i)) for i in there} == before
            continue
        planner.ended(10.0)
        assert planner.counters.held_decodes - held == sum(i in planner.running for i in plan.held)
        assert (shape.decodes, shape.kv_tokens) == (len(ran), sum(before[i][0] for i in ran))
        for item in there:
            took = 10.0 if item.request_id in ran else 0.0
            had, executed = before[item.request_id]
            assert planner.computed(item) == had + (item.request_id in ran)
            assert planner.executed_ms(item) == executed + took
        if plan.held:
            assert [list(planner.protected_decodes), list(planner.rest_decodes)] == [
                [i for i in line if i not in ran] + [i for i in line if i in ran] for line in turns
            ]
        assert planner.kv_tokens == sum(planner.computed(i) for i in there)


def test_a_step_without_a_token_moves_nobody():
    planner = a_planner(an_item("a", prompt=10))
    carry_out(planner, {"a": 10})
    carry_out(planner, {})
    assert planner.computed(planner.find("a")) == 10


def test_only_what_is_ready_is_planned():
    planner = a_planner(an_item("a"), an_item("b", BATCH))
    plan = planner.plan(0.0, MEMORY, lambda item: item.request_id == "b")
    assert [i.request_id for i in plan.admit] == ["b"]


def test_an_engine_that_admits_fewer_than_planned_leaves_the_others_waiting():
    planner = a_planner(an_item("a"), an_item("b", arrival=1.0))
    carry_out(planner, {"a": 50})
    assert (list(planner.running), len(planner.waiting)) == (["a"], 1)


# Preemption.


def test_who_is_preempted_has_everything_to_compute_anew_and_stays_out_of_the_next_step():
    planner = a_planner(an_item("a", BATCH, 100))
    carry_out(planner, {"a": 100})
    carry_out(planner, {"a": 1})
    planner.preempted("a", goal=102)
    item = planner.find("a")
    assert (item.left, item.fresh, planner.queued_prefill_tokens, planner.kv_tokens) == (102, True, 102, 0)
    assert not planner.plan(0.0, MEMORY, always).admit
    carry_out(planner, {})
    carry_out(planner, {"a": 60})
    assert (planner.counters.recomputed_tokens, item.fresh) == (60, True)
    carry_out(planner, {"a": 42})
    # 101 of the 102 had been computed before.
    assert (planner.counters.recomputed_tokens, item.fresh) == (101, False)
    assert planner.computed(item) == 102


def test_what_was_computed_for_an_aborted_request_is_counted_once():
    planner = a_planner(an_item("a", BATCH, 100), an_item("never", BATCH, 100, arrival=1.0))
    carry_out(planner, {"a": 100})
    carry_out(planner, {"a": 1})
    planner.preempted("a", goal=102)
    carry_out(planner, {})
    carry_out(planner, {"a": 10})
    planner.aborted("a")
    planner.aborted("a")
    planner.aborted("never")
    assert planner.counters.aborted_tokens == 101
    assert planner.queued_prefill_tokens == 0


def test_one_that_is_aborted_right_after_its_preemption_is_gone():
    planner = a_planner(an_item("a", BATCH, 100))
    carry_out(planner, {"a": 50})
    planner.preempted("a", goal=100)
    planner.aborted("a")
    assert (planner.barred, len(planner.waiting), planner.queued_prefill_tokens) == (set(), 0, 0)


# Time.


def test_overlapping_steps_end_in_their_order():
    planner = a_planner(an_item("a", prompt=300), learns=True)
    carry_out(planner, {"a": 100})
    carry_out(planner, {"a": 100})
    planner.ended(70.0)
    assert (planner.busy_ms, planner.model.seen, planner.model.largest_tokens) == (70.0, 1, 100)
    planner.ended(30.0)
    assert (planner.busy_ms, planner.model.seen) == (100.0, 2)
    assert planner.executed_ms(planner.find("a")) == 100.0


def test_a_request_that_waits_in_prefill_executes_nothing_meanwhile():
    planner = a_planner(an_item("a", BATCH, 300), an_item("b", BATCH, 300, arrival=1.0))
    carry_out(planner, {"a": 100, "b": 100})
    planner.ended(10.0)
    carry_out(planner, {"a": 100})
    planner.ended(25.0)
    assert planner.executed_ms(planner.find("a")) == 35.0
    assert planner.executed_ms(planner.find("b")) == 10.0


def test_the_model_learns_from_steps_what_they_held():
    costs = Costs(12.0, 300.0, 40.0)
    run = a_run(costs=costs, learns=True)
    for n in range(60):
        run.batch(500 + 37 * n % 900, 30)
        run.realtime(40 + n, 30)
        run.step(4)
    probe = Shape(decodes=10, kv_tokens=5000)
    probe.add_prefill(150, 300)
    assert run.planner.model.error_ms < 0.5
    assert run.planner.model.predict(probe) == pytest.approx(costs.of(probe), rel=0.05)


# What it counts.


def test_waits_are_counted_at_the_first_step_alone():
    planner = a_planner(an_item("a", BATCH, 100, arrival=50.0))
    carry_out(planner, {"a": 60}, now=80.0)
    planner.preempted("a", goal=100)
    carry_out(planner, {}, now=100.0)
    carry_out(planner, {"a": 60}, now=500.0)
    waits = planner.counters.waits[BATCH]
    assert (waits.count, waits.sum_ms, waits.max_ms) == (1, 30.0, 30.0)
    assert planner.counters.waits[REALTIME].count == 0


def test_the_widest_overtaking_of_a_batch_request_is_remembered():
    planner = a_planner(an_item("b", BATCH, 100, arrival=0.0), an_item("r", REALTIME, 100, arrival=700.0))
    carry_out(planner, {"r": 100}, now=700.0)
    assert planner.counters.max_overtake_ms == 700.0


# Steering.


def test_a_delta_moves_one_request_and_only_where_it_is():
    items = [an_item(str(n), BATCH, arrival=float(n)) for n in range(3)]
    planner = a_planner(*items)
    items[2].delta = 2
    planner.waiting_changed([items[2]])
    assert [i.request_id for i in planner.waiting] == ["2", "0", "1"]


def test_new_rules_leave_the_turns_of_decodes_as_they_are():
    run = a_run(prefill__itl_budget_ms=16, prefill__max_suspend_ms=60_000, memory__reserve_high_priority=0.0)
    for _ in range(10):
        run.batch(10, 1000)
    run.step(30)
    run.realtime(10, 100)
    run.step(2)
    turns = list(run.planner.rest_decodes)
    assert turns != sorted(turns)
    run.engine.set_rules(run.engine.rules)
    assert list(run.planner.rest_decodes) == turns


def test_new_rules_move_decodes_between_the_protected_and_the_rest():
    planner = a_planner(an_item("short", BATCH, 50), an_item("long", REALTIME, 500, arrival=1.0))
    carry_out(planner, {"short": 50, "long": 500})
    assert (list(planner.rest_decodes), list(planner.protected_decodes)) == (["short"], ["long"])
    planner.set_rules(rules(paths__protect="length", paths__hot_below=100))
    assert (list(planner.rest_decodes), list(planner.protected_decodes)) == (["long"], ["short"])
    assert (planner.express_running, planner.kv_tokens) == (1, 550)
