"""`trimtab doctor` as a user types it, at a real control plane whose telemetry the test makes up; fixes are real calls."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from controlplane import cli_doctor
from controlplane.cli_doctor import SYMPTOMS, doctor
from controlplane.settings import ControlSettings
from tests.controlplane.folded import Tells, a_gateway, a_telemetry, a_window, a_worker, an_idle_worker, windows
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from trimtab import measures
from trimtab.codec import decode_match
from trimtab.kit.process import free_port
from trimtab.messages import RequestMatch, Workload
from trimtab.v1 import control_pb2


@dataclass
class Shell:
    """Types `trimtab doctor` at a mesh of one worker that obeys every command."""

    mesh: Mesh
    worker: FakeNode
    tells: Tells

    async def __call__(self, *words: str, keys: str = "") -> Result:
        return await asyncio.to_thread(CliRunner().invoke, doctor, [*words, "--control", self.mesh.address], keys)

    async def json(self, *words: str) -> Any:
        return json.loads((await self(*words, "--json")).stdout)

    async def value(self, name: str, node: str = "") -> Any:
        found = await self.mesh.admin.get_policy(node)
        part, _, leaf = name.partition(".")
        return getattr(getattr(found.effective, part), leaf)


@pytest.fixture
async def shell(quiet: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Shell]:
    tells = Tells(a_telemetry()).instead(monkeypatch)
    async with a_mesh() as mesh:
        worker = mesh.start_node(FakeNode(mesh.address))
        worker.obeys = lambda _: control_pb2.CommandResult(ok=True, affected=2)
        await worker.holds(1, 1)
        yield Shell(mesh, worker, tells)


def slow() -> Any:
    waits = {
        measures.REALTIME_WAITS: 10,
        measures.REALTIME_WAIT_MS: 3000,
        measures.BATCH_WAITS: 10,
        measures.BATCH_WAIT_MS: 1000,
    }
    return a_worker(windows=windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, counters=waits)))


def out_of_memory() -> Any:
    counters = {measures.OUT_OF_MEMORY: 1}
    return a_worker(windows=windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, counters=counters)))


@pytest.mark.parametrize("worker", [a_worker, an_idle_worker])
async def test_a_mesh_that_is_well_exits_0_with_a_line_for_each_symptom(shell: Shell, worker: Any) -> None:
    shell.tells.answer = a_telemetry(a_gateway(gauges=dict.fromkeys(measures.GAUGES, 0.0)), worker())
    result = await shell()
    assert (result.exit_code, result.stderr) == (0, ""), result.output
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines if line and not line.startswith(" ")][:-1] == [
        [s, "ok"] for s in SYMPTOMS
    ]
    assert lines[-1] == "all is well"


async def test_what_is_found_exits_1_with_checks_figures_and_commands_in_80_columns(shell: Shell) -> None:
    shell.tells.answer = a_telemetry(a_gateway(), slow(), leader_id="")
    result = await shell()
    assert result.exit_code == 1
    assert "delay        FOUND" in result.stdout and "leader       FOUND" in result.stdout
    assert "longer than BATCH (100 ms)" in " ".join(result.stdout.split())
    assert "\n             trimtab policy set priority.realtime_delta=1\n" in result.stdout
    assert "2 of 12 symptoms show: delay, leader" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


async def test_what_can_not_be_told_exits_5(shell: Shell) -> None:
    shell.tells.answer = a_telemetry(a_gateway(), a_worker(gauges={measures.KV_USED: None}))
    result = await shell("--symptom", "oom")
    assert (result.exit_code, result.stdout.splitlines()[0].split()[:2]) == (5, ["oom", "UNKNOWN"])
    assert "nothing found, but it can't be told of oom" in result.stdout


async def test_one_symptom_alone_is_looked_for(shell: Shell) -> None:
    shell.tells.answer = a_telemetry(a_gateway(), slow(), leader_id="")
    found = await shell.json("--symptom", "leader", "--symptom", "store")
    assert [(s["symptom"], s["verdict"]) for s in found["symptoms"]] == [("store", "ok"), ("leader", "found")]
    assert found["verdict"] == "goal_failed" and "done" not in found


async def test_json_has_checks_and_fixes_and_whether_they_can_be_done_from_here(shell: Shell) -> None:
    shell.tells.answer = a_telemetry(a_gateway(), out_of_memory())
    [found] = (await shell.json("--symptom", "oom"))["symptoms"]
    assert found["checks"][0]["name"] == "engines out of memory" and found["checks"][0]["verdict"] == "found"
    assert {"does", "command", "by_itself"} == set(found["fixes"][0]) and found["fixes"][0]["by_itself"] is True


async def test_fix_sets_the_policy_says_why_and_tells_the_way_back(shell: Shell) -> None:
    await shell.mesh.admin.set_policy({"loops.priority": "on"}, author="t", reason="as a person may")
    shell.tells.answer = a_telemetry(a_gateway(), slow())
    result = await shell("--symptom", "delay", "--fix", "--yes", "--author", "ada")
    assert result.exit_code == 1
    assert "priority.realtime_delta: 0 (default) → 1" in " ".join(result.stdout.split())
    assert "\n  undo: trimtab policy set priority.realtime_delta=default\n" in result.stdout
    assert await shell.value("priority.realtime_delta") == 1
    assert [c.WhichOneof("command") for c in shell.worker.commands.value] == ["reload_policy"]
    [entry] = [e for e in (await shell.mesh.admin.history()).entries if e.author == "ada"]
    assert entry.reason.startswith("doctor: w0: REALTIME waits 300 ms")


async def test_fix_releases_and_halves_one_workers_running_set(shell: Shell) -> None:
    shell.tells.answer = a_telemetry(a_gateway(), out_of_memory())
    done = (await shell.json("--symptom", "oom", "--fix", "--yes"))["done"]
    assert [d["done"] for d in done] == [True, True]
    assert (done[0]["said"], done[1]["undo"]) == (
        "2 requests released",
        "trimtab policy set batch.active=default --for node/w0",
    )
    [command] = shell.worker.commands.value
    match = decode_match(command.release_requests.match)
    assert match == RequestMatch(workload=Workload.BATCH, min_age_ms=60_000)
    assert (await shell.value("batch.active", "w0"), await shell.value("batch.active")) == (24, 48)


async def test_fix_restarts_a_hung_worker(shell: Shell) -> None:
    shell.tells.answer = a_telemetry(a_gateway(), a_worker(state=control_pb2.NODE_STATE_HUNG))
    done = (await shell.json("--symptom", "workers", "--fix", "--yes"))["done"]
    assert [(d["done"], d["undo"]) for d in done] == [(True, "nothing to take back")]
    [command] = shell.worker.commands.value
    assert (command.drain.restart, command.drain.deadline_ms) == (True, 0)


async def test_fix_takes_back_what_was_forced_and_the_way_back_forces_it_again(shell: Shell) -> None:
    forced = control_pb2.BREAKER_FORCE_OPEN
    await shell.mesh.admin.force_breaker("w0", forced, author="ada", for_ms=3_600_000)
    [done] = (await shell.json("--symptom", "breakers", "--fix", "--yes"))["done"]
    assert (done["done"], done["said"]) == (True, "taken back")
    assert done["undo"] in ("trimtab breaker open w0 --for 59m", "trimtab breaker open w0 --for 1h")
    assert (await shell("--symptom", "breakers")).exit_code == 0


async def test_one_that_fails_is_told_and_the_others_are_done(shell: Shell) -> None:
    shell.worker.obeys = lambda _: control_pb2.CommandResult(ok=False, reason="BUSY", message="not now")
    hung = a_worker(state=control_pb2.NODE_STATE_HUNG)
    shell.tells.answer = a_telemetry(a_gateway(), hung, out_of_memory(), leader_id="c0")
    result = await shell("--symptom", "workers", "--symptom", "oom", "--fix", "--yes")
    assert "not done: hand on what w0 has, and have it started anew: BUSY: not now" in " ".join(result.stdout.split())
    assert await shell.value("batch.active", "w0") == 24


@pytest.mark.parametrize(("keys", "value"), [("y\nn\n", 1), ("n\nn\n", 0)])
async def test_at_a_terminal_each_fix_is_asked_about(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, keys: str, value: int
) -> None:
    monkeypatch.setattr(cli_doctor, "_at_a_terminal", lambda: True)
    await shell.mesh.admin.set_policy({"loops.priority": "on"}, author="t", reason="as a person may")
    shell.tells.answer = a_telemetry(a_gateway(), slow())
    result = await shell("--symptom", "delay", "--fix", keys=keys)
    asked = "move REALTIME a level earlier (trimtab policy set priority.realtime_delta=1)?"
    assert asked in " ".join(result.stderr.split()), result.stderr
    assert await shell.value("priority.realtime_delta") == value
    assert ("nothing was set right" in result.stdout) is (value == 0)


@pytest.mark.parametrize("words", [("--fix",), ("--yes",), ("--symptom", "headache")])
async def test_fix_without_anybody_to_ask_and_other_mistakes_are_usage_errors(
    shell: Shell, words: tuple[str, ...]
) -> None:
    result = await shell(*words)
    assert (result.exit_code, len(shell.tells.asked)) == (2, 0)


def test_an_unreachable_control_plane_exits_3() -> None:
    assert CliRunner().invoke(doctor, ["--control", f"127.0.0.1:{free_port()}"]).exit_code == 3


def test_the_document_names_every_symptom_and_every_setting_of_alerts() -> None:
    text = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text()
    settings = [f.name for f in dataclasses.fields(ControlSettings) if f.name.startswith("alert")]
    assert [name for name in (*SYMPTOMS, *settings) if f"`{name}`" not in text] == []
    assert len(settings) == 2


async def test_fix_changes_a_block_size_and_tells_the_way_back(shell: Shell) -> None:
    limits = {"block_size": 256, "block_sizes": [32, 64, 256], "live_blocks": True}
    fewer = windows(lambda ago: a_window(100 - ago, 5.0 * ago + 1, output_tokens=2000 if ago < 6 else 5000))
    wasteful = a_worker(windows=fewer, limits=limits, gauges={measures.FRAGMENTATION: 0.5})
    shell.tells.answer = a_telemetry(a_gateway(), wasteful)
    changed = control_pb2.ReblockResult(change_ms=6.0, recompute_tokens=120, after_block_size=64)
    shell.worker.obeys = lambda _: control_pb2.CommandResult(ok=True, reblock=changed)
    done = (await shell.json("--symptom", "throughput", "--fix", "--yes"))["done"]
    assert [(d["done"], d["undo"]) for d in done] == [(True, "trimtab reblock w0 256")]
    assert "in 6 ms, 120 tokens to compute anew" in done[0]["said"]
    (command,) = shell.worker.commands.value
    assert command.reblock.block_size == 64 and command.reblock.when != control_pb2.REBLOCK_WHEN_NOW
