"""The simulated engine makes of the same inputs the same events as the scheduler inside vLLM, step by step.

vLLM's side runs first, on a virtual clock, and is written down: what came in before each step, when the step began, how long it took, and
what happened in it. Then `EngineValue` is led through the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.vllm.scheduler_run import BASE, SWITCHES, Run, Setting, agree
from trimtab.engine import Costs, EngineValue
from trimtab.messages import Workload
from trimtab.policy import Policy, with_fields
from trimtab.scheduling import Rules
from trimtab.snapshot import Limits

LIMITS = Limits(8, 256)


@dataclass
class Step:
    """Ids are those outside of vLLM. `ran` is in order."""

    now_ms: float
    inputs: list[tuple[Any, ...]]
    ms: float = 0.0
    ran: list[tuple[str, int]] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)
    free_blocks: int = 0
    stats: tuple[float, ...] = ()
    """Of the planner, after the step; what it learned of step times is among them."""


def outside(request_id: str) -> str:
    return request_id.removesuffix("-x")


def inputs(setting: Setting, seed: int) -> Iterator[list[tuple[Any, ...]]]:
    """What comes in before each step; after 300 steps nothing more."""
    rng = random.Random(seed)
    here: list[str] = []
    for step in range(300):
        found: list[tuple[Any, ...]] = []
        for _ in range(rng.choice((0, 0, 0, 0, 1, 1, 3))):
            if len(here) == setting.requests:
                break
            name = f"r{len(here)}"
            realtime = rng.random() < 0.4
            length, output = (
                (rng.randrange(5, 60), rng.randrange(2, 30))
                if realtime
                else (rng.randrange(30, 500), rng.randrange(10, 60))
            )
            found.append(("add", name, length, output, Workload.REALTIME if realtime else Workload.BATCH))
            here.append(name)
        if here and rng.random() < setting.aborts:
            found.append(("abort", rng.choice(here)))
        if rng.random() < setting.switches or not step:
            found.append(("policy", {**BASE, **setting.policy, **(rng.choice(SWITCHES) if step else {})}))
        if here and rng.random() < setting.steers:
            found.append(("steer", rng.choice(here), rng.randint(-2, 2), rng.random() < 0.1))
        yield found
    while True:
        yield []


def record(r: Run, seed: int) -> list[Step]:
    """vLLM's side."""
    engine, steps, preempted = r.engine, [], []
    # A step of the value is one thing: what comes in while vLLM's model runs has no like there.
    engine.before_update = lambda: None
    original = r.scheduler._preempt_request

    def preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(outside(request.request_id))
        return original(request, *args, **kwargs)

    r.scheduler._preempt_request = preempt
    for found in inputs(r.setting, seed):
        for kind, name, *rest in found:
            if kind == "add":
                length, output, workload = rest
                r.add(name, [len(r.wanted)] * length, output, workload)
            elif kind == "abort":
                r.abort(name)
            elif kind == "policy":
                r.scheduler.trimtab_apply(name)
            else:
                delta, isolated = rest
                r.scheduler.trimtab_steer({"request_ids": [name], "delta": delta, "isolated": isolated})
        done, begun = len(engine.finished), r.clock.ticks
        steps.append(Step(r.clock.ms, found))
        scheduled = engine.step()
        agree(r.scheduler)
        if scheduled is None:
            # With nobody here vLLM takes no step, and time goes on all the same.
            r.clock.ticks += 1
            if len(steps) > 300:
                return steps
            continue
        step = steps[-1]
        step.ms = (r.clock.ticks - begun) * r.clock.TICK_S * 1000.0
        step.ran = [(outside(i), n) for i, n in scheduled.num_scheduled_tokens.items()]
        step.preempted = list(preempted)
        preempted.clear()
        step.finished = [outside(i) for i in list(engine.finished)[done:]]
        step.running = [outside(x.request_id) for x in r.scheduler.running]
        step.waiting = [outside(i.request_id) for i in r.scheduler._planner.waiting]
        step.free_blocks = r.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        step.stats = r.scheduler._planner.stats()
    raise AssertionError("unreachable")


class Recorded(Costs):
    """Steps last as long as they lasted there."""

    ms = 0.0

    def of(self, shape: Any) -> float:
        return Recorded.ms


def replay(setting: Setting, steps: list[Step]) -> Iterator[Step]:
    """The same inputs, and what the value makes of them."""
    rules = Rules.of(with_fields(Policy(), {**BASE, **setting.policy}), LIMITS)
    value = EngineValue(Recorded(), 16, setting.blocks, rules)
    # vLLM keeps one block for itself and counts it among all.
    value.free_blocks -= 1
    for there in steps:
        for kind, name, *rest in there.inputs:
            if kind == "add":
                length, output, workload = rest
                value.add(name, length, output, workload, there.now_ms)
            elif kind == "abort":
                value.remove(name)
            elif kind == "policy":
                value.set_rules(Rules.of(with_fields(Policy(), name), LIMITS))
            else:
                delta, isolated = rest
                value.planner.steer([name], delta=delta, isolated=isolated)
        here = Step(there.now_ms, there.inputs, there.ms)
        if there.stats:
            Recorded.ms = there.ms
            result = value.step(there.now_ms)
            here.ran = list(result.ran.items())
            here.preempted = list(result.preempted)
            here.finished = [e.request_id for e in result.emissions if e.last]
            here.running = [s.request_id for s in value.running]
            here.waiting = [i.request_id for i in value.planner.waiting]
            here.free_blocks = value.free_blocks
            here.stats = value.planner.stats()
        yield here


SETTINGS = {
    "trimtab": Setting(),
    "slice": Setting({"preemption.guaranteed_time_slice_ms": 50}),
    "aggressive": Setting({"preemption.mode": "aggressive", "batch.active": 3, "paths.realtime_reserve": 0}),
    "few blocks": Setting(blocks=48),
    "governor": Setting(
        {"prefill.itl_budget_ms": 12, "prefill.max_suspend_ms": 100, "batch.active": 8, "batch.hard_cap": 8}
    ),
    "fcfs": Setting({"scheduler.mode": "fcfs"}, blocks=48),
    "priority": Setting({"scheduler.mode": "priority"}, blocks=48),
    "everything": Setting(blocks=60, aborts=0.02, switches=0.03, steers=0.1),
}


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("name", SETTINGS)
def test_the_value_does_what_vllm_does(name: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = replace(SETTINGS[name], asynchronous=False, prefix_caching=False, requests=60)
    there = record(Run(setting, seed, tmp_path, monkeypatch), seed)
    assert sum(len(s.finished) for s in there) > 20
    for number, (a, b) in enumerate(zip(there, replay(setting, there), strict=True)):
        assert a == b, f"step {number}"
