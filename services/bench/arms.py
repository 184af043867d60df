"""What is measured: four ways to the same engine. An arm sends a burst of requests its way and says what came of each.

Invariant: prompts and sampling are the same for all of them: greedy, `max_tokens` exactly, text in.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import aiohttp

from services.bench.figures import OUTSIDE
from services.bench.load import Ask, Burst, Sample, closed_loop
from services.bench.processes import BenchError, Child
from trimtab.client import Client
from trimtab.messages import Delta, Request, Sampling

MODEL = "bench"


class Arm(Protocol):
    """One way. `roles` says by which name each of its processes goes in a report, and in `Processes.cpu_s`."""

    name: str
    roles: Mapping[str, str]

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst: ...


def grpc_ask(client: Client, max_tokens: int) -> Ask:
    """Generate, at a gateway or at a worker."""
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)

    async def ask(prompt: str) -> AsyncGenerator[int, None]:
        async for event in client.generate(Request("", MODEL, prompt, sampling)):
            if isinstance(event, Delta) and event.token_ids:
                yield len(event.token_ids)

    return ask


class GrpcArm:
    """Our own wire: the whole mesh, or the worker alone."""

    def __init__(self, name: str, client: Client) -> None:
        self.name = name
        self.roles: Mapping[str, str] = {**{role: role for role in OUTSIDE[name]}, "engine": "worker/engine"}
        self._client = client

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        return await closed_loop(grpc_ask(self._client, max_tokens), texts, concurrency)


class HttpArm:
    """A server by its streaming /v1/completions: vLLM's own unless `name` and `roles` say otherwise."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        address: str,
        *,
        name: str = "http",
        roles: Mapping[str, str] = MappingProxyType({"front": "http", "engine": "http/engine"}),
    ) -> None:
        self.name, self.roles = name, roles
        self._session = session
        self._url = f"http://{address}/v1/completions"

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        return await closed_loop(self._asking(max_tokens), texts, concurrency)

    def _asking(self, max_tokens: int) -> Ask:
        fixed = {"model": MODEL, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
        fixed["stream_options"] = {"include_usage": True}

        async def ask(prompt: str) -> AsyncGenerator[int, None]:
            async with self._session.post(self._url, json={**fixed, "prompt": prompt}) as answer:
                if answer.status != 200:
                    raise BenchError(f"arm {self.name} answered {answer.status}: {(await answer.text())[:300]}")
                last = b""
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    if not last:
                        yield 1
                    last = line
                # How many tokens a chunk carries is told by no chunk, but all of them by the usage at the end.
                yield json.loads(last[len(b"data: ") :])["usage"]["completion_tokens"] - 1

        return ask


class BareArm:
    """AsyncLLM in its own process, driven there (`bare.py`)."""

    name = "bare"
    roles: Mapping[str, str] = {"front": "bare", "engine": "bare/engine"}

    def __init__(self, child: Child) -> None:
        self._child = child

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        stdin, stdout = self._child.process.stdin, self._child.process.stdout
        assert stdin is not None and stdout is not None
        job = {"prompts": list(texts), "concurrency": concurrency, "max_tokens": max_tokens}
        stdin.write(json.dumps(job).encode() + b"\n")
        line = await stdout.readline()
        if not line:
            raise BenchError(f"bare ended in the middle of a burst; its last lines:\n{self._child.tail()}")
        answer = json.loads(line)
        return Burst(tuple(Sample(*s) for s in answer["samples"]), answer["wall_s"])
