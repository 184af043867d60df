"""The units of deploy/systemd, by systemd's own check."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

from controlplane.cli_scale import follow
from trimtab.kit.process import EXIT_RESTART

UNITS = Path(__file__).resolve().parents[2] / "deploy" / "systemd"
INSTALLED = "/opt/trimtab/bin"


def text(name: str) -> str:
    return (UNITS / name).read_text()


def command(unit: str) -> list[str]:
    (line,) = [line for line in text(unit).splitlines() if line.startswith("ExecStart=")]
    return shlex.split(line.removeprefix("ExecStart="))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")
def test_systemd_takes_the_units(tmp_path: Path) -> None:
    names = {"trimtab-worker@.service": "trimtab-worker@1.service", "trimtab-scale.service": "trimtab-scale.service"}
    for source, name in names.items():
        (tmp_path / name).write_text(text(source).replace(INSTALLED, str(Path(sys.executable).parent)))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *(str(tmp_path / name) for name in names.values())],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "trimtab-" not in done.stderr, done.stderr


def test_the_follower_is_called_as_it_wants_to_be() -> None:
    words = command("trimtab-scale.service")
    assert words[:3] == [f"{INSTALLED}/trimtab", "scale", "follow"]
    context = follow.make_context("follow", words[3:])
    assert context.params["start"] == "systemctl start trimtab-worker@{n}"
    assert context.params["stop"] == "systemctl stop trimtab-worker@{n}"
    assert isinstance(follow, click.Command)


def test_a_commanded_restart_is_a_failure_to_systemd_and_a_drain_is_none() -> None:
    unit = text("trimtab-worker@.service")
    assert "Restart=on-failure" in unit
    assert "SuccessExitStatus" not in unit
    assert EXIT_RESTART not in (0, 143)
