"""Who may ask what: the roles, pure; then a control plane with TLS, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from controlplane.access import NEEDS, Access, AccessFault, Role, Token, read_access
from controlplane.admin.client import AdminClient
from controlplane.gatekeeper import ADMIN, CONTROL, REPLICA, AccessFile, Gatekeeper
from controlplane.metrics import ControlMetrics
from controlplane.server import ControlPlane
from controlplane.store.memory import MemoryStore
from tests.certificates import Authority
from tests.controlplane.mesh import PATIENCE_S, FakeNode
from trimtab.client import Unreachable
from trimtab.errors import PermissionDenied, TrimtabError, Unauthenticated
from trimtab.kit.tls import PLAIN, Caller, Tls
from trimtab.messages import Role as NodeRole
from trimtab.v1 import admin_pb2, admin_pb2_grpc

TOKEN = "a-token-of-some-length"
DIGEST = hashlib.sha256(TOKEN.encode()).hexdigest()
FILE = f"""
[viewer]
users = ["*"]
[operator]
users = ["oncall"]
[admin]
users = ["ada"]
[[token]]
name = "ci"
role = "operator"
sha256 = "{DIGEST}"
[[token]]
name = "guessed"
role = "admin"
sha256 = "{hashlib.sha256(b"short").hexdigest()}"
"""


def cert(kind: str, name: str) -> Caller:
    return Caller(kind, name, "certificate")


def test_every_method_of_the_admin_service_needs_a_role() -> None:
    assert {m.name for m in admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods} == NEEDS.keys()


@pytest.mark.parametrize(
    ("caller", "token", "role"),
    [
        (cert("", "ada"), "", Role.ADMIN),
        (cert("", "oncall"), "", Role.OPERATOR),
        (cert("", "stranger"), "", Role.VIEWER),
        (cert("operator", "bob"), "", Role.OPERATOR),
        (cert("admin", "oncall"), "", Role.OPERATOR),
        (cert("control", "c0"), "", Role.ADMIN),
        (cert("worker", "ada"), "", Role.NONE),
        (cert("gateway", "g0"), "", Role.NONE),
        (PLAIN, "", Role.NONE),
        (PLAIN, TOKEN, Role.OPERATOR),
        (PLAIN, "short", Role.NONE),
        (cert("", "ada"), TOKEN, Role.OPERATOR),
        (cert("", "ada"), "wrong", Role.NONE),
        (Caller("", "anonymous", "TLS without a certificate"), "", Role.NONE),
        (Caller("", "anonymous", "TLS without a certificate"), TOKEN, Role.OPERATOR),
    ],
)
def test_a_role_is_by_file_certificate_or_token(tmp_path: Path, caller: Caller, token: str, role: Role) -> None:
    file = tmp_path / "access.toml"
    file.write_text(FILE)
    assert read_access(file).grant(caller, token).role is role


def test_without_a_file_plain_text_may_do_everything_and_a_certificate_what_it_says() -> None:
    assert Access().grant(PLAIN).role is Role.ADMIN
    assert Access().grant(cert("viewer", "bob")).role is Role.VIEWER
    assert Access().grant(cert("", "bob")).role is Role.NONE


def test_a_token_is_never_shown() -> None:
    access = Access(tokens=(Token("ci", Role.VIEWER, DIGEST),))
    assert TOKEN not in repr(access)
    assert TOKEN not in access.grant(PLAIN, TOKEN).words + access.grant(PLAIN, TOKEN + "x").words


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[viewr]", "did you mean viewer"),
        ("[viewer]\nuser = []", "did you mean users"),
        ('[admin]\nusers = ["*"]', "everybody"),
        ("[viewer]\nusers = 3", "list of names"),
        ('[[token]]\nname = "ci"\nrole = "king"\nsha256 = ""', "a role"),
        ('[[token]]\nname = "ci"\nrole = "admin"\nsha256 = "12"', "64 hex"),
        ("viewer = 3", "a table"),
        ("[", "not TOML"),
    ],
)
def test_a_faulty_file_says_what_is_wrong(tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "access.toml"
    file.write_text(text)
    with pytest.raises(AccessFault, match=why):
        read_access(file)


def test_a_file_is_read_again_when_it_changes_and_the_last_good_one_holds(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(FILE)
    access = AccessFile(file)
    for number, (text, role) in enumerate((("[", Role.ADMIN), ('[viewer]\nusers = ["ada"]', Role.VIEWER)), 1):
        file.write_text(text)
        os.utime(file, ns=(number, number))
        assert access.now.grant(cert("", "ada")).role is role


async def test_a_call_that_nothing_can_judge_is_not_let_through() -> None:
    async def nothing(*_: object) -> None:
        raise AssertionError("a denied call was told")

    keeper = Gatekeeper(AccessFile(None), ControlMetrics(CollectorRegistry()), "default", nothing)

    async def found(details: SimpleNamespace) -> grpc.RpcMethodHandler:
        return grpc.unary_stream_rpc_method_handler(lambda *_: None)

    for method, open_ in (
        (f"{ADMIN}WatchPolicy", False),
        (f"{CONTROL}Watch", False),
        ("/grpc.health.v1.Health/Watch", True),
    ):
        handler = await keeper.intercept_service(found, SimpleNamespace(method=method))
        assert (handler is not None) is open_, method


@contextlib.asynccontextmanager
async def a_plane(tls: Tls | None, access: AccessFile | None = None) -> AsyncIterator[ControlPlane]:
    plane = ControlPlane(
        MemoryStore(), "127.0.0.1:0", ControlMetrics(CollectorRegistry()), tls=tls, access=access, replica_id="c0"
    )
    await plane.start()
    try:
        await asyncio.wait_for(plane.loaded(), PATIENCE_S)
        yield plane
    finally:
        await plane.stop()


def denied(plane: ControlPlane) -> float:
    return plane.metrics.registry.get_sample_value("trimtab_control_denied_total", {"method": "Connect"}) or 0.0


async def refused(plane: ControlPlane, tls: Tls | None, token: str = "") -> TrimtabError | None:
    """What came of a change by this caller."""
    async with AdminClient(plane.address, tls=tls, token=token) as client:
        try:
            await client.set_policy({"batch.active": "9"}, author="mallory")
        except TrimtabError as e:
            return e
    return None


async def test_each_certificate_may_what_it_is_for(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with a_plane(ca.issue("control", "c0")) as plane:
        for kind in ("viewer", "worker", "gateway"):
            assert isinstance(await refused(plane, ca.issue(kind, "eve")), PermissionDenied), kind
        assert await refused(plane, ca.issue("operator", "oncall")) is None
        async with AdminClient(plane.address, tls=ca.issue("viewer", "bob")) as viewer:
            entries = (await viewer.history()).entries
            assert entries[0].author == "oncall", "whoever is known writes in that name"
            assert [e.author for e in entries if "denied" in e.refused_because] == ["eve"] * 3
            assert (await viewer.get_policy()).spec_version == 1
        assert await refused(plane, ca.issue("admin", "ada")) is None


async def test_an_admin_may_write_in_anothers_name(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with a_plane(ca.issue("control", "c0")) as plane:
        await refused(plane, ca.issue("admin", "ada"))
        assert (await plane.replica.store.history(1))[0].author == "mallory"


async def test_who_has_no_certificate_of_the_authority_gets_nowhere(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    ca, other = Authority(tmp_path), Authority(tmp_path / "other")
    forged = other.issue("admin", "ada")
    async with a_plane(ca.issue("control", "c0")) as plane:
        assert isinstance(await refused(plane, None), Unreachable)
        assert isinstance(await refused(plane, Tls(ca.ca, forged.cert, forged.key, "default")), Unreachable)
        assert isinstance(
            await refused(plane, ca.issue("admin", "eve", mesh="another")), PermissionDenied | Unauthenticated
        )


async def test_a_worker_does_not_pass_for_a_control_plane(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with a_plane(ca.issue("worker", "w0")) as plane:
        assert isinstance(await refused(plane, ca.issue("admin", "ada")), Unreachable)


async def test_a_token_stands_for_a_certificate_on_loopback(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(FILE)
    async with a_plane(None, AccessFile(file)) as plane:
        assert isinstance(await refused(plane, None), Unauthenticated)
        assert isinstance(await refused(plane, None, "wrong"), PermissionDenied)
        assert await refused(plane, None, TOKEN) is None
        assert (await plane.replica.store.history(1))[0].author == "ci"


async def test_a_node_joins_under_its_own_name_alone(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    async with a_plane(ca.issue("control", "c0")) as plane:
        mine = FakeNode(plane.address, "w0", tls=ca.issue("worker", "w0"))
        pod = FakeNode(plane.address, "w1", tls=ca.issue("worker", "*"))
        thief = FakeNode(plane.address, "w2", tls=ca.issue("worker", "w9"))
        person = FakeNode(plane.address, "w3", tls=ca.issue("admin", "ada"))
        other_role = FakeNode(plane.address, "g0", role=NodeRole.GATEWAY, tls=ca.issue("worker", "g0"))
        nodes = [mine, pod, thief, person, other_role]
        for node in nodes:
            node.start()
        await mine.holds(1, 1)
        await pod.holds(1, 1)
        async with asyncio.timeout(PATIENCE_S):
            while denied(plane) < 3:
                await asyncio.sleep(0.01)
        assert {m.node_id for m in plane.fleet} == {"w0", "w1"}
        for node in nodes:
            await node.stop()


async def test_a_servers_certificate_is_renewed_without_a_restart(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    tls, ada = ca.issue("control", "c0", into="server"), ca.issue("admin", "ada")
    async with a_plane(tls) as plane:
        node = FakeNode(plane.address, "w0", tls=ca.issue("worker", "w0"))
        node.start()
        await node.holds(1, 1)
        ca.issue("worker", "not-a-control-plane", into="server")
        assert isinstance(await refused(plane, ada), Unreachable), "new handshakes see the new certificate"
        tls.key.write_bytes(b"half")
        tls.cert.write_bytes(ca.issue("control", "c0", into="next").cert.read_bytes())
        assert isinstance(await refused(plane, ada), Unreachable), "a pair that does not fit is passed over"
        ca.issue("control", "c0", into="server")
        assert await refused(plane, ada) is None
        await node.holds(1, 2)
        await node.stop()


async def test_a_replica_asks_the_others_with_its_certificate_of_now(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    ca, other = Authority(tmp_path), Authority(tmp_path / "other")
    forged, store = other.issue("control", "c1"), MemoryStore()
    ours = Tls(ca.ca, forged.cert, forged.key, "default")
    planes = [
        ControlPlane(store, "127.0.0.1:0", ControlMetrics(CollectorRegistry()), tls=tls, replica_id=name)
        for name, tls in (("c0", ca.issue("control", "c0")), ("c1", ours))
    ]
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        for plane in planes:
            await plane.start()
            stack.push_async_callback(plane.stop)

        async def asked() -> Any:
            return (await planes[1].peers.ask("GetFleet", admin_pb2.GetFleetRequest())).get("c0")

        while not isinstance(await asked(), TrimtabError):
            await asyncio.sleep(0.02)
        good = ca.issue("control", "c1")
        ours.cert.write_bytes(good.cert.read_bytes())
        ours.key.write_bytes(good.key.read_bytes())
        while not isinstance(await asked(), admin_pb2.GetFleetResponse):
            await asyncio.sleep(0.02)


async def test_replicas_know_each_other_by_their_words_where_no_certificates_do(tmp_path: Path) -> None:
    file = tmp_path / "access.toml"
    file.write_text(FILE)
    store = MemoryStore()
    planes = [
        ControlPlane(
            store, "127.0.0.1:0", ControlMetrics(CollectorRegistry()), access=AccessFile(file), replica_id=name
        )
        for name in ("c0", "c1")
    ]
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        for plane in planes:
            await plane.start()
            stack.push_async_callback(plane.stop)
        node = FakeNode(planes[1].address, "w0")
        node.start()
        stack.push_async_callback(node.stop)
        await node.holds(1, 1)

        async def asked(method: str, request: Any) -> Any:
            return (await planes[0].peers.ask(method, request)).get("c1")

        while not isinstance(await asked("ListReports", admin_pb2.ListReportsRequest()), admin_pb2.ListReportsResponse):
            await asyncio.sleep(0.02)
        reload = admin_pb2.ReloadNodeRequest(node_id="w0", author="controller/heal", local=True)
        assert isinstance(await asked("ReloadNode", reload), admin_pb2.ReloadNodeResponse), "as a leader commands"

        async with grpc.aio.insecure_channel(planes[1].address) as channel:
            stub = admin_pb2_grpc.AdminServiceStub(channel)
            told = (await store.peers({}))[0].info.hex()
            for said in ("", "c0", "c0 ", "c0 a-guess", "c9 a-guess", f"c0 {told[-64:]}"):
                with pytest.raises(grpc.aio.AioRpcError) as e:
                    await stub.GetFleet(admin_pb2.GetFleetRequest(), metadata=((REPLICA, said),))
                assert e.value.code() is grpc.StatusCode.UNAUTHENTICATED, said
        async with AdminClient(planes[1].address, token=TOKEN) as client:
            replicas = (await client.fleet()).replicas
        assert [(r.replica_id, r.word_sha256) for r in replicas] == [("c1", b""), ("c0", b"")]
