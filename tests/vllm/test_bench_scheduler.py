"""What the bench of the scheduler's own cost measures is the state that it names, in vLLM's class and in ours."""

from __future__ import annotations

import pytest

from services.bench.scheduler_cost import RUNNING, SCENARIOS, WAITING, Pair, virtual_time

NAMES = [s.name for s in SCENARIOS]


@pytest.mark.parametrize("name", NAMES)
def test_a_scenario_holds_its_state_in_both_classes(name: str) -> None:
    from services.worker.engines import vllm_scheduler

    scenario = next(s for s in SCENARIOS if s.name == name)
    with virtual_time() as clock:
        pair = Pair(scenario, clock, 1)
        found = pair.rounds(10)
        ours, stock = pair.tokens()
        planner = pair.ours.scheduler._planner
        pair.close()
    assert vllm_scheduler.time.__name__ == "time"
    assert len(found) == 10 and all(a > 0 and b > 0 for a, b in found)
    assert abs(ours - stock) <= 8
    assert (len(planner.running), len(planner.waiting), planner.counters.preemptions) == (RUNNING, WAITING, 0)
    match name:
        case "governor":
            assert 100 < ours < 160
        case "prefill":
            assert (ours, len(planner.prefilling)) == (320, 1)
        case "slices":
            assert planner.counters.slices_denied > 0
            assert ours == RUNNING
        case _:
            assert ours == RUNNING
