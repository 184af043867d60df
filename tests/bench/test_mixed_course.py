"""The course of the bench: what runs, checkpoints, an end by hand or by the clock, the report and the picture."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from services.bench.mixed import block, course, figures, picture
from services.bench.mixed import plan as plans
from services.bench.mixed.arms import every
from services.bench.mixed.block import Timing
from services.bench.mixed.plan import Plan
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.stats import nested_bootstrap
from tests.bench.mixed_builders import FakeParts, good_blocks
from trimtab.kit.cli import ExitCode

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _no_vllm_and_short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "model_path", lambda name: f"/models/{name}")
    monkeypatch.setattr(course, "_vllm", lambda: "0.0")
    monkeypatch.setattr(plans, "_timing", lambda block_s, tail_s: Timing(0.03, 0.15, 0.1))
    monkeypatch.setattr(block, "POLL_S", 0.002)
    monkeypatch.setattr(course.workload, "BATCH_PROMPT", (50, 60))
    monkeypatch.setattr(
        figures, "nested_bootstrap", lambda *a, seed, **_: nested_bootstrap(*a, seed=seed, resamples=20)
    )
    monkeypatch.setattr(figures, "bootstrap", partial(figures.bootstrap, resamples=20))
    of = Plan.of
    short = {"capacity": Timing(0.02, 0.3, 0.0), "calibration": 3, "alone": None}
    monkeypatch.setattr(
        plans.Plan, "of", lambda options: replace(of(options), **({"calibration": 3} if options.quick else short))
    )


def options(tmp_path: Path, **fields: Any) -> Options:
    return Options(
        **{"resume": tmp_path / "run", "arms": ("fcfs", "ours-100", "realtime-alone"), "rounds": 2, **fields}
    )


async def test_a_run_checks_calibrates_and_measures_every_arm_in_every_round(tmp_path: Path) -> None:
    fake = FakeParts()
    report = await course.run(options(tmp_path), fake.parts())
    assert (fake.checks, fake.starts) == (1, 1)
    assert [(a["arm"], a["rounds"]) for a in report.arms] == [("fcfs", 2), ("ours-100", 2), ("realtime-alone", 2)]
    assert report.setup["capacity_tokens_per_s"] > 0
    assert report.setup["calibration"]["rate_per_s"] == pytest.approx(
        0.22314 / report.setup["calibration"]["mean_e2e_ms"] * 1000, rel=0.01
    )
    assert {g.name: g.met for g in report.goals}["requests_that_fcfs_serves_as_stock"] is True
    text = report.text()
    assert "capacity" in text
    assert "20 of 20 requests" in text
    assert json.loads(json.dumps(report.as_json()))["setup"]["shape"]["max_num_seqs"] == 32


async def test_the_rate_is_that_of_requests_as_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = plans.Plan.of
    alone = Timing(0.05, 1.0, 5.0)
    monkeypatch.setattr(plans.Plan, "of", lambda options: replace(of(options), alone=alone))
    report = await course.run(options(tmp_path, arms=("fcfs",), rounds=1), FakeParts().parts())
    found = report.setup["calibration"]
    assert found["requests"] > 3, "counted by the block, and not the three that came one at a time"
    assert found["rate_per_s"] == pytest.approx(0.22314 / found["mean_e2e_ms"] * 1000, rel=0.01)


async def test_every_block_runs_by_the_whole_policy_of_its_arm(tmp_path: Path) -> None:
    fake = FakeParts()
    await course.run(options(tmp_path), fake.parts())
    modes = Counter((f["scheduler.mode"], f["prefill.itl_budget_ms"]) for f in fake.engine.steered)
    assert modes["trimtab", "100"] == 2
    assert {frozenset(f) for f in fake.engine.steered} == {frozenset(fake.engine.steered[0])}


async def test_arms_share_arrivals_and_lengths_but_no_prompt(tmp_path: Path) -> None:
    fake = FakeParts()
    await course.run(options(tmp_path, arms=("fcfs", "priority"), rounds=1), fake.parts())
    prompts = [prompt for _, prompt, _ in fake.engine.served]
    assert len(set(prompts)) == len(prompts)


async def test_an_interrupted_run_reports_what_it_has_and_goes_on_from_there(tmp_path: Path) -> None:
    async def on_steer(number: int) -> None:
        if number == 5:  # calibration, capacity, two blocks
            run.cancel()
            await asyncio.sleep(1)

    first, second = FakeParts(on_steer), FakeParts()
    run = asyncio.ensure_future(course.run(options(tmp_path), first.parts()))
    report = await run
    assert not report.whole
    assert report.exit_code(check=True) == 130
    assert sum(a["rounds"] for a in report.arms) == 2
    assert any(n.startswith("interrupted; the same command with --resume") for n in report.notes)
    report = await course.run(options(tmp_path), second.parts())
    assert (second.checks, second.starts, len(second.engine.steered)) == (0, 1, 4)
    assert [a["rounds"] for a in report.arms] == [2, 2, 2]


async def test_a_finished_run_starts_nothing_again_and_arms_and_rounds_can_be_added(tmp_path: Path) -> None:
    await course.run(options(tmp_path), FakeParts().parts())
    same, more = FakeParts(), FakeParts()
    await course.run(options(tmp_path), same.parts())
    assert (same.starts, same.checks) == (0, 0)
    report = await course.run(options(tmp_path, arms=("fcfs", "only-express"), rounds=3), more.parts())
    assert {a["arm"]: a["rounds"] for a in report.arms} == {
        "fcfs": 3,
        "ours-100": 2,
        "realtime-alone": 2,
        "only-express": 2,
    }


async def test_quick_and_full_blocks_never_mix(tmp_path: Path) -> None:
    await course.run(options(tmp_path), FakeParts().parts())
    with pytest.raises(BenchError, match="another setup"):
        await course.run(options(tmp_path, quick=True), FakeParts().parts())


async def test_quick_is_p50_only_and_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Long enough for a P50 of each arm although the machine stalls for a while.
    monkeypatch.setattr(plans, "_timing", lambda block_s, tail_s: Timing(0.03, 0.6, 0.1))
    monkeypatch.setattr(course.workload, "rate_for", lambda *_: 100.0)
    fake = FakeParts()
    report = await course.run(options(tmp_path, quick=True, arms=(), rounds=None), fake.parts())
    assert (fake.checks, [a["arm"] for a in report.arms]) == (0, ["fcfs", "ours-100"])
    assert [list(a["e2e_ms"]) for a in report.arms] == [["p50"], ["p50"]]
    assert {g.met for g in report.goals if g.name != "max_overtake_ms"} == {None}
    assert any(n.startswith("--quick leaves out") for n in report.notes)


async def test_when_time_runs_out_the_rest_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def on_steer(number: int) -> None:
        if number == 3:
            await asyncio.sleep(60)

    monkeypatch.setattr(plans, "QUICK_BUDGET_S", 2.5)
    report = await course.run(options(tmp_path, quick=True, arms=(), rounds=None), FakeParts(on_steer).parts())
    assert report.whole
    assert len(report.arms) == 1
    assert any(n.startswith("time ran out after 2.5 s") for n in report.notes)


async def test_a_failure_in_the_middle_says_where_the_rest_is_kept(tmp_path: Path) -> None:
    async def on_steer(number: int) -> None:
        if number == 4:
            raise BenchError("the worker ended with code 3")

    with pytest.raises(BenchError, match=r"ended with code 3\nwhat was measured before is kept: --resume .*run"):
        await course.run(options(tmp_path), FakeParts(on_steer).parts())


async def test_an_unknown_arm_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no arm is called 'ous-100'; did you mean ours-100") as caught:
        await course.run(options(tmp_path, arms=("ous-100",)), FakeParts().parts())
    assert caught.value.code == ExitCode.USAGE


def figures_of(blocks: list[Any]) -> list[dict[str, Any]]:
    found = figures.by_arm(blocks)
    return [figures.arm_figures(a, found, 1, quick=False) for a in every((50, 100, 200)) if a.name in found]


def test_a_picture_is_written_of_whatever_there_is(tmp_path: Path) -> None:
    for number, blocks in enumerate((good_blocks(), [b for b in good_blocks(1) if b.arm == "fcfs"], [])):
        path = tmp_path / f"{number}.png"
        picture.draw(path, figures_of(blocks), "a title")
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_picture_falls_back_to_p50_where_an_arm_has_no_p95() -> None:
    assert picture.quantile_drawn(figures_of(good_blocks())) == "p95"
    assert picture.quantile_drawn(figures_of(good_blocks(1, fcfs={"requests": 10}))) == "p50"


async def test_the_picture_of_a_run_is_written_and_one_that_cannot_be_is_known_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await course.run(options(tmp_path, png=tmp_path / "mixed.png", rounds=1), FakeParts().parts())
    assert (tmp_path / "mixed.png").stat().st_size > 5000
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    fake = FakeParts()
    with pytest.raises(BenchError, match="--png needs matplotlib"):
        await course.run(options(tmp_path, png=tmp_path / "other.png"), fake.parts())
    assert fake.starts == 0


def test_the_tables_have_every_arm(tmp_path: Path) -> None:
    from services.bench.mixed import tables

    found = dict(tables.sections(figures_of(good_blocks())))
    assert len(found) == 6
    work = next(text for title, text in found.items() if title.startswith("Work"))
    assert [line.split()[0] for line in work.splitlines()[1:]] == [
        "fcfs", "priority", "ours-50", "ours-100", "ours-200", "realtime-alone", "batch-alone",
    ]  # fmt: skip
