"""`trimtab config`: every fault at once, and where each value comes from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trimtab_cli.__main__ import cli


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, ["config", *args], env=env)


def test_the_defaults_are_right() -> None:
    result = config("check")
    assert (result.exit_code, result.output) == (0, "the settings are right (no settings file)\n")


def test_every_fault_of_every_section_is_told_at_once() -> None:
    Path("trimtab.toml").write_text(
        '[worker]\nengine = "steam"\n[gateway]\nlisen = "x"\n[control]\nforget_s = "soon"\n'
    )
    env = {"TRIMTAB_UP_WORKERS": "0", "TRIMTAB_GATWAY_HTTP": "x"}
    result = config("check", env=env)
    assert result.exit_code == 2
    for part in (
        "engine must be vllm or simulated, not 'steam'",
        "unknown key lisen; did you mean listen?",
        "forget_s must be a number, not 'soon'",
        "up workers must be 1 to 64, not 0",
        "nobody reads TRIMTAB_GATWAY_HTTP; did you mean TRIMTAB_GATEWAY_HTTP?",
    ):
        assert part in result.stderr
    assert result.stdout == ""
    as_json = json.loads(config("check", "--json", env=env).stdout)
    assert as_json["ok"] is False
    assert len(as_json["faults"]) == 5


def test_a_fault_of_the_file_is_told_once() -> None:
    Path("trimtab.toml").write_text("[wroker]\n")
    assert config("check").stderr.count("unknown section [wroker]; did you mean worker?") == 1


def test_a_missing_file_is_a_fault_only_when_named() -> None:
    assert config("check", "--config", "nowhere.toml").exit_code == 2


def test_each_value_shows_its_source() -> None:
    Path("mine.toml").write_text('[worker]\npool = "fp8"\nlabels = ["rack=1"]\n')
    result = config(
        "print", "--config", "mine.toml", "--section", "worker", "--json", env={"TRIMTAB_WORKER_NODE_ID": "w7"}
    )
    rows = {row["key"]: (row["value"], row["source"]) for row in json.loads(result.stdout)}
    assert rows["pool"] == ("fp8", "mine.toml")
    assert rows["labels"] == (["rack=1"], "mine.toml")
    assert rows["node_id"] == ("w7", "TRIMTAB_WORKER_NODE_ID")
    assert rows["mesh"] == ("default", "default")


def test_print_can_be_pasted_into_a_settings_file() -> None:
    printed = config("print").stdout
    kept = "\n".join(line for line in printed.splitlines() if not line.endswith('= ""') or "max" not in line)
    Path("trimtab.toml").write_text(kept)
    assert config("check").exit_code == 0


def test_a_password_is_not_shown() -> None:
    result = config("print", env={"TRIMTAB_CONTROL_REDIS": "rediss://me:s3:cret@host:6379/0"})
    assert "cret" not in result.stdout
    assert "rediss://me:***@host:6379/0" in result.stdout
    for url in ("redis://:sec@cret@host", "redis://host?db=1&password=cret"):
        assert "cret" not in config("print", env={"TRIMTAB_CONTROL_REDIS": url}).stdout


def test_of_a_webhook_only_its_host_is_shown() -> None:
    for url in ("https://hooks.example/T0/cret", "https://me:cret@hooks.example?k=cret", "https://hooks.example"):
        shown = config("print", env={"TRIMTAB_CONTROL_ALERT_WEBHOOK": url}).stdout
        assert ("cret" not in shown, '"https://hooks.example/***"' in shown) == (True, True)
