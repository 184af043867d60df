"""The course of `reblock` on the simulated engine: what streams see, what is kept, and what goes on from there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.bench.options import Options
from services.bench.processes import BenchError, Processes
from services.bench.reblock import course, figures, live
from services.bench.reblock.course import Parts, plan_of
from services.bench.reblock.hosted import Process
from services.bench.reblock.streams import Broken, Streams, a_job, leaked_blocks
from services.bench.start import Shape
from services.worker.engines.simulated import SimulatedEngine
from tests.bench.reblock_builders import Hosts, LocalHost, an_engine
from trimtab.kit.cli import ExitCode


@pytest.fixture(autouse=True)
def _no_vllm_and_short_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(course, "model_path", lambda name: f"/models/{name}")
    monkeypatch.setattr(course, "vllm_version", lambda bench: "0.0")
    whole = course.plan_of
    short = {"prompts": (10, 60, 30), "output": 120, "changes": 3, "in_a_row": 40, "served_output": 150}
    monkeypatch.setattr(course, "plan_of", lambda options: replace(whole(options), **short))


@pytest.fixture
async def engine() -> Any:
    found = an_engine()
    await found.start()
    yield found
    await found.stop()


def bout_args(**fields: Any) -> dict[str, Any]:
    return {"seed": "1", "name": "bout/0", "prompts": [10, 60, 30], "output": 120, "sizes": [64, 32, 256], **fields}


async def test_a_bout_gives_the_references_tokens_and_says_what_each_change_did(engine: SimulatedEngine) -> None:
    reference = await live.bout(engine, bout_args(name="reference/0", sizes=[]))
    found = await live.bout(engine, bout_args())
    assert figures.compare(figures.tokens_of(reference), figures.tokens_of(found)) == (0, 0)
    assert [len(t) for t in figures.tokens_of(found)] == [120] * 3
    assert [(c["before"], c["after"]) for c in found["changes"]] == [(16, 64), (64, 32), (32, 256)]
    for c in found["changes"]:
        assert c["requests"] == 3 and len(c["pauses_ms"]) == 3
        assert c["predicted_tokens"] > 100
        assert 0.7 <= c["predicted_tokens"] / c["measured_tokens"] <= 1.3
    assert (found["leaked"], found["cut_short"]) == (0, "")
    assert engine.limits.block_size == 256


async def test_streams_of_one_seed_have_the_same_prompts_in_every_bout(engine: SimulatedEngine) -> None:
    prompts = [[j.token_ids for j in live._jobs(engine, bout_args(seed=seed), name)] for seed, name in
               (("1", "reference/0"), ("1", "bout/3"), ("2", "bout/3"))]  # fmt: skip
    assert prompts[0] == prompts[1] != prompts[2]
    assert len(set(prompts[0])) == 3, "distinct, or they would share blocks"


async def test_streams_that_end_before_all_changes_cut_the_bout_short(engine: SimulatedEngine) -> None:
    found = await live.bout(engine, bout_args(output=20, sizes=[64, 32] * 20))
    assert "a stream came to its last token" in found["cut_short"]
    assert 0 < len(found["changes"]) < 40


async def test_a_size_that_is_refused_in_a_bout_ends_its_changes_and_no_stream(engine: SimulatedEngine) -> None:
    found = await live.bout(engine, bout_args(sizes=[64, 3]))
    assert len(found["changes"]) == 1 and "3" in found["cut_short"]
    assert [len(t) for t in figures.tokens_of(found)] == [120] * 3


async def test_as_served_the_engine_has_its_default_policy_and_fcfs_otherwise(
    engine: SimulatedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes = []
    apply = engine.apply

    async def watched(policy: Any) -> Any:
        modes.append(str(policy.scheduler.mode))
        return await apply(policy)

    monkeypatch.setattr(engine, "apply", watched)
    await live.bout(engine, bout_args(sizes=[], output=5))
    await live.bout(engine, bout_args(sizes=[], output=5, as_served=True))
    assert modes == ["fcfs", "trimtab"]


async def test_refusals_are_told_apart_from_a_change(engine: SimulatedEngine) -> None:
    found = await live.refusals(engine, bout_args(sizes=[0, -1, 10**9, 64]))
    causes = [(t["size"], t["cause"], t["unchanged"]) for t in found["tried"]]
    assert causes == [(0, "SIZE", True), (-1, "SIZE", True), (10**9, "SIZE", True), (64, "", False)]
    assert found["leaked"] == 0


async def test_many_changes_leave_every_block_free(engine: SimulatedEngine) -> None:
    found = await live.soak(engine, {"seed": "1", "sizes": figures.order([32, 64, 128], 40, 16, "soak")})
    assert {k: len(v) for k, v in found["change_ms"].items()} == {"idle": 20, "busy": 20, "carried": 0}
    assert found["leaked"] == [0] * 4 and found["errors"] == []
    assert all(kb > 1000 for kb in found["resident_kb"]) and len(found["resident_kb"]) == 4


async def test_blocks_that_never_come_back_are_counted(engine: SimulatedEngine) -> None:
    engine._value.free_blocks -= 3
    assert await leaked_blocks(engine, patience_s=0.0) == 3


async def test_waiting_for_more_of_a_stream_that_failed_says_why(engine: SimulatedEngine) -> None:
    async with Streams(engine, [a_job(engine, "a", 10, 1 << 20), a_job(engine, "b", 10, 1 << 20)]) as both:
        await both.more(3)
        await engine.abort(["b"])
        with pytest.raises(Broken, match=r"b ended after \d+ tokens: EngineFault"):
            await both.more(1 << 19)
    assert await leaked_blocks(engine) == 0, "leaving closes the one that still runs"


# The host's process.


class SimulatedProcess(Process):
    module = "tests.bench.simulated_host"


@pytest.mark.slow
async def test_the_hosts_process_answers_parts_and_is_another_one_after_a_restart(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        process = SimulatedProcess(processes, Shape("m", max_num_seqs=24))
        await process.start()
        assert process.facts["engine"] == "simulated" and process.facts["live_blocks"]
        assert (await process.ask("size", size=64))["block_size"] == 64
        found = await process.ask("bout", **bout_args(sizes=[32]))
        assert [len(t) for t in figures.tokens_of(found)] == [120] * 3
        assert found["changes"][0]["before"] == 64
        first = processes.children["engine"].process.pid
        took = await process.restart()
        assert took["stop_s"] > 0 and took["start_s"] > 0
        assert processes.children["engine"].process.pid != first and not psutil.pid_exists(first)
        assert (await process.ask("settle"))["block_size"] == 16, "it starts as it does by default"


async def test_a_part_that_fails_and_a_host_that_is_gone_are_errors_with_their_log(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        process = SimulatedProcess(processes, Shape("m"))
        await process.start()
        with pytest.raises(BenchError, match="size: ReblockRefused"):
            await process.ask("size", size=7)
        assert (await process.ask("settle"))["held"] == 0, "it serves on"
        processes.children["engine"].process.kill()
        with pytest.raises(BenchError, match="ended too early"):
            await process.ask("settle")


# The course.


def options(tmp_path: Path, **fields: Any) -> Options:
    return Options(**{"resume": tmp_path / "run", "rounds": 2, **fields})


@pytest.mark.slow
async def test_the_whole_course_measures_every_part_once(tmp_path: Path) -> None:
    hosts = Hosts()
    report = await course.run(options(tmp_path), Parts(hosts.engine))
    by_name = {g.name: g for g in report.goals}
    for name in ("wrong_tokens", "lost_tokens", "leaked_blocks", "control_differing_tokens", "refusals_not_kept"):
        assert by_name[name].value == 0, name
    assert by_name["changes_under_load"].value == 6 and by_name["changes_under_load"].met is False
    assert hosts.shapes[0].dtype == "float32"
    sizes = [c["after"] for a in report.arms if a["arm"] == "under load" for c in a["changes"]]
    assert len(set(sizes)) == 6, "each is another one as long as there are others"
    parts = [p for p in hosts.parts if p != "settle"]
    assert parts == [*["bout"] * 5, "refusals", "soak", "bout", "bout"]
    told = [args.get("carry", False) for h in hosts.all for part, args in h.asked if part == "bout"]
    assert told == [False, False, True, False, True, False, True], "by turns; what is served carries where it can"
    arms = [a["arm"] for a in report.arms]
    assert arms == ["under load", "carried over", "as served", "in a row", "refusals", "restart"]
    text = report.text()
    assert "restart ÷" in text and "stop 4.0 s, start 20.0 s" in text
    json.dumps(report.as_json())
    again = Hosts()
    second = await course.run(options(tmp_path), Parts(again.engine))
    assert again.all == [] and second.arms == report.arms, "nothing is left to measure"


@pytest.mark.slow
async def test_a_failure_keeps_what_was_measured_and_the_next_run_goes_on_there(tmp_path: Path) -> None:
    asked: list[str] = []

    def fail(part: str) -> None:
        asked.append(part)
        if asked.count("bout") == 4:
            raise BenchError("the engine's process ended too early")

    with pytest.raises(BenchError, match=r"what was measured before is kept: --resume"):
        await course.run(options(tmp_path), Parts(Hosts(fail).engine))
    hosts = Hosts()
    report = await course.run(options(tmp_path), Parts(hosts.engine))
    assert [p for p in hosts.parts if p != "settle"] == ["bout", "bout", "refusals", "soak", "bout", "bout"]
    assert any("resumed: 3 finished parts" in n for n in report.notes)
    assert {g.name: g.value for g in report.goals}["wrong_tokens"] == 0


async def test_interrupted_it_reports_what_it_has(tmp_path: Path) -> None:
    begun = asyncio.Event()
    hosts = Hosts(lambda part: begun.set() if part == "refusals" else None)
    running = asyncio.ensure_future(course.run(options(tmp_path), Parts(hosts.engine)))
    await begun.wait()
    running.cancel()
    report = await running
    assert not report.whole and any("--resume" in n for n in report.notes)
    assert {a["arm"] for a in report.arms} == {"under load", "carried over"}


async def test_an_engine_that_cannot_change_while_it_runs_is_an_error_that_says_so(tmp_path: Path) -> None:
    class Fixed(Hosts):
        def engine(self, directory: Path, shape: Any) -> Any:
            made = super().engine(directory, shape)

            class Managed:
                async def __aenter__(self) -> LocalHost:
                    host: LocalHost = await made.__aenter__()
                    host.facts = {**host.facts, "live_blocks": False}
                    return host

                async def __aexit__(self, *error: Any) -> Any:
                    return await made.__aexit__(*error)

            return Managed()

    with pytest.raises(BenchError, match="only by a restart") as e:
        await course.run(options(tmp_path), Parts(Fixed().engine))
    assert e.value.code is ExitCode.REFUSED


def test_the_full_plan_has_what_the_goals_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(Options())  # as imported, before the fixture's
    assert plan.bouts * plan.changes == figures.CHANGES
    assert plan.in_a_row == figures.SOAK_CHANGES
    assert (min(plan.prompts), max(plan.prompts), len(plan.prompts)) == (40, 1500, 8)
    worst = plan.changes * (2 * live.SETTLED_TOKENS + live.JITTER_TOKENS)
    assert plan.output > 2 * worst, "streams outlive their changes, though those with short prompts run ahead"
    quick = plan_of(Options(quick=True))
    assert quick.expected_s() < 180 and quick.budget_s is not None and quick.budget_s < 180
