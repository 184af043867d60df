"""The systemd units: by systemd's own checks, with every drop-in that the installer makes; and what their numbers have to do with each other."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import click
import pytest

from controlplane.cli_scale import follow
from services.gateway.processes import START_S
from services.gateway.settings import GatewaySettings
from services.worker.__main__ import ENDS_S
from services.worker.engines.vllm import environment
from services.worker.settings import WorkerSettings
from tests.deploy.units import Unit, install
from trimtab.kit.notify import PACE_S, PATIENCE_S
from trimtab.kit.process import EXIT_RESTART
from trimtab.policy import Policy
from trimtab.progress import HUNG_AFTER_MS

SERVICES = (
    "trimtab-control.service",
    "trimtab-gateway.service",
    "trimtab-worker@0.service",
    "trimtab-scale.service",
    "trimtab-gpu.service",
)
NOTIFYING = SERVICES[:3]
EXPOSED_AT_MOST = dict.fromkeys(SERVICES, 30) | {"trimtab-worker@0.service": 40}
"""Tenths of systemd-analyze's score, 0 to 100. A worker has the GPUs' devices, and makes machine code at run time."""

ROOT = Path(__file__).parents[2]

systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="this machine has no systemd-analyze")


@pytest.fixture(scope="module", params=["--tls", "--tls-credentials"])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("root")
    done = install(root, "--gpus", "1", "--numa", "0", request.param, "--scale")
    assert done.returncode == 0, done.stderr
    return root


def analyze(root: Path, tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """systemd-analyze over copies in which the commands are those of this environment, which it looks for."""
    names = []
    tool = tmp_path / "nvidia-modprobe"  # of the driver, which this machine need not have
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    for name in (*SERVICES, "trimtab.target"):
        files = Unit(root, name).files
        text = files[0].read_text().replace("/opt/trimtab/", f"{root}/opt/trimtab/")
        (tmp_path / name).write_text(text.replace("/usr/bin/nvidia-modprobe", str(tool)))
        names.append(str(tmp_path / name))
        if files[1:]:
            (tmp_path / f"{name}.d").mkdir()
        for file in files[1:]:
            (tmp_path / f"{name}.d" / file.name).write_text(file.read_text())
    return subprocess.run(["systemd-analyze", *words, *names], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.slow
@systemd
def test_systemd_takes_the_units_and_their_drop_ins(root: Path, tmp_path: Path) -> None:
    done = analyze(root, tmp_path, "verify", "--man=no")
    assert done.returncode == 0, done.stderr
    assert "trimtab" not in done.stderr, done.stderr


@systemd
def test_systemd_finds_a_mistake_in_a_drop_in(root: Path, tmp_path: Path) -> None:
    """The check above would see one."""
    bad = root / "etc/systemd/system/trimtab-worker@0.service.d/99-bad.conf"
    bad.write_text("[Service]\nNUMAPolicy=nearby\n")
    try:
        assert "99-bad.conf" in analyze(root, tmp_path, "verify", "--man=no").stderr
    finally:
        bad.unlink()


@systemd
@pytest.mark.parametrize("name", SERVICES)
def test_a_unit_is_exposed_no_more_than_it_must_be(root: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / name
    copy.write_text("".join(file.read_text() for file in Unit(root, name).files))
    words = ["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSED_AT_MOST[name]}", str(copy)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout[-300:]


def seconds(unit: Unit, key: str) -> float:
    (value,) = unit.values(key)
    return float(value)


def test_a_drain_has_time_before_systemd_kills(root: Path) -> None:
    """Those of the settings' default; a longer one lives on its pings, each of which must reach beyond the next and beyond the end."""
    worker, gateway = Unit(root, "trimtab-worker@0.service"), Unit(root, "trimtab-gateway.service")
    assert seconds(worker, "TimeoutStopSec") > WorkerSettings().drain_s + ENDS_S
    assert seconds(gateway, "TimeoutStopSec") > GatewaySettings().drain_s
    assert PATIENCE_S > 2 * PACE_S + ENDS_S
    assert seconds(gateway, "TimeoutStartSec") > START_S, (
        "one of several processes is started anew, and not all of them"
    )


def test_a_hung_worker_is_the_control_plane_s_first_and_the_watchdog_s_last(root: Path) -> None:
    for name in NOTIFYING:
        assert Unit(root, name).values("Type") == ["notify"]
        assert seconds(Unit(root, name), "WatchdogSec") > 2 * PACE_S
    watchdog_s = seconds(Unit(root, "trimtab-worker@0.service"), "WatchdogSec")
    assert watchdog_s > 2 * (Policy().heal.no_progress_s + HUNG_AFTER_MS / 1000)


def test_a_commanded_restart_is_a_failure_to_systemd_and_a_drain_is_none(root: Path) -> None:
    for name in NOTIFYING:
        unit = Unit(root, name)
        assert unit.values("Restart") == ["on-failure"]
        assert unit.values("SuccessExitStatus") == []
        assert unit.values("RestartPreventExitStatus") == ["2"]
    assert EXIT_RESTART not in (0, 2, 143)


def test_worker_n_has_gpu_n_and_ports_of_its_own(root: Path) -> None:
    """By the unit alone, as for one that `trimtab scale follow` starts and the installer knew nothing of."""
    env = Unit(root, "trimtab-worker@3.service").environment
    assert (env["TRIMTAB_WORKER_NODE_ID"], env["CUDA_VISIBLE_DEVICES"]) == ("w3", "3")
    assert (env["TRIMTAB_WORKER_LISTEN"], env["TRIMTAB_WORKER_METRICS"]) == ("127.0.0.1:7103", "127.0.0.1:7203")
    WorkerSettings(node_id=env["TRIMTAB_WORKER_NODE_ID"], listen=env["TRIMTAB_WORKER_LISTEN"])


def test_an_engine_gets_as_long_to_load_as_its_unit_and_its_chart_wait(root: Path) -> None:
    """vLLM by itself gives up after ten minutes, which a model of hundreds of GB may take."""
    seconds = int(environment(1)["VLLM_ENGINE_READY_TIMEOUT_S"])
    assert seconds * 1000 == minutes_ms(Unit(root, "trimtab-worker@0.service").values("TimeoutStartSec")[0])
    assert f"startupSeconds: {seconds}" in (ROOT / "deploy/helm/trimtab/values.yaml").read_text()


def test_no_unit_shares_its_state_with_another_user_s(root: Path) -> None:
    """systemd gives the directory to the unit that starts."""
    users = {}
    for name in SERVICES:
        unit = Unit(root, name)
        for directory in unit.values("StateDirectory"):
            users.setdefault(directory, set()).add(tuple(unit.values("User")))
            assert unit.environment["TRIMTAB_STATE_DIR"] == str(root / "var/lib" / directory)
    assert {directory: len(who) for directory, who in users.items()} == {"trimtab": 1, "trimtab-scale": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "node_id", "most"),
    [(["--gpus", "0"], "w{n}", 10), (["--gpus", "2"], "w{n}", 2), (["--gpus", "4", "--name", "box"], "box-w{n}", 4)],
)
def test_the_follower_starts_no_worker_that_has_no_gpu(
    tmp_path: Path, words: list[str], node_id: str, most: int
) -> None:
    """And knows its workers by the names that their own variables give them."""
    assert install(tmp_path, "--scale", *words).returncode == 0
    command = Unit(tmp_path, "trimtab-scale.service").command
    assert command[:3] == [f"{tmp_path}/opt/trimtab/bin/trimtab", "scale", "follow"]
    assert isinstance(follow, click.Command)
    asked = follow.make_context("follow", command[3:]).params
    assert (asked["pool"], asked["node_id"], asked["most"]) == ("default", node_id, most)
    # `systemctl start` waits until the unit serves, which a large model does after half an hour, and others may be missing too.
    assert asked["start"] == "systemctl start --no-block trimtab-worker@{n}"
    assert asked["joins_within_ms"] > minutes_ms(
        Unit(tmp_path, "trimtab-worker@0.service").values("TimeoutStartSec")[0]
    )
    assert asked["stop"] == "systemctl stop trimtab-worker@{n}"
    worker = Unit(tmp_path, "trimtab-worker@0.service")
    assert worker.environment["TRIMTAB_WORKER_NODE_ID"] == node_id.replace("{n}", "0")


def minutes_ms(said: str) -> int:
    assert said.endswith("min")
    return int(said.removesuffix("min")) * 60_000


def test_cuda_s_devices_are_made_before_a_worker_starts(root: Path) -> None:
    worker, gpu = Unit(root, "trimtab-worker@0.service"), Unit(root, "trimtab-gpu.service")
    for key in ("Wants", "After"):
        assert gpu.name in worker.values(key)[0].split()
    assert gpu.values("Type") == ["oneshot"]
    assert gpu.values("User") == []
    (condition,), (command,) = gpu.values("ConditionPathExists"), gpu.values("ExecStart")
    assert command.removeprefix("-").split()[0] == condition
