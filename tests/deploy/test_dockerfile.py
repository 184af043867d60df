"""The image's recipe: by its linter, and by what of it must agree with the rest of the project."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setup import UV

from services.worker.model import SMOLLM2, ModelError, _download
from services.worker.progress_bar import Stages
from tests.deploy.units import ENVIRONMENT, ROOT

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest), comments left out and continued lines joined."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined)]


def of(word: str) -> list[str]:
    return [rest for found, rest in instructions() if found == word]


def test_hadolint_has_nothing_to_say() -> None:
    words = [str(Path(sys.executable).parent / "hadolint"), "--failure-threshold", "style", str(DOCKERFILE)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_every_base_is_an_argument_that_may_be_a_digest_or_a_stage() -> None:
    stages: set[str] = set()
    for line in of("FROM"):
        base, _, name = line.partition(" AS ")
        assert base in ("${PYTHON_IMAGE}", "engine-${ENGINE}")
        stages.add(name)
    assert {f"engine-{engine}" for engine in ("gpu", "cpu", "none")} <= stages
    assert instructions()[0] == ("ARG", "PYTHON_IMAGE=python:3.11-slim-bookworm")


def test_it_runs_as_nobody_s_root_and_can_t_change_what_it_runs() -> None:
    assert of("USER") == ["10001:10001"]
    assert of("COPY")[-1] == "--from=build /opt/trimtab /opt/trimtab"
    last = [word for word, _ in instructions()]
    assert last.index("USER") > max(i for i, word in enumerate(last) if word in ("RUN", "COPY"))


def test_it_has_every_command_and_the_signal_that_drains() -> None:
    assert set(PROJECT["scripts"]) == {"trimtab", "trimtab-control", "trimtab-gateway", "trimtab-worker"}
    assert of("STOPSIGNAL") == ["SIGTERM"]
    assert of("ENTRYPOINT") == []


def test_what_is_copied_is_there_and_gets_through_dockerignore() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert "*" in lines
    copied = {name for line in of("COPY") if "--from" not in line for name in line.split()[:-1]}
    assert copied == let_in
    assert all((ROOT / name).exists() for name in copied)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(packages["packages"]) <= copied
    assert PROJECT["readme"] in copied
    assert set(PROJECT["license-files"]) <= copied


def test_its_extras_and_constraints_exist() -> None:
    run = " ".join(of("RUN"))
    assert (
        set(re.findall(r"--extra ([a-z-]+)", run))
        == {"gpu", "cpu", "vllm-door"}
        <= set(PROJECT["optional-dependencies"])
    )
    for file in re.findall(r"requirements/\S+\.txt", run):
        assert (ROOT / file).exists()


def test_setup_image_and_installer_resolve_by_the_same_uv() -> None:
    assert f"UV_VERSION={UV.removeprefix('uv==')}" in of("ARG")
    assert f"\nUV={UV}\n" in ENVIRONMENT.read_text()


@pytest.mark.slow
def test_what_fetches_the_default_model_is_in_the_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is made as the image's is, and in it the module that the worker runs."""
    asked: list[list[str]] = []

    def run(stages: Stages, command: list[str], label: str, **how: object) -> tuple[int, str]:
        asked.append(command)
        return 1, "not here"

    monkeypatch.setattr(Stages, "run", run)
    with pytest.raises(ModelError):
        _download(SMOLLM2, tmp_path, Stages(quiet=True))
    (command,) = asked
    assert command[:2] == [sys.executable, "-m"]
    (made,) = re.findall(r"python -m (venv\b.*?) /opt/trimtab(?:\s|$)", " ".join(of("RUN")))
    subprocess.run([sys.executable, "-m", *made.split(), str(tmp_path / "venv")], check=True, timeout=300)
    words = [str(tmp_path / "venv/bin/python"), "-m", *command[2:4], "--help"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


def test_which_gpus_it_sees_is_not_the_image_s_to_say() -> None:
    """With the variable set to all, a container engine hands out every GPU, past the device plugin."""
    env = " ".join(of("ENV"))
    assert "NVIDIA_VISIBLE_DEVICES" not in env
    assert "NVIDIA_DRIVER_CAPABILITIES=compute,utility" in env


def test_no_engine_keeps_the_build_of_torch_that_the_lock_was_made_with() -> None:
    """A constraint on 2.x+cpu could be met by no build for GPUs; that on 2.x is met by both."""
    (expression,) = set(re.findall(r"sed -E '([^']+)'", " ".join(of("RUN"))))
    assert f"sed -E '{expression}'" in ENVIRONMENT.read_text()
    for name in ("constraints.txt", "constraints-gpu.txt"):
        lines = subprocess.run(
            ["sed", "-E", expression, str(ROOT / "requirements" / name)], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        (torch,) = [line for line in lines if line.startswith("torch==")]
        assert re.fullmatch(r"torch==[0-9.]+", torch)
