"""Connections of a process that outlives its certificate, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.certificates import Authority
from tests.renewal import look_often, serial_of, serial_shown
from trimtab.kit import rpc
from trimtab.kit.renewing import Renewing
from trimtab.kit.tls import HttpCertificate, Tls, generation

PATIENCE_S = 20.0
ASKED = health_pb2.HealthCheckRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING


class Door(health_pb2_grpc.HealthServicer):
    """Keeps which certificates were shown; a Watch says something whenever `more` is set."""

    def __init__(self) -> None:
        self.shown: list[int] = []
        self.more = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> health_pb2.HealthCheckResponse:  # type: ignore[override]
        if "x509_pem_cert" in context.auth_context():
            self.shown.append(serial_shown(context.auth_context()))
        return health_pb2.HealthCheckResponse(status=SERVING)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[health_pb2.HealthCheckResponse]:  # type: ignore[override]
        self.shown.append(serial_shown(context.auth_context()))
        while True:
            yield health_pb2.HealthCheckResponse(status=SERVING)
            await self.more.wait()
            self.more.clear()


@contextlib.asynccontextmanager
async def a_door(tls: Tls | None) -> AsyncIterator[tuple[str, Door]]:
    server, door = grpc.aio.server(options=rpc.SERVER_OPTIONS), Door()
    health_pb2_grpc.add_HealthServicer_to_server(door, server)
    port = rpc.bind(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", door
    finally:
        await server.stop(None)


@pytest.fixture
def plain() -> Iterator[None]:
    before = list(rpc._of_process)
    rpc.use_tls(None)
    yield
    rpc._of_process[:] = before


async def check(door: Renewing[Any]) -> int:
    with door.call() as stub:
        answer = await stub.Check(ASKED, timeout=PATIENCE_S)
    return int(answer.status)


async def test_new_calls_show_the_renewed_certificate_and_a_stream_that_runs_goes_on_to_its_end(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    mine = ca.issue("gateway", "g0")
    async with a_door(ca.issue("worker", "w0")) as (address, door), asyncio.timeout(PATIENCE_S):
        renewing: Renewing[Any] = Renewing(address, "worker", health_pb2_grpc.HealthStub, tls=mine)
        before = serial_of(mine)
        with renewing.call() as stub:
            stream = stub.Watch(ASKED)
            assert (await stream.read()).status == SERVING
            old = renewing._newest
            ca.issue("gateway", "g0")
            after = serial_of(mine)
            assert before != after
            assert await check(renewing) == await check(renewing) == SERVING
            assert door.shown == [before, after, after]
            door.more.set()
            assert (await stream.read()).status == SERVING, "nobody has cut it"
            ca.issue("gateway", "g0")
            assert await check(renewing) == SERVING
            assert old.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN
            stream.cancel()
        while old.channel.get_state() is not grpc.ChannelConnectivity.SHUTDOWN:
            await asyncio.sleep(0.01)
        assert not renewing._older, "those without calls are let go at once"
        assert await check(renewing) == SERVING
        assert door.shown[-1] == serial_of(mine)
        await renewing.close()


async def test_files_that_are_half_written_change_nothing(tmp_path: Path) -> None:
    ca = Authority(tmp_path)
    mine = ca.issue("gateway", "g0")
    async with a_door(ca.issue("worker", "w0")) as (address, door), asyncio.timeout(PATIENCE_S):
        renewing: Renewing[Any] = Renewing(address, "worker", health_pb2_grpc.HealthStub, tls=mine)
        first, before = renewing._newest, generation(mine)
        other = ca.issue("gateway", "g1")
        mine.cert.write_bytes(other.cert.read_bytes())
        assert await check(renewing) == SERVING
        assert (renewing._newest, generation(mine)) == (first, before)
        mine.key.write_bytes(other.key.read_bytes())
        assert await check(renewing) == SERVING
        assert generation(mine) == before + 1
        assert door.shown[-1] == serial_of(other)
        await renewing.close()


async def test_files_that_are_written_again_with_the_same_content_are_no_renewal(tmp_path: Path) -> None:
    mine = Authority(tmp_path).issue("gateway", "g0")
    before = generation(mine)
    for path in (mine.ca, mine.cert, mine.key):
        path.write_bytes(path.read_bytes())
    assert generation(mine) == before


async def test_plain_text_keeps_its_channel(plain: None) -> None:
    async with a_door(None) as (address, _), asyncio.timeout(PATIENCE_S):
        renewing: Renewing[Any] = Renewing(address, "worker", health_pb2_grpc.HealthStub)
        first = renewing._newest
        assert await check(renewing) == SERVING
        assert renewing._newest is first
        assert rpc.generation() == 0
        await renewing.close()


async def test_https_believes_an_authority_no_more_that_is_taken_out_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_often(monkeypatch)
    (tmp_path / "old").mkdir()
    old, new = Authority(tmp_path / "old"), Authority(tmp_path)
    leaver, stayer = old.issue("viewer", "ann"), new.issue("viewer", "bob")
    own = new.issue("gateway", "g0", hosts=("localhost",))
    own.ca.write_bytes(new.authority + old.authority)
    certificate = HttpCertificate(own, asks_clients=True)
    renewing = asyncio.create_task(certificate.renew())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            writer.write(b"here\n")
            await writer.drain()
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=certificate.context)
    port = server.sockets[0].getsockname()[1]

    async def let_in(who: Tls) -> bool:
        context = ssl.create_default_context(cafile=str(tmp_path / "roots.pem"))
        context.load_cert_chain(who.cert, who.key)
        try:
            reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
            try:
                return await reader.readline() == b"here\n"
            finally:
                writer.close()
        except (ssl.SSLError, ConnectionError):
            return False

    (tmp_path / "roots.pem").write_bytes(new.authority)
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await let_in(leaver)
            assert await let_in(stayer)
            own.ca.write_bytes(new.authority)
            while await let_in(leaver):
                await asyncio.sleep(0.02)
            assert await let_in(stayer)
            own.ca.write_bytes(new.authority + old.authority)
            while not await let_in(leaver):
                await asyncio.sleep(0.02)
    finally:
        await rpc.cancel_and_wait(renewing)
        server.close()
