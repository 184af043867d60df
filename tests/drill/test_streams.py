"""The drill on small meshes of real processes, with simulated engines."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from services.bench.processes import BenchError
from services.drill import streams
from services.drill.cases import cases
from services.drill.crowd import Crowd
from services.drill.figures import OFF, STRIKES, Arm
from services.drill.mesh import Mesh, Shape, frozen, mesh
from services.drill.options import DrillOptions
from services.drill.strikes import Kind, Strike
from trimtab.kit.cli import ExitCode

PATIENCE_S = 30.0
SMALL = Shape(workers=2, gateways=1, flags=["--engine", "simulated", "--step-ms", "20", "--token-us", "0"])
PLAN = streams.Plan(streams=20, different=10, open=10)


async def disturbed(running: Mesh, arm: Arm, *kinds: Kind) -> Arm:
    """Each kind once, the first after streams have begun everywhere."""
    asked = cases(5, PLAN.different)
    crowd = Crowd(running.gateways, asked)
    await crowd.ask(PLAN.open, lambda number: number < len(asked))
    right = [crowd.seen[i] for i in range(len(asked))]
    strikes = [Strike(kind, 1.0, 0.0) for kind in kinds]
    await streams._disturbed(running, asked, right, PLAN, strikes, arm, streams.Found())
    running.check()
    return arm


@pytest.mark.slow
async def test_killed_and_cut_off_workers_lose_nothing_and_are_back(tmp_path: Path) -> None:
    async with mesh(tmp_path, SMALL) as running:
        arm = await disturbed(running, Arm(STRIKES, "simulated"), Kind.KILL, Kind.CUT)
    assert not arm.lost
    assert [o.faults for o in arm.wrong] == []
    assert len(arm.outcomes) >= PLAN.streams
    assert {s.kind for s in arm.struck} == {Kind.KILL, Kind.CUT} and all(s.back for s in arm.struck)
    moved = sum(len(o.moves) for o in arm.outcomes)
    assert moved > 0
    assert sum(arm.counts["resumes"].values()) >= moved


@pytest.mark.slow
async def test_where_streams_do_not_move_a_kill_loses_some(tmp_path: Path) -> None:
    async with mesh(tmp_path, SMALL) as running:
        await running.steering.steer({"resume.attempts": "1"})
        arm = await disturbed(running, Arm(OFF, "simulated"), Kind.KILL)
    assert set(arm.lost) == {"STREAM_CUT"}
    assert [o.faults for o in arm.wrong] == []
    assert not any(o.moves for o in arm.outcomes)


@pytest.fixture
def sleeper() -> Iterator[psutil.Process]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield psutil.Process(process.pid)
    os.kill(process.pid, signal.SIGCONT)
    process.kill()
    process.wait()


async def until(process: psutil.Process, *, stopped: bool) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (process.status() == psutil.STATUS_STOPPED) is not stopped:
            await asyncio.sleep(0.01)


async def test_a_frozen_process_is_thawed_on_leaving(sleeper: psutil.Process) -> None:
    async def fail() -> None:
        async with frozen(sleeper.pid):
            await until(sleeper, stopped=True)
            raise KeyError

    with pytest.raises(KeyError):
        await fail()
    await until(sleeper, stopped=False)


async def test_a_frozen_process_is_thawed_when_the_drill_is_killed(sleeper: psutil.Process) -> None:
    code = (
        "import asyncio\n"
        "from services.drill.mesh import frozen\n"
        "async def main():\n"
        f"    async with frozen({sleeper.pid}):\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    drill = await asyncio.create_subprocess_exec(sys.executable, "-c", code, cwd=Path(streams.__file__).parents[2])
    try:
        await until(sleeper, stopped=True)
    finally:
        drill.kill()
        await drill.wait()
    await until(sleeper, stopped=False)


async def test_too_few_real_streams_are_refused() -> None:
    with pytest.raises(BenchError, match="prove little") as refused:
        await streams.run(DrillOptions(real=3))
    assert refused.value.code is ExitCode.USAGE
