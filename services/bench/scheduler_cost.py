"""What our scheduler adds to vLLM's, step by step: the real classes, ours and the stock one, on the same state, over a runner without a model.

Steps take a time that is made up, so that the governor has something to hold back; what is measured is CPU time of this thread, which other
programs on the machine stretch least. Where ours leaves decodes out of a step, the stock class is made to leave out as many at no cost, so
that the difference is the deciding and not the smaller step.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.bench.bare_scheduler import Size, request, scheduler
from services.bench.processes import BenchError
from trimtab.kit.cli import ExitCode
from trimtab.messages import Workload
from trimtab.policy import Policy, Value, flatten, with_fields

RUNNING = 256
WAITING = 8
HOUR_MS = 3_600_000
PROMPT = 32
LONG_PROMPT = 200_000
BASE: dict[str, Value] = {
    "batch.active": RUNNING, "batch.hard_cap": RUNNING, "paths.realtime_max_running": RUNNING, "paths.realtime_reserve": 0,
    "memory.reserve_high_priority": 0.0, "prefill.itl_budget_ms": 0, "prefill.step_tokens": 8192,
    "priority.max_overtake_ms": HOUR_MS,
}  # fmt: skip
SIZE = Size(max_num_seqs=RUNNING, max_step_tokens=8192, blocks=40_000, max_model_len=1 << 20, prefix_caching=False)
SETTLE = 24
"""Steps before the first that counts: the step-time model knows its engine then."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`protected` of the running are REALTIME; the first of the others is a long prompt in prefill where `prefilling`."""

    name: str
    words: str
    policy: dict[str, Value] = field(default_factory=dict)
    protected: int = 0
    prefilling: bool = False
    waiting: Workload = Workload.BATCH


SCENARIOS = (
    Scenario("decode", "256 decode, 8 of the same kind wait"),
    Scenario(
        "slices",
        "8 protected wait, every slot is taken by batch requests whose time slice lasts",
        {"preemption.guaranteed_time_slice_ms": HOUR_MS},
        waiting=Workload.REALTIME,
    ),
    Scenario(
        "spent",
        "8 protected wait, nobody who runs may be preempted once more",
        {"preemption.max_preemptions": 0},
        waiting=Workload.REALTIME,
    ),
    Scenario(
        "governor",
        "8 protected decode, half of the other decodes sit each step out",
        {"prefill.itl_budget_ms": 27, "prefill.max_suspend_ms": HOUR_MS},
        protected=8,
    ),
    Scenario("prefill", "255 decode beside one long prompt", {"prefill.step_tokens": 320}, prefilling=True),
)


class Clock:
    """Stands for `time` in our scheduler."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@contextmanager
def virtual_time() -> Iterator[Clock]:
    """Our scheduler's steps last as long as the clock is moved."""
    from services.worker.engines import vllm_scheduler

    names = vars(vllm_scheduler)
    clock, real = Clock(), names["time"]
    names["time"] = clock
    try:
        yield clock
    finally:
        names["time"] = real


class Arm:
    """One scheduler, running."""

    def __init__(self, scenario: Scenario, clock: Clock, directory: Path, *, ours: bool) -> None:
        self.clock = clock
        self.scheduler = scheduler(SIZE, directory, ours=ours)
        self.ran: dict[str, int] = {}
        self._ours = ours
        self._apply({})
        for i in range(RUNNING - scenario.prefilling):
            self._add(f"r{i}", PROMPT, Workload.REALTIME if i < scenario.protected else Workload.BATCH)
        self.step()
        self._apply(scenario.policy)
        if scenario.prefilling:
            self._add("long", LONG_PROMPT, Workload.BATCH)
            self.step()
        for i in range(WAITING):
            self._add(f"w{i}", PROMPT, scenario.waiting)
        for _ in range(SETTLE):
            self.step()

    def step(self) -> float:
        """One step; the microseconds of CPU that its two calls took."""
        s = self.scheduler
        begun = time.thread_time_ns()
        step = s.schedule()
        scheduled = time.thread_time_ns() - begun
        self.ran = step.num_scheduled_tokens
        output = self._output()
        self.clock.now_s += (1.0 + 0.2 * step.total_num_scheduled_tokens) / 1000.0
        begun = time.thread_time_ns()
        s.update_from_output(step, output)
        return (scheduled + time.thread_time_ns() - begun) / 1000.0

    def check(self) -> None:
        """BenchError when the state is not the one that was to be measured."""
        found = len(self.scheduler.running), len(self.scheduler.waiting)
        if found != (RUNNING, WAITING):
            text = f"{found[0]} run and {found[1]} wait in the {'own' if self._ours else 'stock'} scheduler"
            raise BenchError(f"{text}, where {RUNNING} and {WAITING} were to be", ExitCode.USAGE)

    def _output(self) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(self.ran)
        tokens = [[] if request_id.startswith("long") else [7] for request_id in ids]
        return ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, tokens)

    def _apply(self, fields: dict[str, Value]) -> None:
        fields = {**BASE, **fields}
        if self._ours:
            self.scheduler.trimtab_apply(flatten(with_fields(Policy(), fields)))
        else:
            self.scheduler.max_num_scheduled_tokens = fields["prefill.step_tokens"]

    def _add(self, name: str, prompt_tokens: int, workload: Workload) -> None:
        # It never ends here, and the stock class admits in the same order.
        self.scheduler.add_request(request(name, [1] * prompt_tokens, 1 << 19, workload, self.clock.now_s * 1000.0))


class Pair:
    """Ours and the stock class in one scenario."""

    def __init__(self, scenario: Scenario, clock: Clock, seed: int) -> None:
        self.scenario = scenario
        self._rng = random.Random(f"{seed}/{scenario.name}")
        self._directories = [tempfile.TemporaryDirectory(prefix="trimtab-bench-") for _ in range(2)]
        paths = [Path(d.name) for d in self._directories]
        self.ours, self.stock = (
            Arm(scenario, clock, path, ours=ours) for path, ours in zip(paths, (True, False), strict=True)
        )
        self._held: set[str] = set()
        if len(self.ours.ran) < RUNNING:
            held = self._held
            self.stock.scheduler._reserve_prefill_lookahead = lambda r, _, tokens: 0 if r.request_id in held else tokens

    def rounds(self, steps: int) -> list[tuple[float, float]]:
        """Microseconds of ours and of the stock class, in turns; who goes first is left to chance."""
        found = []
        for _ in range(steps):
            self._held.clear()
            self._held.update({r.request_id for r in self.ours.scheduler.running} - self.ours.ran.keys())
            if self._rng.random() < 0.5:
                ours, stock = self.ours.step(), self.stock.step()
            else:
                stock, ours = self.stock.step(), self.ours.step()
            found.append((ours, stock))
        self.ours.check()
        self.stock.check()
        return found

    def tokens(self) -> tuple[int, int]:
        """Of the last step, here and there."""
        return sum(self.ours.ran.values()), sum(self.stock.ran.values())

    def close(self) -> None:
        for directory in self._directories:
            directory.cleanup()
