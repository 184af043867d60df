"""What README tells a newcomer to type is run here, as it stands there, against a mesh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from trimtab.kit.process import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
VERBS = re.findall(r"^\.venv/bin/trimtab (.*)$", README, re.MULTILINE)


@dataclass
class Up:
    grpc: str
    http: str
    env: dict[str, str]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    env = {**os.environ, "TRIMTAB_STATE_DIR": str(tmp_path_factory.mktemp("state"))}
    for section, keys in (
        ("GATEWAY", ("LISTEN", "HTTP")),
        ("CONTROL", ("LISTEN", "METRICS")),
        ("WORKER", ("LISTEN", "METRICS")),
    ):
        for key in keys:
            env[f"TRIMTAB_{section}_{key}"] = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "trimtab_cli", "up", "--engine", "simulated", "--json"]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "ready":
                break
        else:
            pytest.fail(f"up ended with {process.wait()}")
        yield Up(event["gateway"], event["http"], env)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=40)


def test_there_are_examples_to_run():
    assert len(BLOCKS) == 2
    assert len(VERBS) >= 5


@pytest.mark.parametrize("block", BLOCKS, ids=["grpc", "openai"])
def test_the_client_examples_print_an_answer(up, block):
    code = block.replace("127.0.0.1:7070", up.grpc).replace("127.0.0.1:7080", up.http.removeprefix("http://"))
    assert code != block
    done = subprocess.run(
        [sys.executable, "-c", code], env=up.env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "rudder" in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_the_verbs_succeed(up, verb):
    done = subprocess.run(
        f"{sys.executable} -m trimtab_cli {verb}",
        shell=True,
        env=up.env,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_make_targets_that_readme_names_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
