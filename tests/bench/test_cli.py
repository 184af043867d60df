"""The verb."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.bench import cli
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.report import Report
from tests.bench.test_report import a_goal, a_report
from trimtab.kit.cli import ExitCode


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """A bench named `fake`: what it is to report, or to raise, goes in as `answer`; the options it got come out."""
    state: dict[str, object] = {"answer": a_report(a_goal(True))}

    async def run(options: Options) -> Report:
        state["options"] = options
        if isinstance(state["answer"], Exception):
            raise state["answer"]
        return state["answer"]  # type: ignore[return-value]

    module = types.ModuleType("fake_bench")
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fake_bench", module)
    monkeypatch.setitem(cli.BENCHES, "fake", cli.Bench("fake_bench", "run", "a fake"))
    monkeypatch.setattr(cli.bench.params[0].type, "choices", ["overhead", "fake"])
    return state


def trimtab_bench(*args: str) -> Result:
    return CliRunner().invoke(cli.bench, ["fake", *args])


def test_it_prints_the_report_and_writes_the_json(asked: dict[str, object], tmp_path: Path) -> None:
    done = trimtab_bench("--json", str(tmp_path / "out.json"), "--quick", "--rounds", "3")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("bench overhead")
    assert json.loads((tmp_path / "out.json").read_text())["goals"][0]["met"] is True
    assert asked["options"] == Options(quick=True, rounds=3)


def test_json_to_stdout_leaves_it_to_the_json(asked: dict[str, object]) -> None:
    done = trimtab_bench("--json", "-")
    assert json.loads(done.stdout)["bench"] == "overhead"
    assert "GOAL" in done.stderr


def test_a_check_fails_on_a_missed_goal_only(asked: dict[str, object]) -> None:
    asked["answer"] = a_report(a_goal(None, "speed"))
    done = trimtab_bench("--check")
    assert (done.exit_code, done.stderr) == (0, "check: no goal is missed; undecided: speed\n")
    asked["answer"] = a_report(a_goal(False, "speed"))
    assert trimtab_bench().exit_code == 0
    done = trimtab_bench("--check")
    assert (done.exit_code, done.stderr) == (1, "check: missed: speed\n")


def test_a_bench_that_cannot_run_says_why(asked: dict[str, object]) -> None:
    asked["answer"] = BenchError("worker ended with code 1", ExitCode.UNREACHABLE)
    done = trimtab_bench()
    assert (done.exit_code, done.stderr) == (3, "error: worker ended with code 1\n")


def test_a_json_file_that_cannot_be_written_is_known_before_the_run(asked: dict[str, object]) -> None:
    done = trimtab_bench("--json", "/nowhere/out.json")
    assert done.exit_code == 2
    assert "there is no directory /nowhere" in done.stderr
    assert "options" not in asked


def test_an_unknown_bench_names_those_that_are() -> None:
    done = CliRunner().invoke(cli.bench, ["overhaed"])
    assert done.exit_code == 2
    assert "overhead" in done.stderr
