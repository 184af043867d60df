"""run.json: found while its supervisor lives, and never after."""

from __future__ import annotations

import os
import stat
import subprocess
import time
from pathlib import Path

import pytest

from trimtab.kit.run_file import RunFile, control_address, gateway_address, read


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("TRIMTAB_CONTROL", raising=False)
    monkeypatch.delenv("TRIMTAB_GATEWAY", raising=False)


def a_run(mesh: str = "default", pid: int | None = None, *, started_unix_ms: int | None = None) -> RunFile:
    now = int(time.time() * 1000) if started_unix_ms is None else started_unix_ms
    pids = {"up": pid or os.getpid(), "w0": 1}
    return RunFile(mesh, f"{mesh}:1", f"{mesh}:2", f"{mesh}:3", now, "/somewhere", pids)


def test_a_running_mesh_is_found_and_its_file_is_private() -> None:
    path = a_run().write()
    assert read("default") == a_run(started_unix_ms=read("default").started_unix_ms)  # type: ignore[union-attr]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (control_address(None), gateway_address(None)) == ("default:3", "default:1")


def test_a_flag_wins_over_the_environment_and_that_over_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    a_run().write()
    monkeypatch.setenv("TRIMTAB_CONTROL", "env:1")
    assert (control_address("flag:1"), control_address(None)) == ("flag:1", "env:1")


def test_without_a_running_mesh_the_default_ports_are_meant() -> None:
    assert (control_address(None), gateway_address(None)) == ("127.0.0.1:7071", "127.0.0.1:7070")


def test_a_file_of_a_dead_supervisor_is_ignored() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    a_run(pid=child.pid).write()
    assert read("default") is None
    assert control_address(None) == "127.0.0.1:7071"


def test_a_process_that_only_inherited_the_number_does_not_count() -> None:
    a_run(started_unix_ms=1000).write()
    assert read("default") is None


def test_the_only_running_mesh_is_meant_and_of_several_none() -> None:
    a_run("blue").write()
    assert control_address(None) == "blue:3"
    a_run("green").write()
    assert control_address(None) == "127.0.0.1:7071"


def test_only_its_own_file_is_removed() -> None:
    path = a_run().write()
    a_run(pid=1).remove()
    assert path.exists()
    a_run().remove()
    assert not path.exists()


def test_a_broken_file_is_no_mesh(tmp_path: Path) -> None:
    a_run().write().write_text('{"mesh": 1}')
    assert read("default") is None
