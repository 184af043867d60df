"""Options that only `mixed` has."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.bench import cli
from services.bench.mixed import course
from services.bench.options import Options
from services.bench.report import Report


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    found: list[Options] = []

    async def run(options: Options) -> Report:
        found.append(options)
        return Report("mixed", [], [])

    monkeypatch.setattr(course, "run", run)
    return found


def bench(*args: str) -> Result:
    return CliRunner().invoke(cli.bench, args)


def test_its_options_reach_it(asked: list[Options], tmp_path: Path) -> None:
    done = bench(
        "mixed", "--arms", "main, only-express", "--itl-budgets", "50,150", "--block-s", "30", "--realtime-per-arm", "20",
        "--step-tokens", "512", "--png", str(tmp_path / "x.png"), "--trace", str(tmp_path),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert asked == [
        Options(
            png=tmp_path / "x.png", arms=("main", "only-express"), block_s=30.0, realtime_per_arm=20, itl_budgets_ms=(50, 150),
            step_tokens=512, trace=tmp_path,
        )
    ]  # fmt: skip


def test_traces_lie_beside_the_checkout_unless_said_otherwise(asked: list[Options]) -> None:
    assert bench("mixed", "--trace", "--quick").exit_code == 0
    assert bench("mixed").exit_code == 0
    assert [o.trace for o in asked] == [cli.TRACES, None]
    assert cli.TRACES.parts[-2:] == ("shared", "traces")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("overhead", "--arms", "mesh"), "bench overhead has no option --arms"),
        (("mixed", "--itl-budgets", "50,x"), "no list of whole numbers"),
        (("mixed", "--itl-budgets", "0"), "at least 1"),
        (("mixed", "--png", "/nowhere/x.png"), "there is no directory /nowhere"),
    ],
)
def test_a_wrong_option_is_named(asked: list[Options], args: tuple[str, ...], message: str) -> None:
    done = bench(*args)
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert asked == []
