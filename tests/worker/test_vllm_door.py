"""Requests through vLLM's own gRPC service at a worker, by the stubs of its own package, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from services.worker.reading import Reading
from tests.worker.conftest import a_request as our_request
from tests.worker.vllm_door_rig import (
    EOS,
    PATIENCE_S,
    Rig,
    a_request,
    collect,
    refused,
    rest,
    running,
    tokens_of,
)
from trimtab import errors, validation
from trimtab.kit import rpc
from trimtab.messages import Workload
from trimtab.v1 import inference_pb2_grpc


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with running(tmp_path, monkeypatch) as r:
        yield r


async def test_a_stream_is_chunks_of_token_ids_and_a_complete_with_all_of_them(rig):
    chunks, complete = await collect(rig.stub.Generate(a_request(max_tokens=30)))
    assert tokens_of(chunks) == list(complete.output_ids) and len(complete.output_ids) == 30
    assert {(c.prompt_tokens, c.completion_tokens - len(c.token_ids), c.index) for c in chunks} == {(5, 0, 0)}
    assert (complete.finish_reason, complete.prompt_tokens, complete.completion_tokens) == ("length", 5, 30)
    assert complete.WhichOneof("matched_stop") is None
    assert not complete.HasField("output_logprobs")
    await rig.idle()


async def test_without_stream_there_is_one_message_with_the_same_tokens(rig):
    chunks, _ = await collect(rig.stub.Generate(a_request(max_tokens=30)))
    none, complete = await collect(rig.stub.Generate(a_request(max_tokens=30, stream=False)))
    assert not none
    assert (list(complete.output_ids), complete.finish_reason) == (tokens_of(chunks), "length")


async def test_text_is_tokenised_here(rig):
    text = a_request()
    text.text = "hello"
    assert await collect(rig.stub.Generate(text)) == await collect(rig.stub.Generate(a_request()))


def tensor(mm: pb.MultimodalInputs) -> None:
    mm.pixel_values.inline = b"x"


REFUSED = {
    "mm_inputs": lambda r: tensor(r.mm_inputs),
    "extra_mm_inputs": lambda r: tensor(r.extra_mm_inputs.add()),
    "media_refs": lambda r: r.media_refs.items.add(url="http://there/x.png"),
    "kv_transfer_params": lambda r: setattr(r.kv_transfer_params, "remote_port", 1),
    "kv_transfer_params_json": lambda r: setattr(r, "kv_transfer_params_json", "{}"),
    "data_parallel_rank": lambda r: setattr(r, "data_parallel_rank", 1),
    "tokenized": lambda r: r.ClearField("tokenized"),
    "tokenized.input_ids": lambda r: r.tokenized.input_ids.append(999),
    "tokenized.input_ids ": lambda r: r.tokenized.input_ids.extend([1] * (validation.MAX_PROMPT_TOKENS + 1)),
    "sampling_params.n": lambda r: setattr(r.sampling_params, "n", 2),
    "sampling_params.prompt_logprobs": lambda r: setattr(r.sampling_params, "prompt_logprobs", 0),
    "sampling_params.truncate_prompt_tokens": lambda r: setattr(r.sampling_params, "truncate_prompt_tokens", -1),
    "sampling_params.structural_tag": lambda r: setattr(r.sampling_params, "structural_tag", "{}"),
    "sampling_params.logprobs": lambda r: setattr(r.sampling_params, "logprobs", -1),
    "sampling_params.logit_bias": lambda r: r.sampling_params.logit_bias.update({-1: 1.0}),
    "sampling_params.max_tokens": lambda r: setattr(r.sampling_params, "max_tokens", 5000),
    "sampling_params.temperature": lambda r: setattr(r.sampling_params, "temperature", 3),
    "sampling_params.seed": lambda r: setattr(r.sampling_params, "seed", -5),
    "sampling_params.stop": lambda r: r.sampling_params.stop.append(""),
    "sampling_params.json_schema": lambda r: setattr(r.sampling_params, "json_schema", "{"),
    "sampling_params.choice": lambda r: r.sampling_params.choice.choices.append(""),
    "sampling_params.regex": lambda r: setattr(r.sampling_params, "regex", "[a-z]"),
    "request_id": lambda r: setattr(r, "request_id", "x" * 200),
    "text": lambda r: setattr(r, "text", ""),
}


@pytest.mark.parametrize("field", REFUSED)
async def test_what_can_not_be_done_is_refused_by_the_name_of_its_field(rig, field):
    request = a_request()
    REFUSED[field](request)
    code, error = await refused(rig.stub.Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in error.violations] == [field.strip()]
    assert field.strip() in error.message
    assert rig.engine.pulse().step_no == 0
    await rig.idle()


async def test_a_field_that_only_a_newer_protocol_knows_is_refused_by_its_number(rig):
    request = pb.GenerateRequest.FromString(a_request().SerializeToString() + b"\x98\x06\x01")
    request.sampling_params.MergeFromString(b"\x98\x06\x01")
    code, error = await refused(rig.stub.Generate(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in error.violations] == ["99", "sampling_params.99"]


async def test_values_that_mean_nothing_special_are_taken(rig):
    request = a_request(
        n=1, top_p=0.0, repetition_penalty=0.0, grammar_from_first_token=True, spaces_between_special_tokens=True,
        json_object=False, logit_bias={1: 1.0}, seed=7,
    )  # fmt: skip
    request.data_parallel_rank = 0
    request.tokenized.original_text = "hello"
    assert len((await collect(rig.stub.Generate(request)))[1].output_ids) == 8


async def test_a_stop_string_ends_at_the_token_that_completes_it(rig):
    _, whole = await collect(rig.stub.Generate(a_request(max_tokens=200)))
    text = bytes(whole.output_ids)
    end = text.index(b"rudder, and") + len(b"rudder, and")
    chunks, complete = await collect(rig.stub.Generate(a_request(max_tokens=200, stop=["rudder, and"])))
    assert bytes(tokens_of(chunks)) == bytes(complete.output_ids) == text[:end]
    assert (complete.finish_reason, complete.matched_stop_str) == ("stop", "rudder, and")
    await rig.idle()


async def test_the_end_of_sequence_is_a_stop_and_a_stop_token_is_named(rig):
    _, complete = await collect(rig.stub.Generate(a_request(max_tokens=500, ignore_eos=False)))
    assert (complete.finish_reason, complete.output_ids[-1]) == ("stop", EOS)
    assert complete.WhichOneof("matched_stop") is None
    _, complete = await collect(rig.stub.Generate(a_request(max_tokens=500, ignore_eos=False, stop_token_ids=[EOS])))
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", EOS)


@pytest.mark.parametrize("wanted", [0, 1])
async def test_log_probabilities_come_for_each_token_and_the_best_where_they_are_wanted(rig, wanted):
    chunks, complete = await collect(rig.stub.Generate(a_request(logprobs=wanted)))
    assert [list(c.output_logprobs.token_ids) for c in chunks] == [list(c.token_ids) for c in chunks]
    found = complete.output_logprobs
    assert list(found.token_ids) == list(complete.output_ids)
    assert len(found.token_logprobs) == 8
    assert [list(top.token_ids) for top in found.top_logprobs] == [[t] for t in complete.output_ids if wanted]


async def test_an_abort_ends_a_running_request_with_what_it_had_and_frees_the_engine(rig):
    call = rig.stub.Generate(a_request(max_tokens=4000, request_id="long"))
    first = [(await call.read()).chunk for _ in range(3)]
    assert rig.engine.load().running == 1
    await rig.stub.Abort(pb.AbortRequest(request_ids=["nobody", "", "long"]))
    chunks, complete = await collect(call)
    assert complete.finish_reason == "abort"
    assert tokens_of(first + chunks) == list(complete.output_ids)
    assert complete.completion_tokens == len(complete.output_ids) < 4000
    await rig.idle()


async def test_an_abort_ends_a_request_that_waits_and_nobody_elses(rig):
    rig.policy(batch__active=1, admission__engine_queue=0)
    runs = rig.stub.Generate(a_request(max_tokens=4000, request_id="runs"))
    await runs.read()
    waits = rig.stub.Generate(a_request(request_id="waits", stream=False))
    await rig.until(lambda: rig.gate.waiting == 1)
    await rig.stub.Abort(pb.AbortRequest(request_ids=["waits"]))
    _, complete = await collect(waits)
    assert (complete.finish_reason, list(complete.output_ids)) == ("abort", [])
    assert rig.gate.waiting == 0 and rig.engine.load().running == 1
    runs.cancel()
    await rig.idle()


async def test_an_abort_that_comes_before_the_queue_is_not_lost(rig, monkeypatch):
    serving, go, here = rig.worker.serving, asyncio.Event(), asyncio.Event()
    plain = serving._tokenise

    async def slow(prompt):
        here.set()
        await go.wait()
        return await plain(prompt)

    monkeypatch.setattr(serving, "_tokenise", slow)
    call = rig.stub.Generate(a_request(max_tokens=4000))
    reading = asyncio.create_task(collect(call))
    await asyncio.wait_for(here.wait(), PATIENCE_S)
    await rig.stub.Abort(pb.AbortRequest(request_ids=["r"]))
    go.set()
    _, complete = await asyncio.wait_for(reading, PATIENCE_S)
    assert complete.finish_reason == "abort"
    await rig.idle()


async def test_an_abort_does_not_reach_requests_of_the_other_door(rig):
    ours = inference_pb2_grpc.InferenceServiceStub(rig.channel).Generate(
        our_request(max_tokens=4000, request_id="same")
    )
    await ours.read()
    await ours.read()
    await rig.stub.Abort(pb.AbortRequest(request_ids=["same"]))
    assert (await ours.read()).WhichOneof("event") == "delta"
    assert rig.engine.load().running == 1
    ours.cancel()
    await rig.idle()


async def test_a_client_that_cancels_frees_the_engine(rig):
    call = rig.stub.Generate(a_request(max_tokens=4000))
    await call.read()
    call.cancel()
    await rig.idle()


@pytest.mark.slow
async def test_a_gateway_that_stops_reading_gives_its_place_back(rig, monkeypatch):
    """It sets no deadline, and its connection takes little."""
    monkeypatch.setitem(Reading.__init__.__kwdefaults__, "behind_s", 0.05)
    options = [*rpc.CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(rig.address, options=options) as channel, asyncio.timeout(60):
        call = pb_grpc.VllmEngineStub(channel).Generate(a_request(max_tokens=4000))
        await call.read()
        await rig.idle(within_steps=3500)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rest(call)
        assert isinstance(rpc.from_call(caught.value), errors.SlowReader)


async def test_the_deadline_ends_the_stream_and_frees_the_engine(rig):
    code, _ = await refused(rig.stub.Generate(a_request(max_tokens=4000), timeout=0.15))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    await rig.idle()


async def test_a_draining_worker_is_unavailable_and_says_so_before_anybody_asks_for_tokens(rig):
    rig.worker.serving.draining = True
    code, error = await refused(rig.stub.Generate(a_request()))
    assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, errors.Draining)
    health = await rig.stub.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "draining")
    assert (await rig.stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused


async def test_a_dead_engine_is_unavailable(rig):
    call = rig.stub.Generate(a_request(max_tokens=4000))
    await call.read()
    rig.engine._task.cancel()
    await asyncio.wait([rig.engine._task])
    code, error = await refused(call)
    assert (code, type(error)) == (grpc.StatusCode.UNAVAILABLE, errors.EngineDead)
    code, _ = await refused(rig.stub.Generate(a_request()))
    assert code is grpc.StatusCode.UNAVAILABLE
    health = await rig.stub.HealthCheck(pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "the engine is gone")


async def test_a_full_queue_is_resource_exhausted_with_a_hint_when_to_come_again(rig):
    rig.policy(batch__active=1, admission__engine_queue=0, admission__realtime_queue=0)
    first = rig.stub.Generate(a_request(max_tokens=4000))
    await first.read()
    code, error = await refused(rig.stub.Generate(a_request()))
    assert (code, type(error)) == (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.QueueFull)
    assert error.retry_after_ms
    first.cancel()
    await rig.idle()


@pytest.mark.parametrize(
    ("metadata", "workload"), [((), Workload.REALTIME), ((("trimtab-workload", "batch"),), Workload.BATCH)]
)
async def test_the_workload_comes_in_the_metadata(rig, metadata, workload):
    call = rig.stub.Generate(a_request(max_tokens=4000), metadata=metadata)
    await call.read()
    assert [held.job.workload for held in rig.worker.steering._held.values()] == [workload]
    call.cancel()
    await rig.idle()


async def test_an_unknown_workload_is_refused(rig):
    code, error = await refused(rig.stub.Generate(a_request(), metadata=(("trimtab-workload", "urgent"),)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert [v.field for v in error.violations] == ["trimtab-workload"]
