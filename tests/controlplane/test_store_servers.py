"""The store on every server that it is said to work with: versions, ACL, TLS, sentinels, a cluster of one node."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from controlplane.store import Answer, Peer, PolicyStore, Receipt, Stored
from controlplane.store.redis import RedisStore
from tests.certificates import Authority
from tests.controlplane import test_store_contract, test_store_lease
from tests.controlplane.mesh import PATIENCE_S
from tests.controlplane.servers import (
    ADMIN,
    BINARIES,
    SECRET,
    Sentinel,
    Server,
    binary,
    make_cluster_of_one,
    running,
    tls_before,
    wait_for,
)
from tests.controlplane.test_store_contract import a_stored, a_write, seeded
from trimtab.errors import StoreUnavailable
from trimtab.kit.process import free_port
from trimtab.kit.tls import Tls
from trimtab.snapshot import Identity

LONG_MS = 60_000
CLUSTER = "valkey-9-cluster-of-one"


def checks() -> list[Callable[..., Any]]:
    """Every test of the suites that all stores pass, and of those for Redis alone whatever needs only its address."""
    found = []
    for module in (test_store_contract, test_store_lease):
        for name, check in vars(module).items():
            if name.startswith("test_") and inspect.iscoroutinefunction(check):
                needs = set(inspect.signature(check).parameters)
                if needs & {"store", "valkey_address"} and needs <= {"store", "valkey_address", "monkeypatch"}:
                    found.append(check)
    return found


@pytest.fixture(scope="module", params=[*BINARIES, CLUSTER])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    cluster = request.param == CLUSTER
    flags = ("--cluster-enabled", "yes", "--cluster-port", str(free_port())) if cluster else ()
    made = Server(binary("valkey-9" if cluster else request.param), tmp_path_factory.mktemp("server"), flags)
    with running(made):
        if cluster:
            make_cluster_of_one(made)
        yield made


@pytest.fixture
async def store(server: Server) -> AsyncIterator[RedisStore]:
    async with opened(server.url()) as made:
        yield made


@contextlib.asynccontextmanager
async def opened(url: str, mesh: str = "", **more: Any) -> AsyncIterator[RedisStore]:
    made = RedisStore(url, mesh or uuid.uuid4().hex, **more)
    try:
        yield made
    finally:
        await made.close()


async def refused(store: PolicyStore, words: str) -> str:
    with pytest.raises(StoreUnavailable, match=words) as caught:
        await store.load()
    assert not store.state.connected
    return caught.value.message + store.state.description


@pytest.mark.slow
@pytest.mark.parametrize("check", checks(), ids=lambda check: check.__name__.removeprefix("test_"))
async def test_what_holds_for_every_store(
    check: Callable[..., Any], server: Server, store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    have = {"store": store, "valkey_address": server.url(), "monkeypatch": monkeypatch}
    await check(**{name: have[name] for name in inspect.signature(check).parameters})


async def test_replicas_tell_of_themselves(store: RedisStore) -> None:
    first = Peer("c0", "10.0.0.1:7071", 1, b"info", b"nodes")
    assert await store.announce(first, ttl_ms=LONG_MS)
    assert not await store.announce(Peer("c1", "10.0.0.2:7071", 1), ttl_ms=LONG_MS)
    assert await store.announce(dataclasses.replace(first, seq=2, nodes=None), ttl_ms=LONG_MS)
    newer = dataclasses.replace(first, seq=2)
    other = Peer("c1", "10.0.0.2:7071", 1)
    assert await store.peers({}) == [newer, other]
    assert await store.peers({"c0": 2}) == [dataclasses.replace(newer, nodes=None), other]
    await store.withdraw("c0")
    await store.announce(other, ttl_ms=1)
    async with asyncio.timeout(PATIENCE_S):
        while await store.peers({}):
            await asyncio.sleep(0.01)


async def test_what_nodes_answered_is_kept(store: RedisStore) -> None:
    said = [Answer(f"w{i}", "i1", Identity(1, i, bytes(32)), "applied", i, 0.5) for i in range(300)]
    await store.record_answers(said)
    assert await store.answers() == said[::-1]


@pytest.mark.slow
async def test_a_wrong_password_is_said_and_not_shown(server: Server) -> None:
    async with opened(server.url(password="wr0ng")) as store:
        assert "wr0ng" not in await refused(store, "check user, password and ACL")
        with pytest.raises(StoreUnavailable, match="check user, password and ACL"):
            await store.put(a_write(a_stored()))
    async with opened(f"redis://127.0.0.1:{server.port}/0") as store:
        await refused(store, "Authentication required.*check user, password and ACL")


async def test_a_user_without_rights_is_told_so(server: Server) -> None:
    for user in ("stranger", "writer"):
        async with opened(server.url(user)) as store:
            assert SECRET not in await refused(store, "check user, password and ACL")


@pytest.mark.parametrize("user", ["reader", "scripter"])
async def test_a_user_who_may_not_write_reads_all_the_same(server: Server, store: RedisStore, user: str) -> None:
    """One may not run scripts; the other may, but not what is in them."""
    mesh = uuid.uuid4().hex
    async with opened(server.url(), mesh) as writing, opened(server.url(user), mesh) as reading:
        first = await seeded(writing)
        with pytest.raises(StoreUnavailable, match="check user, password and ACL") as caught:
            await reading.put(a_write(a_stored(1, 2, 1), first))
        assert "pipeline" not in caught.value.message
        assert (reading.state.connected, reading.state.writable) == (True, False)
        assert await writing.load() == first
        assert [e.identity for e in await reading.history(10)] == [first.identity]


@pytest.mark.slow
async def test_a_resent_put_is_committed_when_replicas_have_it_and_not_before(server: Server, tmp_path: Path) -> None:
    """Sent again on another connection, which wrote nothing that WAIT could speak for."""
    flags = ("--replicaof", "127.0.0.1", str(server.port))
    if server.flags:
        pytest.skip("in a cluster replicas are set up otherwise")
    mesh = uuid.uuid4().hex
    with running(Server(server.binary, tmp_path, flags)) as replica:
        wait_for(server.has_replica)
        async with opened(server.url(), mesh, replicas=1, wait_ms=50) as store:
            first = a_stored()
            async with asyncio.timeout(PATIENCE_S):
                write = a_write(first)
                while not (await store.put(write)).committed:
                    pass
            replica.pause()
            write = a_write(a_stored(1, 2, 1), first)
            assert await store.put(write) == Receipt(0, 1)
            async with opened(server.url(), mesh, replicas=1, wait_ms=50) as again:
                assert await again.put(write) == Receipt(0, 1)
            replica.wake()
            async with opened(server.url(), mesh, replicas=1, wait_ms=50) as again, asyncio.timeout(PATIENCE_S):
                while not (await again.put(write)).committed:
                    pass
        async with opened(replica.url(), mesh) as reading:
            assert await reading.load() == write.stored
            with pytest.raises(StoreUnavailable, match="read-only replica; point the control plane at its primary"):
                await reading.put(a_write(a_stored(1, 3, 2), write.stored))


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[Server]:
    with running(Server(binary("valkey-9"), tmp_path / "primary")) as made:
        yield made


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    return Authority(tmp_path_factory.mktemp("ours")), Authority(tmp_path_factory.mktemp("theirs"))


@pytest.fixture(scope="module")
def certificate(authorities: tuple[Authority, Authority]) -> Tls:
    return authorities[0].issue("control", "store", hosts=("127.0.0.1", "127.0.0.2"))


def over_tls(server: Server, port: int, **options: object) -> str:
    url = server.url().replace("redis://", "rediss://").replace(f":{server.port}/", f":{port}/")
    return url + "?" + "&".join(f"{name}={quote(str(value))}" for name, value in options.items())


@pytest.mark.slow
async def test_tls_of_a_private_authority(
    valkey: Server, authorities: tuple[Authority, Authority], certificate: Tls
) -> None:
    ours, theirs = authorities
    async with tls_before(valkey.port, certificate) as port:
        async with opened(over_tls(valkey, port, ssl_ca_certs=ours.ca)) as store:
            first = await seeded(store)
            async with contextlib.aclosing(store.watch()) as states, asyncio.timeout(PATIENCE_S):
                assert await anext(states) == first
        for url in (over_tls(valkey, port, ssl_ca_certs=theirs.ca), over_tls(valkey, port)):
            async with opened(url) as store:
                assert SECRET not in await refused(store, "(?i)certificate.verify.failed")
        async with opened(over_tls(valkey, port, ssl_ca_certs=ours.where / "missing.pem")) as store:
            await refused(store, "No such file")
        async with opened(over_tls(valkey, port).replace("rediss:", "redis:")) as store:
            await refused(store, "can't be used")


async def test_tls_of_another_host_is_refused(valkey: Server, authorities: tuple[Authority, Authority]) -> None:
    elsewhere = authorities[0].issue("control", "elsewhere", hosts=("10.9.8.7",))
    async with tls_before(valkey.port, elsewhere) as port:
        async with opened(over_tls(valkey, port, ssl_ca_certs=authorities[0].ca)) as store:
            await refused(store, "(?i)IP address mismatch")
        async with opened(over_tls(valkey, port, ssl_ca_certs=authorities[0].ca, ssl_check_hostname="no")) as store:
            assert await store.load() is None


async def test_tls_with_a_certificate_of_ones_own(
    valkey: Server, authorities: tuple[Authority, Authority], certificate: Tls
) -> None:
    ca = authorities[0].ca
    mine = authorities[0].issue("operator", "plane")
    async with tls_before(valkey.port, certificate, demands=ca) as port:
        async with opened(
            over_tls(valkey, port, ssl_ca_certs=ca, ssl_certfile=mine.cert, ssl_keyfile=mine.key)
        ) as store:
            await seeded(store)
        async with opened(over_tls(valkey, port, ssl_ca_certs=ca)) as store:
            await refused(store, "can't be used")


async def test_a_servers_own_tls(tmp_path: Path, authorities: tuple[Authority, Authority], certificate: Tls) -> None:
    port = str(free_port())
    flags = ("--tls-port", port, "--tls-cert-file", str(certificate.cert), "--tls-key-file", str(certificate.key))
    flags += ("--tls-ca-cert-file", str(authorities[0].ca), "--tls-auth-clients", "no")
    server = Server(binary("redis-on-PATH"), tmp_path, flags)
    with running(server):
        async with opened(over_tls(server, int(port), ssl_ca_certs=authorities[0].ca)) as store:
            first = await seeded(store)
            assert await store.load() == first
        async with opened(over_tls(server, int(port), ssl_ca_certs=authorities[1].ca)) as store:
            await refused(store, "(?i)certificate.verify.failed")


@pytest.fixture
def sentinel(valkey: Server, tmp_path: Path) -> Iterator[Sentinel]:
    made = Sentinel(valkey.binary, tmp_path / "sentinel")
    try:
        yield made
    finally:
        made.kill()


def by_sentinel(
    *ports: int,
    service: str = "main",
    password: str = SECRET,
    login: str = ADMIN,
    more: str = "",
    user: str = "trimtab",
) -> str:
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    asked = f"?sentinel_password={quote(login, safe='')}" if login else ""
    return f"redis+sentinel://{user}:{quote(password, safe='')}@{hosts}/{service}{asked}{more}"


async def test_sentinels_and_the_primary_have_passwords_of_their_own(valkey: Server, sentinel: Sentinel) -> None:
    sentinel.watch(valkey)
    dead = free_port()
    async with opened(by_sentinel(dead, sentinel.port)) as store:
        await seeded(store)
        assert store.state.description == f"redis+sentinel://127.0.0.1:{dead},127.0.0.1:{sentinel.port}/main"
    for login in ("wr0ng", ""):
        async with opened(by_sentinel(sentinel.port, login=login)) as store:
            said = await refused(store, "check sentinel_username and sentinel_password")
            assert "wr0ng" not in said
    async with opened(by_sentinel(sentinel.port, password="wr0ng")) as store:
        assert "wr0ng" not in await refused(store, "check user, password and ACL")
    async with opened(by_sentinel(sentinel.port, service="other")) as store:
        await refused(store, "no sentinel names a primary for 'other': they do not know it")
    async with opened(by_sentinel(dead)) as store:
        await refused(store, f"no sentinel names a primary for 'main': .*{dead}")


async def test_sentinels_over_tls(
    valkey: Server, sentinel: Sentinel, authorities: tuple[Authority, Authority], certificate: Tls
) -> None:
    """The primary's TLS listens on the same port of another loopback address, which the sentinel's TLS puts into its answers."""
    sentinel.watch(valkey)
    async with contextlib.AsyncExitStack() as stack:
        asked = await stack.enter_async_context(tls_before(sentinel.port, certificate, other_host="127.0.0.2"))
        await stack.enter_async_context(tls_before(valkey.port, certificate, host="127.0.0.2", at=valkey.port))
        for authority in authorities:
            url = by_sentinel(asked, more=f"&ssl_ca_certs={quote(str(authority.ca))}").replace("redis+", "rediss+")
            store = await stack.enter_async_context(opened(url))
            if authority is authorities[0]:
                first = await seeded(store)
                assert await store.load() == first
            else:
                await refused(store, "(?i)certificate.verify.failed")


@pytest.mark.slow
async def test_a_killed_primary_is_followed_by_its_replica_with_all_that_was_committed(
    valkey: Server, sentinel: Sentinel, tmp_path: Path
) -> None:
    flags = ("--replicaof", "127.0.0.1", str(valkey.port))
    with running(Server(valkey.binary, tmp_path / "replica", flags)) as replica:
        wait_for(valkey.has_replica)
        sentinel.watch(valkey)
        wait_for(lambda: sentinel.replicas() == 1)
        async with opened(by_sentinel(sentinel.port), replicas=1, wait_ms=1000) as store, asyncio.timeout(90):
            committed: list[int] = []
            newest = a_stored()
            taken = await store.put(a_write(newest))
            states = store.watch()
            assert await anext(states) == newest
            killing = None
            while len(committed) < 30 or taken.committed:
                if len(committed) >= 30 and killing is None:
                    killing = asyncio.create_task(asyncio.to_thread(valkey.kill))
                newest, taken = await followed(store, newest)
                if taken.committed:
                    committed.append(newest.identity.revision)
            assert killing is not None
            await killing
            # The replica has none of its own.
            assert taken == Receipt(0, 1)
            assert await store.load() == newest
            written = [e.identity.revision for e in await store.history(1000)]
            assert written == list(range(newest.identity.revision, 0, -1))
            assert set(committed) <= set(written)
            while await anext(states) != newest:
                pass
            await states.aclose()
        assert replica.ask("ROLE")[0] == "master"


async def followed(store: RedisStore, held: Stored) -> tuple[Stored, Receipt]:
    """The next revision, sent again until it is taken, as a person would repeat it."""
    revision = held.identity.revision + 1
    write = a_write(a_stored(1, revision, revision), held)
    while True:
        try:
            return write.stored, await store.put(write)
        except StoreUnavailable:
            await asyncio.sleep(0.1)
