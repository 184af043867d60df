"""A request through the gateway's gRPC door: what the client sees, and what the worker hears."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import grpc
import pytest

from tests.gateway.builders import a_request, read, until
from tests.gateway.fake_worker import WORDS, Running, hang
from trimtab import messages as m
from trimtab.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    QueueFull,
    TrimtabError,
)
from trimtab.kit import rpc
from trimtab.v1 import inference_pb2, inference_pb2_grpc


async def test_tokens_come_through_whole_and_in_order(start_worker, start_gateway, client_of):
    client = client_of(await start_gateway(await start_worker()))
    events = [e async for e in client.generate(a_request(request_id="r1"))]
    assert isinstance(events[0], m.Accepted)
    assert events[0].worker_id == "w0"
    deltas = [e for e in events if isinstance(e, m.Delta)]
    assert "".join(d.text for d in deltas) == "Hello world!"
    assert [t for d in deltas for t in d.token_ids] == [100, 101, 102, 103, 104]
    assert isinstance(events[-1], m.Finish)
    assert events[-1].usage.completion_tokens == 5


async def test_deltas_that_wait_together_become_one_with_nothing_lost_or_doubled(
    start_worker, start_gateway, client_of
):
    """Three steps: two tokens, a notice between three and one, and the end."""

    def logprobs(i: int) -> tuple[m.TokenLogprobs, ...]:
        return (m.TokenLogprobs(-float(i), str(i).encode()),)

    begun = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        for i in range(2):
            r.token(str(i), logprobs(i))
        await begun.wait()
        for i in range(2, 5):
            r.token(str(i), logprobs(i))
        r.event(m.Notice(m.NoticeKind.PREEMPTED))
        r.token("5", logprobs(5))
        r.event(m.Delta(6, (), "…"))
        r.finish()

    async def each(event: m.Event) -> None:
        if isinstance(event, m.Delta):
            begun.set()

    client = client_of(await start_gateway(await start_worker(script=script)))
    events: list[m.Event] = []
    await read(client.generate(a_request()), events, each)
    assert [type(e).__name__ for e in events] == ["Accepted", "Delta", "Delta", "Notice", "Delta", "Finish"]
    deltas = [e for e in events if isinstance(e, m.Delta)]
    assert [d.text for d in deltas] == ["01", "234", "5…"]
    assert [d.first_index for d in deltas] == [0, 2, 5]
    assert [t for d in deltas for t in d.token_ids] == [100, 101, 102, 103, 104, 105]
    assert [x.token for d in deltas for x in d.logprobs] == [b"0", b"1", b"2", b"3", b"4", b"5"]


async def test_a_long_answer_is_granted_window_after_window(start_worker, start_gateway, client_of):
    async def script(r: Running) -> None:
        r.accept()
        await r.tokens(("x",) * 1000)
        r.finish()

    worker = await start_worker(script=script)
    text, finish = await client_of(await start_gateway(worker)).complete(a_request())
    assert (len(text), finish.usage.completion_tokens) == (1000, 1000)
    assert worker.count("window") <= 1 + 1000 // 128


async def test_the_worker_gets_tenant_workload_id_time_and_trace_from_the_gateway(
    start_worker, start_gateway, client_of, spans
):
    worker = await start_worker()
    client = client_of(await start_gateway(worker))
    trace = "0af7651916cd43dd8448eb211c80319c"
    await client.complete(a_request(tenant="someone else"), timeout_s=60, traceparent=f"00-{trace}-b7ad6b7169203331-01")
    start = await worker.hears("start")
    assert start.generate_request.tenant == "default"
    assert start.generate_request.workload == inference_pb2.WORKLOAD_REALTIME
    assert len(start.request_id) == 32
    assert start.generate_request.request_id == start.request_id
    assert 30_000 < start.timeout_ms <= 61_000  # gRPC rounds a deadline up on its way
    assert start.traceparent.split("-")[1] == trace
    # The client has its answer before the gateway has closed its books.
    await until(lambda: len(spans.get_finished_spans()) == 2)
    request, dispatch = sorted(spans.get_finished_spans(), key=lambda s: s.start_time)
    assert start.traceparent.split("-")[2] == f"{dispatch.context.span_id:016x}"
    assert dispatch.parent.span_id == request.context.span_id
    assert f"{request.parent.span_id:016x}" == "b7ad6b7169203331"
    assert (request.name, dispatch.name) == ("text_completion m", "dispatch")
    assert request.attributes["gen_ai.usage.output_tokens"] == 5
    assert (await worker.hears("hello")).gateway_id == "g0"


async def test_a_request_without_deadline_gets_its_workloads(start_worker, start_gateway, client_of):
    worker = await start_worker()
    client = client_of(await start_gateway(worker, realtime_deadline_s=60.0, batch_deadline_s=600.0))
    await client.complete(a_request())
    await client.complete(a_request(workload=m.Workload.BATCH))
    assert 30_000 < (await worker.hears("start")).timeout_ms <= 60_000
    assert 500_000 < (await worker.hears("start", times=2)).timeout_ms <= 600_000


async def test_metadata_names_workload_and_request_where_the_message_does_not(start_worker, start_gateway):
    worker = await start_worker()
    gateway = await start_gateway(worker)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        pb = inference_pb2.GenerateRequest(model="m", text="x")
        async for _ in stub.Generate(pb, metadata=(("x-workload", "batch"), ("x-request-id", "mine"))):
            pass
        start = await worker.hears("start")
        assert start.request_id == "mine"
        assert start.generate_request.workload == inference_pb2.WORKLOAD_BATCH
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(pb, metadata=(("x-workload", "sometimes"),)):
                pass
    error = rpc.from_call(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.violations[0].field == "x-workload"


async def test_calls_that_share_an_id_in_metadata_run_side_by_side(start_worker, start_gateway):
    worker = await start_worker(script=hang)
    gateway = await start_gateway(worker)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        pb = inference_pb2.GenerateRequest(model="m", text="x")
        calls = [stub.Generate(pb, metadata=(("x-request-id", "mine"),)) for _ in range(3)]
        said = [(await call.read()).accepted.request_id for call in calls]
        assert len(set(said)) == 3 and [each[:4] for each in said] == ["mine"] * 3
        assert "mine" in said
        named = stub.Generate(inference_pb2.GenerateRequest(model="m", text="x", request_id="mine"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await named.read()
        assert isinstance(rpc.from_call(caught.value), InvalidRequest), "an id in the message is the caller's own"
        for call in calls:
            call.cancel()
        await until(lambda: not gateway.admission.live)
        again = stub.Generate(pb, metadata=(("x-request-id", "mine"),))
        assert (await again.read()).accepted.request_id == "mine"
        again.cancel()


async def test_metadata_above_the_limit_is_refused_with_the_limit(start_worker, start_gateway):
    gateway = await start_gateway(await start_worker())
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(model="m", text="x"), metadata=(("x-long", "y" * 40_000),)
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "metadata size" in (caught.value.details() or "")


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        ({"prompt": ""}, InvalidRequest, "prompt"),
        ({"prompt": ()}, InvalidRequest, "prompt"),
        ({"sampling": m.Sampling(temperature=3.0)}, InvalidRequest, "sampling.temperature"),
        ({"sampling": m.Sampling(max_tokens=0)}, InvalidRequest, "sampling.max_tokens"),
        ({"request_id": "x" * 200}, InvalidRequest, "request_id"),
        ({"model": "other"}, ModelNotFound, None),
    ],
)
async def test_a_bad_request_is_refused_before_any_worker_is_asked(
    start_worker, start_gateway, client_of, change, kind, field
):
    worker = await start_worker()
    client = client_of(await start_gateway(worker))
    with pytest.raises(kind) as caught:
        await client.complete(a_request(**change))
    assert field is None or caught.value.violations[0].field == field
    assert worker.count("start") == 0


async def test_an_empty_model_means_the_only_one(start_worker, start_gateway, client_of):
    client = client_of(await start_gateway(await start_worker()))
    text, _ = await client.complete(a_request(model=""))
    assert text == "Hello world!"


async def test_an_id_that_still_runs_is_refused_and_free_again_afterwards(start_worker, start_gateway, client_of):
    worker = await start_worker()
    gate = worker_gate(worker)
    client = client_of(await start_gateway(worker))
    async with aclosing(client.generate(a_request(request_id="same"))) as events:
        await anext(events)
        with pytest.raises(InvalidRequest, match="still runs"):
            await client.complete(a_request(request_id="same"))
        gate.set()
        assert [e async for e in events][-1].usage.completion_tokens == 5
    text, _ = await client.complete(a_request(request_id="same"))
    assert text == "Hello world!"


def worker_gate(worker):
    """The worker goes on past Accepted when the event is set."""
    gate = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        await gate.wait()
        await r.tokens(WORDS)
        r.finish()

    worker.script = script
    return gate


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QueueFull("full"), "RESOURCE_EXHAUSTED"),
        (InvalidRequest("too long"), "INVALID_ARGUMENT"),
        (DeadlineExceeded("late"), "DEADLINE_EXCEEDED"),
        (EngineDead("gone"), "UNAVAILABLE"),
    ],
)
async def test_a_workers_error_keeps_its_code_and_reason(start_worker, start_gateway, client_of, error, code):
    async def script(r: Running) -> None:
        r.fail(error)

    client = client_of(await start_gateway(await start_worker(script=script)))
    with pytest.raises(TrimtabError) as caught:
        await client.complete(a_request())
    assert (caught.value.grpc_code, caught.value.reason) == (code, error.reason)
    assert caught.value.retry_after_ms == error.retry_after_ms


async def test_no_worker_is_its_own_error(start_gateway, client_of):
    client = client_of(await start_gateway())
    with pytest.raises(NoWorker, match="there is no worker now") as caught:
        await client.complete(a_request())
    assert caught.value.retry_after_ms == 1000


async def test_attach_is_for_workers(start_gateway):
    gateway = await start_gateway()
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Attach()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_models_are_those_of_the_workers(start_worker, start_gateway, client_of):
    client = client_of(await start_gateway(await start_worker("w0"), await start_worker("w1", model="b")))
    assert [(x.name, x.max_model_len) for x in await client.models()] == [("b", 4096), ("m", 4096)]


@pytest.mark.parametrize(
    ("workload", "bound"), [(m.Workload.REALTIME, 48 + 8 + 256), (m.Workload.BATCH, 16 + 8 + 4096)]
)
async def test_requests_beyond_the_bound_that_no_worker_has_accepted_are_refused(
    start_worker, start_gateway, client_of, workload, bound
):
    async def never(_: Running) -> None:
        await asyncio.Event().wait()

    worker = await start_worker(script=never)
    gateway = await start_gateway(worker)
    gateway.admission.unaccepted[workload] = bound
    with pytest.raises(QueueFull) as caught:
        await client_of(gateway).complete(a_request(workload=workload))
    assert caught.value.metadata == {"bound": str(bound), "workload": workload.value}
    gateway.admission.unaccepted[workload] = 0
