"""`trimtab certs`, as it is typed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from trimtab.kit.certificates import about
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


def test_a_small_site_is_made_in_one_go(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# who there is\ncontrol c0 10.0.0.1\nworker w0   # no clients from outside\n\noperator oncall\n")
    where = str(tmp_path / "certs")
    flags = ("--hosts", str(hosts), "--host", "gateway/g0=llm.example.org,10.0.0.5", "--host", "worker/*")
    made = json.loads(typed("init", "--dir", where, "--mesh", "prod", *flags, "--json").stdout)
    stems = ["control-c0", "worker-w0", "operator-oncall", "gateway-g0", "worker-any"]
    assert [Path(row["cert"]).stem for row in made["certificates"]] == stems
    assert {Path(row["key"]).stat().st_mode & 0o777 for row in made["certificates"]} == {0o600}
    assert Path(where).stat().st_mode & 0o777 == 0o700
    found = {Path(row["cert"]).stem: about(Path(row["cert"]).read_bytes()) for row in made["certificates"]}
    assert found["gateway-g0"].hosts == ("gateway.prod.trimtab", "llm.example.org", "10.0.0.5")
    assert (found["worker-any"].name, found["control-c0"].hosts[1:]) == ("*", ("10.0.0.1",))
    assert (found["operator-oncall"].kind, found["operator-oncall"].hosts) == ("operator", ())
    assert typed("show", *(row["cert"] for row in made["certificates"])).exit_code == 0


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--host", "king/k0"), "'king' is none of"),
        (("--host", "worker/a b"), "a name is"),
        (("--host", "gateway"), "'gateway' is none of|a name is"),
        (("--host", "gateway/g0=münchen.example"), "can't be a host"),
        (("--host", "worker/w0=a", "--host", "worker/w0=b"), "worker-w0 is named twice"),
        (("--hosts", "FILE"), "line 2: 'wroker' is none of"),
    ],
)
def test_a_site_that_cant_be_made_leaves_nothing_behind(tmp_path: Path, flags: tuple[str, str], why: str) -> None:
    file = tmp_path / "hosts"
    file.write_text("worker w0\nwroker w1\n")
    where = tmp_path / "certs"
    said = typed("init", "--dir", str(where), *(str(file) if flag == "FILE" else flag for flag in flags))
    assert said.exit_code == 2
    assert re.search(why, " ".join(said.output.split()))
    assert not where.exists()


def test_nothing_that_is_there_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "worker-w0-key.pem").write_text("somebody's")
    refused = typed("init", "--dir", str(tmp_path), "--host", "worker/w0")
    assert (refused.exit_code, "worker-w0-key.pem is there already" in refused.output) == (4, True)
    assert (tmp_path / "worker-w0-key.pem").read_text() == "somebody's"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["worker-w0-key.pem"]


def test_what_ends_soon_is_renewed_for_the_same_names_and_as_long(tmp_path: Path) -> None:
    where = str(tmp_path)
    typed("init", "--dir", where, "--mesh", "prod")
    typed("issue", "gateway", "g0", "--dir", where, "--host", "llm.example.org", "--days", "10")
    typed("issue", "worker", "w0", "--dir", where, "--days", "200")
    before = {name: (tmp_path / f"{name}.pem").read_bytes() for name in ("gateway-g0", "worker-w0", "ca")}
    key = (tmp_path / "gateway-g0-key.pem").read_bytes()
    rows = json.loads(typed("renew", "--dir", where, "--json").stdout)
    assert [row["whose"] for row in rows] == ["gateway g0 of mesh prod"]
    old, new = (about(x) for x in (before["gateway-g0"], (tmp_path / "gateway-g0.pem").read_bytes()))
    assert (new.hosts, new.name) == (old.hosts, old.name)
    assert new.serial != old.serial
    assert round((new.not_after - new.not_before).total_seconds() / 86400) == 10
    assert (tmp_path / "gateway-g0-key.pem").read_bytes() != key
    assert (tmp_path / "gateway-g0-key.pem").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "worker-w0.pem").read_bytes() == before["worker-w0"]
    assert (tmp_path / "ca.pem").read_bytes() == before["ca"]
    assert "no certificate" in typed("renew", "--dir", where, "--within", "5").output
    assert len(json.loads(typed("renew", "--dir", where, "--all", "--json").stdout)) == 2
    named = typed("renew", f"{where}/worker-w0.pem", "--dir", where, "--days", "5")
    assert (named.exit_code, "worker w0 of mesh prod" in named.output) == (0, True)
    of_ca = typed("renew", f"{where}/ca.pem", "--dir", where)
    assert (of_ca.exit_code, "is not of a mesh" in of_ca.output) == (2, True)


def test_an_authority_renews_nothing_of_another_mesh(tmp_path: Path) -> None:
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    typed("init", "--dir", ours, "--mesh", "a")
    typed("init", "--dir", theirs, "--mesh", "b", "--host", "worker/w0")
    said = typed("renew", f"{theirs}/worker-w0.pem", "--dir", ours)
    assert (said.exit_code, "it is of mesh b" in said.output) == (2, True)
