"""Who a certificate says that somebody is, and what a process may listen on without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gateway.settings import GatewaySettings
from services.worker.settings import WorkerSettings
from tests.certificates import Authority
from trimtab.kit.certificates import about
from trimtab.kit.config import ConfigError, load
from trimtab.kit.tls import PLAIN, Caller, CertificateError, Tls, caller_of, from_environment, is_loopback, speaks_for


def auth(*uris: str, name: str = "x") -> dict[str, list[bytes]]:
    found = {"transport_security_type": [b"ssl"], "x509_common_name": [name.encode()]}
    return {**found, "peer_uri": [u.encode() for u in uris]}


@pytest.mark.parametrize(
    ("said", "caller"),
    [
        ({}, PLAIN),
        ({"transport_security_type": [b"insecure"]}, PLAIN),
        ({"transport_security_type": [b"ssl"]}, Caller("", "anonymous", "TLS without a certificate")),
        (auth("trimtab://m/worker/w0"), Caller("worker", "w0", "certificate")),
        (auth("spiffe://x/y", "trimtab://m/admin/ada"), Caller("admin", "ada", "certificate")),
        (auth("trimtab://other/admin/ada", name="ada"), Caller("", "ada", "certificate")),
        (auth("trimtab://m/root/ada", name="ada"), Caller("", "ada", "certificate")),
        (auth("trimtab://m/admin/", name="ada"), Caller("", "ada", "certificate")),
        (auth("trimtab://m/admin", name="ada"), Caller("", "ada", "certificate")),
        (auth(name="control c0"), Caller("", "control c0", "certificate")),
    ],
)
def test_a_certificate_says_who_calls_and_another_meshs_says_nothing(said: Any, caller: Caller) -> None:
    assert caller_of(said, "m") == caller


def test_a_node_is_who_its_certificate_names() -> None:
    w0, pool = Caller("worker", "w0", "certificate"), Caller("worker", "*", "certificate")
    assert speaks_for(w0, "worker", "w0")
    assert not speaks_for(w0, "worker", "w1")
    assert not speaks_for(w0, "gateway", "w0")
    assert speaks_for(pool, "worker", "w7")
    assert not speaks_for(pool, "gateway", "w7")
    assert speaks_for(PLAIN, "worker", "w0")
    assert not speaks_for(Caller("", "anonymous", "TLS without a certificate"), "worker", "w0")


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("0.0.0.0:1", False),
        ("10.0.0.1:1", False),
        ("h:1", False),
    ],
)
def test_loopback_is_what_nobody_else_reaches(address: str, here: bool) -> None:
    assert is_loopback(address) is here


def test_plain_text_beyond_this_machine_is_refused_unless_told_to() -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:7100 would speak plain text"):
        load(WorkerSettings, "worker", flags={"listen": "0.0.0.0:7100"}, env={})
    assert load(WorkerSettings, "worker", flags={"listen": "0.0.0.0:7100", "insecure": True}, env={}).insecure
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:7080"):
        load(GatewaySettings, "gateway", flags={"http": "0.0.0.0:7080"}, env={})


def test_faulty_files_are_named(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("worker", "w0")
    other = Authority(tmp_path).issue("worker", "w1")
    good = {"tls_ca": str(tls.ca), "tls_cert": str(tls.cert), "tls_key": str(tls.key), "listen": "0.0.0.0:7100"}
    assert load(WorkerSettings, "worker", flags=good, env={}).tls_cert == str(tls.cert)
    for wrong, why in (
        ({"tls_key": ""}, "needs all of"),
        ({"tls_key": str(other.key)}, "is not the key of"),
        ({"tls_key": str(tmp_path / "none")}, "can't read"),
        ({"tls_cert": str(tls.key)}, "not PEM"),
    ):
        with pytest.raises(ConfigError, match=why):
            load(WorkerSettings, "worker", flags={**good, **wrong}, env={})


def test_the_environment_names_a_persons_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert from_environment() is None
    monkeypatch.setenv("TRIMTAB_TLS_CA", str(tmp_path / "ca"))
    with pytest.raises(CertificateError, match="TRIMTAB_TLS_CERT, TRIMTAB_TLS_KEY is missing"):
        from_environment()
    monkeypatch.setenv("TRIMTAB_TLS_CERT", "c")
    monkeypatch.setenv("TRIMTAB_TLS_KEY", "k")
    assert from_environment() == Tls(tmp_path / "ca", Path("c"), Path("k"), "default")


def test_a_certificate_is_for_what_it_was_issued_for(tmp_path: Path) -> None:
    tls = Authority(tmp_path, mesh="m").issue("gateway", "g0", hosts=("llm.example.org", "10.0.0.1"))
    found = about(tls.cert.read_bytes())
    assert (found.mesh, found.kind, found.name, found.authority) == ("m", "gateway", "g0", False)
    assert found.hosts == ("gateway.m.trimtab", "llm.example.org", "10.0.0.1")
    assert about(tls.ca.read_bytes()).authority
    person = about(Authority(tmp_path).issue("admin", "ada").cert.read_bytes())
    assert person.hosts == (), "a person's certificate serves nothing"
