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


def test_no_fault_hides_another() -> None:
    Path("trimtab.toml").write_text(
        '[wroker]\n[worker]\nengine = "steam"\nkv_cache_gib = 0\nlabels = ["a", "b"]\nengine_args = "no"\n'
        '[gateway]\nlisten = "x"\ncoalesce_ms = -1\nprocesses = 0\ndefault_workload = "?"\nclient_certs = true\n'
        '[control]\nmetrics = "y"\nlease_s = 0\nforget_s = 0\n[up]\nmesh = "a b/c"\nworkers = 0\ncontrols = 0\npreset = "?"\n'
    )
    told = config("check").stderr
    for part in (
        "unknown section [wroker]",
        "engine must be vllm",
        "kv_cache_gib must be",
        "key=value, not 'a'",
        "key=value, not 'b'",
        "engine_args is not JSON",
        "gateway listen must be",
        "coalesce_ms must be",
        "gateway processes must be",
        "default_workload must be",
        "client_certs: clients show",
        "control metrics must be",
        "lease_s must be",
        "forget_s must be",
        "up mesh must be",
        "up workers must be",
        "up controls must be",
        "up preset must be",
    ):
        assert part in told
    assert "plain text" not in told  # of an address that is none


def test_what_would_keep_a_process_from_starting_is_a_fault_beside_those_of_the_file() -> None:
    Path("trimtab.toml").write_text(
        '[wroker]\n[worker]\nmodel = "./nowhere"\nmetrics = "127.0.0.1:7100"\n[gateway]\nhttp = "127.0.0.1:7070"\n'
        '[control]\nredis = "http://x"\naccess = "gone.toml"\n[up]\nredis = "redis://h:port"\n'
    )
    result = config("check")
    assert result.exit_code == 2
    for part in (
        "worker model: ./nowhere does not exist",
        "worker listen and metrics must be two addresses, not both 127.0.0.1:7100",
        "gateway listen and http must be two addresses, not both 127.0.0.1:7070",
        "control redis: the store must be memory:// or one of",
        "control access: can't read gone.toml",
        "up redis: the store's URL can't be read",
        "unknown section [wroker]",
    ):
        assert part in result.stderr
    assert len(result.stderr.splitlines()) == 8
    Path("trimtab.toml").write_text('[worker]\nmodel = "./nowhere"\nengine = "simulated"\n')
    assert config("check").exit_code == 0


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


def test_a_password_by_itself_is_not_shown_either_and_goes_into_no_url_that_has_one() -> None:
    shown = config("print", env={"TRIMTAB_CONTROL_REDIS_PASSWORD": "s3/cret"}).stdout
    assert "cret" not in shown and '"***"' in shown
    two = {"TRIMTAB_CONTROL_REDIS_PASSWORD": "s3/cret", "TRIMTAB_CONTROL_REDIS": "redis://:other@host"}
    result = config("check", env=two)
    assert (result.exit_code, "cret" in result.stderr, "leave one of them out" in result.stderr) == (2, False, True)


def test_what_a_supervisor_sets_is_not_shown_to_people() -> None:
    shown = config("print").stdout
    assert "parent_pid" not in shown and "siblings" not in shown and "processes" in shown


def test_of_a_webhook_only_its_host_is_shown() -> None:
    for url in ("https://hooks.example/T0/cret", "https://me:cret@hooks.example?k=cret", "https://hooks.example"):
        shown = config("print", env={"TRIMTAB_CONTROL_ALERT_WEBHOOK": url}).stdout
        assert ("cret" not in shown, '"https://hooks.example/***"' in shown) == (True, True)
