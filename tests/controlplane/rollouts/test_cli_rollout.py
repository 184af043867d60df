"""`trimtab rollout`, as it is typed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from controlplane.cli_rollout import rollout
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh

ROOT = click.Group(commands={"rollout": rollout})


async def typed(mesh: Mesh, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, ROOT, ["rollout", *words, "--control", mesh.address])


async def read(mesh: Mesh, *words: str) -> Any:
    return json.loads((await typed(mesh, *words, "--json")).stdout)


async def workers(mesh: Mesh) -> None:
    for i in range(3):
        mesh.start_node(FakeNode(mesh.address, f"w{i}"))
    await mesh.until(lambda fleet: len(fleet) == 3 and all(m.report is not None for m in fleet.values()))


async def test_a_rollout_from_its_start_to_its_end(quiet: None, tmp_path: Path) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text("fields: {batch: {active: 8}}\n")
    async with a_mesh() as mesh:
        await workers(mesh)
        assert "there has been no rollout" in (await typed(mesh, "list")).stdout
        dry = await typed(mesh, "start", "-f", str(file), "--canary", "50%", "--dry-run")
        assert "would try batch.active=8 on w0, w1" in dry.stdout
        begun = await read(
            mesh, "start", "-f", str(file), "--set", "batch.hard_cap=50", "--bake", "10m", "--weight", "0.2"
        )
        assert begun["fields"] == {"batch.active": "8", "batch.hard_cap": "50"}
        assert (begun["node_ids"], begun["weight"], begun["bake_s"], begun["live"]) == (["w0"], 0.2, 600, True)
        second = await typed(mesh, "start", "--set", "batch.active=9")
        assert second.exit_code == 4 and begun["rollout_id"] in second.stderr
        shown = await typed(mesh, "show", begun["rollout_id"])
        assert "baking" in shown.stdout and "yet without it: w1, w2" in shown.stdout
        assert (await read(mesh, "show"))["rollout_id"] == begun["rollout_id"]
        over = await typed(mesh, "abort", begun["rollout_id"], "--author", "ada", "--reason", "enough")
        assert "aborted by ada: enough" in over.stdout
        assert [(r["stage"], r["kind"]) for r in await read(mesh, "list")] == [("aborted", "policy")]
        again = await typed(mesh, "promote", begun["rollout_id"])
        assert again.exit_code == 4 and "has ended" in again.stderr


@pytest.mark.slow
async def test_wait_tells_what_happens_and_ends_with_5_where_it_was_not_promoted(quiet: None) -> None:
    async with a_mesh() as mesh:
        await workers(mesh)
        # Nobody asks anything of these workers: it ends undecided.
        result = await typed(mesh, "start", "--set", "batch.active=8", "--bake", "1s", "--wait")
        assert result.exit_code == 5
        assert "canaries: w0" in result.stdout and "undecided: too few requests" in result.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "name at least one field"),
        (["--set", "batch.active"], "FIELD=VALUE"),
        (["--set", "batch.active=8", "--canary", "100%"], "above 0% and below 100%"),
        (["--set", "batch.active=8", "--canary", "0"], "a number from 1"),
        (["--set", "batch.active=8", "--canary", "2", "--canary", "w0"], "of a number, a share or a label"),
        (["--set", "batch.active=8", "--weight", "0"], "weight"),
    ],
)
def test_what_is_typed_wrong_is_said_before_anybody_is_asked(words: list[str], says: str) -> None:
    result = CliRunner().invoke(ROOT, ["rollout", "start", *words, "--control", "127.0.0.1:1"])
    assert result.exit_code == 2 and says in result.stderr
