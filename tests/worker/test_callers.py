"""Who may call a worker, and what becomes of those who may not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from structlog.testing import capture_logs

from services.worker.callers import Callers
from services.worker.server import InferenceServicer
from tests.certificates import MESH, Authority
from tests.worker.conftest import Rig, a_request
from trimtab.errors import PermissionDenied
from trimtab.kit import rpc
from trimtab.kit.tls import KINDS
from trimtab.v1 import inference_pb2 as pb
from trimtab.v1 import inference_pb2_grpc


class Door:
    """A worker's door with TLS before the rig's serving."""

    def __init__(self, rig: Rig, authority: Authority) -> None:
        self.rig, self.authority, self.address = rig, authority, ""

    async def generate(self, kind: str, name: str = "x0", mesh: str = MESH) -> list[str]:
        """The events that this caller gets."""
        tls = self.authority.issue(kind, name, mesh=mesh)
        async with rpc.channel(self.address, "worker", tls=tls) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return [str(r.WhichOneof("event")) async for r in stub.Generate(a_request(max_tokens=3))]

    def denied(self, method: str) -> float:
        return self.rig.metrics.registry.get_sample_value("trimtab_worker_denied_total", {"method": method}) or 0.0


@pytest.fixture
async def door(rig: Rig, tmp_path: Path) -> AsyncIterator[Door]:
    door = Door(rig, Authority(tmp_path))
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    servicer = InferenceServicer(rig.serving, rig.gate, lambda: 0, 4096, Callers(MESH, rig.metrics.denied))
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = rpc.bind(server, "127.0.0.1:0", door.authority.issue("worker", "w0"))
    await server.start()
    door.address = f"127.0.0.1:{port}"
    yield door
    await server.stop(0)


@pytest.mark.parametrize("kind", ["gateway", "operator", "admin"])
async def test_gateways_and_who_may_change_the_mesh_may_generate(door: Door, kind: str) -> None:
    events = await door.generate(kind)
    assert (events[0], events[-1], door.denied("Generate")) == ("accepted", "finish", 0.0)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"gateway", "operator", "admin"}))
async def test_whoever_else_has_a_certificate_may_not(door: Door, kind: str) -> None:
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        await door.generate(kind)
    error = rpc.from_call(caught.value)
    assert isinstance(error, PermissionDenied)
    assert error.message == "Generate is for gateways and operators and admins of the mesh; you are 'x0'"
    said = [(e["method"], e["kind"], e["identity"]) for e in logs if e["event"] == "denied"]
    assert said == [("Generate", kind, "x0")]
    assert (door.denied("Generate"), door.rig.serving.unfinished) == (1.0, 0)


async def test_an_operator_of_another_mesh_is_nobody_here(door: Door) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await door.generate("operator", mesh="other")
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_attach_is_for_gateways_alone(door: Door) -> None:
    async with rpc.channel(door.address, "worker", tls=door.authority.issue("admin", "ann")) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).Attach().read()
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert door.denied("Attach") == 1.0
    async with rpc.channel(door.address, "worker", tls=door.authority.issue("gateway", "g0")) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Attach()
        assert isinstance(await call.read(), pb.AttachResponse)
        call.cancel()
