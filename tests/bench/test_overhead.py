"""The course of the bench: turns, checkpoints, an end by hand or by the clock; and its one part that needs no vLLM, for real."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from services.bench import figures, overhead, plan, turns
from services.bench.added_ttft import measure_pairs
from services.bench.figures import ARMS
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.stats import bootstrap
from tests.bench.builders import FakeParts

CONCURRENCIES = (1, 8, 32)
LONE = plan.FULL.lone_rounds * plan.LONE_REQUESTS


@pytest.fixture(autouse=True)
def _no_engine_and_no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "_vllm", lambda: "0.0")
    monkeypatch.setattr(overhead, "model_path", lambda name: f"/models/{name}")
    monkeypatch.setattr(turns, "QUIET_POLL_S", 0.001)
    monkeypatch.setattr(turns, "QUIET_LIMIT_S", 0.0)
    monkeypatch.setattr(figures, "bootstrap", partial(bootstrap, resamples=50))


def options(tmp_path: Path, **fields: Any) -> Options:
    return Options(resume=tmp_path / "run", **fields)


def test_every_arm_goes_first_as_often_and_pairs_of_rounds_run_both_ways() -> None:
    orders = [plan.FULL.order(r) for r in range(8)]
    assert Counter(o[0] for o in orders) == dict.fromkeys(ARMS, 2)
    assert all(orders[r + 1] == orders[r][::-1] for r in range(0, 8, 2))
    assert all(sorted(o) == sorted(ARMS) for o in orders)


def test_the_expected_time_of_quick_leaves_room_within_three_minutes() -> None:
    assert plan.QUICK.expected_s() <= plan.QUICK.budget_s < 180


async def test_a_full_run_measures_every_arm_in_every_round(tmp_path: Path) -> None:
    fake = FakeParts()
    report = await overhead.run(options(tmp_path), fake.parts())
    assert Counter(fake.measured) == {(arm, c): 10 for arm in ARMS for c in CONCURRENCIES}
    assert [(a["arm"], a["concurrency"]) for a in report.arms[:-4]] == [(arm, c) for c in CONCURRENCIES for arm in ARMS]
    assert [(a["arm"], a["ttft_samples"]) for a in report.arms[-4:-2]] == [(f"lone {a}", LONE) for a in plan.LONE_ARMS]
    assert report.arms[-2]["ttft_samples"] == plan.FULL.pairs >= 200
    assert {g.name: g.met for g in report.goals} == {
        "cpu_s_per_1000_tokens_outside_engine_at_32": True,
        "tokens_per_s_ratio_to_bare_lower_at_1": True,
        "tokens_per_s_ratio_to_bare_lower_at_8": True,
        "tokens_per_s_ratio_to_bare_lower_at_32": True,
        "added_ttft_p50_ms_at_1": True,
        "ttft_p50_ratio_to_vllm_http_upper_at_1": True,
    }
    assert report.whole
    assert "Speed" in report.text()


async def test_quick_says_what_it_leaves_out_and_decides_only_what_it_can(tmp_path: Path) -> None:
    fake = FakeParts()
    report = await overhead.run(options(tmp_path, quick=True), fake.parts())
    assert Counter(fake.measured) == {(arm, 32): 2 for arm in ("mesh", "worker", "bare")}
    assert [g.name for g in report.goals if g.met is not None] == ["added_ttft_p50_ms_at_1"]
    assert any(note.startswith("--quick leaves out") for note in report.notes)


async def test_an_interrupted_run_reports_what_it_has_and_goes_on_from_there(tmp_path: Path) -> None:
    bursts = [
        3,
        2,
        2,
        3,
        2,
    ]  # bursts of one turn in each block: a primer, the measured one, and at 1 stream the short ones
    interrupted = 4 * sum(bursts) + 2 * 2 + 1  # in the middle of the sixth block

    async def on_burst(number: int) -> None:
        if number == interrupted:
            run.cancel()
            await asyncio.sleep(1)

    first, second = FakeParts(on_burst), FakeParts()
    run = asyncio.ensure_future(overhead.run(options(tmp_path), first.parts()))
    report = await run
    assert not report.whole
    assert report.exit_code(check=True) == 130
    assert [a["rounds"] for a in report.arms if a["arm"] == "mesh"] == [2, 2, 1]
    report = await overhead.run(options(tmp_path), second.parts())
    assert (second.pairings, len(second.measured)) == (0, 4 * (30 - 5))
    assert report.arms[-4]["ttft_samples"] == LONE
    assert [a["rounds"] for a in report.arms if a["arm"] == "mesh"] == [10, 10, 10]
    assert "resumed: 6 finished parts are of an earlier session" in report.notes


async def test_a_finished_run_starts_nothing_again_and_more_rounds_can_be_added(tmp_path: Path) -> None:
    await overhead.run(options(tmp_path, rounds=1), FakeParts().parts())
    same, more = FakeParts(), FakeParts()
    await overhead.run(options(tmp_path, rounds=1), same.parts())
    assert (same.starts, same.pairings) == (0, 0)
    await overhead.run(options(tmp_path, rounds=2), more.parts())
    assert Counter(more.measured) == {(arm, c): 1 for arm in ARMS for c in CONCURRENCIES}


async def test_quick_and_full_rounds_never_mix(tmp_path: Path) -> None:
    await overhead.run(options(tmp_path, rounds=1), FakeParts().parts())
    with pytest.raises(BenchError, match="another setup"):
        await overhead.run(options(tmp_path, quick=True), FakeParts().parts())


@pytest.mark.slow
async def test_when_time_runs_out_the_rest_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def on_burst(number: int) -> None:
        if number == 2 * (3 + 1):
            await asyncio.sleep(60)

    monkeypatch.setattr(overhead, "QUICK", replace(plan.QUICK, budget_s=3.0))
    report = await overhead.run(options(tmp_path, quick=True), FakeParts(on_burst).parts())
    assert report.whole
    assert [(a["concurrency"], a["rounds"]) for a in report.arms if a["arm"] == "mesh"] == [(32, 1)]
    assert any(note.startswith("time ran out after 3 s") for note in report.notes)


async def test_a_failed_request_ends_the_bench_in_words(tmp_path: Path) -> None:
    async def on_burst(_: int) -> None:
        raise OSError("connection reset")

    with pytest.raises(BenchError, match="a request of arm mesh failed: connection reset"):
        await overhead.run(options(tmp_path), FakeParts(on_burst).parts())


@pytest.mark.slow
async def test_what_a_gateway_adds_to_the_ttft_of_a_simulated_engine_is_measured_in_pairs(tmp_path: Path) -> None:
    """Real processes: control plane, worker and gateway. Whether it adds little enough is the bench's business, not a test's."""
    found = await measure_pairs(tmp_path, 6, 1)
    assert len(found) == 6
    assert all(through > 5.0 and straight > 5.0 for through, straight in found)  # a step takes that long
    through, straight = (median(side) for side in zip(*found, strict=True))
    assert figures.added_ttft(found, 1).value == pytest.approx(through - straight)
    assert (tmp_path / "logs" / "gateway.log").exists()
