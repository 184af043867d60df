"""What a client sees while nothing comes, readers that never read, and tokens that travel together."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import psutil
import pytest

from services.gateway import coalesce, openai, opening
from services.gateway.coalesce import Coalescer
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import Running
from trimtab import messages as m
from trimtab.errors import InvalidRequest
from trimtab.kit import rpc
from trimtab.kit.process import free_port
from trimtab.v1 import inference_pb2, inference_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
BATCH = {"model": "m", "prompt": "x", "stream": True}
READERS = 100
"""By each door."""
OUTPUT_TOKENS = 50_000
"""Of each, if anybody read them."""
CHANNEL_OPTIONS = [
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 8192),
    ("grpc.max_receive_message_length", 16 << 20),
]


@pytest.fixture
async def full(start_worker, start_gateway):
    """(worker, gateway) whose worker has no room for BATCH."""
    worker = await start_worker()
    worker.credits = inference_pb2.Credits(realtime=9, batch=0)
    gateway = await start_gateway(worker)
    await until(lambda: all(e.credits is not None for e in gateway.endpoints.serving()))
    return worker, gateway


def make_room(worker) -> None:
    worker.credits = inference_pb2.Credits(realtime=9, batch=9)


@asynccontextmanager
async def http_batch(gateway) -> AsyncIterator[aiohttp.ClientResponse]:
    async with aiohttp.ClientSession() as session, asyncio.timeout(30):
        url = f"http://127.0.0.1:{gateway.http.port}/v1/completions"
        async with session.post(url, json=BATCH, headers={"x-workload": "batch", "x-request-id": "b"}) as answer:
            yield answer


async def test_a_stream_that_waits_in_line_has_headers_and_comments(full, monkeypatch):
    worker, gateway = full
    monkeypatch.setattr(opening, "HEADERS_S", 0.02)
    monkeypatch.setattr(openai, "KEEP_ALIVE_S", 0.02)
    async with http_batch(gateway) as answer:
        assert (answer.status, answer.headers["x-request-id"]) == (200, "b")
        while (line := await answer.content.readline()) != b": keep-alive\n":
            assert line
        assert worker.count("start") == 0
        make_room(worker)
        rest = await answer.text()
    assert rest.endswith("data: [DONE]\n\n")


async def test_http_calls_that_share_an_id_run_side_by_side(full):
    worker, gateway = full
    async with http_batch(gateway) as first:
        assert first.headers["x-request-id"] == "b"
        async with http_batch(gateway) as second:
            assert second.status == 200
            assert second.headers["x-request-id"].startswith("b~")
            make_room(worker)
            assert (await second.text()).endswith("data: [DONE]\n\n")
        assert (await first.text()).endswith("data: [DONE]\n\n")


async def test_an_error_before_the_headers_has_its_own_status_and_one_after_them_is_an_event(full, monkeypatch):
    _, gateway = full

    async def ended(answer_of) -> None:
        await until(lambda: "b" in gateway.admission.live)
        await answer_of()
        gateway.admission.live["b"].end(InvalidRequest("no"))

    async def at_once() -> None:
        pass

    ending = asyncio.create_task(ended(at_once))
    async with http_batch(gateway) as answer:
        assert answer.status == 400
    await ending
    monkeypatch.setattr(opening, "HEADERS_S", 0.02)
    async with http_batch(gateway) as answer:
        assert answer.status == 200
        await ended(at_once)
        text = await answer.text()
    assert '"error"' in text
    assert "[DONE]" not in text


async def test_grpc_metadata_goes_out_while_a_request_waits_in_line(full, monkeypatch):
    worker, gateway = full
    monkeypatch.setattr(opening, "HEADERS_S", 0.02)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel, asyncio.timeout(30):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(request_id="b", model="m", text="x", workload=inference_pb2.WORKLOAD_BATCH)
        )
        await call.initial_metadata()
        assert worker.count("start") == 0
        make_room(worker)
        assert [r.WhichOneof("event") async for r in call][-1] == "finish"


async def test_grpc_errors_after_the_metadata_keep_their_code(full, monkeypatch):
    _, gateway = full
    monkeypatch.setattr(opening, "HEADERS_S", 0.02)
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}", "gateway") as channel, asyncio.timeout(30):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            inference_pb2.GenerateRequest(request_id="b", model="m", text="x", workload=inference_pb2.WORKLOAD_BATCH)
        )
        await call.initial_metadata()
        gateway.admission.live["b"].end(InvalidRequest("no"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_first_word_waits_for_headers_that_are_on_their_way():
    said: list[str] = []
    go_on = asyncio.Event()

    async def slowly() -> None:
        await go_on.wait()
        said.append("headers")

    stream = opening.Opening(slowly)
    async with stream:
        stream._begin()
        await asyncio.sleep(0)
        first = asyncio.create_task(stream.over())
        await asyncio.sleep(0)
        assert not first.done()
        go_on.set()
        await first
        said.append("first word")
    assert said == ["headers", "first word"]


async def test_headers_are_not_sent_twice():
    async with opening.Opening(lambda: pytest.fail("the first word brought them")) as stream:
        await stream.over()
        assert not stream.pending
    assert stream._timer is not None
    assert stream._timer.cancelled()


@pytest.mark.parametrize(("coalesce_ms", "late_s", "holds"), [(10, 0.05, True), (10, 0.0, False), (0, 0.05, False)])
def test_writers_hold_back_only_where_that_is_wanted_and_the_loop_is_late(coalesce_ms, late_s, holds):
    c = Coalescer(coalesce_ms)
    for _ in range(20):
        c.late(late_s)
    assert c.holds is holds
    for _ in range(40):
        c.late(0.0)
    assert not c.holds


async def test_a_late_loop_is_noticed():
    c = Coalescer(10)
    watching = asyncio.create_task(c.watch())
    async with asyncio.timeout(30):
        while not c.holds:
            await asyncio.sleep(0)
            loop = asyncio.get_running_loop()
            end = loop.time() + coalesce.TICK_S * 2
            while loop.time() < end:
                pass
    await rpc.cancel_and_wait(watching)


async def test_under_load_tokens_of_a_while_share_a_message_and_the_first_goes_at_once(
    start_worker, start_gateway, client_of
):
    """The worker sends the rest only once the client has the first one, in several steps; the writer pauses until all have come."""
    have_first, all_sent = asyncio.Event(), asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        r.token("a")
        await have_first.wait()
        for text in "bcd":
            r.token(text)
            await asyncio.sleep(0.01)
        all_sent.set()
        r.finish()

    worker = await start_worker(script=script)
    gateway = await start_gateway(worker, coalesce_ms=1)
    paused = gateway.coalescer
    paused.late = lambda _: None  # type: ignore[method-assign]
    paused._late_s = 1.0
    pauses: list[int] = []
    texts: list[str] = []

    async def pause() -> None:
        pauses.append(1)
        if len(pauses) == 2:  # after the first token; before it there was Accepted
            await all_sent.wait()
            await until(lambda: "".join(e.delta.text for s in streams() for e in s._events) == "bcd")

    def streams():
        return [s for e in gateway.endpoints.serving() for s in e._streams.values()]

    paused.pause = pause  # type: ignore[method-assign]
    async for event in client_of(gateway).generate(a_request()):
        if isinstance(event, m.Delta):
            texts.append(event.text)
            have_first.set()
    assert texts == ["a", "bcd"]


async def started(*argv: str, ready: bytes) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    assert process.stdout is not None
    async with asyncio.timeout(60):
        while ready not in (line := await process.stdout.readline()):
            assert line, "it ended"
    return process


async def drained(process: asyncio.subprocess.Process) -> None:
    """Read away what it logs."""
    assert process.stdout is not None
    while await process.stdout.read(1 << 16):
        pass


@pytest.fixture
async def processes():
    """(gateway's process, its gRPC and HTTP addresses, the workers' metrics): two simulated workers of steps of 2 ms, all as processes.

    Two, so that their queues are not so full that the gateway caps outputs.
    """
    workers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    metrics = [f"127.0.0.1:{free_port()}" for _ in workers]
    listen, http, nobody = (f"127.0.0.1:{free_port()}" for _ in range(3))
    common = ["--control", nobody, "--parent-pid", str(os.getpid())]
    engine = ["--engine", "simulated", "--step-ms", "2", "--token-us", "0", "--served-model-name", "m"]
    async with AsyncExitStack() as stack:

        async def start(module: str, *argv: str) -> asyncio.subprocess.Process:
            process = await started("-m", f"services.{module}", *common, *argv, ready=b" ready")
            stack.push_async_callback(process.wait)
            stack.callback(process.kill)
            stack.push_async_callback(rpc.cancel_and_wait, asyncio.create_task(drained(process)))
            return process

        for i, (address, its_metrics) in enumerate(zip(workers, metrics, strict=True)):
            await start("worker", *engine, "--node-id", f"w{i}", "--listen", address, "--metrics", its_metrics)
        front = await start("gateway", "--workers", ",".join(workers), "--listen", listen, "--http", http)
        async with rpc.channel(listen, "gateway") as channel, asyncio.timeout(60):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while not (await stub.ListModels(inference_pb2.ListModelsRequest())).models:
                await asyncio.sleep(0.05)
        yield front, listen, http, metrics


async def ended(metrics: Sequence[str]) -> float:
    """Requests that have ended at the workers, none of them by having all its tokens."""
    counts: list[str] = []
    async with aiohttp.ClientSession() as session:
        for address in metrics:
            async with session.get(f"http://{address}/metrics") as answer:
                lines = (await answer.text()).splitlines()
            counts += [line for line in lines if line.startswith("trimtab_worker_requests_total")]
    assert not [line for line in counts if 'outcome="ok"' in line]
    return sum(float(line.split()[-1]) for line in counts)


def deaf_http_reader(http: str, number: int) -> socket.socket:
    """Asks for a long stream, and reads nothing of it; its kernel takes little."""
    host, port = http.rsplit(":", 1)
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    s.connect((host, int(port)))
    body = b'{"model": "m", "prompt": "x", "stream": true, "max_tokens": %d, "ignore_eos": true}' % OUTPUT_TOKENS
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nx-request-id: h{number}\r\nContent-Length: {len(body)}\r\n\r\n"
    s.sendall(head.encode() + body)
    return s


@pytest.mark.slow
async def test_two_hundred_readers_that_never_read_leave_the_engine_and_cost_no_memory(processes):
    """Each is held back by its window at the worker and ended there; what the gateway holds for all of them is bounded."""
    gateway, address, http, metrics = processes
    memory = psutil.Process(gateway.pid)
    before = most = memory.memory_info().rss
    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = []
        for i in range(READERS):
            request = inference_pb2.GenerateRequest(request_id=f"g{i}", model="m", text="x")
            request.sampling.max_tokens = OUTPUT_TOKENS
            request.sampling.ignore_eos = True
            calls.append(stub.Generate(request))
        sockets = [deaf_http_reader(http, i) for i in range(READERS)]
        async with asyncio.timeout(200):
            while await ended(metrics) < 2 * READERS:
                most = max(most, memory.memory_info().rss)
                await asyncio.sleep(0.2)
        for call in calls:
            call.cancel()
        for s in sockets:
            s.close()
    # For each a window of pieces, which keep the messages that they came in, what a transport holds, and the request itself: half a MiB
    # as measured. What they asked for would be GiBs.
    assert most - before < 2 * READERS << 20
