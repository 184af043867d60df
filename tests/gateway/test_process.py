"""The gateway as a process: readiness, health, drain, taken ports, and what it never imports."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from contextlib import asynccontextmanager

import aiohttp
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.gateway.builders import a_request, read
from tests.gateway.fake_worker import WORDS, Running, hang
from trimtab import messages as m
from trimtab.client import Client
from trimtab.errors import Draining, StreamCut
from trimtab.kit import rpc
from trimtab.kit.process import free_port

pytestmark = pytest.mark.slow


@asynccontextmanager
async def a_gateway(*flags: str):
    """(process, gRPC address, HTTP address) of one that is ready."""
    listen, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", "--listen", listen, "--http", http, "--control", "", *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(30):
            while b"gateway ready" not in await process.stdout.readline():
                assert process.returncode is None
        yield process, listen, http
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def serving(address: str, want: int) -> None:
    async with rpc.channel(address, "gateway") as channel, asyncio.timeout(20):
        request = health_pb2.HealthCheckRequest(service="trimtab.v1.InferenceService")
        async for answer in health_pb2_grpc.HealthStub(channel).Watch(request):
            if answer.status == want:
                return


async def test_sigterm_drains(start_worker):
    """Health says no, new requests are refused, the one that runs ends well, and the exit code is 0."""
    go_on = asyncio.Event()

    async def script(r: Running) -> None:
        r.accept()
        await r.tokens(WORDS[:2])
        await go_on.wait()
        await r.tokens(WORDS[2:])
        r.finish()

    worker = await start_worker(script=script)
    async with a_gateway("--workers", worker.address) as (process, listen, http), Client(listen) as client:
        await serving(listen, health_pb2.HealthCheckResponse.SERVING)
        running = asyncio.create_task(client.complete(a_request()))
        await worker.hears("start")
        process.send_signal(signal.SIGTERM)
        await serving(listen, health_pb2.HealthCheckResponse.NOT_SERVING)
        with pytest.raises(Draining):
            await client.complete(a_request())
        async with aiohttp.ClientSession() as session:
            body = {"model": "m", "prompt": "x"}
            answer = await session.post(f"http://{http}/v1/completions", json=body)
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        go_on.set()
        text, _ = await running
        assert text == "Hello world!"
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_what_outlives_the_drain_is_cut_with_its_count(start_worker):
    async def script(r: Running) -> None:
        r.accept()
        await r.tokens(WORDS[:2])
        await hang(r)

    worker = await start_worker(script=script)
    async with (
        a_gateway("--workers", worker.address, "--drain-s", "0.2") as (process, listen, _),
        Client(listen) as client,
    ):
        await serving(listen, health_pb2.HealthCheckResponse.SERVING)

        async def each(event):
            if isinstance(event, m.Delta):
                process.send_signal(signal.SIGTERM)

        with pytest.raises(StreamCut) as caught:
            await read(client.generate(a_request()), [], each)
        assert caught.value.metadata == {"tokens_delivered": "2", "cause": "DRAINING"}
        async with asyncio.timeout(20):
            assert await process.wait() == 0


async def test_a_taken_port_is_exit_2_and_names_the_holder(start_worker):
    worker = await start_worker()
    for flags in (("--listen", worker.address), ("--listen", "127.0.0.1:0", "--http", worker.address)):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", "--control", "", *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, err = await process.communicate()
        assert process.returncode == 2
        assert f"pid {os.getpid()}" in err.decode()


async def test_a_gateway_imports_neither_torch_nor_vllm():
    code = (
        "import sys, services.gateway.__main__\n"
        "print(*{n.partition('.')[0] for n in sys.modules} & {'torch', 'vllm', 'transformers', 'numpy'})"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    assert (process.returncode, out.strip()) == (0, b"")
