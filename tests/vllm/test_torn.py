"""A worker whose real engine process is torn: a change of its KV block size fails half-way, and so does the way back.

The faults are made in the engine's process by a plug-in (`torn/`). One worker at a time serves, which a supervisor would start anew; here
the test does. Its KV cache is given in bytes, as nothing else gives a small one.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.vllm.client import Client, Stream, a_request, follow
from tests.vllm.conftest import ROOT, Mesh
from trimtab.kit.process import free_port

PLUGIN = Path(__file__).parent / "torn"
KV_BYTES = 200 << 20
BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4
"""SmolLM2's: layers, KV heads, head size, keys and values, float32."""
BLOCK = 128
ENDED_BY_ENGINE = 3
PROMPTS = [f"Tell me of the rudder, part {i}: it" for i in range(4)]
TOKENS = 200
"""So many that none is through before the change comes."""
PATIENCE_S = 300.0


@dataclass
class Small(Mesh):
    """The tests' mesh, with a small KV cache."""

    def command(self, name: str) -> list[str]:
        more = {"kv_cache_memory_bytes": KV_BYTES}
        own = ["--engine-args", json.dumps(more), "--max-model-len", "2048"] if name == "worker" else []
        return [*super().command(name), *own]

    def tear(self, stage: str) -> Any:
        """A change of the block size that fails at that stage, and so does its way back; what the CLI says of it."""
        file = Path(self.env["TRIMTAB_TORN"])
        file.write_text(stage)
        try:
            return self.trimtab("reblock", "w0", "64", "--when", "now", "--reason", "test")
        finally:
            file.unlink()

    def engine(self) -> list[psutil.Process]:
        return psutil.Process(self.processes["worker"].pid).children(recursive=True)

    async def gone(self, engine: list[psutil.Process]) -> None:
        """The worker has said not serving until it ended, as one whose engine died, and nothing of the engine is left."""
        process = self.processes["worker"]
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None:
            assert time.monotonic() < deadline, self.log("worker")[-4000:]
            await asyncio.sleep(0.05)
        assert process.returncode == ENDED_BY_ENGINE
        assert not await asyncio.to_thread(self.serving, "worker")
        _, alive = await asyncio.to_thread(psutil.wait_procs, engine, 60)
        assert not alive, f"left behind: {alive}"

    async def again(self) -> None:
        self.start("worker")
        await asyncio.to_thread(self.wait_serving, "worker", 400)
        # Which has found it then.
        await asyncio.to_thread(self.wait_serving, "gateway", 60)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, model_path: str) -> Iterator[Small]:
    directory = tmp_path_factory.mktemp("torn")
    env = {
        **os.environ,
        "TRIMTAB_STATE_DIR": str(directory / "state"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(PLUGIN)]),
        "VLLM_PLUGINS": "torn",
        "TRIMTAB_TORN": str(directory / "stage"),
        "TEST_REDIS": "memory://",
        "HF_HUB_OFFLINE": "1",
    }
    m = Small(directory, model_path, env)
    for name in ("control", "control-metrics", "worker", "worker-metrics", "gateway", "http"):
        m.ports[name] = free_port()
    try:
        for name in ("control", "worker", "gateway"):
            m.start(name)
        for name in ("control", "worker", "gateway"):
            m.wait_serving(name, 400)
        # A stream waits for the worker to come back, as it would where no other one is left.
        m.set_policy("resume.wait_ms=600000", "prefill.itl_budget_ms=0")
        yield m
    finally:
        m.stop()


@pytest.fixture(scope="module")
def right(small: Small) -> list[list[int]]:
    """The tokens of each prompt where nothing happens."""

    async def ask() -> list[Stream]:
        async with Client(small.address("gateway")) as client:
            return await asyncio.gather(*(client.run(asked(p), PATIENCE_S) for p in PROMPTS))

    streams = asyncio.run(ask())
    assert [len(s.tokens) for s in streams] == [TOKENS] * len(PROMPTS)
    return [s.tokens for s in streams]


def asked(prompt: str) -> Any:
    return a_request(prompt, max_tokens=TOKENS)


def torn(answer: tuple[int, Any]) -> str:
    """What the one worker said."""
    code, said = answer
    (node,) = said["nodes"]
    assert code != 0 and not node["done"], said
    return str(node)


def test_a_cache_that_is_given_in_bytes_has_that_many(small: Small) -> None:
    code, said = small.trimtab("blocks")
    assert code == 0
    (node,) = said["nodes"]
    assert node["total_blocks"] == KV_BYTES // (BLOCK * BYTES_PER_TOKEN), node


async def test_torn_while_idle_it_serves_nobody_more_and_ends(small: Small, right: list[list[int]]) -> None:
    engine = small.engine()
    assert "way back" in torn(await asyncio.to_thread(small.tear, "create_kv_cache_views"))
    async with Client(small.address("gateway")) as client:
        # Who comes at that very moment may be refused, or wait; he gets nothing that is wrong.
        late = asyncio.create_task(client.run(asked(PROMPTS[0]), 2 * PATIENCE_S))
        await small.gone(engine)
        assert "and so did its way back" in small.log("worker")
        await small.again()
        (stream,) = await asyncio.gather(late, return_exceptions=True)
        if isinstance(stream, grpc.aio.AioRpcError):
            assert stream.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.ABORTED), stream
        else:
            assert isinstance(stream, Stream) and stream.tokens == right[0], stream


async def test_torn_under_streams_these_go_on_where_they_were_with_the_right_tokens(
    small: Small, right: list[list[int]]
) -> None:
    engine = small.engine()
    async with Client(small.address("gateway")) as client:
        begun = await asyncio.gather(*(client.begin(asked(p), 5, 2 * PATIENCE_S) for p in PROMPTS))
        following = [asyncio.create_task(follow(call, stream)) for call, stream in begun]
        assert "way back" in torn(await asyncio.to_thread(small.tear, "_manager"))
        await small.gone(engine)
        had = [len(stream.tokens) for _, stream in begun]
        assert all(count < TOKENS for count in had), had
        assert [stream.tokens for _, stream in begun] == [tokens[:n] for tokens, n in zip(right, had, strict=True)]
        await small.again()
        streams = await asyncio.gather(*following)
    assert [s.tokens for s in streams] == right
