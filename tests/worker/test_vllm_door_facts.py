"""What a worker says of itself through vLLM's own gRPC service, and where there is no such door."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc
from smg_grpc_proto.generated import common_pb2

from services.worker import __main__ as main
from services.worker import model_files
from services.worker.settings import WorkerSettings
from services.worker.vllm_door import CHUNK_BYTES, SERVICE, VllmDoor
from tests.certificates import Authority
from tests.worker.conftest import a_request as our_request
from tests.worker.vllm_door_rig import (
    EOS,
    Rig,
    a_request,
    collect,
    refused,
    running,
)
from trimtab.kit import rpc
from trimtab.messages import NodeState
from trimtab.policy import Policy
from trimtab.v1 import inference_pb2_grpc


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with running(tmp_path, monkeypatch) as r:
        yield r


async def test_health_is_told_by_both_services(rig):
    health = await rig.stub.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (True, "serving")
    check = health_pb2_grpc.HealthStub(rig.channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
    assert (await check).status == health_pb2.HealthCheckResponse.SERVING


async def test_the_model_is_what_the_engine_says_it_is(rig):
    info = await rig.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert info == pb.GetModelInfoResponse(
        model_path="sim", served_model_name="sim", is_generation=True, max_context_length=4096, vocab_size=257,
        eos_token_ids=[EOS], max_req_input_len=4095,
    )  # fmt: skip


async def test_the_server_tells_its_limits_and_what_it_has_to_do(rig):
    before = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (before.active_requests, before.last_receive_timestamp, before.is_paused) == (0, 0.0, False)
    call = rig.stub.Generate(a_request(max_tokens=4000))
    await call.read()
    info = await rig.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (info.active_requests, info.server_type, info.data_parallel_size) == (1, "vllm-grpc", 1)
    assert (info.block_size, info.max_num_seqs) == (16, 8)
    assert info.last_receive_timestamp > 0 and info.uptime_seconds > 0
    call.cancel()
    await rig.idle()


async def test_loads_are_those_of_engine_and_queue(rig):
    rig.policy(batch__active=1, admission__engine_queue=0)
    call = rig.stub.Generate(a_request(max_tokens=4000))
    await call.read()
    waiting = rig.stub.Generate(a_request(tuple(b"x" * 100), request_id="waits"))
    await rig.until(lambda: rig.gate.waiting == 1)
    response = await rig.stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
    [load] = response.loads
    assert (response.version, response.dp_rank_count, load.dp_rank) == ("simulated", 1, 0)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
    assert load.num_waiting_uncached_tokens == 100
    assert load.max_total_num_tokens == rig.engine.limits.total_blocks * 16
    assert load.token_usage == load.num_used_tokens / load.max_total_num_tokens > 0
    assert load.max_running_requests == 8
    other = await rig.stub.GetLoads(pb.GetLoadsRequest(dp_rank=1))
    assert (other.dp_rank_count, len(other.loads)) == (0, 0)
    call.cancel()
    await collect(waiting)
    await rig.idle()


@pytest.mark.parametrize(
    ("method", "request_"),
    [
        ("Embed", pb.EmbedRequest()),
        ("FlushCache", common_pb2.FlushCacheRequest()),
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
        ("SubscribeKvEvents", common_pb2.SubscribeKvEventsRequest()),
        ("GetTokenizer", common_pb2.GetTokenizerRequest()),
    ],
)
async def test_what_is_not_served_here_says_why(rig, method, request_):
    code, error = await refused(getattr(rig.stub, method)(request_))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert len(error.message.split()) > 4


async def services(rig: Rig) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
    call = stub.ServerReflectionInfo()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    response = await call.read()
    call.cancel()
    return [s.name for s in response.list_services_response.service]


async def test_reflection_lists_it(rig):
    assert {SERVICE, "trimtab.v1.InferenceService", "grpc.health.v1.Health"} <= set(await services(rig))


@pytest.mark.parametrize(("setting", "installed"), [("off", True), ("auto", False)])
async def test_a_worker_without_the_door_is_a_worker(tmp_path, monkeypatch, setting, installed):
    monkeypatch.setattr(main, "vllm_protos", lambda: installed)
    async with running(tmp_path, monkeypatch, vllm_door=setting) as rig:
        assert SERVICE not in await services(rig)
        code, _ = await refused(rig.stub.Generate(a_request()))
        assert code is grpc.StatusCode.UNIMPLEMENTED
        ours = inference_pb2_grpc.InferenceServiceStub(rig.channel).Generate(our_request())
        assert [r async for r in ours]


def test_a_door_that_is_wanted_and_can_not_be_is_a_usage_error(monkeypatch):
    monkeypatch.setattr(main, "vllm_protos", lambda: False)
    done = CliRunner().invoke(main.main, ["--engine", "simulated", "--vllm-door", "on"])
    assert done.exit_code == main.EXIT_USAGE
    assert "install the extra vllm-door" in done.output


def test_the_setting_has_three_values():
    with pytest.raises(ValueError, match="vllm_door must be auto, on or off, not 'yes'"):
        WorkerSettings(vllm_door="yes")


async def test_with_certificates_the_door_is_for_gateways(tmp_path, monkeypatch):
    authority = Authority(tmp_path)
    own = authority.issue("worker", "w0")
    rpc.use_tls(authority.issue("gateway", "smg"))
    try:
        files = {"tls_ca": str(own.ca), "tls_cert": str(own.cert), "tls_key": str(own.key)}
        async with running(tmp_path, monkeypatch, **files) as rig:
            assert len((await collect(rig.stub.Generate(a_request())))[1].output_ids) == 8
            assert (await rig.stub.HealthCheck(pb.HealthCheckRequest())).healthy
            async with rpc.channel(rig.address, "worker", tls=authority.issue("admin", "ann")) as channel:
                stub = pb_grpc.VllmEngineStub(channel)
                for method, request in (
                    ("Generate", a_request()),
                    ("Abort", pb.AbortRequest(request_ids=["r"])),
                    ("HealthCheck", pb.HealthCheckRequest()),
                    ("GetModelInfo", pb.GetModelInfoRequest()),
                    ("GetServerInfo", pb.GetServerInfoRequest()),
                    ("GetLoads", pb.GetLoadsRequest()),
                    ("GetTokenizer", common_pb2.GetTokenizerRequest()),
                ):
                    code, error = await refused(getattr(stub, method)(request))
                    assert code is grpc.StatusCode.PERMISSION_DENIED, method
                    assert "for gateways of the mesh; you are 'ann'" in error.message
            await rig.idle()
    finally:
        rpc.use_tls(None)


def a_model(where: Path) -> Path:
    where.mkdir()
    (where / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "pad_token_id": 2})
    )
    (where / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": None, "max_length": 9}))
    (where / "tokenizer.json").write_text("{}" + " " * 10)
    (where / "model.safetensors").write_bytes(b"weights")
    return where


def test_a_models_files_say_what_it_is(tmp_path):
    files = model_files.read(str(a_model(tmp_path / "m")))
    assert (files.model_type, files.architectures) == ("llama", ("LlamaForCausalLM",))
    assert (files.bos_token_id, files.pad_token_id) == (1, 2)
    assert json.loads(files.sampling_defaults) == {"temperature": 0.6}
    bare = tmp_path / "bare"
    bare.mkdir()
    assert model_files.read(str(bare)) == model_files.ModelFiles(str(bare), bare)


async def test_a_gateway_gets_the_models_tokenizer_in_pieces_and_not_its_weights(rig, tmp_path):
    where = a_model(tmp_path / "m")
    (where / "vocab.json").write_bytes(hashlib.shake_256(b"seed").digest(3 * CHUNK_BYTES))
    worker = rig.worker
    door = VllmDoor(
        worker.serving, worker.engine, worker.steering,
        state=lambda: NodeState.SERVING, policy=Policy, files=model_files.read(str(where)),
    )  # fmt: skip
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    assert door.register(server) == SERVICE
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}", "worker") as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        chunks = [c async for c in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        assert len(chunks) > 2 and {c.sha256 for c in chunks[:-1]} == {""}
        data = b"".join(c.data for c in chunks)
        assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            assert archive.namelist() == ["config.json", "generation_config.json", "tokenizer.json", "vocab.json"]
            assert archive.read("tokenizer.json") == (where / "tokenizer.json").read_bytes()
        info = await stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (info.model_path, info.tokenizer_path, info.model_type) == (str(where), str(where), "llama")
        assert json.loads(info.default_sampling_params_json) == {"temperature": 0.6}
    await server.stop(0)
