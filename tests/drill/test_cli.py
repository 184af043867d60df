"""The verb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types

import pytest
from click.testing import CliRunner

from services.bench.report import Report
from services.drill import cli
from services.drill.options import DrillOptions
from tests.bench.test_report import a_goal


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[DrillOptions]:
    """Options that a drill named `streams` got, which reports one missed goal."""
    got: list[DrillOptions] = []

    async def run(options: DrillOptions) -> Report:
        got.append(options)
        return Report("streams", [], [a_goal(False, "lost")], kind="drill")

    module = types.ModuleType("fake_drill")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_drill", module)
    monkeypatch.setitem(cli.DRILLS, "streams", cli.Drill("fake_drill", "a fake"))
    return got


def test_it_reports_and_fails_a_check_on_a_missed_goal(asked: list[DrillOptions]) -> None:
    done = CliRunner().invoke(cli.drill, ["streams", "--quick", "--real", "60", "--seed", "4", "--check"])
    assert (done.exit_code, asked) == (1, [DrillOptions(quick=True, real=60, seed=4)])
    assert done.stdout.startswith("drill streams, ")
    assert done.stderr == "check: missed: lost\n"


def test_its_json_says_that_it_is_a_drill(asked: list[DrillOptions]) -> None:
    done = CliRunner().invoke(cli.drill, ["streams", "--json", "-"])
    assert done.exit_code == 0
    assert json.loads(done.stdout)["drill"] == "streams"


def test_a_json_file_that_cannot_be_written_is_known_before_the_run(asked: list[DrillOptions]) -> None:
    done = CliRunner().invoke(cli.drill, ["streams", "--json", "/nowhere/out.json"])
    assert (done.exit_code, asked) == (2, [])


@pytest.mark.parametrize(("module", "verb", "argument"), [("drill", "drill", "streams"), ("bench", "bench", "push")])
def test_grpc_is_told_of_forks_before_it_is_imported(module: str, verb: str, argument: str) -> None:
    """It reads that word once. Else it starts threads in each child that is forked, which may crash before it becomes another program."""
    code = (
        "import importlib, os, sys\n"
        "class Witness:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'grpc':\n"
        "            print(os.environ.get('GRPC_ENABLE_FORK_SUPPORT'), flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Witness())\n"
        f"import services.{module}.cli as cli\n"
        f"cli.{verb}(['{argument}'])\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout == "0\n", done.stderr
