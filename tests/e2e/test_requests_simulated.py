"""An operator at a busy mesh: requests that wait and run are moved and released by the command, and their clients see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.mesh import APPLIED, Mesh, environment, up
from trimtab.client import Client
from trimtab.errors import Released
from trimtab.messages import Accepted, Delta, Request, Sampling, Workload

pytestmark = pytest.mark.slow

ONE_AT_A_TIME = ("batch.active=1", "paths.realtime_reserve=0", "preemption.mode=none")
LONG = 50_000
"""Tokens; minutes, unless somebody ends it."""


class Batch:
    """One batch request through the gateway. `first_tokens` collects names in the order in which first tokens come."""

    def __init__(self, name: str, max_tokens: int, first_tokens: list[str]) -> None:
        self._request = Request(
            name, "simulated", "hello", Sampling(max_tokens=max_tokens, ignore_eos=True), Workload.BATCH
        )
        self._first_tokens = first_tokens
        self.accepted, self.begun = asyncio.Event(), asyncio.Event()

    async def read(self, client: Client) -> None:
        async for event in client.generate(self._request):
            if isinstance(event, Accepted):
                assert event.request_id == self._request.request_id
                self.accepted.set()
            if isinstance(event, Delta) and not self.begun.is_set():
                self._first_tokens.append(self._request.request_id)
                self.begun.set()


async def verb(mesh: Mesh, *words: str) -> dict[str, Any]:
    done = await asyncio.to_thread(mesh.verb, "requests", *words, "--reason", "the test says so", "--json")
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


async def move_and_release(mesh: Mesh, gateway: str) -> None:
    order: list[str] = []
    async with Client(gateway) as client, asyncio.timeout(60):
        runs = Batch("runs", LONG, order)
        running = asyncio.create_task(runs.read(client))
        await runs.begun.wait()
        waiting = []
        for name in ("a", "b", "c"):
            batch = Batch(name, 20, order)
            waiting.append(asyncio.create_task(batch.read(client)))
            await batch.accepted.wait()
        moved = await verb(mesh, "reprioritise", "--id", "c", "--delta", "2")
        assert (moved["affected"], moved["nodes"][0]["node_id"]) == (1, "w0")
        assert (await verb(mesh, "release", "--id", "runs"))["affected"] == 1
        with pytest.raises(Released) as e:
            await running
        assert (e.value.grpc_code, e.value.reason) == ("ABORTED", "RELEASED")
        await asyncio.gather(*waiting)
    assert order == ["runs", "c", "a", "b"]


@asynccontextmanager
async def an_http_stream(http: str) -> AsyncIterator[httpx.Response]:
    body = {"model": "simulated", "prompt": "hello", "max_tokens": LONG, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(timeout=60) as client,
        client.stream("POST", f"{http}/v1/completions", json=body, headers={"x-workload": "batch"}) as response,
    ):
        yield response


async def release_by_what_an_http_client_sees(mesh: Mesh, http: str, *, from_header: bool) -> None:
    async with an_http_stream(http) as response:
        lines = response.aiter_lines()
        first = json.loads((await anext(lines)).removeprefix("data: "))
        seen = response.headers["x-request-id"] if from_header else first["id"]
        assert (await verb(mesh, "release", "--id", seen))["affected"] == 1
        last = [line async for line in lines if line.startswith("data: ")][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "released"


def test_requests_are_moved_and_released_by_the_ids_that_clients_see(tmp_path: Path) -> None:
    with up(environment(tmp_path), "--no-prompt") as mesh:
        ready = mesh.until("ready")
        mesh.joined("w0")
        assert mesh.verb("policy", "set", *ONE_AT_A_TIME, *APPLIED).returncode == 0
        asyncio.run(move_and_release(mesh, ready["gateway"]))
        for from_header in (True, False):
            asyncio.run(release_by_what_an_http_client_sees(mesh, ready["http"], from_header=from_header))
        gone = mesh.verb("requests", "release", "--id", "runs", "--reason", "again")
        assert (gone.returncode, "nobody has such a request" in gone.stderr) == (4, True)
