"""What stands during the bench: one simulated worker, and before it our gateway, our gateway without the shared stream, the proxy, and SMG."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio

from services.bench.gateway import smg
from services.bench.gateway.arms import CONNECTIONS, MODEL, Arm, GrpcArm, HttpArm
from services.bench.gateway.load import Emissions
from services.bench.gateway.worker import STAMPS_ENV
from services.bench.processes import Processes, grpc_serving
from services.bench.steering import Steering
from trimtab.kit import rpc
from trimtab.kit.process import free_port

START_S = 60.0
STEP_MS = 20.0
"""Fifty tokens a second for each stream."""
MOST_STREAMS = 256
COALESCE_MS = 10
"""Of the arm `coalesced`."""


@dataclass(frozen=True, slots=True)
class Stand:
    processes: Processes
    arms: dict[str, Arm]
    emissions: Emissions


@asynccontextmanager
async def stand(directory: Path, names: Sequence[str], smg_path: Path | None) -> AsyncIterator[Stand]:
    """All up and idle; all ended on leaving."""
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes(directory))
        at = {name: f"127.0.0.1:{free_port()}" for name in ("control", "metrics", "worker", "worker-metrics", "proxy")}
        await _start_worker(processes, directory, at)

        def channels(address: str, kind: str) -> list[grpc.aio.Channel]:
            found = [rpc.channel(address, kind) for _ in range(CONNECTIONS)]
            for channel in found:
                stack.push_async_callback(channel.close)
            return found

        arms: dict[str, Arm] = {"direct": GrpcArm("direct", "", channels(at["worker"], "worker"))}
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        if {"mux", "http"} & {*names}:
            address, http = await _start_gateway(processes, "gateway", "services.gateway", at["control"])
            arms["mux"] = GrpcArm("mux", "gateway", channels(address, "gateway"))
            arms["http"] = HttpArm("http", "gateway", session, http)
        if "coalesced" in names:
            more = ("--coalesce-ms", str(COALESCE_MS))
            address, _ = await _start_gateway(processes, "coalesced", "services.gateway", at["control"], *more)
            arms["coalesced"] = GrpcArm("coalesced", "coalesced", channels(address, "gateway"))
        if "unmuxed" in names:
            address, _ = await _start_gateway(processes, "unmuxed", "services.bench.gateway.unmuxed", at["control"])
            arms["unmuxed"] = GrpcArm("unmuxed", "unmuxed", channels(address, "gateway"))
        if "plain" in names:
            argv = ["--listen", at["proxy"], "--worker", at["worker"], "--parent-pid", str(os.getpid())]
            child = await processes.start("proxy", ["-m", "services.bench.gateway.proxy", *argv])
            await child.ready(lambda: grpc_serving(at["proxy"]), START_S)
            arms["plain"] = GrpcArm("plain", "proxy", channels(at["proxy"], "gateway"))
        if "smg" in names and smg_path is not None:
            tokenizer = smg.byte_tokenizer_in(directory)
            address = await smg.start(processes, session, smg_path, at["worker"], tokenizer=tokenizer)
            arms["smg"] = HttpArm("smg", "smg", session, address)
        yield Stand(processes, {name: arms[name] for name in names}, Emissions(directory))


async def _start_worker(processes: Processes, directory: Path, at: dict[str, str]) -> None:
    """With its control plane, whose policy lets all streams run at once."""
    common = ["--mesh", "bench", "--parent-pid", str(os.getpid())]
    control = ["--listen", at["control"], "--metrics", at["metrics"], "--redis", "memory://"]
    await processes.start("control", ["-m", "controlplane", *common, *control])
    what = ["--engine", "simulated", "--step-ms", str(STEP_MS), "--token-us", "0", "--served-model-name", MODEL]
    where = ["--listen", at["worker"], "--metrics", at["worker-metrics"], "--control", at["control"]]
    argv = ["-m", "services.bench.gateway.worker", *common, *where, *what, "--max-num-seqs", str(MOST_STREAMS)]
    child = await processes.start("worker", argv, {STAMPS_ENV: str(directory)})
    await child.ready(lambda: grpc_serving(at["worker"]), START_S)
    steering = Steering(processes, at["control"])
    await steering.connected()
    fields = ("batch.active", "batch.hard_cap", "paths.realtime_max_running")
    await steering.steer(dict.fromkeys(fields, str(MOST_STREAMS)))


async def _start_gateway(processes: Processes, name: str, module: str, control: str, *more: str) -> tuple[str, str]:
    """(gRPC address, HTTP address) of one that serves."""
    address, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    where = ["--listen", address, "--http", http, "--control", control, "--node-id", name]
    argv = ["-m", module, "--mesh", "bench", "--parent-pid", str(os.getpid()), *where, *more]
    child = await processes.start(name, argv)
    await child.ready(lambda: grpc_serving(address), START_S)
    return address, http
