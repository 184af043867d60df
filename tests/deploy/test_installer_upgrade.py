"""The installer where something is installed already: the environment is replaced whole or not at all, and not under what runs in it.

An environment takes minutes to build and an index to build from. Here its parts (venv, pip, uv) are stand-ins that do as they are told.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.deploy.units import INSTALL, PATIENCE_S, VENV

PYTHON = """#!/bin/sh
case "$1 $2" in
"-m venv")
    for to; do :; done
    mkdir -p "$to/bin" && cp {parts}/env-python "$to/bin/python" && echo "command = -m venv $to" > "$to/pyvenv.cfg" ;;
*) exec {real} "$@" ;;
esac
"""
ENV_PYTHON = """#!/bin/sh
here=$(dirname "$0")
case "$1 $2 $3" in
"-m pip install") cp {parts}/uv "$here/uv" ;;
"-I -c "*) if test -e "$here/broken"; then echo "No module named trimtab_cli" >&2; exit 1; fi ;;
*) exec {real} "$@" ;;
esac
"""
UV = """#!/bin/sh
here=$(dirname "$0")
case $BUILD in
fails) echo "no such version" >&2; exit 1 ;;
broken) touch "$here/broken" ;;
esac
printf '#!%s/python\\n# %s\\n' "$here" "$BUILD" > "$here/trimtab"
"""
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """The installer with a wheel of these bytes, whose build ends so."""
    parts = tmp_path / "parts"
    parts.mkdir()
    for name, text in (("python", PYTHON), ("env-python", ENV_PYTHON), ("uv", UV)):
        file = parts / name
        file.write_text(text.replace("{parts}", str(parts)).replace("{real}", sys.executable))
        file.chmod(0o755)

    def run(wheel: str, build: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "trimtab.whl").write_text(wheel)
        words = ["--root", str(tmp_path / "root"), "--role", "control", "--wheel", str(tmp_path / "trimtab.whl")]
        command = ["bash", str(INSTALL), *words, "--python", str(parts / "python")]
        env = {**os.environ, "BUILD": build}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)

    return run


def environments(root: Path) -> dict[str, str]:
    """What is under /opt, and what its command says."""
    return {p.name: (p / "bin/trimtab").read_text() for p in (root / "opt").iterdir()}


@pytest.mark.slow
def test_a_newer_package_takes_the_older_one_s_place(tmp_path: Path, run: Run) -> None:
    """By scripts that name where they are, and not where they were built."""
    for n in ("1", "2"):
        done = run(n, f"whole {n}")
        assert done.returncode == 0, done.stderr
        assert environments(tmp_path / "root") == {"trimtab": f"#!/opt/trimtab/bin/python\n# whole {n}\n"}
    assert ".new" not in (tmp_path / "root/opt/trimtab/pyvenv.cfg").read_text()
    assert "nothing to do" in run("2", "fails").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "why"),
    [("fails", "it could not be built (above); /opt/trimtab is as it was"), ("broken", "what was built does not load")],
)
def test_one_that_can_not_be_had_leaves_the_older_one_as_it_was(tmp_path: Path, run: Run, build: str, why: str) -> None:
    assert run("1", "whole").returncode == 0
    before = environments(tmp_path / "root")
    done = run("2", build)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr
    assert environments_that_work(tmp_path / "root") == before
    assert run("2", "whole 2").returncode == 0
    assert environments(tmp_path / "root") == {"trimtab": "#!/opt/trimtab/bin/python\n# whole 2\n"}


def environments_that_work(root: Path) -> dict[str, str]:
    return {p.name: (p / "bin/trimtab").read_text() for p in (root / "opt").iterdir() if p.suffix != ".new"}


@pytest.mark.slow
def test_a_first_one_that_does_not_load_leaves_nothing(tmp_path: Path, run: Run) -> None:
    assert run("1", "broken").returncode == 2
    assert not (tmp_path / "root/opt/trimtab").exists()


@pytest.mark.slow
def test_a_run_that_was_cut_short_between_the_two_is_mended(tmp_path: Path, run: Run) -> None:
    assert run("1", "whole").returncode == 0
    opt = tmp_path / "root/opt"
    (opt / "trimtab").rename(opt / "trimtab.old")
    again = run("1", "fails")
    assert (again.returncode, "bring back /opt/trimtab" in again.stdout) == (0, True), again.stderr
    assert set(environments(tmp_path / "root")) == {"trimtab"}


def test_a_directory_beside_it_that_is_somebody_s_is_left_alone(tmp_path: Path, run: Run) -> None:
    theirs = tmp_path / "root/opt/trimtab.old/precious"
    theirs.parent.mkdir(parents=True)
    theirs.write_text("x")
    done = run("1", "whole")
    assert (done.returncode, "/opt/trimtab.old is there already" in done.stderr) == (2, True)
    assert theirs.read_text() == "x"


def on_this_machine(tmp_path: Path, running: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A dry run without --root, where systemctl lists these units as running, over a link to another environment."""
    tool = tmp_path / "bin/systemctl"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\ncase $1 in list-units) printf "{running}" ;; esac\n')
    tool.chmod(0o755)
    prefix, before = tmp_path / "opt/trimtab", tmp_path / "before"
    prefix.parent.mkdir()
    before.mkdir()
    prefix.symlink_to(before)
    command = ["bash", str(INSTALL), "--dry-run", "--prefix", str(prefix), "--link-venv", str(VENV), *words]
    env = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)


def test_an_environment_is_not_replaced_under_units_that_run_in_it(tmp_path: Path) -> None:
    done = on_this_machine(tmp_path, "trimtab-worker@0.service loaded active running Trimtab\\n")
    assert done.returncode == 2
    assert "under trimtab-worker@0.service: first systemctl stop 'trimtab-*'" in done.stderr


@pytest.mark.parametrize(("running", "words"), [("", []), ("trimtab-control.service loaded active\\n", ["--force"])])
def test_it_is_where_nothing_runs_or_somebody_insists(tmp_path: Path, running: str, words: list[str]) -> None:
    done = on_this_machine(tmp_path, running, *words)
    assert done.returncode == 0, done.stderr
    assert f"would: link {tmp_path}/opt/trimtab to {VENV}" in done.stdout
