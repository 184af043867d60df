"""KEDA's external scaler, asked as KEDA asks it: numbers where the leader has said one, and errors, never a guess, where nobody has."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from controlplane.admin.client import AdminClient
from controlplane.controllers.decision import Want
from controlplane.keda import METRIC, wanted
from controlplane.pools import AS_IT_IS, NOT_YET
from controlplane.store import Mark, open_store
from tests.certificates import Authority
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from tests.controlplane.replicas import a_store, valkey_binary
from tests.controlplane.test_loop import Told, until
from tests.controlplane.test_process import a_process, line_with
from trimtab.errors import PoolNotFound, WantUnknown
from trimtab.kit.process import free_port
from trimtab.kit.rpc import from_call
from trimtab.v1 import admin_pb2
from trimtab.v1.keda import externalscaler_pb2 as keda
from trimtab.v1.keda import externalscaler_pb2_grpc as keda_grpc

FOUR = {"scale.min_workers": "0", "scale.max_workers": "4"}


def ref(pool: str = "default") -> keda.ScaledObjectRef:
    """As KEDA fills it of a ScaledObject."""
    metadata = {"scalerAddress": "trimtab-control:7071"} | ({"pool": pool} if pool else {})
    return keda.ScaledObjectRef(name="workers", namespace="llm", scalerMetadata=metadata)


@contextlib.asynccontextmanager
async def scaler_of(address: str, credentials: Any = None) -> AsyncIterator[Any]:
    made = (
        grpc.aio.secure_channel(address, credentials) if credentials is not None else grpc.aio.insecure_channel(address)
    )
    async with made as channel:
        yield keda_grpc.ExternalScalerStub(channel)


async def metric(scaler: Any, pool: str = "default") -> float:
    asked = keda.GetMetricsRequest(scaledObjectRef=ref(pool), metricName=METRIC)
    (value,) = (await scaler.GetMetrics(asked)).metricValues
    assert (value.metricName, value.metricValue) == (METRIC, value.metricValueFloat)
    return float(value.metricValueFloat)


async def refusal(call: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as e:
        await call
    return e.value.code().name, from_call(e.value).reason


def an_answer(leader: str = "c0", **facts: Any) -> admin_pb2.GetScaleResponse:
    pool = {"pool": "p", "wanted": 2, "running": 1, "max_workers": 4, "reason": "a queue"} | facts
    return admin_pb2.GetScaleResponse(pools=[admin_pb2.PoolScale(**pool)], leader_id=leader)


def test_what_a_leader_has_decided_is_the_number_and_one_where_it_is_none() -> None:
    assert wanted(an_answer(), "p") == 2
    assert wanted(an_answer(wanted=9), "p") == 4
    assert wanted(an_answer(wanted=0), "p") == 1, "nothing would bring the first one back"


@pytest.mark.parametrize(
    "answer", [an_answer(leader=""), an_answer(max_workers=0, reason=AS_IT_IS), an_answer(reason=NOT_YET)]
)
def test_what_nobody_has_decided_is_no_number(answer: Any) -> None:
    with pytest.raises(WantUnknown):
        wanted(answer, "p")


def test_a_pool_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(PoolNotFound, match="no pool 'q'; there are: p"):
        wanted(an_answer(), "q")


@contextlib.asynccontextmanager
async def a_scaled_mesh(told: Told) -> AsyncIterator[Mesh]:
    async with a_mesh(controllers=(told,)) as mesh:
        await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
        await mesh.admin.set_policy(FOUR, author="t", reason="may grow")
        await until(lambda: told.ticks)
        yield mesh


@pytest.mark.slow
async def test_keda_gets_the_leaders_word_and_a_worth_of_one_for_each_worker() -> None:
    told = Told(wants=(Want("default", 3, "a queue"),))
    async with a_scaled_mesh(told) as mesh, scaler_of(mesh.address) as scaler:
        await until(lambda: mesh.plane.loop.wants)
        assert await metric(scaler) == 3.0
        assert (await scaler.IsActive(ref())).result
        (spec,) = (await scaler.GetMetricSpec(ref())).metricSpecs
        assert (spec.metricName, spec.targetSize, spec.targetSizeFloat) == (METRIC, 1, 1.0)
        assert await refusal(metric(scaler, "other")) == ("NOT_FOUND", "POOL_NOT_FOUND")
        assert await refusal(metric(scaler, "")) == ("INVALID_ARGUMENT", "INVALID_REQUEST")
        assert await refusal(scaler.GetMetricSpec(ref(""))) == ("INVALID_ARGUMENT", "INVALID_REQUEST")


@pytest.mark.slow
async def test_before_anybody_has_decided_there_is_an_error_and_no_zero() -> None:
    async with a_scaled_mesh(Told()) as mesh, scaler_of(mesh.address) as scaler:
        unknown = ("UNAVAILABLE", "WANT_UNKNOWN")
        assert await refusal(metric(scaler)) == unknown
        assert await refusal(scaler.IsActive(ref())) == unknown
        assert await refusal(scaler.StreamIsActive(ref()).read()) == unknown
        assert (await scaler.GetMetricSpec(ref())).metricSpecs, "KEDA makes its autoscaler all the same"


@pytest.mark.slow
async def test_a_pool_that_wants_nobody_is_active_all_the_same() -> None:
    """KEDA would end its last worker, and a pool without one has nobody who says that requests wait."""
    told = Told(wants=(Want("default", 0, "nobody asks"),))
    async with a_scaled_mesh(told) as mesh, scaler_of(mesh.address) as scaler:
        await until(lambda: mesh.plane.loop.wants)
        assert await metric(scaler) == 1.0
        assert (await scaler.IsActive(ref())).result
        stream = scaler.StreamIsActive(ref())
        async with asyncio.timeout(PATIENCE_S):
            assert (await stream.read()).result
        stream.cancel()


async def test_reflection_shows_it() -> None:
    async with a_mesh() as mesh, grpc.aio.insecure_channel(mesh.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answer = await call.read()
        assert "externalscaler.ExternalScaler" in {s.name for s in answer.list_services_response.service}


@pytest.mark.slow
async def test_a_control_plane_process_answers_keda_by_its_certificate(tmp_path: Path) -> None:
    valkey_binary()
    authority = Authority(tmp_path)
    host, port = "localhost", free_port()
    own = authority.issue("control", "c0", hosts=(host,))
    roots = authority.ca.read_bytes()

    def as_keda(kind: str, name: str) -> grpc.ChannelCredentials:
        tls = authority.issue(kind, name)
        return grpc.ssl_channel_credentials(roots, tls.key.read_bytes(), tls.cert.read_bytes())

    with a_store(tmp_path / "store") as store:
        kept = open_store(store.url, "default")
        said = {"kind": "want", "pool": "default", "workers": 3, "reason": "a queue", "evidence": "", "surplus": []}
        # What an earlier leader has left.
        async with asyncio.timeout(PATIENCE_S):
            while True:
                with contextlib.suppress(Exception):
                    if await kept.mark(Mark("want/default", 1, json.dumps(said).encode())):
                        break
                await asyncio.sleep(0.05)
        await kept.close()
        flags = ("--tls-ca", str(own.ca), "--tls-cert", str(own.cert), "--tls-key", str(own.key))
        process = await a_process(tmp_path, "--redis", store.url, "--listen", f"127.0.0.1:{port}", *flags)
        node = FakeNode(f"127.0.0.1:{port}", tls=authority.issue("worker", "w0"))
        try:
            await line_with(process, "control plane ready")
            node.start()
            viewer = as_keda("viewer", "keda")
            async with (
                scaler_of(f"{host}:{port}", viewer) as scaler,
                scaler_of(f"{host}:{port}", as_keda("worker", "w0")) as thief,
            ):
                await node.holds(1, 1)
                assert await refusal(metric(scaler)) == ("UNAVAILABLE", "WANT_UNKNOWN"), "it may not scale yet"
                assert await refusal(metric(thief)) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
                assert await refusal(thief.StreamIsActive(ref()).read()) == ("PERMISSION_DENIED", "PERMISSION_DENIED")
                await _may_grow(f"127.0.0.1:{port}", authority)
                await node.holds(1, 2)
                async with asyncio.timeout(PATIENCE_S):
                    while True:
                        with contextlib.suppress(grpc.aio.AioRpcError):
                            if await metric(scaler) == 3.0:
                                break
                        await asyncio.sleep(0.1)
                assert (await scaler.IsActive(ref())).result
        finally:
            await node.stop()
            process.terminate()
            await process.wait()


async def _may_grow(address: str, authority: Authority) -> None:
    async with AdminClient(address, tls=authority.issue("operator", "oncall")) as admin:
        await admin.set_policy(FOUR, author="oncall", reason="may grow")
