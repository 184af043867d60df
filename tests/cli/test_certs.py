"""`trimtab certs`, as it is typed."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner, Result

from trimtab_cli.certs import certs


def typed(*words: str) -> Result:
    return CliRunner().invoke(certs, words)


def test_an_authority_is_made_once_and_signs(tmp_path: Path) -> None:
    where = str(tmp_path / "certs")
    made = json.loads(typed("init", "--dir", where, "--mesh", "m", "--json").stdout)
    assert Path(made["key"]).stat().st_mode & 0o777 == 0o600
    again = typed("init", "--dir", where)
    assert (again.exit_code, "has an authority already" in again.output) == (4, True)
    issued = typed("issue", "worker", "w0", "--dir", where, "--mesh", "m")
    assert issued.exit_code == 0
    assert "--tls-cert" in issued.output
    key = tmp_path / "certs" / "worker-w0-key.pem"
    assert key.stat().st_mode & 0o777 == 0o600
    first = key.read_bytes()
    assert typed("issue", "worker", "w0", "--dir", where, "--mesh", "m").exit_code == 0
    assert key.read_bytes() != first, "issued again, it is renewed"
    person = typed("issue", "operator", "oncall", "--dir", where)
    assert "TRIMTAB_TLS_CERT=" in person.output


def test_certificates_are_shown_with_their_end(tmp_path: Path) -> None:
    where = str(tmp_path)
    typed("init", "--dir", where)
    typed("issue", "gateway", "g0", "--dir", where, "--host", "llm.example.org", "--days", "10")
    rows = json.loads(typed("show", f"{where}/ca.pem", f"{where}/gateway-g0.pem", "--json").stdout)
    assert [(row["whose"], row["state"]) for row in rows] == [
        ("authority", "good"),
        ("gateway g0 of mesh default", "expires soon"),
    ]
    assert "llm.example.org" in rows[1]["hosts"]


def test_keys_among_the_files_are_passed_over_with_a_warning_where_they_are_open(tmp_path: Path) -> None:
    where = str(tmp_path)
    typed("init", "--dir", where)
    files = sorted(str(path) for path in tmp_path.glob("*.pem"))
    assert files == [f"{where}/ca-key.pem", f"{where}/ca.pem"], "what the shell makes of *.pem"
    assert typed("show", *files).stderr == ""
    (tmp_path / "ca-key.pem").chmod(0o644)
    shown = typed("show", *files)
    assert (shown.exit_code, shown.stdout.count("\n")) == (0, 1)
    assert f"chmod 600 {where}/ca-key.pem" in shown.stderr


def test_a_certificate_is_for_the_authoritys_mesh_and_does_not_outlive_it(tmp_path: Path) -> None:
    where = str(tmp_path)
    typed("init", "--dir", where, "--mesh", "prod", "--days", "5")
    issued = json.loads(typed("issue", "control", "c0", "--dir", where, "--days", "90", "--json").stdout)
    assert issued["mesh"] == "prod"
    ends = [row["not_after"] for row in json.loads(typed("show", issued["ca"], issued["cert"], "--json").stdout)]
    assert ends[0] == ends[1]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    where = str(tmp_path)
    no_authority = typed("issue", "worker", "w0", "--dir", where)
    assert (no_authority.exit_code, "trimtab certs init" in no_authority.output) == (4, True)
    typed("init", "--dir", where)
    assert typed("issue", "worker", "a b", "--dir", where).exit_code == 2
    assert typed("issue", "king", "w0", "--dir", where).exit_code == 2
    assert typed("issue", "gateway", "g0", "--dir", where, "--host", "münchen.example").exit_code == 2
    assert typed("issue", "worker", "w0", "--dir", where, "--mesh", "a b").exit_code == 2
    assert typed("init", "--dir", f"{where}/new", "--mesh", "a/b").exit_code == 2
    (tmp_path / "x.pem").write_text("x")
    assert typed("show", f"{where}/x.pem").exit_code == 2
