"""`trimtab drain` under `trimtab up`: real processes; streams that run on the worker that goes are finished by the one that stays."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.e2e.mesh import GONE_WITHIN_S, Mesh, environment, gone, up
from trimtab.client import Client
from trimtab.errors import NoWorker
from trimtab.messages import Accepted, Delta, Finish, Notice, Request, Sampling

pytestmark = pytest.mark.slow

STEP_MS = "25"
TOKENS = 400
"""Ten seconds of a lone stream: the drain comes well before the end."""
STREAMS = 6


@dataclass
class Stream:
    """What a client got. `begun` is set at the first token, wherever it comes from."""

    workers: list[str] = field(default_factory=list)
    indices: list[int] = field(default_factory=list)
    text: str = ""
    finish: str = ""
    notices: list[str] = field(default_factory=list)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, gateway: str, prompt: str, tokens: int = TOKENS) -> None:
        async with Client(gateway) as client:
            sampling = Sampling(max_tokens=tokens, ignore_eos=True)
            async for event in client.generate(Request("", "simulated", prompt, sampling)):
                match event:
                    case Accepted():
                        self.workers.append(event.worker_id)
                    case Notice():
                        self.notices.append(event.kind.value)
                    case Delta():
                        self.indices += range(event.first_index, event.first_index + len(event.token_ids))
                        self.text += event.text
                        self.begun.set()
                    case Finish():
                        self.finish = event.reason.value


async def undisturbed(gateway: str, prompt: str) -> Stream:
    stream = Stream()
    await stream.run(gateway, prompt)
    return stream


async def verb(mesh: Mesh, *words: str) -> str:
    done = await asyncio.to_thread(mesh.verb, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def drain_under_load(mesh: Mesh, gateway: str) -> None:
    prompts = [f"prompt number {i}" for i in range(STREAMS)]
    whole = await asyncio.gather(*(undisturbed(gateway, p) for p in prompts))
    assert all(s.indices == list(range(TOKENS)) for s in whole)
    # Forced open, w1 is given nothing, so that all of them begin at w0.
    await verb(mesh, "breaker", "open", "w1", "--for", "60s", "--reason", "all to w0")
    streams = [Stream() for _ in prompts]
    running = [asyncio.create_task(s.run(gateway, p)) for s, p in zip(streams, prompts, strict=True)]
    await asyncio.gather(*(s.begun.wait() for s in streams))
    assert {w for s in streams for w in s.workers} == {"w0"}
    await verb(mesh, "breaker", "reset", "w1")
    assert not any(s.finish for s in streams)
    told = json.loads(
        await verb(mesh, "drain", "w0", "--deadline", "0.5s", "--wait", "--reason", "a new card", "--json")
    )
    assert (told["done"], told["gone"], told["others"]) == (True, True, 1)
    await asyncio.gather(*running)
    for stream, like in zip(streams, whole, strict=True):
        assert stream.indices == list(range(TOKENS)), "each index once"
        assert (stream.text, stream.finish) == (like.text, like.finish)
        assert "resumed" in stream.notices, "it was cut while it ran"
        assert len(stream.workers) == 1, "the client sees one stream"


async def the_rest_goes_on(mesh: Mesh, gateway: str) -> None:
    stream = Stream()
    await stream.run(gateway, "afterwards", tokens=10)
    assert (stream.workers, stream.indices) == (["w1"], list(range(10)))
    nodes = {n["node_id"]: n for n in json.loads(await verb(mesh, "fleet", "--json"))["nodes"]}
    assert (nodes["w0"]["state"], nodes["w0"]["connected"]) == ("drained", False)
    assert nodes["w1"]["connected"]
    actions = json.loads(await verb(mesh, "why", "w0", "--json"))["actions"]
    assert [(a["what"], a["reason"]) for a in actions] == [("drain within 500ms", "a new card")]


async def the_last_one(mesh: Mesh, gateway: str) -> None:
    last = await asyncio.to_thread(mesh.verb, "drain", "w1", "--deadline", "0s", "--wait")
    assert last.returncode == 0, last.stderr
    assert "w1 is the last worker that serves simulated" in last.stderr
    await asyncio.to_thread(mesh.until, "no_worker_left")
    stream = Stream()
    try:
        await stream.run(gateway, "nobody is left", tokens=1)
    except NoWorker:
        return
    raise AssertionError("somebody answered")


def test_streams_of_a_drained_worker_go_on_at_another_and_it_stays_away(tmp_path: Path) -> None:
    with up(environment(tmp_path), "--workers", "2", "--no-prompt", "--", "--step-ms", STEP_MS) as mesh:
        ready = mesh.until("ready")
        mesh.joined("w0", "w1", "g0")
        asyncio.run(drain_under_load(mesh, ready["gateway"]))
        left = mesh.until("left")
        assert left["name"] == "w0"
        asyncio.run(the_rest_goes_on(mesh, ready["gateway"]))
        asyncio.run(the_last_one(mesh, ready["gateway"]))
        kinds = [e.get("event") for e in mesh.events]
        assert "died" not in kinds and "restarting" not in kinds
        family = mesh.family()
        mesh.process.terminate()
        mesh.until("stopped")
        assert mesh.process.wait(timeout=GONE_WITHIN_S) == 0
        assert gone(family)
