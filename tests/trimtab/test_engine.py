"""The engine as a value: who runs, what comes out, and that blocks and requests balance."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.engine import Costs, EngineValue
from trimtab.messages import Workload
from trimtab.scheduling import StepCaps


def an_engine(blocks=1000):
    return EngineValue(Costs(10.0, 20.0), block_size=16, total_blocks=blocks)


def run(engine, caps, steps=10_000):
    order = []
    for n in range(steps):
        if not engine.busy:
            return order
        result = engine.step(caps)
        order += [(n, x.request_id, x.index, x.last) for x in result.emissions]
    raise AssertionError("the engine never became idle")


def test_with_one_place_requests_run_one_after_the_other():
    engine = an_engine()
    engine.add("a", 4, 3, Workload.REALTIME)
    engine.add("b", 4, 3, Workload.REALTIME)
    order = [r for _, r, _, _ in run(engine, StepCaps(active=1, step_tokens=100))]
    assert order == ["a"] * 3 + ["b"] * 3


def test_with_two_places_they_run_together():
    engine = an_engine()
    engine.add("a", 4, 3, Workload.REALTIME)
    engine.add("b", 4, 3, Workload.REALTIME)
    order = [r for _, r, _, _ in run(engine, StepCaps(active=2, step_tokens=100))]
    assert order == ["a", "b"] * 3


def test_realtime_is_admitted_before_batch_that_came_first():
    engine = an_engine()
    engine.add("batch", 4, 1, Workload.BATCH)
    engine.add("realtime", 4, 1, Workload.REALTIME)
    assert [r for _, r, _, _ in run(engine, StepCaps(1, 100))] == ["realtime", "batch"]


def test_a_long_prompt_is_prefilled_in_chunks_of_the_step_budget():
    engine = an_engine()
    engine.add("a", 100, 1, Workload.REALTIME)
    steps = [engine.step(StepCaps(8, 32)).tokens for _ in range(4)]
    assert steps == [32, 32, 32, 4]
    assert not engine.busy


def test_a_step_costs_its_constant_and_its_tokens():
    engine = an_engine()
    engine.add("a", 50, 2, Workload.REALTIME)
    assert engine.step(StepCaps(8, 100)).cost_ms == 11.0
    assert engine.step(StepCaps(8, 100)).cost_ms == 10.02


jobs = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20), st.sampled_from(Workload)), min_size=1, max_size=20)


@given(jobs, st.integers(1, 6), st.integers(8, 64), st.integers(0, 19))
@settings(max_examples=60, deadline=None)
def test_every_request_leaves_once_whole_and_blocks_balance(jobs, active, budget, drop):
    engine = an_engine(blocks=40)
    for i, (prompt, output, workload) in enumerate(jobs):
        engine.add(str(i), prompt, output, workload)
    engine.remove(str(drop))
    seen = {}
    steps = 0
    while engine.busy and steps < 50_000:
        steps += 1
        result = engine.step(StepCaps(active, max(budget, active)))
        assert len(engine.running) <= active
        assert result.tokens <= max(budget, active)
        assert engine.free_blocks >= 0
        for x in result.emissions:
            assert x.index == seen.get(x.request_id, 0)
            seen[x.request_id] = x.index + 1
    expected = {str(i): output for i, (_, output, _) in enumerate(jobs) if i != drop}
    assert seen == expected
    assert engine.free_blocks == 40
