"""The proof that a mesh works: one prompt through the gateway, as any client would send it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from controlplane.admin.client import AdminClient
from controlplane.render_fleet import role_of, state_of
from trimtab.client import Client, Model
from trimtab.errors import BackPressure, ModelNotFound, NoWorker, TrimtabError
from trimtab.messages import Accepted, ChatMessage, Delta, Request, Sampling
from trimtab_cli import doors

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


async def greet(gateway: str, control: str) -> Greeting:
    """Raises the error tree when the mesh does not answer."""
    async with doors.gateway(gateway) as client, doors.control(control) as admin:
        return await patiently(lambda: _once(client, admin))


async def patiently(call: Callable[[], Awaitable[T]]) -> T:
    """Call until there is no back-pressure and no model that has gone, for RETRY_FOR_S at most."""
    give_up = time.monotonic() + RETRY_FOR_S
    while True:
        try:
            return await call()
        except (BackPressure, ModelNotFound):
            if time.monotonic() > give_up:
                raise
            await asyncio.sleep(0.05)


async def served(client: Client, admin: AdminClient) -> Model:
    """The first model that the gateway serves and a worker of this mesh has; NoWorker while there is none.

    A gateway that has just started may still name the models of the mesh before: it goes by the fleet that it has on disk.
    """
    models = await client.models()
    if not models:
        raise NoWorker("the gateway serves no model yet")
    there = await _on_workers(admin)
    found = next((m for m in models if there is None or m.name in there), None)
    if found is None:
        raise NoWorker(f"the gateway has not met the workers yet: it names {', '.join(m.name for m in models)}")
    return found


async def _on_workers(admin: AdminClient) -> set[str] | None:
    """The models of workers that serve now; None where the control plane does not tell."""
    try:
        nodes = (await admin.fleet()).nodes
    except TrimtabError:
        return None
    return {n.hello.model for n in nodes if n.connected and role_of(n) == "worker" and state_of(n) == "serving"}


async def _once(client: Client, admin: AdminClient) -> Greeting:
    model = await served(client, admin)
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
