"""Links that last for days move to a renewed certificate: the node is never away, and no running stream is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from controlplane.admin.client import AdminClient
from controlplane.gatekeeper import caller_of
from controlplane.metrics import ControlMetrics
from controlplane.server import ControlPlane
from controlplane.store.memory import MemoryStore
from services.gateway.endpoints import Endpoints
from tests.certificates import Authority
from tests.controlplane.mesh import FakeNode
from tests.gateway.builders import until
from tests.gateway.fake_worker import FakeWorker, Running
from tests.gateway.test_endpoints import a_view
from tests.renewal import look_often, serial_of, serial_shown
from trimtab.kit import rpc
from trimtab.kit.tls import Tls
from trimtab.v1 import control_pb2, inference_pb2, inference_pb2_grpc

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def _look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    look_often(monkeypatch)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def use_tls() -> Iterator[Callable[[Tls], None]]:
    """For all channels of this process, as its start does."""
    before = list(rpc._of_process)
    yield rpc.use_tls
    rpc._of_process[:] = before


@asynccontextmanager
async def a_plane(tls: Tls) -> AsyncIterator[ControlPlane]:
    plane = ControlPlane(MemoryStore(), "127.0.0.1:0", ControlMetrics(CollectorRegistry()), tls=tls)
    await plane.start()
    try:
        await plane.loaded()
        yield plane
    finally:
        await plane.stop()


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Serial numbers of the certificates by which nodes and people have come to the control plane, each once."""
    serials: list[int] = []

    def noting(auth: Any, mesh: str) -> Any:
        if (serial := serial_shown(auth)) not in serials:
            serials.append(serial)
        return caller_of(auth, mesh)

    monkeypatch.setattr("controlplane.gatekeeper.caller_of", noting)
    return serials


async def test_a_node_moves_to_its_renewed_certificate_and_is_never_away(
    authority: Authority, shown: list[int]
) -> None:
    mine = authority.issue("worker", "w0")
    async with a_plane(authority.issue("control", "c0")) as plane, asyncio.timeout(PATIENCE_S):
        away: list[int] = []
        lost = plane.fleet.lost

        def noting(session: int, now: float) -> None:
            if plane.fleet.current(session) is not None:
                away.append(session)
            lost(session, now)

        plane.fleet.lost = noting  # type: ignore[method-assign]
        node = FakeNode(plane.address, tls=mine)
        node.obeys = lambda command: control_pb2.CommandResult(ok=True)
        node.start()
        async with AdminClient(plane.address, tls=authority.issue("operator", "oncall")) as admin:
            await node.holds(1, 1)
            for revision in (2, 3):
                authority.issue("worker", "w0")
                await until(lambda: serial_of(mine) in shown, PATIENCE_S)
                await admin.set_policy({"batch.active": str(revision)}, author="oncall", reason="to see it arrive")
                await node.holds(1, revision)
                assert (await admin.drain("w0", 0, author="oncall", reason="to see it obey")).done
            assert node.active[-2:] == [2, 3]
            assert len(shown) == 4, "three of the node, and the operator's"
            authority.issue("operator", "oncall")
            await admin.fleet()
            assert len(shown) == 5, "and the operator's new one"
        (member,) = plane.fleet.connected()
        assert (member.node_id, away) == ("w0", [])
        assert node.link.connected
        await node.stop()


async def test_a_node_stays_where_it_is_while_its_new_certificate_is_turned_away(
    authority: Authority, shown: list[int], tmp_path: Path
) -> None:
    (tmp_path / "stranger").mkdir()
    stranger = Authority(tmp_path / "stranger").issue("worker", "w0")
    mine = authority.issue("worker", "w0")
    async with a_plane(authority.issue("control", "c0")) as plane, asyncio.timeout(PATIENCE_S):
        node = FakeNode(plane.address, tls=mine)
        node.start()
        await node.holds(1, 1)
        with capture_logs() as said:
            mine.key.write_bytes(stranger.key.read_bytes())
            mine.cert.write_bytes(stranger.cert.read_bytes())
            await until(lambda: any("stays with its old certificate" in line["event"] for line in said), PATIENCE_S)
        assert node.link.connected
        assert [m.node_id for m in plane.fleet.connected()] == ["w0"]
        authority.issue("worker", "w0")
        await until(lambda: serial_of(mine) in shown, PATIENCE_S)
        assert len(shown) == 2
        await node.stop()


class TlsWorker(FakeWorker):
    """Keeps which certificates gateways have shown."""

    def __init__(self, tls: Tls, **facts: Any) -> None:
        super().__init__(**facts)
        self.shown: list[int] = []
        self._tls = tls

    async def start(self, address: str = "127.0.0.1:0") -> FakeWorker:
        self._server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{rpc.bind(self._server, address, self._tls)}"
        await self._server.start()
        return self

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[inference_pb2.AttachRequest], context: Any
    ) -> AsyncIterator[inference_pb2.AttachResponse]:
        self.shown.append(serial_shown(context.auth_context()))
        async for response in super().Attach(request_iterator, context):
            yield response


def a_request(request_id: str) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(request_id=request_id, model="m", text="Say hello")


@asynccontextmanager
async def some_endpoints(worker: FakeWorker, *, static: bool = False) -> AsyncIterator[Endpoints]:
    endpoints = Endpoints("g0", (worker.address,) if static else ())
    endpoints.start()
    try:
        if not static:
            endpoints.on_fleet(a_view(worker))
        await until(lambda: endpoints.can_serve, PATIENCE_S)
        yield endpoints
    finally:
        await endpoints.close()


@pytest.mark.parametrize("static", [False, True])
async def test_a_gateways_link_is_made_anew_and_what_runs_on_the_first_one_ends_there(
    authority: Authority, use_tls: Callable[[Tls], None], static: bool
) -> None:
    go_on = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        r.token("Hel")
        if r.start.request_id == "early":
            await go_on.wait()
        r.token("lo")
        r.finish()

    mine = authority.issue("gateway", "g0")
    use_tls(mine)
    worker = TlsWorker(authority.issue("worker", "w0"), script=script)
    await worker.start()
    try:
        async with some_endpoints(worker, static=static) as endpoints, asyncio.timeout(PATIENCE_S):
            (first,) = endpoints.serving()
            early = first.open(a_request("early"), 1, timeout_ms=60_000, traceparent="")
            await early.take()
            before = serial_of(mine)
            authority.issue("gateway", "g0")
            await until(lambda: endpoints.get(first.node_id) is not first, PATIENCE_S)
            (second,) = endpoints.serving()
            assert worker.shown == [before, serial_of(mine)]
            assert (second.model, second.max_model_len) == (first.model, first.max_model_len)
            assert (second.life, second.guard) == (first.life, first.guard), "to routing it is the same worker"
            assert (first.retiring, endpoints.links_up) == (True, 2)
            assert endpoints.workers("m").endpoints == (second,)
            late = second.open(a_request("late"), 1, timeout_ms=60_000, traceparent="")
            events = []
            while not any(e.HasField("finish") for e in events):
                events += await late.take()
            late.close()
            authority.issue("gateway", "g0")
            await until(lambda: endpoints.get(first.node_id) is not second, PATIENCE_S)
            assert worker.shown[-1] == serial_of(mine)
            await until(lambda: endpoints.links_up == 2, PATIENCE_S)  # the second one has nothing left to do
            go_on.set()
            events = []
            while not any(e.HasField("finish") for e in events):
                events += await early.take()
            early.close()
            await until(lambda: endpoints.links_up == 1, PATIENCE_S)
    finally:
        await worker.die()


async def test_a_link_stays_while_the_new_certificate_is_turned_away(
    authority: Authority, use_tls: Callable[[Tls], None], tmp_path: Path
) -> None:
    (tmp_path / "stranger").mkdir()
    stranger = Authority(tmp_path / "stranger").issue("gateway", "g0")
    mine = authority.issue("gateway", "g0")
    use_tls(mine)
    worker = TlsWorker(authority.issue("worker", "w0"))
    await worker.start()
    try:
        async with some_endpoints(worker) as endpoints, asyncio.timeout(PATIENCE_S):
            (first,) = endpoints.serving()
            with capture_logs() as said:
                mine.key.write_bytes(stranger.key.read_bytes())
                mine.cert.write_bytes(stranger.cert.read_bytes())
                await until(lambda: any("link stays with its old" in line["event"] for line in said), PATIENCE_S)
            assert endpoints.serving() == [first]
            authority.issue("gateway", "g0")
            await until(lambda: endpoints.get("w0") is not first, PATIENCE_S)
            assert worker.shown[-1] == serial_of(mine)
            await until(lambda: endpoints.links_up == 1, PATIENCE_S)
    finally:
        await worker.die()


async def test_a_worker_that_leaves_while_its_link_is_renewed_leaves_no_link_behind(
    authority: Authority, use_tls: Callable[[Tls], None]
) -> None:
    mine = authority.issue("gateway", "g0")
    use_tls(mine)
    worker = TlsWorker(authority.issue("worker", "w0"))
    await worker.start()
    endpoints = Endpoints("g0", (), leave_grace_s=0.01)
    endpoints.start()
    try:
        async with asyncio.timeout(PATIENCE_S):
            endpoints.on_fleet(a_view(worker))
            await until(lambda: endpoints.can_serve, PATIENCE_S)
            await worker.die()
            authority.issue("gateway", "g0")
            endpoints._succeed(*next(iter(endpoints._members.items())))
            endpoints.on_fleet(control_pb2.FleetView())
            await until(lambda: not endpoints._members, PATIENCE_S)
            await until(lambda: not endpoints._tasks and not endpoints._successors, PATIENCE_S)
    finally:
        await endpoints.close()
