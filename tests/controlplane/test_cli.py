"""The verbs as a user types them: output, exit codes, and JSON that a program can read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import click
import pytest
import structlog
from click.testing import CliRunner, Result

from controlplane.cli import fleet, policy
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from trimtab.kit.process import free_port
from trimtab.snapshot import Limits

ROOT = click.Group(commands={"policy": policy, "fleet": fleet})


@dataclass
class Shell:
    """Types verbs at a mesh. A verb runs an event loop of its own, so it runs in a thread."""

    mesh: Mesh

    async def __call__(self, *words: str) -> Result:
        return await asyncio.to_thread(CliRunner().invoke, ROOT, [*words, "--control", self.mesh.address])

    async def json(self, *words: str) -> Any:
        result = await self(*words, "--json")
        return json.loads(result.stdout)


@pytest.fixture
def quiet() -> Iterator[None]:
    """The control plane of these tests shares stdout with the verbs; its log must not be taken for their answer."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    yield
    structlog.reset_defaults()


@pytest.fixture
async def shell(quiet: None) -> AsyncIterator[Shell]:
    async with a_mesh() as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        yield Shell(mesh)


async def test_get_shows_value_unit_source_and_doc_in_80_columns(shell: Shell) -> None:
    result = await shell("policy", "get")
    assert result.exit_code == 0
    assert 'policy 1.1, version 0, by trimtab "first start"' in result.stdout
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("batch.active")]
    assert line.split()[:4] == ["batch.active", "48", "requests", "default"]
    assert max(map(len, result.stdout.splitlines())) <= 80
    one = await shell.json("policy", "get", "batch.active")
    assert list(one["fields"]) == ["batch.active"]
    assert (one["fields"]["batch.active"]["value"], one["identity"]["revision"]) == (48, 1)


async def test_set_says_what_changed_and_who_applied_it(shell: Shell) -> None:
    result = await shell("policy", "set", "batch.active=8", "--reason", "less", "--author", "ada")
    assert result.exit_code == 0
    assert "batch.active: 48 (default) → 8" in result.stdout
    assert "w0: applied in 0.5 ms" in result.stdout
    again = await shell("policy", "set", "batch.active=8")
    assert (again.exit_code, "nothing to change" in again.stdout) == (0, True)
    answer = await shell.json("policy", "set", "batch.active=default")
    assert answer["changes"] == [{"field": "batch.active", "before": "8", "after": "default"}]
    assert [(n["node_id"], n["answer"]) for n in answer["nodes"]] == [("w0", "applied")]


@pytest.mark.parametrize("value", ["0", "-1", "text", "65"])
async def test_a_refused_value_exits_4_says_why_and_is_in_the_history(shell: Shell, value: str) -> None:
    result = await shell("policy", "set", f"batch.active={value}")
    assert result.exit_code == 4
    assert "batch.active" in result.stderr
    assert result.stdout == ""
    history = await shell.json("policy", "history")
    assert history[0]["refused_because"].startswith(f"batch.active={value}")
    assert "REFUSED, nothing changed" in (await shell("policy", "history")).stdout
    assert (await shell.json("policy", "get"))["identity"]["revision"] == 1
    fleet = (await shell("fleet")).stdout
    assert "was refused, nothing changed" in fleet
    assert max(map(len, fleet.splitlines())) <= 80
    assert (await shell.json("fleet"))["last_refused"]["refused_because"].startswith(f"batch.active={value}")
    await shell("policy", "set", "batch.active=7")
    assert (await shell.json("fleet"))["last_refused"] is None


async def test_a_conflict_exits_4_with_its_reason_in_json(shell: Shell) -> None:
    await shell("policy", "set", "batch.active=8")
    result = await shell("policy", "set", "batch.active=9", "--expect-version", "0", "--json")
    error = json.loads(result.stdout)["error"]
    assert (result.exit_code, error["reason"], error["found"]) == (4, "CONFLICT", "1")


async def test_a_dry_run_writes_nothing(shell: Shell) -> None:
    result = await shell("policy", "set", "batch.active=8", "--dry-run")
    assert (result.exit_code, "nothing was written" in result.stdout) == (0, True)
    assert (await shell.json("policy", "set", "batch.active=8", "--dry-run"))["written"] is False


async def test_a_worker_that_does_not_answer_in_time_makes_it_partial(shell: Shell) -> None:
    shell.mesh.nodes[0].ready.clear()
    result = await shell("policy", "set", "batch.active=8", "--wait", "50")
    assert (result.exit_code, "w0: no answer yet" in result.stdout) == (5, True)
    assert (await shell("policy", "set", "batch.active=9", "--wait", "0")).exit_code == 0


@pytest.mark.parametrize(
    "words",
    [
        ("policy", "set", "batch.active"),
        ("policy", "set", "batch.active="),
        ("policy", "set", "batch.active=1", "batch.active=2"),
        ("policy", "set"),
        ("policy", "get", "batch.activ"),
        ("policy", "get", "--node", "w9"),
        ("policy", "history", "-n", "0"),
    ],
)
async def test_a_mistyped_verb_is_a_usage_error(shell: Shell, words: tuple[str, ...]) -> None:
    assert (await shell(*words)).exit_code == 2


async def test_fleet_shows_nodes_refusals_and_who_is_lost(shell: Shell) -> None:
    await shell("policy", "set", "batch.active=32")
    small = shell.mesh.start_node(FakeNode(shell.mesh.address, "w1", limits=Limits(max_num_seqs=16)))
    await shell.mesh.until(lambda fleet: "w1" in fleet and fleet["w1"].refusal is not None)
    await shell.mesh.nodes[0].stop()
    await shell.mesh.until(lambda fleet: not fleet["w0"].connected)
    result = await shell("fleet")
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    lines = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith("w")}
    assert "LOST" in lines["w0"]
    assert lines["w1"].split()[1:6] == ["worker", "default", "serving", "0/0", "-"]
    assert "! w1 refused policy 1.2 (ABOVE_ENGINE_LIMIT)" in result.stdout
    assert "newest policy: 1.2; store: memory" in result.stdout
    assert (await shell("policy", "get", "--node", "w1")).exit_code == 4
    nodes = {n["node_id"]: n for n in (await shell.json("fleet"))["nodes"]}
    assert (nodes["w0"]["connected"], nodes["w0"]["state"], nodes["w0"]["policy"]["applied"]["revision"]) == (
        False,
        "lost",
        2,
    )
    assert nodes["w1"]["policy"]["refusal"]["field"] == "batch.active"
    await small.stop()


def test_an_unreachable_control_plane_exits_3_and_says_what_to_do() -> None:
    words = ["fleet", "--control", f"127.0.0.1:{free_port()}"]
    result = CliRunner().invoke(ROOT, words)
    assert (result.exit_code, "trimtab up" in result.stderr) == (3, True)
    error = json.loads(CliRunner().invoke(ROOT, [*words, "--json"]).stdout)["error"]
    assert error["reason"] == "UNREACHABLE"
