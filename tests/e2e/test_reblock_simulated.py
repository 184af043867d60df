"""`trimtab reblock` under `trimtab up`: real processes; streams go on through it, and everybody has the new size afterwards."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from tests.e2e.mesh import GONE_WITHIN_S, Mesh, environment, gone, up
from tests.e2e.test_drain_simulated import STEP_MS, STREAMS, TOKENS, Stream, undisturbed, verb

pytestmark = pytest.mark.slow


def scraped(place: str) -> str:
    with urllib.request.urlopen(f"http://{place}/metrics", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


async def reblock_under_load(mesh: Mesh, gateway: str, metrics: str) -> None:
    prompts = [f"prompt number {i}" for i in range(STREAMS)]
    whole = await asyncio.gather(*(undisturbed(gateway, p) for p in prompts))
    refused = await asyncio.to_thread(mesh.verb, "reblock", "default", "20", "--when", "now")
    assert refused.returncode == 4, refused.stderr
    assert "it would accept 8, 16, 24, 32" in refused.stderr
    dry = json.loads(await verb(mesh, "reblock", "default", "64", "--dry-run", "--json"))
    assert [(n["node_id"], n["done"]) for n in dry["nodes"]] == [("w0", True), ("w1", True)]
    assert 'block_size="16"' in await asyncio.to_thread(scraped, metrics), "nothing is changed yet"
    streams = [Stream() for _ in prompts]
    running = [asyncio.create_task(s.run(gateway, p)) for s, p in zip(streams, prompts, strict=True)]
    await asyncio.gather(*(s.begun.wait() for s in streams))
    told = json.loads(
        await verb(mesh, "reblock", "default", "64", "--when", "now", "--reason", "long prompts", "--json")
    )
    assert [(n["node_id"], n["done"], n["result"]["after"]["block_size"]) for n in told["nodes"]] == [
        ("w0", True, 64),
        ("w1", True, 64),
    ]
    assert sum(n["result"]["requests"] for n in told["nodes"]) > 0, "it came under load"
    assert 'block_size="64"' in await asyncio.to_thread(scraped, metrics)
    await asyncio.gather(*running)
    for stream, like in zip(streams, whole, strict=True):
        assert stream.indices == list(range(TOKENS)), "each index once"
        assert (stream.text, stream.finish, stream.notices) == (like.text, like.finish, like.notices)
    nodes = {n["node_id"]: n for n in json.loads(await verb(mesh, "blocks", "--json"))["nodes"]}
    assert {n["block_size"] for n in nodes.values()} == {64}
    assert "KV block size 16 → 64" in await verb(mesh, "why", "w0")


def test_streams_go_on_through_a_change_of_the_block_size(tmp_path: Path) -> None:
    with up(environment(tmp_path), "--workers", "2", "--no-prompt", "--", "--step-ms", STEP_MS) as mesh:
        ready = mesh.until("ready")
        mesh.joined("w0", "w1", "g0")
        asyncio.run(reblock_under_load(mesh, ready["gateway"], mesh.env["TRIMTAB_WORKER_METRICS"]))
        family = mesh.family()
        mesh.process.terminate()
        mesh.until("stopped")
        assert mesh.process.wait(timeout=GONE_WITHIN_S) == 0
        assert gone(family)
