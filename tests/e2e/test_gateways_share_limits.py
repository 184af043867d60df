"""Two gateways of a real mesh: a tenant gets by both together what the mesh allows him, and by the one that stays all of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from services.gateway.key_file import digest
from tests.e2e.mesh import APPLIED, Mesh, environment, up
from trimtab.client import Client
from trimtab.errors import QueueFull
from trimtab.kit.process import free_port
from trimtab.messages import Delta, Request, Sampling

pytestmark = pytest.mark.slow

KEY = "tt-acme-key-of-the-test"
LONG = 50_000
"""Tokens; minutes, unless somebody ends it."""
PATIENCE_S = 60.0


def a_mesh(where: Path) -> dict[str, str]:
    """Of eight slots the tenant may take two."""
    file = where / "keys.yaml"
    file.write_text(json.dumps({"tenants": {"acme": {"keys": [f"sha256:{digest(KEY)}"], "share": 0.25}}}))
    return {**environment(where), "TRIMTAB_GATEWAY_KEYS": str(file), "TRIMTAB_KEY": KEY}


@contextmanager
def another_gateway(mesh: Mesh, log: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`g1`, and where it listens."""
    listen = f"127.0.0.1:{free_port()}"
    flags = ("--node-id", "g1", "--listen", listen, "--http", f"127.0.0.1:{free_port()}")
    command = [sys.executable, "-m", "services.gateway", *flags, "--control", mesh.env["TRIMTAB_CONTROL_LISTEN"]]
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=mesh.env | {"PYTHONUNBUFFERED": "1"}, stdout=out, stderr=out)
        try:
            yield process, listen
        finally:
            process.kill()
            process.wait()


def said_of(log: Path) -> list[int]:
    """What a gateway has counted, as it logged it."""
    return [json.loads(line)["gateways"] for line in log.read_text().splitlines() if "gateways counted" in line]


async def counts(log: Path, gateways: int) -> None:
    """Until this gateway's last word is that there are so many."""
    async with asyncio.timeout(PATIENCE_S):
        while said_of(log)[-1:] != [gateways]:
            await asyncio.sleep(0.1)


@asynccontextmanager
async def a_stream(address: str) -> AsyncIterator[None]:
    """That runs; QueueFull where it may not."""
    begun = asyncio.Event()

    async def read() -> None:
        request = Request("", "simulated", "hello", Sampling(max_tokens=LONG, ignore_eos=True))
        async with Client(address, key=KEY, attempts=1) as client:
            async for event in client.generate(request):
                if isinstance(event, Delta):
                    begun.set()

    reading, waiting = asyncio.create_task(read()), asyncio.create_task(begun.wait())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((reading, waiting), return_when=asyncio.FIRST_COMPLETED)
        if reading.done():
            reading.result()
        yield
    finally:
        for task in (reading, waiting):
            task.cancel()
        await asyncio.gather(reading, waiting, return_exceptions=True)


async def refused(address: str, words: str) -> None:
    with pytest.raises(QueueFull, match=words):
        async with a_stream(address):
            pass


async def share(first: str, its_log: Path, mesh: Mesh, log: Path) -> None:
    with another_gateway(mesh, log) as (process, second):
        await counts(its_log, 2)
        await counts(log, 2)
        async with a_stream(first), a_stream(second):
            for address in (first, second):
                await refused(address, "here its part of 2 gateways")
        process.kill()
    await counts(its_log, 1)
    async with a_stream(first), a_stream(first):
        await refused(first, r"has its share of the slots \(0.25\)")


def test_two_gateways_give_a_tenant_his_share_once(tmp_path: Path) -> None:
    with up(a_mesh(tmp_path), "--no-prompt") as mesh:
        ready = mesh.until("ready")
        mesh.joined("w0", "g0")
        done = mesh.verb("policy", "set", "batch.active=8", *APPLIED)
        assert done.returncode == 0, done.stderr
        (its_log,) = tmp_path.glob("**/logs/gateway*")
        asyncio.run(share(ready["gateway"], its_log, mesh, tmp_path / "g1.log"))
