"""Traces, and the same question in virtual time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from services.bench.mixed import course, simulation, traces
from services.bench.mixed.arms import FCFS, PRIORITY, REALTIME_ALONE, ours
from services.bench.mixed.simulation import Outcome, blocks, only, simulate
from services.bench.mixed.traces import Entry
from services.bench.options import Options
from services.bench.stats import quantile
from trimtab.messages import Workload

AZURE, VIDUR = traces.MIXES[0].files
MOONCAKE = traces.MIXES[1].files[0]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Traces of a few rows, in the formats of the public ones."""
    for name in (AZURE, VIDUR, MOONCAKE):
        (tmp_path / name).parent.mkdir(exist_ok=True)
    rows = [f"2023-11-16 18:15:{i // 4:02d}.{i % 4 * 25:02d}46590,{100 + i},{5 + i % 7}" for i in range(120)]
    (tmp_path / AZURE).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows))
    documents = [f"{1000 + 10 * i},{40 + i},{0},{0.0}" for i in range(150)]
    (tmp_path / VIDUR).write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n" + "\n".join(documents)
    )
    lines = [
        {
            "timestamp": 3000 * (i // 10),
            "input_length": 500 * (1 + i % 20),
            "output_length": 5 + i % 30,
            "hash_ids": [0],
        }
        for i in range(150)
    ]
    (tmp_path / MOONCAKE).write_text("\n".join(map(json.dumps, lines)) + "\n")
    return tmp_path


def test_each_format_is_read(directory: Path) -> None:
    assert traces.read_azure(directory / AZURE)[:2] == [(0.0, 100, 5), (0.25, 101, 6)]
    assert traces.read_mooncake(directory / MOONCAKE)[10] == (3.0, 5500, 15)
    assert traces.read_vidur(directory / VIDUR)[1] == (1010, 41)


def test_times_with_an_offset_are_read_too(tmp_path: Path) -> None:
    path = tmp_path / "2024.csv"
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 00:00:01.009930+00:00,9,9\n"
    path.write_text(text)
    assert traces.read_azure(path) == [(0.0, 2162, 5), (1.0, 9, 9)]


@pytest.mark.parametrize("mix", traces.MIXES, ids=lambda m: m.name)
def test_a_mix_is_three_realtime_to_seven_batch_by_count_in_order(mix: traces.Mix, directory: Path) -> None:
    entries = mix.entries(directory, 100, 1)
    assert [e.number for e in entries] == list(range(100))
    assert sum(e.workload is Workload.REALTIME for e in entries) == 30
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(entries))
    assert entries == mix.entries(directory, 100, 1) != mix.entries(directory, 100, 2)


def outcome(arm: Any, entries: list[Entry]) -> Outcome:
    *_, last = simulate(arm, entries)
    assert isinstance(last, Outcome)
    return last


def a_load(seconds: int = 40) -> list[Entry]:
    """Documents that fill the engine, and a chat request a second."""
    found = [Entry(i * 0.25, Workload.BATCH, 8000, 100) for i in range(4 * seconds)]
    found += [Entry(i + 0.1, Workload.REALTIME, 100, 20) for i in range(seconds)]
    return [Entry(e.at_s, e.workload, e.prompt, e.output, i) for i, e in enumerate(sorted(found, key=lambda e: e.at_s))]


def p95(found: Outcome, workload: Workload = Workload.REALTIME) -> float:
    return quantile([f.last_ms - f.entry.at_s * 1000 for f in found.fates if f.entry.workload is workload], 0.95)


def test_everybody_is_served_once_and_every_token_is_counted() -> None:
    entries = a_load(10)
    for arm in (FCFS, PRIORITY, ours(40)):
        found = outcome(arm, entries)
        assert all(f.first_ms >= f.entry.at_s * 1000 and len(f.gaps_ms) == f.entry.output - 1 for f in found.fates)
        # The last token of a request comes out and is never computed.
        assert found.progress[-1][1] == sum(e.prompt + e.output - 1 for e in entries)


def test_realtime_waits_least_in_ours_and_longest_by_fcfs() -> None:
    entries = a_load()
    fcfs, priority, mine = (p95(outcome(arm, entries)) for arm in (FCFS, PRIORITY, ours(20)))
    alone = p95(outcome(REALTIME_ALONE, only(REALTIME_ALONE, entries)))
    assert alone < mine < priority < fcfs


def test_blocks_share_their_requests_over_all_arms() -> None:
    entries = a_load(10)
    span_s = entries[-1].at_s
    found = {
        arm.name: blocks(arm, outcome(arm, only(arm, entries)), span_s) for arm in (FCFS, ours(20), REALTIME_ALONE)
    }
    indices = [[[r.index for r in b.realtime] for b in each] for each in found.values()]
    assert indices[0] == indices[1] == indices[2]
    assert sum(len(x) for x in indices[0]) == 10
    assert sum(b.tokens for b in found["fcfs"]) == sum(e.prompt + e.output - 1 for e in entries)


@pytest.mark.slow
async def test_the_report_says_that_it_is_simulated_and_judges_no_goal(
    directory: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(simulation, "QUICK_REQUESTS", 100)
    report = await course.run(Options(quick=True, trace=directory, itl_budgets_ms=(40,), png=tmp_path / "p.png"))
    assert [(a["mix"], a["arm"]) for a in report.arms] == [
        (mix, arm)
        for mix in ("azure-arxiv", "mooncake")
        for arm in ("fcfs", "priority", "ours-40", "realtime-alone", "batch-alone")
    ]
    assert all(a["simulated"] for a in report.arms)
    assert report.goals == []
    assert report.notes[0].startswith("SIMULATED: no engine ran")
    assert "SIMULATED, mooncake" in report.text()
    assert (tmp_path / "p-mooncake.png").exists()
    json.dumps(report.as_json())


async def test_a_trace_that_is_not_there_is_skipped_with_its_reason(tmp_path: Path) -> None:
    report = await course.run(Options(trace=tmp_path))
    assert (report.arms, report.exit_code(check=True)) == ([], 0)
    assert report.notes[1] == f"azure-arxiv is skipped: {tmp_path / AZURE} is not there"
    assert len(report.notes) == 3
