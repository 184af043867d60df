"""Tenants of a real mesh: their keys at the gateway, and what the policy and an operator do to one of them alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.gateway.key_file import digest
from tests.e2e.mesh import APPLIED, Mesh, environment, up
from trimtab.client import Client
from trimtab.errors import Released
from trimtab.messages import Delta, Request, Sampling

pytestmark = pytest.mark.slow

KEYS = {name: f"tt-{name}-key-of-the-test" for name in ("acme", "globex")}
LONG = 50_000
"""Tokens; minutes, unless somebody ends it."""
PATIENCE_S = 60.0


def a_mesh(where: Path) -> dict[str, str]:
    file = where / "keys.yaml"
    file.write_text(json.dumps({"tenants": {n: {"keys": [f"sha256:{digest(key)}"]} for n, key in KEYS.items()}}))
    return {**environment(where), "TRIMTAB_GATEWAY_KEYS": str(file), "TRIMTAB_KEY": KEYS["acme"]}


def asks(mesh: Mesh, tenant: str) -> tuple[int, str]:
    mesh.env["TRIMTAB_KEY"] = KEYS.get(tenant, tenant)
    done = mesh.verb("generate", "Hello", "--max-tokens", "2")
    return done.returncode, done.stderr


async def released_alone(mesh: Mesh, gateway: str) -> None:
    """Both tenants' requests run; globex's is released by its name."""
    request = Request("", "simulated", "hello", Sampling(max_tokens=LONG, ignore_eos=True))
    begun = {name: asyncio.Event() for name in KEYS}

    async def read(client: Client, name: str) -> None:
        async for event in client.generate(request):
            if isinstance(event, Delta):
                begun[name].set()

    async with (
        asyncio.timeout(PATIENCE_S),
        Client(gateway, key=KEYS["acme"]) as acme,
        Client(gateway, key=KEYS["globex"]) as globex,
    ):
        stays, goes = (asyncio.create_task(read(c, name)) for c, name in ((acme, "acme"), (globex, "globex")))
        for each in begun.values():
            await each.wait()
        words = ("requests", "release", "--tenant", "globex", "--reason", "the test says so", "--json")
        done = await asyncio.to_thread(mesh.verb, *words)
        assert (done.returncode, json.loads(done.stdout)["affected"]) == (0, 1), done.stderr
        with pytest.raises(Released):
            await goes
        assert not stays.done()
        stays.cancel()


def test_a_tenant_is_known_by_its_key_from_the_gateway_to_the_engine(tmp_path: Path) -> None:
    with up(a_mesh(tmp_path)) as mesh:
        ready = mesh.until("ready")
        assert ready["greeting"], "up has sent its own prompt with TRIMTAB_KEY"
        mesh.joined("w0")
        assert asks(mesh, "acme") == asks(mesh, "globex") == (0, "")
        code, said = asks(mesh, "tt-a-key-of-nobody")
        assert (code, "the key is not known here" in said) == (4, True)
        asyncio.run(released_alone(mesh, ready["gateway"]))
        policy = ("isolate.tenants=acme", "isolate.action=refuse")
        assert mesh.verb("policy", "set", *policy, *APPLIED).returncode == 0
        code, said = asks(mesh, "acme")
        assert (code, "isolate.action = refuse" in said) == (2, True), said
        assert asks(mesh, "globex") == (0, "")
