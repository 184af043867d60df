"""A worker in this process: the real servicer on a real socket, before a simulated engine."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from services.control import PolicyKeeper
from services.worker.__main__ import around, obedience, policy_of
from services.worker.engines.simulated import SimulatedEngine
from services.worker.gate import Gate
from services.worker.health import Health
from services.worker.measuring import Measuring
from services.worker.metrics import WorkerMetrics
from services.worker.server import InferenceServicer
from services.worker.serving import Serving
from services.worker.steering import Steering
from trimtab.kit import rpc
from trimtab.policy import Policy, with_fields
from trimtab.snapshot import Node
from trimtab.v1 import inference_pb2 as pb
from trimtab.v1 import inference_pb2_grpc

IDLE_WITHIN_STEPS = 1000


@dataclass
class Rig:
    engine: SimulatedEngine
    gate: Gate
    keeper: PolicyKeeper
    serving: Serving
    health: Health
    metrics: WorkerMetrics
    address: str
    stub: inference_pb2_grpc.InferenceServiceStub
    steering: Steering
    measuring: Measuring

    async def obey(self, fields: dict[str, object]) -> None:
        """These fields over the defaults, in force."""
        fits = {
            "batch.active": self.engine.limits.max_num_seqs,
            "prefill.step_tokens": self.engine.limits.max_step_tokens,
        }
        await obedience(self.engine, self.gate)(with_fields(Policy(), {**fits, **fields}))

    async def idle(self, *, within_steps: int = IDLE_WITHIN_STEPS) -> None:
        """Until nothing is left anywhere of any request.

        Steps decide, not seconds: a request of thousands of tokens that was not freed must not come to its own end meanwhile.
        """
        begun = self.engine._value.steps
        async with asyncio.timeout(20):
            while self.serving.unfinished or self.gate.handed or self.gate.waiting or self.engine._live:
                assert self.engine._value.steps - begun < within_steps, "a request lives on"
                await asyncio.sleep(0.005)
        assert self.engine.load().running == 0


@contextlib.asynccontextmanager
async def running_worker(path: Path, *, step_ms: float = 2.0, max_num_seqs: int = 8) -> AsyncIterator[Rig]:
    engine = SimulatedEngine(
        model="sim", max_num_seqs=max_num_seqs, max_step_tokens=256, max_model_len=4096, step_ms=step_ms, token_us=0.0
    )
    await engine.start()
    gate = Gate(Policy())
    keeper = PolicyKeeper(Node("w0", limits=engine.limits), obedience(engine, gate), path)
    await keeper.start()
    metrics = WorkerMetrics("sim")
    steering = Steering(engine, gate)
    measuring = Measuring(functools.partial(policy_of, keeper), functools.partial(around, engine), time.monotonic())
    serving = Serving("w0", engine, gate, keeper, metrics, measuring, steering)
    health = Health(engine, lambda: serving.draining, lambda: None)
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(
        InferenceServicer(serving, gate, lambda: engine.pulse().step_no, 4096), server
    )
    port = rpc.bind(server, "127.0.0.1:0")
    await server.start()
    async with rpc.channel(f"127.0.0.1:{port}", "worker") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        yield Rig(engine, gate, keeper, serving, health, metrics, f"127.0.0.1:{port}", stub, steering, measuring)
    await server.stop(0)
    await engine.stop()


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    async with running_worker(tmp_path / "policy.json") as r:
        yield r


def a_request(
    text: str = "hello", *, max_tokens: int = 8, ignore_eos: bool = True, **fields: object
) -> pb.GenerateRequest:
    request = pb.GenerateRequest(text=text, **fields)  # type: ignore[arg-type]
    request.sampling.max_tokens = max_tokens
    request.sampling.ignore_eos = ignore_eos
    return request
