"""Processes that die: what goes on, what is said, and that nothing is left behind. These tests come last."""

import asyncio
import signal
import time
from pathlib import Path

import grpc
import psutil
import pytest

from tests.vllm.client import Client, a_request, follow


def engine_processes(mesh):
    return psutil.Process(mesh.processes["worker"].pid).children(recursive=True)


def boards_of(pid):
    return list(Path("/dev/shm").glob(f"trimtab-{pid}-*"))


async def test_the_control_planes_death_harms_no_stream_and_no_policy(mesh):
    answer = mesh.set_policy("batch.active=5")
    async with Client(mesh.address("gateway")) as client:
        call, stream = await client.begin(a_request(max_tokens=60), 3)
        mesh.kill("control")
        stream = await follow(call, stream)
        assert len(stream.tokens) == 60
        assert len((await client.run(a_request(max_tokens=3))).tokens) == 3
    mesh.start("control")
    mesh.wait_serving("control", 60)
    async with asyncio.timeout(60):
        while True:
            _, fleet = mesh.trimtab("fleet")
            workers = [n for n in fleet["nodes"] if n["role"] == "worker" and n["connected"]]
            if workers and workers[0]["policy"]["applied"]:
                break
            await asyncio.sleep(0.2)
    assert workers[0]["policy"]["applied"] == answer["identity"]
    mesh.set_policy("batch.active=6")


async def test_a_stuck_engine_is_not_serving_within_seconds_and_recovers(mesh):
    engine = next(
        p for p in engine_processes(mesh) if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name()
    )
    async with Client(mesh.address("gateway")) as client:
        call, stream = await client.begin(a_request(max_tokens=80), 3)
        engine.send_signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            while await asyncio.to_thread(mesh.serving, "worker"):
                assert time.monotonic() - begun < 30
                await asyncio.sleep(0.1)
        finally:
            engine.send_signal(signal.SIGCONT)
        stream = await follow(call, stream)
        assert len(stream.tokens) == 80
    mesh.wait_serving("worker", 60)


async def test_a_killed_worker_leaves_no_engine_process_and_fleet_and_gateway_say_so(mesh):
    children = engine_processes(mesh)
    assert children, "the engine runs in processes of its own"
    async with Client(mesh.address("gateway")) as client:
        call, stream = await client.begin(a_request(max_tokens=200), 3)
        killed = time.monotonic()
        mesh.killed = mesh.processes["worker"].pid
        mesh.kill("worker")
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await follow(call, stream)
        assert e.value.code() is grpc.StatusCode.ABORTED
        _, alive = psutil.wait_procs(children, timeout=60)
        assert not alive, f"left behind: {alive}"
        while True:
            _, fleet = mesh.trimtab("fleet")
            worker = next(n for n in fleet["nodes"] if n["role"] == "worker")
            if not worker["connected"]:
                break
            assert time.monotonic() - killed < 20, "fleet still shows the worker as connected"
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await client.run(a_request(max_tokens=3), timeout_s=60)
        assert e.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_comes_back_with_its_policy_and_ends_with_its_engine(mesh):
    mesh.start("worker")
    mesh.wait_serving("worker", 400)
    assert not boards_of(mesh.killed), "the board of a killed worker is swept at the next start"
    async with asyncio.timeout(60):
        while True:
            _, fleet = mesh.trimtab("fleet")
            workers = [n for n in fleet["nodes"] if n["role"] == "worker" and n["connected"]]
            if workers and workers[0]["policy"]["applied"] == fleet["desired"]:
                break
            await asyncio.sleep(0.2)
    async with Client(mesh.address("gateway")) as client:
        async with asyncio.timeout(60):
            while True:
                try:
                    served = await client.run(a_request(max_tokens=3))
                    break
                except grpc.aio.AioRpcError:
                    # The gateway has not found the new worker yet.
                    await asyncio.sleep(0.2)
        assert len(served.tokens) == 3
        # An engine that dies takes its worker along, with an exit code of its own: a supervisor starts a new one.
        core = next(
            p for p in engine_processes(mesh) if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name()
        )
        call, stream = await client.begin(a_request(max_tokens=200), 3)
        core.kill()
        with pytest.raises(grpc.aio.AioRpcError):
            await follow(call, stream)
    assert mesh.processes["worker"].wait(60) == 3
