"""One of our schedulers inside a loop like the engine's, over a model runner without a model, and everything that can be done to it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from services.bench.bare_scheduler import Size, hasher, internal, request, scheduler
from services.worker.engines.board import Board
from tests.vllm.fake_runner import Clock, Engine, Runner, Truth
from trimtab.messages import Workload
from trimtab.policy import Policy, flatten, with_fields
from trimtab.scheduling import STATS

BASE = {
    "batch.active": 6, "batch.hard_cap": 4, "paths.hot_below": 64, "prefill.step_tokens": 256, "prefill.itl_budget_ms": 0,
    "preemption.guaranteed_time_slice_ms": 0, "memory.reserve_high_priority": 0.0,
}  # fmt: skip
SWITCHES = (
    {},
    {"scheduler.mode": "fcfs"},
    {"scheduler.mode": "priority", "batch.active": 3},
    {"preemption.mode": "aggressive", "batch.active": 3, "paths.realtime_reserve": 0},
    {"preemption.mode": "none"},
    {"preemption.guaranteed_time_slice_ms": 50, "paths.protect": "length"},
    {"prefill.itl_budget_ms": 12, "prefill.max_suspend_ms": 200},
    {"prefill.itl_budget_ms": 8, "prefill.max_suspend_ms": 0, "batch.active": 8},
    {"prefill.step_tokens": 32, "prefill.concurrent": 4, "clusters.spread_limit": 1.0},
    {"prefill.step_tokens": 3, "prefill.max_suspend_ms": 50},
    {"serial.above": 200, "isolate.from_tokens": 400, "batch.hard_cap": 2},
    {"priority.max_overtake_ms": 50, "memory.pressure_threshold": 0.5, "memory.reserve_high_priority": 0.3},
)
"""What a run that switches goes through, on top of its own policy."""


@dataclass(frozen=True)
class Setting:
    policy: dict[str, Any] = field(default_factory=dict)
    asynchronous: bool = True
    second: bool = False
    """vLLM's second model runner."""
    blocks: int = 400
    specs: Callable[[], list[Any]] | None = None
    """The KV caches of its groups of layers in vLLM's words; the first keeps all tokens. By default there is that one, of 16 tokens a block."""
    prefix_caching: bool = True
    shared: float = 0.0
    """Of the prompts begin as others do."""
    aborts: float = 0.0
    """Chance of one at each moment where one can come."""
    switches: float = 0.0
    """Chance before each step of another policy."""
    steers: float = 0.0
    requests: int = 60
    seeds: int = 2
    shows: tuple[str, ...] = ()
    """Statistics that some of the runs must have raised, or they prove nothing."""


class Run:
    """One engine over `Setting`, and everything that is done to it; all chance comes from `seed`."""

    def __init__(self, setting: Setting, seed: int, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from services.worker.engines import vllm_scheduler

        self.setting, self.rng, self.clock, self.truth = setting, random.Random(seed), Clock(), Truth()
        monkeypatch.setattr(vllm_scheduler, "time", self.clock)
        size = Size(blocks=setting.blocks, prefix_caching=setting.prefix_caching, asynchronous=setting.asynchronous)
        specs = setting.specs() if setting.specs else []
        self.scheduler = scheduler(size, directory, specs=specs)
        # It needs a GPU to run, but none to be scheduled for.
        self.scheduler.use_v2_model_runner = setting.second
        self.board = Board(directory / "board")
        self.hasher = hasher(self.scheduler.hash_block_size) if setting.prefix_caching else None
        runner = Runner(
            self.truth,
            block_size=specs[0].block_size if specs else size.block_size,
            asynchronous=setting.asynchronous,
            second=setting.second,
        )
        self.engine = Engine(self.scheduler, runner, self.clock, cost_ticks)
        self.engine.before_update = self._maybe_abort
        self.wanted: dict[str, int] = {}
        self.aborted: set[str] = set()
        self.apply({})

    def apply(self, fields: dict[str, Any]) -> None:
        self.scheduler.trimtab_apply(flatten(with_fields(Policy(), {**BASE, **self.setting.policy, **fields})))

    def add(self, name: str, prompt: list[int], max_tokens: int, workload: Workload, **more: Any) -> None:
        self.truth.add(internal(name), prompt)
        self.wanted[name] = max_tokens
        self.scheduler.add_request(
            request(name, prompt, max_tokens, workload, self.clock.ms, block_hasher=self.hasher, **more)
        )

    def abort(self, *names: str) -> None:
        from vllm.v1.request import RequestStatus

        self.aborted.update(n for n in names if internal(n) in self.scheduler.requests)
        self.scheduler.finish_requests([internal(n) for n in names], RequestStatus.FINISHED_ABORTED)

    def storm(self) -> None:
        """All the setting's requests, to the end."""
        pending = self._arrivals()
        while pending or self.engine.busy:
            while pending and (pending[0][0] <= self.clock.ticks or not self.engine.busy):
                tick, *what = pending.pop(0)
                self.clock.ticks = max(self.clock.ticks, tick)
                self.add(*what)
            if self.rng.random() < self.setting.switches:
                self.apply(self.rng.choice(SWITCHES))
            if self.rng.random() < self.setting.steers:
                self._steer()
            self._maybe_abort()
            self.engine.step()
            agree(self.scheduler)
            assert self.clock.ms < 10_000_000, "it does not come to an end"

    def _arrivals(self) -> list[tuple[Any, ...]]:
        rng = self.rng
        prefixes = [[rng.randrange(5, 60_000) for _ in range(rng.randrange(20, 200))] for _ in range(3)]
        found = []
        for i in range(self.setting.requests):
            realtime = rng.random() < 0.4
            length, output = (
                (rng.randrange(5, 60), rng.randrange(2, 20))
                if realtime
                else (rng.randrange(30, 500), rng.randrange(10, 60))
            )
            prefix = rng.choice(prefixes) if rng.random() < self.setting.shared else []
            prompt = prefix + [rng.randrange(5, 60_000) for _ in range(length)]
            workload = Workload.REALTIME if realtime else Workload.BATCH
            found.append(
                (self.clock.ticks + rng.randrange(0, 20 * self.setting.requests), f"r{i}", prompt, output, workload)
            )
        return sorted(found)

    def _maybe_abort(self) -> None:
        here = list(self.scheduler.requests)
        if here and self.rng.random() < self.setting.aborts:
            names = [r.removesuffix("-x") for r in self.rng.sample(here, min(len(here), self.rng.choice((1, 1, 3))))]
            self.abort(*names)
            agree(self.scheduler)

    def _steer(self) -> None:
        here = [r.removesuffix("-x") for r in self.scheduler.requests]
        names = self.rng.sample(here, min(len(here), 3))
        command = {"request_ids": [*names, "nobody"], "delta": self.rng.randint(-2, 2)}
        if self.rng.random() < 0.3:
            command["isolated"] = self.rng.random() < 0.5
        assert self.scheduler.trimtab_steer(command) == len(names)

    def tokens(self, name: str) -> list[int]:
        return self.engine.tokens.get(internal(name), [])

    def check(self) -> None:
        """After the end: every stream is exact, and nothing is left behind."""
        s, planner = self.scheduler, self.scheduler._planner
        for name, count in self.wanted.items():
            got, expected = self.tokens(name), self.truth.output(internal(name), count)
            assert got == (expected[: len(got)] if name in self.aborted else expected), name
        assert not s.requests and not s.running and not len(s.waiting) and not s.deferred_waiting
        assert s.kv_cache_manager.block_pool.get_num_free_blocks() == self.setting.blocks - 1
        assert not s._internal_id and not s._in_flight
        assert not planner.running and not len(planner.waiting) and not planner._in_flight
        assert (planner.queued_prefill_tokens, planner.express_running, planner.kv_tokens) == (0, 0, 0)
        row = self.board.read()
        assert (row.running, row.waiting, row.queued_prefill_tokens, row.ended) == (0, 0, 0, 1)
        assert row.free_blocks == self.setting.blocks - 1
        assert row.output_tokens == sum(len(t) for t in self.engine.tokens.values())
        # Of two batches in flight the second begins when the first ends: no time is counted twice.
        assert planner.busy_ms == self.engine.busy_ticks * Clock.TICK_S * 1000.0
        stats = self.board.read_stats()
        assert row.computed_tokens == stats["computed_tokens"]
        assert row.preemptions == stats["preemptions"] + stats["memory_preemptions"]
        assert stats["realtime_waits"] + stats["batch_waits"] >= len(self.wanted) - len(self.aborted)

    def stats(self) -> dict[str, float]:
        return dict(zip(STATS, self.scheduler._planner.stats(), strict=True))


def cost_ticks(step: Any) -> int:
    """A decode is dear here, so that the governor has something to hold back."""
    decodes = sum(n == 1 for n in step.num_scheduled_tokens.values())
    return 2 + 2 * decodes + step.total_num_scheduled_tokens // 16


def agree(s: Any) -> None:
    """What the planner believes is what vLLM has."""
    p = s._planner
    assert set(p.running) == {r.request_id for r in s.running}
    assert {i.request_id for i in p.waiting} == {r.request_id for r in s.waiting}
    assert len(s.running) + len(s.waiting) == len(s.requests)
    decodes = {**p.rest_decodes, **p.protected_decodes}
    assert len(decodes) + len(p.prefilling) == len(p.running)
    assert p.express_running == sum(i.express for i in p.running.values())
    assert p.queued_prefill_tokens == sum(i.left for i in (*p.waiting, *p.prefilling.values()))
    for i in p.prefilling.values():
        assert i.computed == s.requests[i.request_id].num_computed_tokens
    for i in decodes.values():
        assert s.requests[i.request_id].num_computed_tokens == p.computed(i)


def prompt(length: int, seed: int = 1) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, 60_000) for _ in range(length)]


def rounds(r: Run, count: int) -> None:
    for _ in range(count):
        r.engine.step()
        agree(r.scheduler)


def finish(r: Run) -> None:
    while r.engine.busy:
        rounds(r, 1)
        assert r.clock.ms < 10_000_000, "it does not come to an end"
    r.check()
