"""A worker process that is told to restart: how it ends, also when its engine is stuck."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tests.controlplane.mesh import Mesh, a_mesh
from trimtab.kit.process import EXIT_RESTART, free_port
from trimtab.v1 import control_pb2

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
STUCK = """
import asyncio, subprocess, time
from services.worker import __main__ as worker
from services.worker.engines.simulated import SimulatedEngine

worker.ENDS_S, worker.LAST_WORDS_S = 2.0, 0.1
engines = subprocess.Popen(["sleep", "600"], start_new_session=True)
print("engine's process", engines.pid, flush=True)

async def stop(self):
    print("the engine is asked to stop", flush=True)
    {how}

SimulatedEngine.stop = stop
worker.main()
"""
WAITS, BLOCKS = "await asyncio.to_thread(time.sleep, 600)", "time.sleep(600)"


@asynccontextmanager
async def a_worker(mesh: Mesh, tmp_path: Path, *program: str) -> AsyncIterator[Process]:
    """Joined to the mesh as w0."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("TRIMTAB_")}
    flags = ("--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{free_port()}", "--engine", "simulated")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(program or ("-m", "services.worker")),
        *(*flags, "--control", mesh.address),
        stdout=PIPE,
        stderr=STDOUT,
        env={**env, "TRIMTAB_STATE_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"},
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not (m := mesh.plane.fleet.member("w0")) or not m.connected or m.report is None:
                await asyncio.sleep(0.02)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        # Read to the end: a pipe that is left open holds the transport.
        await process.communicate()


async def tell(mesh: Mesh, deadline_s: float, *, restart: bool) -> control_pb2.CommandResult:
    drain = control_pb2.DrainCommand(deadline_ms=int(deadline_s * 1000), restart=restart)
    command = control_pb2.Command(command_id=f"c{deadline_s}{restart}", drain=drain)
    result = await mesh.plane.control.command_one("w0", command, within_s=PATIENCE_S)
    assert result is not None
    return result


async def code_of(process: Process) -> int:
    return await asyncio.wait_for(process.wait(), PATIENCE_S)


@pytest.mark.parametrize(("restart", "code"), [(True, EXIT_RESTART), (False, 0)])
async def test_a_drain_ends_with_0_and_a_restart_with_75(tmp_path: Path, restart: bool, code: int) -> None:
    async with a_mesh() as mesh, a_worker(mesh, tmp_path) as process:
        assert (await tell(mesh, 30.0, restart=restart)).ok
        assert await code_of(process) == code


async def hold(mesh: Mesh) -> asyncio.Task[None]:
    """A request that runs for ever at w0, so that a drain lasts."""
    from trimtab.client import Client
    from trimtab.messages import Request, Sampling

    member = mesh.plane.fleet.member("w0")
    assert member is not None
    begun = asyncio.Event()

    async def run() -> None:
        async with Client(member.hello.address) as client:
            request = Request("", "simulated", "go on", Sampling(max_tokens=100_000, ignore_eos=True))
            async for _ in client.generate(request):
                begun.set()

    task = asyncio.create_task(run())
    await asyncio.wait_for(begun.wait(), PATIENCE_S)
    return task


async def test_who_wants_it_gone_wins_over_who_wants_it_anew(tmp_path: Path) -> None:
    async with a_mesh() as mesh, a_worker(mesh, tmp_path) as process:
        held = await hold(mesh)
        assert (await tell(mesh, 600.0, restart=True)).ok
        assert (await tell(mesh, 500.0, restart=False)).ok
        refused = await tell(mesh, 400.0, restart=True)
        assert (refused.ok, refused.reason) == (False, "LEAVING")
        assert (await tell(mesh, 0.0, restart=False)).ok
        assert await code_of(process) == 0
        await asyncio.gather(held, return_exceptions=True)


async def test_a_sigterm_ends_a_restart_for_good(tmp_path: Path) -> None:
    async with a_mesh() as mesh, a_worker(mesh, tmp_path) as process:
        held = await hold(mesh)
        assert (await tell(mesh, 600.0, restart=True)).ok
        process.send_signal(signal.SIGTERM)
        held.cancel()
        await asyncio.gather(held, return_exceptions=True)
        assert await code_of(process) == 0


async def test_a_restart_with_no_time_sends_what_runs_elsewhere(tmp_path: Path) -> None:
    async with a_mesh() as mesh, a_worker(mesh, tmp_path) as process:
        held = await hold(mesh)
        assert (await tell(mesh, 0.0, restart=True)).ok
        assert await code_of(process) == EXIT_RESTART
        (error,) = await asyncio.gather(held, return_exceptions=True)
        assert error is not None, "its stream was ended"


@pytest.mark.parametrize("how", [WAITS, BLOCKS], ids=["its stop never returns", "it blocks the event loop"])
async def test_a_stuck_engine_is_killed_with_its_processes(tmp_path: Path, how: str) -> None:
    async with a_mesh() as mesh, a_worker(mesh, tmp_path, "-c", STUCK.replace("{how}", how)) as process:
        assert process.stdout is not None
        engine = psutil.Process(int((await process.stdout.readline()).split()[-1]))
        held = await hold(mesh)
        assert (await tell(mesh, 0.0, restart=True)).ok
        assert await code_of(process) == EXIT_RESTART
        await asyncio.gather(held, return_exceptions=True)
        assert b"the engine is asked to stop" in await process.stdout.read()
        await asyncio.to_thread(psutil.wait_procs, [engine], timeout=PATIENCE_S)
        assert not engine.is_running()
