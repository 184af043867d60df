"""The proof that a mesh works: one prompt through the gateway, as any client would send it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from trimtab.client import Client, Model
from trimtab.errors import BackPressure, NoWorker
from trimtab.kit.cli import own_key
from trimtab.messages import Accepted, ChatMessage, Delta, Request, Sampling

T = TypeVar("T")

PROMPT = "Say hello in one short sentence."
MAX_TOKENS = 24
RETRY_FOR_S = 10.0
"""A gateway that has just become healthy may not have met its workers yet."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """What came back. `ttft_ms` is measured here, at the client; `policy` is the revision that the worker ran under."""

    prompt: str
    answer: str
    model: str
    worker: str
    policy: str
    ttft_ms: float


async def greet(gateway: str) -> Greeting:
    """Raises the error tree when the mesh does not answer."""
    # The gateway is this machine's own, whatever the address that it listens on.
    async with Client(gateway, key=own_key(), insecure_key=True) as client:
        return await patiently(lambda: _once(client))


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call until there is no back-pressure, for RETRY_FOR_S at most."""
    give_up = time.monotonic() + RETRY_FOR_S
    while True:
        try:
            return await call()
        except BackPressure:
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.05)


async def served(client: Client) -> Model:
    """The first model that the gateway serves; NoWorker while there is none."""
    models = await client.models()
    if not models:
        raise NoWorker("the gateway serves no model yet")
    return models[0]


async def _once(client: Client) -> Greeting:
    model = await served(client)
    request = Request(
        request_id="",
        model=model.name,
        prompt=(ChatMessage("user", PROMPT),),
        sampling=Sampling(max_tokens=MAX_TOKENS, temperature=0.0),
    )
    accepted: Accepted | None = None
    text, ttft_ms = "", 0.0
    begun = time.perf_counter()
    async with aclosing(client.generate(request, timeout_s=60.0)) as events:
        async for event in events:
            if isinstance(event, Accepted):
                accepted = event
            elif isinstance(event, Delta):
                ttft_ms = ttft_ms or (time.perf_counter() - begun) * 1000.0
                text += event.text
    assert accepted is not None, "Accepted comes first"
    return Greeting(PROMPT, text.strip(), accepted.model, accepted.worker_id, str(accepted.policy), ttft_ms)
