"""What docs/clients.md shows is run here, as it stands there, against a mesh."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.test_readme import ROOT, Up
from tests.docs.test_readme import up as up

pytestmark = pytest.mark.slow

DOCUMENT = (ROOT / "docs" / "clients.md").read_text()


def block(kind: str) -> str:
    (found,) = re.findall(rf"```{kind}\n(.*?)```", DOCUMENT, re.DOTALL)
    return found


def test_the_example_prints_an_answer(up: Up) -> None:
    code = block("python").replace("127.0.0.1:7070", up.grpc)
    done = subprocess.run(
        [sys.executable, "-c", code], env=up.env, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("tokens")
    assert "rudder" in done.stdout


def test_the_batch_of_one_line_comes_out_as_shown(up: Up, tmp_path: Path) -> None:
    line, shown = block("json").splitlines()
    models = [sys.executable, "-m", "trimtab_cli", "chat", "hi", "--json", "--gateway", up.grpc]
    asked = subprocess.run(models, env=up.env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    (tmp_path / "in.jsonl").write_text(line.replace('"tiny"', json.dumps(json.loads(asked.stdout)["model"])) + "\n")
    verb = block("console").strip().removeprefix("trimtab ").split()
    command = [sys.executable, "-m", "trimtab_cli", *verb, "--gateway", up.grpc]
    env = {**up.env, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    (answer,) = [json.loads(x) for x in (tmp_path / "out.jsonl").read_text().splitlines()]
    wanted = json.loads(shown)
    assert list(answer) == list(wanted)
    assert list(answer["response"]) == list(wanted["response"])
    assert answer["custom_id"] == wanted["custom_id"]
    assert answer["response"]["body"]["object"] == wanted["response"]["body"]["object"]
