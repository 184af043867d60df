"""The course of `blocks` on the simulated engine: every size in every round, what is kept, and what goes on from there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from services.bench import cli
from services.bench.blocks import course, long_model, rounds
from services.bench.blocks.course import Parts
from services.bench.blocks.plan import FULL, LONG, SERVED, Cell, Plan
from services.bench.blocks.prefixes import Talk
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.reblock import host
from services.bench.start import Shape
from tests.bench.reblock_builders import Hosts, an_engine
from trimtab.blocks import LADDER

SIZES = [s for s in LADDER if s % 8 == 0]


@pytest.fixture(autouse=True)
def _no_vllm_and_short_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "model_path", lambda name: f"/models/{name}")
    monkeypatch.setattr(course, "vllm_version", lambda bench: "0.0")
    whole = Plan.of
    small: dict[str, Any] = {
        "served": (Cell(50, 3, 6, 1.0), Cell(200, 2, 6, 1.0)), "long": (Cell(800, 2, 6, 1.0),),
        "talk": Talk(2, 2, 40, (5, 9), 3),
    }  # fmt: skip
    monkeypatch.setattr(Plan, "of", staticmethod(lambda options: replace(whole(options), **small)))


async def no_model(directory: Path, like: str) -> str:
    return f"{like}-long"


def options(tmp_path: Path, **fields: Any) -> Options:
    return Options(**{"resume": tmp_path / "run", "rounds": 2, "trace": tmp_path / "none", **fields})


def visited(report_dir: Path) -> list[tuple[str, int, int]]:
    raw = [json.loads(line) for line in (report_dir / "raw.jsonl").read_text().splitlines()]
    return [(p["model"], p["round"], p["size"]) for p in raw if p["kind"] == "visit"]


@pytest.mark.slow
async def test_every_size_has_its_turn_in_every_round_with_both_models(tmp_path: Path) -> None:
    hosts = Hosts()
    report = await course.run(options(tmp_path), Parts(hosts.engine, no_model))
    turns = visited(tmp_path / "run")
    assert sorted(turns) == sorted((m, r, s) for m in (SERVED, LONG) for r in range(2) for s in SIZES)
    assert [s.model for s in hosts.shapes] == ["/models/default", "/models/default-long"]
    by_name = {g.name: g for g in report.goals}
    assert by_name["sizes_measured"].met is True
    assert by_name["rounds_of_each_size"].met is False, "2 of the 3 that a verdict needs"
    assert by_name["prompt_tokens_found_in_cache"].value == 0
    assert by_name["prefix_hits_off_computed"].met is False, "the simulated engine has no prefix cache"
    assert report.setup["default"] == 16
    assert report.setup["calibration"] == {}, "two rounds calibrate nothing"
    assert all(
        set(a["speeds"]) == {"50", "200", "800"} and a["speeds"]["50"]["decode_ratio"]["n"] == 2 for a in report.arms
    )
    assert all(a["prefixes"]["computed"] == a["hits_computed"] for a in report.arms), (
        "lengths are the same for all sizes"
    )
    assert {v["workload"] for v in report.setup["verdicts"]} == {"chat", "code", "summaries", "documents", "sessions"}
    assert all(v["worth"] is None for v in report.setup["verdicts"])
    assert any("mooncake is left out" in n for n in report.notes)
    text = report.text()
    assert "For trimtab.blocks.SPEED" not in text and "| block |" in text
    json.dumps(report.as_json())
    again = Hosts()
    second = await course.run(options(tmp_path), Parts(again.engine, no_model))
    assert again.all == [] and second.arms == report.arms, "nothing is left to measure"


@pytest.mark.slow
async def test_a_failure_keeps_what_was_measured_and_the_next_run_goes_on_there(tmp_path: Path) -> None:
    asked: list[str] = []

    def fail(part: str) -> None:
        asked.append(part)
        if asked.count("prefixes") == 4:
            raise BenchError("the engine's process ended too early")

    with pytest.raises(BenchError, match=r"what was measured before is kept: --resume"):
        await course.run(options(tmp_path), Parts(Hosts(fail).engine, no_model))
    before = visited(tmp_path / "run")
    assert len(before) == 4, "the fourth size's speeds are there, its prefixes are not"
    report = await course.run(options(tmp_path), Parts(Hosts().engine, no_model))
    turns = visited(tmp_path / "run")
    assert turns[:4] == before and len(turns) == len(set(turns)) == 4 * len(SIZES)
    assert all(a["prefixes"] for a in report.arms)


async def test_quick_visits_three_sizes_of_the_served_model_and_gives_no_verdict(tmp_path: Path) -> None:
    hosts = Hosts()
    quick = options(tmp_path, quick=True, rounds=None)
    no_long = Parts(hosts.engine, no_model)
    report = await course.run(quick, no_long)
    assert {s for m, _, s in visited(tmp_path / "run") if m == SERVED} == {8, 16, 2048}
    assert report.setup["verdicts"] == []
    assert {g.met for g in report.goals} <= {None, False}


@pytest.mark.slow
async def test_the_picture_is_drawn_from_what_was_measured(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png = tmp_path / "blocks.png"
    await course.run(options(tmp_path, quick=True, rounds=1, png=png), Parts(Hosts().engine, no_model))
    assert png.read_bytes().startswith(b"\x89PNG")


async def test_a_part_that_fails_is_told_with_its_reason() -> None:
    engine = an_engine()
    await engine.start()
    try:
        said = await host.answer(engine, json.dumps({"part": "size", "args": {"size": 7}}))
        assert said["error"].startswith("size: ReblockRefused")
        args = {"name": "n", "context": 9000, "streams": 1, "output": 4}
        said = await host.answer(engine, json.dumps({"part": "size", "args": {"size": 64}}))
        assert said["done"]["block_size"] == 64
        await engine.stop()
        said = await host.answer(engine, json.dumps({"part": "speed", "args": args}))
        assert said["error"].startswith("speed: Failed: EngineDead")
    finally:
        await engine.stop()


async def test_sizes_that_are_refused_are_listed_with_the_engines_reason() -> None:
    engine = an_engine(max_model_len=4096)
    await engine.start()
    try:
        found = await rounds.refused(engine, {"sizes": [7, 64]})
    finally:
        await engine.stop()
    assert [(s["size"], s["cause"]) for s in found["said"]] == [(7, "SIZE"), (64, "")]
    assert engine.limits.block_size == 16, "nothing was changed"


def test_a_long_model_that_is_there_whole_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    long_model.make(tmp_path / "nowhere", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert FULL.long[0].context + FULL.long[0].output < long_model.WINDOW


def test_both_benches_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Options] = []

    async def run(options: Options) -> Any:
        asked.append(options)
        raise BenchError("enough")

    from services.bench.reblock import course as reblock

    monkeypatch.setattr(course, "run", run)
    monkeypatch.setattr(reblock, "run", run)
    png = str(tmp_path / "x.png")
    assert CliRunner().invoke(cli.bench, ["blocks", "--quick", "--png", png]).exit_code == 3
    assert CliRunner().invoke(cli.bench, ["reblock", "--rounds", "3"]).exit_code == 3
    assert CliRunner().invoke(cli.bench, ["reblock", "--png", png]).exit_code == 2
    assert asked == [Options(quick=True, png=Path(png)), Options(rounds=3)]


def test_a_host_runs_every_part_that_the_courses_ask_for() -> None:
    assert set(host.PARTS) == {"bout", "soak", "refusals", "settle", "size", "refused", "speed", "prefixes"}
    assert FULL.served[0].streams == 8 and Shape("m").kv_cache_gib == 1
