"""`trimtab keys`, as it is typed, and what the verbs make of TRIMTAB_KEY."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from services.cli import generate
from services.cli_keys import keys
from services.gateway.key_file import digest, parse


def typed(*words: str) -> Result:
    return CliRunner().invoke(keys, words)


def test_a_new_key_is_shown_once_with_the_lines_for_the_file() -> None:
    made = json.loads(typed("new", "acme", "--json").stdout)
    assert made["key"].startswith("tt-")
    assert len(made["key"]) == 46, "the prefix, and 256 bits in base64"
    assert made["sha256"] == f"sha256:{digest(made['key'])}"
    assert parse(made["lines"]).by_key[digest(made["key"])].name == "acme"
    shown = typed("new", "acme").stdout
    key = shown.splitlines()[0]
    assert f'    keys: ["sha256:{digest(key)}"]\n' in shown
    assert key != made["key"]


def test_a_name_that_the_file_would_refuse_gets_no_key() -> None:
    for name in ("a b", "other", "-", "x" * 65):
        refused = typed("new", "--", name)
        assert (refused.exit_code, "tt-" in refused.output) == (2, False), name


def test_a_file_is_checked_and_its_tenants_are_shown_without_their_hashes(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    first, second = (json.loads(typed("new", "acme", "--json").stdout)["sha256"] for _ in range(2))
    file.write_text(
        f"tenants:\n  acme: {{keys: ['{first}', '{second}'], realtime: false, share: 0.25, tokens_per_s: 50}}\n"
    )
    shown = typed("check", str(file))
    assert (shown.exit_code, shown.stdout.splitlines()[1].split()) == (
        0,
        ["acme", "2", "0", "0.25", "-", "50", "batch"],
    )
    answer = typed("check", str(file), "--json")
    assert json.loads(answer.stdout) == {
        "ok": True,
        "file": str(file),
        "faults": [],
        "tenants": [
            {
                "tenant": "acme",
                "keys": 2,
                "identities": 0,
                "realtime": False,
                "share": 0.25,
                "requests_per_s": None,
                "tokens_per_s": 50.0,
                "workload": "batch",
                "deadline_s": {},
            }
        ],
    }
    assert first[7:] not in shown.output + answer.output


def test_every_fault_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    file.write_text("tenants:\n  acme: {keyz: []}\n")
    told = [
        "tenants.acme.keyz: is unknown; did you mean keys?",
        "tenants.acme: has neither keys nor identities, so nobody could be this tenant",
    ]
    checked = typed("check", str(file))
    assert (checked.exit_code, checked.stderr) == (2, "".join(f"{file}: {fault}\n" for fault in told))
    answer = json.loads(typed("check", str(file), "--json").stdout)
    assert (answer["ok"], answer["faults"]) == (False, told)
    missing = typed("check", str(tmp_path / "none"))
    assert (missing.exit_code, "can't be read: No such file" in missing.stderr) == (2, True)


@pytest.mark.parametrize(
    ("key", "gateway", "words"),
    [("h\u00e9", "127.0.0.1:1", "printable ASCII"), ("tt-x", "gateway.example:7070", "in plain text; use TLS")],
)
def test_a_key_that_cant_be_sent_is_a_usage_error(
    monkeypatch: pytest.MonkeyPatch, key: str, gateway: str, words: str
) -> None:
    monkeypatch.setenv("TRIMTAB_KEY", key)
    done = CliRunner().invoke(generate, ["Hello", "--gateway", gateway])
    assert (done.exit_code, "TRIMTAB_KEY: " in done.output, words in done.output) == (2, True, True), done.output
    assert key not in done.output
