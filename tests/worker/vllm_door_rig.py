"""A worker with the door to vLLM's own service, as its process composes it, and what its tests ask."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from services.worker import __main__ as main
from services.worker.settings import WorkerSettings
from trimtab import errors
from trimtab.kit import rpc
from trimtab.kit.process import free_port
from trimtab.messages import NodeState
from trimtab.policy import Policy, with_fields

PATIENCE_S = 20
IDLE_WITHIN_STEPS = 1000
PROMPT = tuple(b"hello")
EOS = 256


@dataclass
class Rig:
    worker: main.Worker
    address: str
    channel: grpc.aio.Channel
    stub: pb_grpc.VllmEngineStub

    @property
    def engine(self):
        return self.worker.engine

    @property
    def gate(self):
        return self.worker.serving._gate

    def policy(self, **fields: object) -> None:
        self.gate.set_policy(with_fields(Policy(), {k.replace("__", "."): v for k, v in fields.items()}))

    async def idle(self, *, within_steps: int = IDLE_WITHIN_STEPS) -> None:
        """Until nothing is left of any request; a long one that was not freed must not come to its own end meanwhile."""
        begun = self.engine._value.steps
        async with asyncio.timeout(PATIENCE_S):
            while self.worker.serving.unfinished or self.gate.handed or self.gate.waiting or self.engine._live:
                assert self.engine._value.steps - begun < within_steps, "a request lives on"
                await asyncio.sleep(0.005)
        assert self.engine.load().running == 0

    async def until(self, condition) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def running(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> AsyncIterator[Rig]:
    """A worker as its process composes it, without control plane."""
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(path))
    address = f"127.0.0.1:{free_port()}"
    s = WorkerSettings(
        listen=address, engine="simulated", served_model_name="sim", max_num_seqs=8, max_step_tokens=256,
        max_model_len=4096, step_ms=2.0, token_us=0.0, **{"vllm_door": "on", **settings},
    )  # fmt: skip
    worker = await main.compose(s)
    await worker.server.start()
    judging = asyncio.create_task(worker.health.run())
    async with rpc.channel(address, "worker") as channel:
        rig = Rig(worker, address, channel, pb_grpc.VllmEngineStub(channel))
        await rig.until(lambda: worker.health.state is NodeState.SERVING)
        yield rig
    await rpc.cancel_and_wait(judging)
    await worker.server.stop(0)
    await worker.engine.stop()


def a_request(
    prompt: tuple[int, ...] = PROMPT, *, max_tokens: int = 8, stream: bool = True, request_id: str = "r", **sampling
) -> pb.GenerateRequest:
    sampling = {"ignore_eos": True, "skip_special_tokens": True, **sampling}
    return pb.GenerateRequest(
        request_id=request_id,
        tokenized=pb.TokenizedInput(input_ids=prompt),
        sampling_params=pb.SamplingParams(max_tokens=max_tokens, **sampling),
        stream=stream,
    )


async def rest(call) -> list[pb.GenerateResponse]:
    """What a call still has to say; the first of it may have been read already."""
    found = []
    while (response := await call.read()) is not grpc.aio.EOF:
        found.append(response)
    return found


async def collect(call) -> tuple[list[pb.GenerateStreamChunk], pb.GenerateComplete]:
    """Chunks, and what completes them: the last message, and the only one of its kind."""
    responses = await rest(call)
    assert [r.WhichOneof("response") for r in responses] == ["chunk"] * (len(responses) - 1) + ["complete"]
    return [r.chunk for r in responses[:-1]], responses[-1].complete


def tokens_of(chunks) -> list[int]:
    return [t for chunk in chunks for t in chunk.token_ids]


async def refused(call) -> tuple[grpc.StatusCode, errors.TrimtabError]:
    end = call if isinstance(call, grpc.aio.UnaryUnaryCall) else rest(call)
    with pytest.raises(grpc.aio.AioRpcError) as e:
        await end
    return e.value.code(), rpc.from_call(e.value)
