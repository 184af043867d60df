"""The `trimtab` command as a whole: quick help, lazy verbs, helpful mistakes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from trimtab_cli.__main__ import VERBS, cli

HEAVY = {"grpc", "vllm", "torch", "rich", "redis", "google.protobuf", "opentelemetry", "asyncio", "numpy", "psutil"}


def trimtab(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "trimtab_cli", *args], capture_output=True, text=True, check=False, timeout=30
    )


def test_help_imports_nothing_heavy() -> None:
    """What makes it slow, rather than how slow it is: a time would measure the machine."""
    code = (
        "import sys\n"
        "sys.argv = ['trimtab', '--help']\n"
        "from trimtab_cli.__main__ import main\n"
        "try:\n    main()\nexcept SystemExit as e:\n    assert e.code == 0\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stderr.strip() == "[]"
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_loads_and_has_help_and_json(verb: str) -> None:
    result = CliRunner().invoke(cli, [verb, "--help"])
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"Usage: cli {verb}")


def test_the_version_is_the_packages() -> None:
    result = CliRunner().invoke(cli, ["--version"])
    assert (result.exit_code, result.output) == (0, f"trimtab {version('trimtab')}\n")


def test_an_unknown_verb_names_the_nearest() -> None:
    done = trimtab("polcy")
    assert done.returncode == 2
    assert "there is no verb 'polcy'; did you mean policy?" in done.stderr


def test_a_verb_like_no_other_gets_the_list() -> None:
    result = CliRunner().invoke(cli, ["zzz"])
    assert result.exit_code == 2
    assert "verbs: up, chat," in result.output


@pytest.mark.parametrize(
    "args",
    [
        ("up", "--workers", "0"),
        ("up", "--nonsense"),
        ("up", "stray"),
        ("up", "--", "--nonsense", "1"),
        ("up", "--", "--listen", "127.0.0.1:1"),
        ("up", "--engine", "steam"),
        ("up", "--", "--max-num-seqs", "many"),
        ("up", "--config", "nowhere.toml"),
        ("chat", "--temperature", "-1", "hi"),
        ("generate",),
        ("generate", "hi", "--token-ids", "1"),
        ("generate", "--token-ids", "1,x"),
        ("config", "print", "--section", "nothing"),
    ],
)
def test_a_mistake_is_usage(args: tuple[str, ...]) -> None:
    assert CliRunner().invoke(cli, args).exit_code == 2


def commands(command: click.Command, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every verb and what is below it, that does something by itself."""
    if isinstance(command, click.Group):
        for name in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), name)
            assert below is not None
            yield from commands(below, (*words, name))
    else:
        yield words, command


def test_every_verb_takes_json() -> None:
    """As a flag, or with a file where a report for people comes too. One that only follows what `scale` tells has nothing to say itself."""
    without = [
        " ".join(w) for w, command in commands(cli) if "--json" not in {o for p in command.params for o in p.opts}
    ]
    assert without == ["scale follow"]


@pytest.mark.parametrize(
    "args",
    [
        ("polcy", "--json"),
        ("--nonsense", "fleet", "--json"),
        ("up", "--nonsense", "--json"),
        ("policy", "get", "batch.activ", "--json"),
        ("policy", "pin", "batch.activ", "--json"),
        ("policy", "explain", "batch.activ", "--json"),
        ("policy", "set", "batch.active", "--json"),
        ("breaker", "--json", "opn", "w0"),
        ("drain", "--json"),
    ],
)
def test_a_mistake_is_json_where_json_was_asked_for(args: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, args)
    told = json.loads(result.stdout)["error"]
    assert (result.exit_code, bool(told["message"])) == (2, True)
    assert told["message"].splitlines()[0] in result.stderr
    assert told["reason"] == ("POLICY_REFUSED" if "batch.activ" in args else "USAGE")


def test_a_verb_whose_reader_has_gone_ends_as_a_shell_expects() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "trimtab_cli", "policy", "schema"],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize("args", [("up", "--mesh", "a b/c"), ("up", "--mesh", "../x"), ("up", "--mesh", "")])
def test_a_mesh_that_can_name_no_directory_is_usage_and_nothing_is_made(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path / "state"))
    result = CliRunner().invoke(cli, args)
    assert (result.exit_code, "up mesh must be letters" in result.stderr) == (2, True)
    assert not (tmp_path / "state").exists()
