"""A mesh of two builds: what a worker of the older one does with a policy that needs the newer. It is a process that knows one schema less."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.contracts.test_version_skew import a_value_away_from_the_default
from tests.controlplane.mesh import FakeNode, Mesh, a_mesh
from tests.controlplane.test_process import line_with
from trimtab.client import Client
from trimtab.kit.process import free_port
from trimtab.messages import Request, Sampling
from trimtab.policy import FIELDS, POLICY_SCHEMA, text
from trimtab_cli.__main__ import cli

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
NEWEST = next(f for f in FIELDS.values() if f.schema == POLICY_SCHEMA)
SET = f"{NEWEST.path}={text(a_value_away_from_the_default(NEWEST))}"
RUN = "from services.worker.__main__ import main; main()"
OLDER = f"import trimtab.policy; trimtab.policy.POLICY_SCHEMA -= 1; {RUN}"
"""Before anybody else takes the number from there."""


@contextlib.asynccontextmanager
async def a_worker(build: str, state: Path, listen: str, control: str) -> AsyncIterator[Process]:
    where = ("--listen", listen, "--metrics", f"127.0.0.1:{free_port()}", "--control", control, "--node-id", "w0")
    env = {**os.environ, "TRIMTAB_STATE_DIR": str(state), "PYTHONUNBUFFERED": "1"}
    command = (sys.executable, "-c", build, "--engine", "simulated", "--drain-s", "0", *where)
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=STDOUT, env=env)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await asyncio.wait_for(process.communicate(), PATIENCE_S)


async def answer_of(worker: str) -> int:
    """Tokens of a request that it was asked."""
    async with Client(worker, kind="worker") as client:
        request = Request("", "simulated", "hello", Sampling(max_tokens=8, ignore_eos=True))
        _, finish = await client.complete(request, timeout_s=PATIENCE_S)
        return finish.usage.completion_tokens


async def typed(mesh: Mesh, *words: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, cli, [*words, "--control", mesh.address])


async def test_an_older_worker_refuses_what_it_does_not_know_serves_on_and_takes_it_once_that_is_gone(
    quiet: None, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with a_mesh() as mesh:
        newer = mesh.start_node(FakeNode(mesh.address, "new"))
        await newer.holds(1, 1)
        assert (await typed(mesh, "policy", "set", SET)).exit_code == 0
        await newer.holds(1, 2)
        async with a_worker(OLDER, tmp_path, listen, mesh.address):
            fleet = await mesh.until(lambda fleet: "w0" in fleet and fleet["w0"].refusal is not None)
            refusal = fleet["w0"].refusal
            assert refusal is not None
            assert (refusal.reason, str(refusal.identity)) == ("SCHEMA_TOO_OLD", "1.2")
            shown = (await typed(mesh, "fleet")).stdout
            assert "SCHEMA_TOO_OLD" in shown
            assert await answer_of(listen) == 8

            back = await typed(mesh, "policy", "set", f"{NEWEST.path}=default", "--wait", "20000")
            assert (back.exit_code, "w0: applied in" in back.stdout) == (0, True)
            fleet = await mesh.until(lambda fleet: fleet["w0"].refusal is None)
            assert str(fleet["w0"].applied) == "1.3"

            barred = await typed(mesh, "policy", "set", SET)
            assert (barred.exit_code, "w0" in barred.stderr, newer.held.value.revision) == (4, True, 3)
            assert await answer_of(listen) == 8


async def test_an_older_worker_that_finds_a_newer_policy_on_its_disk_serves_by_the_defaults_and_says_so(
    quiet: None, tmp_path: Path
) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with a_mesh() as mesh:
        async with a_worker(RUN, tmp_path, listen, mesh.address) as newer:
            await mesh.until(lambda fleet: "w0" in fleet and str(fleet["w0"].applied) == "1.1")
            assert (await typed(mesh, "policy", "set", SET, "--wait", "20000")).exit_code == 0
            newer.terminate()
            await asyncio.wait_for(newer.communicate(), PATIENCE_S)
        nowhere = f"127.0.0.1:{free_port()}"
        async with a_worker(OLDER, tmp_path, listen, nowhere) as older:
            assert "SCHEMA_TOO_OLD" in await line_with(older, "policy on disk refused")
            await line_with(older, "worker ready")
            assert await answer_of(listen) == 8
