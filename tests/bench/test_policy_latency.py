"""The bench of a policy's latency: which call is late, what is counted of steps, and what is made of the figures."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.bench import policy_latency, policy_latency_calls
from services.bench import policy_latency_figures as figures
from services.bench.options import Options
from services.bench.policy_latency import FULL, QUICK, Parts, Plan
from services.bench.policy_latency_calls import (
    HIGHEST,
    LOWEST,
    STREAMS,
    WARM_UP_CALLS,
    Steps,
    busy,
    idle,
    measure,
    policies,
)
from services.bench.policy_latency_figures import Call
from services.bench.processes import BenchError
from services.bench.start import Shape
from services.bench.stats import bootstrap
from services.worker.engines import Applied, Job, Output
from services.worker.engines.board import Row
from trimtab.errors import PolicyRefused
from trimtab.kit.cli import ExitCode
from trimtab.policy import Policy
from trimtab.scheduling import Rules
from trimtab.snapshot import Limits


def a_call(ends: int = 1, *, ms: float = 30.0, at: int = 10, **fields: Any) -> Call:
    """Put while step `at` + 1 ran."""
    return Call(**{"ms": ms, "ended_at_put": at, "ended_at_ack": at + ends, "applied_before": at + ends + 1, **fields})


LATER_S = 1e9
"""No step of the fake ends just as a policy is put."""


class FakeEngine:
    """A board that stands at `row`, and policies that are in force after `ends` more steps. `applied` records them."""

    def __init__(self, ends: int = 0) -> None:
        self.now = Row(step_no=5, begun=LATER_S, ended=0 if ends else 1)
        self.ends = ends
        self.applied: list[Policy] = []
        self.asked: list[Job] = []
        self.open = 0

    def row(self) -> Row:
        return self.now

    def step(self) -> None:
        n = self.now.step_no + 1
        self.now = Row(step_no=n, begun=LATER_S + n, ended=0)

    async def apply(self, policy: Policy) -> Applied:
        await asyncio.sleep(0)
        self.applied.append(policy)
        for _ in range(self.ends):
            self.step()
        return Applied(self.now.step_no if self.ends else self.now.step_no + 1)

    async def generate(self, job: Job) -> AsyncGenerator[Output, None]:
        self.asked.append(job)
        self.open += 1
        try:
            for _ in range(job.max_tokens):
                await asyncio.sleep(0.0005)
                self.step()
                yield Output((1,))
        finally:
            self.open -= 1


# Which call is late.


@pytest.mark.parametrize(
    ("ends", "first_end_ms", "late"),
    [
        (0, None, False),
        (1, 30.0, False),
        (1, 0.1, False),
        (2, 30.0, True),
        (2, None, True),
        (2, 0.1, False),  # that step ended while the call was on its way, so it waited for the next one
        (3, 0.1, True),
    ],
)
def test_a_call_is_late_when_it_waits_longer_than_for_the_step_in_flight(
    ends: int, first_end_ms: float | None, late: bool
) -> None:
    call = a_call(ends, first_end_ms=first_end_ms)
    assert (call.ends, call.late) == (ends, late)


def test_the_engines_own_count_is_told_apart_from_the_boards() -> None:
    assert a_call(2, applied_before=12).ends_until_applied == 1
    assert a_call(1).ends_until_applied == 1


def test_steps_that_have_ended_are_counted_from_the_board() -> None:
    steps = Steps()
    assert steps.note(Row()) == 0
    assert steps.note(Row(step_no=7, begun=1.0, ended=0)) == 6
    assert steps.note(Row(step_no=7, begun=1.0, ended=1)) == 7
    steps.note(Row(step_no=8, begun=1.05, ended=0))
    steps.note(Row(step_no=10, begun=1.2, ended=0))
    assert (steps.end_of(7), steps.end_of(8), steps.end_of(9)) == (1.05, None, 1.2)
    assert steps.lengths_ms() == pytest.approx([50.0, 75.0]), "of those between which one was missed, their mean"


# The calls.


def test_each_policy_differs_from_the_one_before_and_fits_the_engine() -> None:
    found = list(itertools.islice(policies(), 60))
    actives = [p.batch.active for p in found]
    assert all(a != b for a, b in itertools.pairwise(actives))
    assert (min(actives), max(actives)) == (LOWEST, HIGHEST)
    assert min(actives) >= STREAMS, "no stream is held back"
    limits = Limits(max_num_seqs=Shape("m").max_num_seqs, max_step_tokens=Shape("m").max_step_tokens)
    for p in found:
        Rules.of(p, limits)
    with pytest.raises(PolicyRefused):
        Rules.of(Policy(), limits)


async def test_idle_calls_are_timed_one_by_one_after_some_that_do_not_count() -> None:
    engine = FakeEngine()
    async with aclosing(idle(engine, 30, random.Random(1), pause_s=0.0)) as times:
        found = [ms async for ms in times]
    assert len(found) == 30 and all(ms >= 0 for ms in found)
    assert len(engine.applied) == WARM_UP_CALLS + 30


@pytest.mark.parametrize(("ends", "late"), [(1, False), (2, True)])
async def test_a_busy_call_knows_the_steps_that_ended_meanwhile(
    ends: int, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_latency_calls, "IDLE_PAUSE_S", 0.0)
    monkeypatch.setattr(policy_latency_calls, "median", lambda lengths: 0.0)
    engine, steps = FakeEngine(ends), Steps()
    async with aclosing(busy(engine, steps, 3, random.Random(1))) as calls:
        found = [call async for call in calls]
    assert [(c.ended_at_put, c.ended_at_ack) for c in found] == [(4 + i * ends, 4 + (i + 1) * ends) for i in range(3)]
    assert [(c.ends_until_applied, c.late) for c in found] == [(ends, late)] * 3


async def test_a_measurement_tells_all_as_it_comes_and_leaves_no_request_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy_latency_calls, "REST_S", 0.0)
    monkeypatch.setattr(policy_latency_calls, "IDLE_PAUSE_S", 0.0)
    monkeypatch.setattr(policy_latency_calls, "WATCH_S", 0.001)
    monkeypatch.setattr(policy_latency_calls, "idle", partial(idle, pause_s=0.0))
    monkeypatch.setattr(policy_latency_calls, "median", lambda lengths: 0.0)
    engine, said = FakeEngine(), []
    await measure(engine, 50, 25, 1, 30_000, lambda m: said.append(json.loads(json.dumps(m))))
    assert (said[0], said[-1]) == ({"ready": True}, {"end": True})
    assert [len(m["idle_ms"]) for m in said if "idle_ms" in m] == [20, 20, 10]
    assert [len(m["calls"]) for m in said if "calls" in m] == [20, 5]
    assert all(Call(**c).ms >= 0 for m in said for c in m.get("calls", ()))
    assert said[-2]["steps_ms"]
    assert engine.open == 0
    assert {len(job.token_ids) for job in engine.asked} == {50}
    assert len({job.token_ids for job in engine.asked}) == len(engine.asked) >= STREAMS


# The figures.


def test_goals_ask_for_enough_calls_but_one_late_call_is_enough() -> None:
    good, calls = [1.0] * 400, [a_call() for _ in range(100)]
    assert [(g.name, g.goal, g.value, g.met) for g in figures.goals(good, calls, 1)] == [
        ("idle_p99_ms", 3.0, 1.0, True),
        ("busy_later_than_the_step_in_flight", 0, 0.0, True),
    ]
    assert [g.met for g in figures.goals(good[:100], calls[:40], 1)] == [None, None]
    assert [g.met for g in figures.goals([9.0] * 400, [a_call(2)], 1)] == [False, False]
    assert [(g.value, g.met) for g in figures.goals([], [], 1)] == [(None, None)] * 2


def test_the_rows_have_what_the_tables_show() -> None:
    calls = [a_call(), a_call(ms=50.0), a_call(2, first_end_ms=1.0), a_call(2)]
    idle_row, busy_row = figures.arms([1.0, 2.0, 3.0], calls, [40.0, 60.0], 1)
    assert (idle_row["calls"], idle_row["p50_ms"], idle_row["max_ms"]) == (3, 2.0, 3.0)
    assert (busy_row["calls"], busy_row["step_p50_ms"], busy_row["max_ms"]) == (4, 50.0, 50.0)
    assert busy_row["step_ends"] == {"1": 2, "2": 2}
    assert (busy_row["late"], busy_row["crossed"], busy_row["applied_after_more_than_one_end"]) == (1, 1, 2)
    text = "\n".join(t for _, t in figures.sections([idle_row, busy_row]))
    assert "steps of 50.0 ms (P50 of 2)" in text and "1 step: 2 calls; 2 steps: 2 calls" in text
    assert figures.sections([]) == []


# The course.


def fake(*answers: Mapping[str, Any], then: Any = None) -> tuple[Parts, list[Plan]]:
    """What the engine's process says; the plans that it was started with."""
    plans: list[Plan] = []

    async def answering(
        directory: Path, shape: Shape, plan: Plan, seed: int
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        plans.append(plan)
        for answer in answers:
            yield answer
        if then is not None:
            await then()

    return Parts(answering), plans


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(policy_latency, "model_path", lambda name: f"/models/{name}")
    monkeypatch.setattr(policy_latency, "new_directory", lambda name: tmp_path / name)
    monkeypatch.setattr(policy_latency, "_check_vllm", lambda: None)
    monkeypatch.setattr(figures, "bootstrap", partial(bootstrap, resamples=20))


CALLS = [figures.as_json(a_call()) for _ in range(50)]
IDLE = {"idle_ms": [1.0] * 200}
BUSY = {"calls": CALLS, "steps_ms": [50.0] * 9}


@pytest.mark.usefixtures("course")
async def test_a_run_collects_what_comes_and_judges_it() -> None:
    parts, plans = fake({"ready": True}, IDLE, IDLE, BUSY, BUSY, {"end": True}, {"foreign_cores": 0.3})
    report = await policy_latency.run(Options(), parts)
    assert plans == [FULL] == [Plan(400, 100)]
    assert {g.name: g.met for g in report.goals} == {"idle_p99_ms": True, "busy_later_than_the_step_in_flight": True}
    assert [(a["arm"], a["calls"]) for a in report.arms] == [("idle", 400), ("busy", 100)]
    assert any("0.30 cores; this machine was not quiet" in note for note in report.notes)
    assert json.loads(json.dumps(report.as_json()))["setup"]["shape"]["max_num_seqs"] == 32
    assert report.exit_code(check=True) == 0


@pytest.mark.usefixtures("course")
async def test_quick_makes_fewer_calls_and_says_so_and_rounds_make_more() -> None:
    parts, plans = fake({"ready": True})
    report = await policy_latency.run(Options(quick=True), parts)
    await policy_latency.run(Options(rounds=3), parts)
    assert plans == [QUICK, Plan(1200, 300)]
    assert any(note.startswith("--quick: 100 idle and 40 busy calls") for note in report.notes)
    assert {g.value for g in report.goals} == {None}


@pytest.mark.usefixtures("course")
async def test_an_interrupted_run_reports_what_it_has() -> None:
    async def stop() -> None:
        run.cancel()
        await asyncio.sleep(1)

    parts, _ = fake({"ready": True}, IDLE, then=stop)
    run = asyncio.ensure_future(policy_latency.run(Options(), parts))
    report = await run
    assert (report.whole, report.exit_code(check=True)) == (False, 130)
    assert [(a["arm"], a["calls"]) for a in report.arms] == [("idle", 200)]


async def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="keeps nothing that could be resumed"):
        await policy_latency.run(Options(resume=tmp_path))


async def test_without_vllm_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise policy_latency.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(policy_latency.metadata, "version", missing)
    with pytest.raises(BenchError, match="needs a real vLLM") as caught:
        await policy_latency.run(Options())
    assert caught.value.code == ExitCode.USAGE
