"""However a call ends early, its worker hears of it at once, and nothing of it stays at the gateway."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import aiohttp
import grpc
import pytest

from services.gateway import endpoint
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import Running, hang, one_token_then_hang
from trimtab.errors import DeadlineExceeded
from trimtab.kit import rpc
from trimtab.v1 import inference_pb2, inference_pb2_grpc


def assert_nothing_left(gateway) -> None:
    assert not gateway.admission.live
    assert not any(gateway.admission.unaccepted.values())
    assert all(e.open_requests == 0 for e in gateway.endpoints._members.values())
    assert gateway.admission.idle.is_set()


async def test_a_grpc_client_that_cancels(start_worker, start_gateway):
    worker = await start_worker(script=one_token_then_hang)
    gateway = await start_gateway(worker)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(request_id="r", model="m", text="x")
        )
        assert (await call.read()).HasField("accepted")
        assert (await call.read()).HasField("delta")
        call.cancel()
        cancel = await worker.hears("cancel")
    assert (cancel.request_id, cancel.attempt) == ("r", 1)
    await until(lambda: not gateway.admission.live)
    assert_nothing_left(gateway)


async def test_a_client_that_breaks_out_of_its_loop(start_worker, start_gateway, client_of):
    worker = await start_worker(script=one_token_then_hang)
    gateway = await start_gateway(worker)
    async with aclosing(client_of(gateway).generate(a_request())) as events:
        async for _ in events:
            break
    await worker.hears("cancel")
    await until(lambda: not gateway.admission.live)
    assert_nothing_left(gateway)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("script", [hang, one_token_then_hang])
async def test_an_http_client_that_disconnects(start_worker, start_gateway, stream, script):
    worker = await start_worker(script=script)
    gateway = await start_gateway(worker)
    body = {"model": "m", "prompt": "x", "stream": stream}
    async with aiohttp.ClientSession() as session:
        posting = asyncio.create_task(session.post(f"http://127.0.0.1:{gateway.http.port}/v1/completions", json=body))
        await worker.hears("start")
        if stream:
            (await posting).close()
        else:
            posting.cancel()
        await worker.hears("cancel")
    await until(lambda: not gateway.admission.live)
    assert_nothing_left(gateway)


async def test_the_deadline_ends_a_request_here_and_at_the_worker(start_worker, start_gateway, client_of):
    worker = await start_worker(script=hang)
    gateway = await start_gateway(worker, realtime_deadline_s=0.2)
    begun = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        await client_of(gateway).complete(a_request())
    assert 0.15 < time.monotonic() - begun < 10
    await worker.hears("cancel")
    assert_nothing_left(gateway)


@pytest.mark.slow
async def test_a_grpc_clients_own_deadline_reaches_the_worker(start_worker, start_gateway, client_of):
    worker = await start_worker(script=hang)
    gateway = await start_gateway(worker)
    client = client_of(gateway)
    # Connected first: a deadline that passes on the way reaches no worker.
    await client.models()
    with pytest.raises(DeadlineExceeded):
        await client.complete(a_request(), timeout_s=1.0)
    await worker.hears("cancel")
    await until(lambda: not gateway.admission.live)
    assert_nothing_left(gateway)


async def test_after_many_cancelled_requests_no_queue_task_or_count_remains(start_worker, start_gateway, client_of):
    worker = await start_worker(script=one_token_then_hang)
    gateway = await start_gateway(worker)
    client = client_of(gateway)

    async def one() -> None:
        async with aclosing(client.generate(a_request())) as events:
            await anext(events)

    await one()
    await until(lambda: not gateway.admission.live)
    before = len(asyncio.all_tasks())
    for _ in range(4):
        await asyncio.gather(*(one() for _ in range(25)))
    await worker.hears("cancel", times=101)
    await until(lambda: not gateway.admission.live and len(asyncio.all_tasks()) <= before)
    assert_nothing_left(gateway)
    assert not worker.running


async def test_a_reader_that_takes_nothing_holds_back_only_itself(start_worker, start_gateway, client_of):
    """Its worker is granted no more than a window; the other request on the same link runs to its end."""

    worker = await start_worker(script=endless)
    gateway = await start_gateway(worker)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        slow = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(request_id="slow", model="m", text="x")
        )
        await slow.read()
        await until(lambda: worker.running["slow"].window == 0)
        stuck_at = worker.running["slow"].index

        async def quick(r: Running) -> None:
            r.accept()
            await r.tokens(("y",) * 600)
            r.finish()

        worker.script = quick
        text, finish = await client_of(gateway).complete(a_request())
        assert (len(text), finish.usage.completion_tokens) == (600, 600)
        assert worker.running["slow"].index - stuck_at <= endpoint.WINDOW_TOKENS
        slow.cancel()
        await worker.hears("cancel")


async def endless(r: Running) -> None:
    r.accept()
    while True:
        await r.tokens(("x" * 32768,))
        await asyncio.sleep(0)


async def to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_stuck_grpc_reader_is_given_up(start_worker, start_gateway):
    worker = await start_worker(script=endless)
    gateway = await start_gateway(worker)
    gateway.admission.stall_s = 0.3
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(request_id="slow", model="m", text="x")
        )
        await call.read()
        await worker.hears("cancel")
        await until(lambda: not gateway.admission.live)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert_nothing_left(gateway)


async def test_a_stuck_http_reader_is_given_up(start_worker, start_gateway):
    worker = await start_worker(script=endless)
    gateway = await start_gateway(worker)
    gateway.admission.stall_s = 0.3
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.http.port, limit=1024)
    body = b'{"model": "m", "prompt": "x", "stream": true}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    await worker.hears("cancel")
    await until(lambda: not gateway.admission.live)
    assert_nothing_left(gateway)
    async with asyncio.timeout(20):
        while await reader.read(1 << 20):
            pass
    writer.close()
