"""The engine as a value: who runs, what comes out, what it costs, and that blocks and requests balance."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trimtab.scheduling_builders import FORGETTING, a_run, rules
from trimtab.engine import Costs, EngineValue
from trimtab.messages import Load, Workload
from trimtab.scheduling import Shape

BARE = {"prefill__itl_budget_ms": 0, "paths__realtime_reserve": 0, "memory__reserve_high_priority": 0.0}
"""Nothing but slots and tokens bounds a step."""


def a_bare_run(**fields):
    return a_run(costs=Costs(10.0, 20.0), **{**BARE, **fields})


def emitted(run):
    return [e.request_id for _, result in run.steps for e in result.emissions]


def test_with_one_place_requests_run_one_after_the_other():
    run = a_bare_run(batch__active=1)
    run.realtime(4, 3)
    run.realtime(4, 3)
    run.drain()
    assert emitted(run) == ["r0"] * 3 + ["r1"] * 3


def test_with_two_places_they_run_together():
    run = a_bare_run(batch__active=2)
    run.realtime(4, 3)
    run.realtime(4, 3)
    run.drain()
    assert emitted(run) == ["r0", "r1"] * 3


def test_realtime_is_admitted_before_batch_that_came_first():
    run = a_bare_run(batch__active=1)
    run.batch(4)
    run.realtime(4, arrival=1.0)
    run.drain()
    assert emitted(run) == ["r1", "b0"]


def test_a_long_prompt_is_prefilled_in_chunks_of_the_step():
    run = a_bare_run(prefill__step_tokens=32)
    run.realtime(100)
    run.drain()
    assert run.tokens_of("r0") == [32, 32, 32, 4]


def test_a_request_comes_out_token_by_token_and_the_last_says_so():
    run = a_bare_run()
    run.realtime(4, 3)
    run.drain()
    assert [(e.index, e.last) for _, result in run.steps for e in result.emissions] == [
        (0, False), (1, False), (2, True),
    ]  # fmt: skip


def test_a_step_costs_its_constant_its_tokens_and_the_context_that_they_read():
    run = a_bare_run()
    run.realtime(50, 2)
    assert run.step().cost_ms == 11.0
    assert run.step().cost_ms == 10.02
    # 100 prompt tokens after 300 read 35 thousand, three decodes 9.
    shape = Shape(decodes=3, kv_tokens=9000)
    shape.add_prefill(100, 300)
    assert Costs(10.0, 20.0, 500.0).of(shape) == pytest.approx(10.0 + 0.02 * 103 + 0.5 * 44)


def test_an_idle_engine_takes_an_empty_step():
    run = a_bare_run()
    result = run.step()
    assert (result.tokens, result.emissions, result.ran) == (0, (), {})
    assert not run.engine.busy


def test_what_started_is_named_again_when_it_resumes():
    run = a_bare_run(batch__active=1, preemption__guaranteed_time_slice_ms=0)
    run.batch(20, 10)
    run.step(3)
    run.realtime(4, 2)
    run.drain()
    assert [n for n, (_, r) in enumerate(run.steps) if "b0" in r.started] == [0, 5]
    assert [n for n, (_, r) in enumerate(run.steps) if "b0" in r.preempted] == [3]


def test_load_tells_what_runs_what_waits_and_what_is_free():
    run = a_bare_run(batch__active=1, prefill__step_tokens=32)
    run.realtime(100)
    run.realtime(50)
    run.step()
    assert run.engine.load() == Load(1, 1, 118, 9998, 10_000)


def test_a_request_can_be_removed_wherever_it_is_and_only_once():
    run = a_bare_run(batch__active=1)
    run.realtime(20, 10)
    run.realtime(20, 10)
    run.step()
    for request_id in ("r0", "r1"):
        assert run.engine.remove(request_id)
        assert not run.engine.remove(request_id)
    assert not run.engine.busy
    assert run.engine.load() == Load(0, 0, 0, 10_000, 10_000)


def test_new_rules_hold_from_the_next_step_on():
    run = a_bare_run()
    run.realtime(100, 2)
    run.engine.set_rules(rules(**BARE, prefill__step_tokens=32))
    assert run.step().tokens == 32


# Memory.


def test_a_decode_that_finds_no_block_makes_the_other_wait_and_both_end():
    run = a_run(costs=Costs(10.0, 20.0), blocks=6, **BARE)
    run.batch(30, 40)
    run.batch(30, 40)
    run.drain()
    assert run.counters.memory_preemptions >= 1
    assert run.engine.free_blocks == 6
    assert sorted(e.index for _, r in run.steps for e in r.emissions if e.request_id == "b0") == list(range(40))


def test_one_that_runs_alone_is_nobodys_victim():
    run = a_run(costs=Costs(10.0, 20.0), blocks=4, **BARE)
    run.batch(30, 34)
    run.drain()
    assert run.counters.memory_preemptions == 0


def test_in_vllms_own_order_nobody_goes_for_blocks_that_the_step_has_no_tokens_for():
    run = a_run(costs=Costs(10.0, 20.0), blocks=20, scheduler__mode="fcfs", prefill__step_tokens=32)
    run.batch(20, 30)
    run.step()
    run.batch(16 * 17, 1)
    run.step(3)
    assert len(run.engine.running) == 2
    assert run.counters.memory_preemptions == 0


jobs = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20), st.sampled_from(Workload)), min_size=1, max_size=20)
modes = st.sampled_from(["trimtab", "fcfs", "priority"])


@given(
    jobs,
    st.integers(1, 6),
    st.integers(1, 64),
    st.integers(0, 19),
    modes,
    st.integers(14, 40),
    st.sampled_from([None, FORGETTING]),
)
@settings(max_examples=60, deadline=None)
def test_every_request_leaves_once_whole_and_blocks_balance(jobs, active, step_tokens, drop, mode, blocks, kv):
    r = rules(batch__active=active, prefill__step_tokens=step_tokens, scheduler__mode=mode)
    blocks = blocks if kv is None else blocks + kv.most(14 * 16)
    engine = EngineValue(Costs(10.0, 20.0), block_size=16, total_blocks=blocks, rules=r, kv=kv)
    for i, (prompt, output, workload) in enumerate(jobs):
        engine.add(str(i), prompt, output, workload, float(i))
    engine.remove(str(drop))
    seen, now = {}, 0.0
    for _ in range(20_000):
        if not engine.busy:
            break
        result = engine.step(now)
        now += result.cost_ms
        assert 0 < result.tokens <= step_tokens
        assert len(engine.running) <= active
        assert 0 <= engine.free_blocks <= blocks
        for e in result.emissions:
            assert e.index == seen.get(e.request_id, 0)
            seen[e.request_id] = e.index + 1
    assert seen == {str(i): output for i, (_, output, _) in enumerate(jobs) if i != drop}
    assert engine.free_blocks == blocks
