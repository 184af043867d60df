"""The bench of a long prompt beside streams: which gaps count, what a round leaves behind, the course, and what is made of the figures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.bench import cli, long_prompt, long_prompt_round
from services.bench import long_prompt_figures as figures
from services.bench.long_prompt import FULL, QUICK, Parts, Plan, policy
from services.bench.long_prompt_figures import FCFS, OURS, Round, budget_for, gaps_ms
from services.bench.long_prompt_round import LONG_PROMPT, STREAMS, alone_ms, measure
from services.bench.mixed import workload
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.report import Report
from services.bench.start import Shape
from services.bench.stats import Estimate
from trimtab.errors import EngineFault
from trimtab.kit.cli import ExitCode
from trimtab.messages import Accepted, Delta, Event, Finish, FinishReason, Timings, Usage, Workload
from trimtab.snapshot import Identity

LONG_S = 1000.0
"""A watch that only its own end ends."""


class FakeEngine:
    """Each request's tokens come some tenths of a millisecond apart; the long prompt's after `prefill_steps` of those, never if None."""

    def __init__(self, prefill_steps: int | None = 20, on_steer: Callable[[int], None] = lambda _: None) -> None:
        self.prefill_steps = prefill_steps
        self.steered: list[Mapping[str, str]] = []
        self.served: list[tuple[Workload, tuple[int, ...]]] = []
        self.fails: Exception | None = None
        self.silent = False
        self._on_steer = on_steer
        self._counts = dict.fromkeys(("steps", "running", "waiting", "queued_prefill_tokens"), 0)

    async def send(self, kind: Workload, prompt: tuple[int, ...], output: int) -> AsyncGenerator[Event, None]:
        self.served.append((kind, prompt))
        self._counts["running"] += 1
        long = kind is Workload.BATCH
        try:
            yield Accepted("r", "w0", Identity(), 0, len(prompt), b"", True, "bench")
            if long:
                if self.fails is not None:
                    raise self.fails
                self._counts["queued_prefill_tokens"] = len(prompt) - 1000
                for _ in range(self.prefill_steps if self.prefill_steps is not None else 1 << 30):
                    await asyncio.sleep(0.0002)
            while self.silent:
                await asyncio.sleep(0.001)
            for i in range(output):
                await asyncio.sleep(0.0002)
                self._counts["steps"] += 1
                yield Delta(i, (i,), "")
            yield Finish(FinishReason.LENGTH, Usage(), Timings())
        finally:
            self._counts["running"] -= 1
            self._counts["queued_prefill_tokens"] = 0

    async def steer(self, fields: Mapping[str, str]) -> None:
        assert not self._counts["running"], "an arm leaks into the next one"
        self.steered.append(dict(fields))
        self._on_steer(len(self.steered))
        await asyncio.sleep(0)

    def counts(self) -> Mapping[str, float]:
        return dict(self._counts)

    def cpu_s(self) -> Mapping[str, float]:
        return {"client": 1.0, "worker": 2.0}

    def check(self) -> None: ...


@pytest.fixture(autouse=True)
def _swift(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompt_round, "POLL_S", 0.001)
    monkeypatch.setattr(long_prompt_round, "ALONE_TOKENS", 5)
    monkeypatch.setattr(long_prompt_round, "STREAM_OUTPUT", 1 << 20)


def prompt_of(name: str, tokens: int) -> tuple[int, ...]:
    return workload.prompt(name, tokens)


def a_round(arm: str = OURS, round_: int = 0, *, worst_ms: float = 150.0, **fields: Any) -> Round:
    known: dict[str, Any] = {
        "gaps_ms": (50.0, 60.0, 70.0, worst_ms), "watched_s": 20.0, "first_token_s": 20.0, "computed_tokens": LONG_PROMPT,
        "steps": 200, "ended": "first token",
    }  # fmt: skip
    return Round(arm, round_, **{**known, **fields})


# Which gaps count.


@pytest.mark.parametrize(
    ("begin", "end", "wanted"),
    [
        (0.0, 10.0, [100.0, 200.0, 300.0]),
        (1.05, 1.2, [100.0, 200.0]),  # one is under way at the beginning, one at the end: both count whole
        (1.1, 1.25, [200.0]),
        (1.1, 1.3, [200.0]),  # what begins with the end is of afterwards
        (5.0, 6.0, []),
    ],
)
def test_a_gap_counts_whole_where_any_part_of_it_lies_in_the_watch(
    begin: float, end: float, wanted: list[float]
) -> None:
    assert gaps_ms([1.0, 1.1, 1.3, 1.6], begin, end) == pytest.approx(wanted)


@pytest.mark.parametrize(("alone_ms", "budget"), [(43.1, 90), (45.0, 90), (45.1, 100), (0.4, 10)])
def test_the_budget_is_twice_the_gap_alone_rounded_up_to_ten(alone_ms: float, budget: int) -> None:
    assert budget_for(alone_ms) == budget


# A round.


async def test_a_round_watches_eight_realtime_streams_from_the_arrival_to_the_first_token() -> None:
    engine = FakeEngine()
    found = await measure(engine, OURS, 3, LONG_S, prompt_of)
    assert (found.arm, found.round, found.ended, found.computed_tokens) == (OURS, 3, "first token", LONG_PROMPT)
    assert found.first_token_s == found.watched_s > 0
    assert len(found.gaps_ms) >= STREAMS and found.worst_ms == max(found.gaps_ms)
    assert found.steps > 0
    assert [(w, len(p)) for w, p in engine.served] == [(Workload.REALTIME, 50)] * STREAMS + [(Workload.BATCH, 6000)]
    assert len({p for _, p in engine.served}) == STREAMS + 1
    assert not engine.counts()["running"]


async def test_a_long_prefill_is_watched_for_a_while_and_cancelled() -> None:
    engine = FakeEngine(prefill_steps=None)
    found = await measure(engine, OURS, 0, 0.02, prompt_of)
    assert (found.ended, found.first_token_s, found.computed_tokens) == ("time", None, 1000)
    assert found.watched_s >= 0.02
    assert len(found.gaps_ms) >= STREAMS
    assert not engine.counts()["running"]


async def test_a_stream_that_comes_to_its_end_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompt_round, "STREAM_OUTPUT", 200)
    found = await measure(FakeEngine(prefill_steps=None), OURS, 0, LONG_S, prompt_of)
    assert (found.ended, found.first_token_s) == ("stream", None)


async def test_the_streams_alone_have_nothing_beside_them() -> None:
    engine = FakeEngine()
    assert await alone_ms(engine, prompt_of) > 0
    assert {w for w, _ in engine.served} == {Workload.REALTIME}
    assert not engine.counts()["running"]


async def test_a_request_that_fails_is_named_with_its_round() -> None:
    engine = FakeEngine()
    engine.fails = EngineFault("out of luck")
    with pytest.raises(BenchError, match="a request failed in round 3 of ours: out of luck"):
        await measure(engine, OURS, 2, LONG_S, prompt_of)


async def test_streams_without_tokens_are_given_up_with_a_word_on_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompt_round, "AROUND_S", 0.05)
    engine = FakeEngine()
    engine.silent = True
    with pytest.raises(
        BenchError, match=r"in the warm-up not every stream gave its tokens within 0\.05 s.*start again"
    ):
        await measure(engine, OURS, long_prompt_round.WARM_UP, 0.0, prompt_of)


def test_a_round_survives_its_json() -> None:
    raw = json.loads(json.dumps({"kind": "round", "at_unix_s": 1.0, **a_round().as_json()}))
    assert Round.from_json(raw) == a_round()


# The figures.


def test_the_worst_gap_of_all_rounds_is_held_against_twice_the_budget() -> None:
    rounds = [a_round(round_=i, worst_ms=ms) for i, ms in enumerate((110.0, 120.0, 130.0, 140.0, 190.0))]
    (goal,) = figures.goals(rounds, 100, 1)
    assert (goal.name, goal.goal, goal.value, goal.met) == ("worst_gap_over_itl_budget", 2.0, 1.9, True)
    assert goal.estimate is not None and (goal.estimate.value, goal.estimate.n) == (1.3, 5)
    (goal,) = figures.goals([*rounds, a_round(round_=5, worst_ms=201.0)], 100, 1)
    assert (goal.value, goal.met) == (2.01, False)


@pytest.mark.parametrize(("worst_ms", "met"), [(150.0, None), (250.0, False)])
def test_one_round_decides_only_what_it_misses(worst_ms: float, met: bool | None) -> None:
    assert figures.goals([a_round(worst_ms=worst_ms)], 100, 1)[0].met is met


def test_what_was_not_measured_is_not_judged() -> None:
    for rounds, budget in (([], 100), ([a_round()], None), ([a_round(FCFS)], 100)):
        assert figures.goals(rounds, budget, 1)[0].value is None
    assert figures.arms([], 100, LONG_PROMPT) == []
    assert figures.sections([], None) == []


def test_an_arms_figures_pool_its_gaps_and_show_its_rounds() -> None:
    cut = {"first_token_s": None, "watched_s": 30.0, "computed_tokens": 1500, "ended": "time", "steps": 300}
    ours, fcfs = figures.arms([a_round(FCFS), a_round(round_=1, worst_ms=180.0, **cut), a_round()], 100, LONG_PROMPT)
    assert (ours["arm"], ours["rounds"], ours["gaps"], fcfs["arm"]) == (OURS, 2, 8, FCFS)
    assert ours["gap_p50_ms"] == {"value": 65.0, "least": 65.0, "most": 65.0}
    assert ours["gap_worst_ms"] == {"value": 180.0, "least": 150.0, "most": 180.0}
    assert ours["worst_over_budget"] == 1.8
    assert ours["first_token_s"] == {"value": 20.0, "least": 20.0, "most": 20.0}
    assert (ours["first_tokens"], ours["computed_share"], ours["steps"]["value"]) == (1, 0.625, 250.0)
    assert ours["ended"] == {"first token": 1, "time": 1}


def test_fcfs_is_compared_by_worst_gaps_of_all_rounds_and_within_rounds() -> None:
    rounds = [a_round(FCFS, i, worst_ms=ms) for i, ms in enumerate((3000.0, 4500.0, 6000.0))]
    rounds += [a_round(OURS, i, worst_ms=ms) for i, ms in enumerate((100.0, 150.0, 120.0))]
    found = figures.compared(rounds, 1)
    assert found is not None
    assert found["worst_fcfs_over_ours"] == 40.0
    assert (found["within_rounds"]["value"], found["within_rounds"]["n"]) == (30.0, 3)
    assert figures.compared(rounds[:3], 1) is None
    text = dict(figures.sections(figures.arms(rounds, 100, LONG_PROMPT), found))
    assert any("40.0; within rounds 30.0" in section for section in text.values())


# The course.


class FakeParts:
    def __init__(self, engine: FakeEngine | None = None) -> None:
        self.engine, self.starts = engine or FakeEngine(), 0

    def parts(self) -> Parts:
        return Parts(self._engine)

    @asynccontextmanager
    async def _engine(self, directory: Path, shape: Shape) -> AsyncIterator[FakeEngine]:
        self.starts += 1
        yield self.engine


@pytest.fixture
def course(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_prompt, "model_path", lambda name: f"/models/{name}")
    monkeypatch.setattr(long_prompt, "_vllm", lambda: "0.0")
    estimate = Estimate(1.0, 0.9, 1.1, 2)
    monkeypatch.setattr(figures, "bootstrap", lambda *_, **__: estimate)
    monkeypatch.setattr(long_prompt, "FULL", replace(FULL, rounds=2))


def options(tmp_path: Path, **given: Any) -> Options:
    return Options(**{"resume": tmp_path / "run", **given})


def test_both_arms_have_a_turn_in_each_round_and_take_turns_to_be_first() -> None:
    assert list(Plan(3, 30.0, 10.0).order()) == [(0, OURS), (0, FCFS), (1, FCFS), (1, OURS), (2, OURS), (2, FCFS)]
    assert (FULL.rounds, QUICK.rounds) == (5, 1)
    assert QUICK.expected_s() < 180 < FULL.expected_s()


def test_an_arm_sets_every_field_that_the_other_one_does() -> None:
    ours, fcfs = policy(OURS, 90), policy(FCFS, 90)
    assert ours.keys() == fcfs.keys()
    wanted = {
        "scheduler.mode": "trimtab",
        "prefill.itl_budget_ms": "90",
        "prefill.max_step_ms": "0",
        "paths.hot_below": "1024",
    }
    assert wanted.items() <= ours.items()
    assert {
        "scheduler.mode": "fcfs",
        "prefill.itl_budget_ms": "default",
        "paths.hot_below": "1024",
    }.items() <= fcfs.items()


@pytest.mark.usefixtures("course")
async def test_a_run_calibrates_warms_up_and_measures_both_arms_in_turns(tmp_path: Path) -> None:
    fake = FakeParts()
    report = await long_prompt.run(options(tmp_path), fake.parts())
    budget = report.setup["calibration"]["itl_budget_ms"]
    assert budget == budget_for(report.setup["calibration"]["alone_ms"])
    steered = [(f["scheduler.mode"], f["prefill.itl_budget_ms"]) for f in fake.engine.steered]
    fcfs, ours = ("fcfs", "default"), ("trimtab", str(budget))
    assert steered == [fcfs, ours, ours, fcfs, fcfs, ours]
    assert [(a["arm"], a["rounds"], a["first_tokens"]) for a in report.arms] == [(OURS, 2, 2), (FCFS, 2, 2)]
    assert [g.name for g in report.goals] == ["worst_gap_over_itl_budget"]
    prompts = [prompt for _, prompt in fake.engine.served]
    assert len(set(prompts)) == len(prompts) == 8 + 5 * 9
    text = report.text()
    assert "rounded up to 10" in text and "the warm-up of ours, which does not count" in text
    assert json.loads(json.dumps(report.as_json()))["setup"]["compared"]["worst_fcfs_over_ours"] > 0


@pytest.mark.usefixtures("course")
async def test_a_budget_that_was_asked_for_is_taken_and_the_report_says_so(tmp_path: Path) -> None:
    fake = FakeParts()
    report = await long_prompt.run(options(tmp_path, quick=True, itl_budgets_ms=(777,)), fake.parts())
    assert [f["prefill.itl_budget_ms"] for f in fake.engine.steered] == ["default", "777", "777", "default"]
    assert "prefill.itl_budget_ms = 777 by ours" in report.text() and "as asked for" in report.text()
    assert any(note.startswith("--quick: 1 round") for note in report.notes)


@pytest.mark.usefixtures("course")
async def test_an_interrupted_run_reports_what_it_has_and_goes_on_from_there(tmp_path: Path) -> None:
    first = FakeParts(FakeEngine(on_steer=lambda number: run.cancel() if number == 4 else None))
    run = asyncio.ensure_future(long_prompt.run(options(tmp_path), first.parts()))
    report = await run
    assert (report.whole, report.exit_code(check=True)) == (False, 130)
    assert [(a["arm"], a["rounds"]) for a in report.arms] == [(OURS, 1)]
    second, third = FakeParts(), FakeParts()
    report = await long_prompt.run(options(tmp_path), second.parts())
    assert [a["rounds"] for a in report.arms] == [2, 2]
    assert len(second.engine.steered) == 1 + 3, "a fresh engine is warmed up again, but not calibrated"
    await long_prompt.run(options(tmp_path), third.parts())
    assert third.starts == 0


@pytest.mark.usefixtures("course")
async def test_a_failure_says_where_the_rounds_before_it_are(tmp_path: Path) -> None:
    fake = FakeParts(
        FakeEngine(on_steer=lambda number: setattr(fake.engine, "fails", EngineFault("gone") if number > 3 else None))
    )
    with pytest.raises(BenchError, match=r"(?s)gone.*what was measured before is kept: --resume"):
        await long_prompt.run(options(tmp_path), fake.parts())


async def test_without_vllm_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise long_prompt.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(long_prompt, "model_path", lambda name: name)
    monkeypatch.setattr(long_prompt.metadata, "version", missing)
    with pytest.raises(BenchError, match="needs a real vLLM") as caught:
        await long_prompt.run(options(tmp_path))
    assert caught.value.code == ExitCode.USAGE


def test_the_budgets_option_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Options] = []

    async def run(given: Options) -> Report:
        asked.append(given)
        return Report("long-prompt", [], [])

    monkeypatch.setattr(long_prompt, "run", run)
    done = CliRunner().invoke(cli.bench, ["long-prompt", "--itl-budget", "120", "--quick"])
    assert done.exit_code == 0, done.output
    assert asked == [Options(quick=True, itl_budgets_ms=(120,))]
    done = CliRunner().invoke(cli.bench, ["mixed", "--itl-budget", "120"])
    assert (done.exit_code, "bench mixed has no option --itl-budget" in done.stderr) == (2, True)
    done = CliRunner().invoke(cli.bench, ["long-prompt", "--itl-budget", "0"])
    assert done.exit_code == 2
