"""Who a certificate says that somebody is, and what a process may listen on without one."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio
from structlog.testing import capture_logs

from services.gateway.settings import GatewaySettings
from services.worker.settings import WorkerSettings
from tests.certificates import Authority
from trimtab.kit import rpc
from trimtab.kit.certificates import about, authority, issue
from trimtab.kit.config import ConfigError, load
from trimtab.kit.rpc import tls_fault
from trimtab.kit.tls import (
    PLAIN,
    Caller,
    CertificateError,
    Tls,
    caller_of,
    channel_credentials,
    check_own,
    from_environment,
    is_loopback,
    speaks_for,
    warn,
)


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


@pytest.mark.parametrize(
    ("kind", "name", "mine"),
    [
        ("worker", "w0", True),
        ("worker", "w1", False),
        ("gateway", "w0", False),
        ("worker", "", True),
        ("control", "", False),
    ],
)
def test_a_process_is_not_started_with_anothers_certificate(tmp_path: Path, kind: str, name: str, mine: bool) -> None:
    tls = Authority(tmp_path, mesh="m").issue("worker", "w0")
    check_own(kind, name, None)
    if mine:
        check_own(kind, name, tls)
    else:
        with pytest.raises(ConfigError, match=rf"is for worker w0 of mesh m, .*trimtab certs issue {kind}"):
            check_own(kind, name, tls)
    with pytest.raises(ConfigError, match="of mesh other"):
        check_own(kind, name, Tls(tls.ca, tls.cert, tls.key, "other"))


def test_a_certificate_for_a_pool_is_every_nodes(tmp_path: Path) -> None:
    check_own("worker", "w7", Authority(tmp_path).issue("worker", "*"))


def test_a_start_warns_of_plain_text_open_keys_and_the_end_of_a_certificate(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("worker", "w0")
    tls.key.chmod(0o644)
    with capture_logs() as said:
        warn(("0.0.0.0:1", "127.0.0.1:2"), None)
        warn(("0.0.0.0:1",), tls, metrics="0.0.0.0:3")
    assert [(line["event"], line.get("listen")) for line in said] == [
        ("plain text beyond this machine", "0.0.0.0:1"),
        ("metrics are plain text beyond this machine", "0.0.0.0:3"),
        ("everybody on this machine can read the private key", None),
        ("certificate runs out", None),
    ]
    tls.key.chmod(0o600)
    with capture_logs() as said:
        warn(("127.0.0.1:1",), tls, metrics="127.0.0.1:3")
    assert [line["event"] for line in said] == ["certificate runs out"], "it holds for a day"


def test_calls_go_on_with_the_last_good_files_while_new_ones_are_written(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("gateway", "g0")
    channel_credentials(tls)
    tls.key.write_bytes(b"half")
    with capture_logs() as said:
        channel_credentials(tls)
        channel_credentials(tls)
    assert [line["event"] for line in said] == ["certificate not renewed; the last good one holds"], "said once"
    tls.key.unlink()
    channel_credentials(tls)
    with pytest.raises(CertificateError):
        channel_credentials(Tls(tls.ca, tls.cert, tls.key, "never read"))


@pytest.mark.parametrize(
    ("said", "plain", "over_tls"),
    [
        ("failed to connect to all addresses; last error: Socket closed", "TRIMTAB_TLS_CERT", "trimtab certs show"),
        ("failed to connect: recvmsg:Connection reset by peer", "TRIMTAB_TLS_CERT", "trimtab certs show"),
        ("Socket closed", "", "trimtab certs show"),
        ("SSL routines:OPENSSL_internal:WRONG_VERSION_NUMBER", "", "speaks plain text"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "", "run out"),
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", "", "not of the authority"),
        ("Hostname Verification Check failed.", "", "not that of a control of mesh 'm'"),
        ("Failed to connect to remote host: Connection refused", "", ""),
    ],
)
def test_a_failed_handshake_says_what_to_do(
    said: str, plain: str, over_tls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trimtab.kit.rpc._of_process", [None])
    without = tls_fault(said, "control")
    assert (plain in without, bool(plain)) == (True, bool(without))
    with_it = tls_fault(said, "control", tls=Tls(Path("ca"), Path("cert"), Path("key"), "m"))
    assert (over_tls in with_it, bool(over_tls)) == (True, bool(with_it))


def test_whose_certificate_has_run_out_is_told_so(tmp_path: Path) -> None:
    tls = Authority(tmp_path).issue("viewer", "bob")
    assert not tls.has_run_out()
    assert "whose it is" in tls_fault("Socket closed", "control", tls=tls)
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=3)
    past = authority("m", days=1, now=before)
    tls.cert.write_bytes(issue(past, "m", "viewer", "bob", hosts=(), days=1, now=before).cert)
    assert f"{tls.cert} has run out: trimtab certs issue renews it" in tls_fault("Socket closed", "control", tls=tls)
    with pytest.raises(CertificateError, match="the authority has run out"):
        issue(past, "m", "viewer", "bob", hosts=(), days=1, now=before + datetime.timedelta(days=2))


@contextlib.asynccontextmanager
async def a_server(tls: Tls, *, clients_need_one: bool = True) -> AsyncIterator[str]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    port = rpc.bind(server, "127.0.0.1:0", tls, clients_need_one=clients_need_one)
    health_pb2_grpc.add_HealthServicer_to_server(aio.HealthServicer(), server)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def served(channel: grpc.aio.Channel) -> bool:
    async with channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.UNAVAILABLE:
                return False
            raise
    return True


@pytest.mark.parametrize("needed", [True, False])
async def test_a_client_needs_no_certificate_where_the_door_asks_for_none(tmp_path: Path, needed: bool) -> None:
    ca = Authority(tmp_path)
    bare = grpc.ssl_channel_credentials(ca.ca.read_bytes())
    async with a_server(ca.issue("gateway", "g0", hosts=("localhost",)), clients_need_one=needed) as address:
        by_host = grpc.aio.secure_channel(address.replace("127.0.0.1", "localhost"), bare)
        name = [("grpc.ssl_target_name_override", "gateway.default.trimtab")]
        assert await served(by_host) is not needed
        assert await served(grpc.aio.secure_channel(address, bare, options=name)) is not needed


async def test_a_new_authority_comes_in_beside_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    old, new = Authority(tmp_path), Authority(tmp_path / "new")
    server, late = old.issue("control", "c0"), new.issue("worker", "w0")
    async with a_server(server) as address:
        early = old.issue("worker", "w1")
        assert await served(rpc.channel(address, "control", tls=early))
        assert not await served(rpc.channel(address, "control", tls=late))
        for ca in (old.ca, new.ca):
            ca.write_bytes(old.authority + new.authority)
        assert await served(rpc.channel(address, "control", tls=late))
        assert await served(rpc.channel(address, "control", tls=early))
