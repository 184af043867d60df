"""`trimtab rollout restart` as a user types it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE

import click
import pytest
from click.testing import CliRunner, Result

from controlplane.cli_restart import add_parser
from controlplane.cli_rollout import rollout
from tests.controlplane.mesh import PATIENCE_S, Mesh, a_mesh
from tests.controlplane.restarts.phoenix import SETTINGS, three


async def typed(mesh: Mesh, *words: str, keys: str = "") -> Result:
    root = click.Group()
    add_parser(root)
    return await asyncio.to_thread(CliRunner().invoke, root, ["restart", *words, "--control", mesh.address], keys)


@pytest.mark.slow
async def test_the_verb_waits_until_it_is_over_and_tells_what_happens(quiet: None) -> None:
    async with a_mesh() as mesh:
        await three(mesh, 2)
        dry = await typed(mesh, "--set", "worker.max_num_seqs=32", "--dry-run")
        assert dry.exit_code == 0
        assert dry.stdout.splitlines() == [
            "would start 2 workers anew, with worker.max_num_seqs=32",
            "  w0 of pool default",
            "  w1 of pool default",
            "the first worker checks the settings before it goes",
        ]
        words = ("--set", "worker.max_num_seqs=32", "--drain", "1s", "--bake", "0s", "--wait", "--yes")
        done = await typed(mesh, *words)
        assert done.exit_code == 0, done.output
        assert done.stdout.splitlines()[-1].endswith("done: 2 of 2 workers were started anew")
        assert "w1 does well" in done.stdout
        told = json.loads((await typed(mesh, *words, "--json")).stdout)
        assert (told["stage"], told["settings"]) == ("done", SETTINGS)


async def test_the_verb_says_how_it_ended(quiet: None) -> None:
    async with a_mesh() as mesh:
        workers = await three(mesh, 2)
        workers[0].refuses = "no"
        stopped = await typed(mesh, "--set", "worker.dtype=x", "--wait", "--yes")
        assert (stopped.exit_code, "BAD_SETTING: no" in stopped.stdout) == (5, True)
        begun = await typed(mesh, "--node", "w1", "--bake", "1h")
        assert (begun.exit_code, "stop it: trimtab rollout abort rs-" in begun.stdout) == (0, True)
        assert (await typed(mesh, "--yes")).exit_code == 4, "another one is on its way"
        for wrong in (("--set", "x"), ("--set", "=1"), ("--set", "a=1", "--set", "a=2"), ("--node", "w9")):
            assert (await typed(mesh, *wrong)).exit_code == 2


@pytest.mark.slow
async def test_what_is_shown_of_one_has_its_steps(quiet: None) -> None:
    async with a_mesh() as mesh:
        await three(mesh, 2)
        done = await typed(
            mesh, "--set", "worker.max_num_seqs=32", "--bake", "0s", "--wait", "--yes", "--reason", "more"
        )
        steps = done.stdout.splitlines()[:-1]
        shown = await asyncio.to_thread(CliRunner().invoke, rollout, ["show", "--control", mesh.address])
        assert "done: 2 of 2 workers were started anew" in shown.stdout
        assert '"more", with worker.max_num_seqs=32' in shown.stdout
        assert shown.stdout.splitlines()[-len(steps) :] == steps and len(steps) > 3


async def test_who_interrupts_the_waiting_is_told_that_it_goes_on(quiet: None) -> None:
    async with a_mesh() as mesh:
        await three(mesh, 2)
        verb = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "trimtab_cli", "rollout", "restart", "--node", "w1", "--bake", "1h", "--wait",
            "--control", mesh.address, stdout=PIPE, stderr=PIPE,
        )  # fmt: skip
        assert verb.stdout is not None and await asyncio.wait_for(verb.stdout.readline(), PATIENCE_S)
        verb.send_signal(signal.SIGINT)
        _, said = await asyncio.wait_for(verb.communicate(), PATIENCE_S)
        assert verb.returncode == 130
        assert "it goes on: see it: trimtab rollout show rs-" in said.decode()
        assert "Traceback" not in said.decode()
        [found] = (await mesh.admin.rollouts(1)).rollouts
        assert found.live


async def test_every_worker_of_the_mesh_is_asked_about(quiet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_mesh() as mesh:
        await three(mesh, 2)
        alone = await typed(mesh)
        assert alone.exit_code == 2 and "--yes where every worker of the mesh is meant" in alone.output
        monkeypatch.setattr("controlplane.cli_restart._at_a_terminal", lambda: True)
        refused = await typed(mesh, keys="n\n")
        assert refused.exit_code == 1 and "nothing was started anew" in refused.output
        assert not (await mesh.admin.rollouts()).rollouts
        assert (await typed(mesh, "--dry-run")).exit_code == 0, "that does nothing"
