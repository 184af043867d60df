"""Certificates that end within seconds, and an authority that gives way to another, under a stream that runs: nobody is started anew."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing

import pytest

from controlplane.admin.client import AdminClient
from tests.controlplane.replicas import valkey_binary
from tests.e2e.tls_mesh import MESH, PATIENCE_S, Mesh, a_mesh, serial_of, serial_shown, until
from trimtab.client import Client, Unreachable
from trimtab.kit.certificates import Pair, authority, issue
from trimtab.kit.rpc import cancel_and_wait
from trimtab.kit.tls import Tls
from trimtab.messages import Delta, Finish, Request, Sampling

pytestmark = pytest.mark.slow

RUNNING = ("control c0", "control c1", "worker w0", "worker w1", "gateway g0")
WHO = (*RUNNING, "operator oncall", "viewer bob")
SHORT_S = 15.0


def sign(mesh: Mesh, signer: Pair, *who: str, lasts_s: float = 86_400.0) -> None:
    """As an issuer does that gives short-lived ones."""
    now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1) + datetime.timedelta(seconds=lasts_s)
    for each in who:
        kind, name = each.split()
        hosts = ("127.0.0.1",) if kind == "gateway" else ()
        pair, files = issue(signer, MESH, kind, name, hosts=hosts, days=1, now=now), mesh.tls(each)
        files.key.write_bytes(pair.key)
        files.cert.write_bytes(pair.cert)


def moved(mesh: Mesh, times: int) -> None:
    """Every node's stream to its control plane, and both of the gateway's links, so often at least."""

    def counted() -> bool:
        said = {p.name: p.said for p in mesh.processes}
        streams = [said[name].count('"control stream moved to a renewed certificate"') for name in ("w0", "w1", "g0")]
        return min(streams) >= times and said["g0"].count('"link renewed"') >= 2 * times

    until(counted, f"everybody to have moved {times} times")


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    valkey_binary()
    with a_mesh(tmp_path_factory.mktemp("rotation")) as made:
        yield made


@pytest.mark.timeout(300)  # it waits for certificates to end, and eight times for everybody to look at the files
async def test_certificates_end_and_an_authority_is_replaced_under_a_running_stream(mesh: Mesh) -> None:
    old, new = (Pair((mesh.certs / "ca.pem").read_bytes(), (mesh.certs / "ca-key.pem").read_bytes()), _authority())
    tokens = 0

    async def listen(client: Client) -> None:
        nonlocal tokens
        request = Request("", "simulated", "Hello", Sampling(max_tokens=100_000, temperature=0.0, ignore_eos=True))
        async with aclosing(client.generate(request)) as events:
            async for event in events:
                assert not isinstance(event, Finish)
                tokens += isinstance(event, Delta)

    async with Client(mesh.gateway, tls=mesh.tls("viewer bob")) as client:
        listening = asyncio.create_task(listen(client))
        try:
            await _more(lambda: tokens, listening)
            sign(mesh, old, *WHO, lasts_s=SHORT_S)
            ends = time.monotonic() + SHORT_S
            await asyncio.to_thread(moved, mesh, 1)
            leaver = _person(mesh, old, "viewer ann")
            async with Client(mesh.gateway, tls=leaver) as before:
                assert await before.models()
            mesh.ca.write_bytes(new.cert + old.cert)
            await asyncio.to_thread(moved, mesh, 2)
            sign(mesh, new, *WHO)
            await asyncio.to_thread(moved, mesh, 3)
            mesh.ca.write_bytes(new.cert)
            await asyncio.to_thread(moved, mesh, 4)
            await asyncio.sleep(max(0.0, ends + 1.0 - time.monotonic()))

            await _more(lambda: tokens, listening)
            assert await client.models(), "the client's next call shows its new one"
            doors = dict(zip(RUNNING, (*mesh.controls, *mesh.workers.values(), mesh.gateway), strict=True))
            shown = {who: serial_shown(address, mesh.tls("operator oncall")) for who, address in doors.items()}
            assert shown == {who: serial_of(mesh.tls(who)) for who in RUNNING}
            for kind, address in (("gateway", mesh.gateway), ("worker", mesh.workers["w0"])):
                with pytest.raises(Unreachable):
                    async with Client(address, kind=kind, tls=leaver) as late:
                        await late.models()
            async with AdminClient(mesh.controls[0], tls=mesh.tls("operator oncall")) as admin:
                # The other worker hears it through the other replica.
                done = await admin.set_policy({"batch.active": "9"}, author="oncall", reason="after", wait_ms=20_000)
                fleet = await admin.fleet()
            assert {n.hello.node_id for n in fleet.nodes if n.connected} == {"w0", "w1", "g0"}
            assert {n.node_id for n in done.nodes if n.applied == done.identity} == {"w0", "w1", "g0"}
            await _more(lambda: tokens, listening)
        finally:
            await cancel_and_wait(listening)
    assert all(p.running.poll() is None for p in mesh.processes)
    for process in mesh.processes:
        assert '"link down"' not in process.said, process.name
        assert '"control plane away"' not in process.said.partition("control stream moved")[2], process.name


def _authority() -> Pair:
    return authority(MESH, days=2, now=datetime.datetime.now(datetime.UTC))


def _person(mesh: Mesh, signer: Pair, who: str) -> Tls:
    """Somebody whose certificate nobody renews."""
    sign(mesh, signer, who)
    return mesh.tls(who)


async def _more(count: Callable[[], int], listening: asyncio.Task[None]) -> None:
    """The stream gives tokens, and has not ended."""
    before = count()
    async with asyncio.timeout(PATIENCE_S):
        while count() < before + 5:
            assert not listening.done(), listening.exception()
            await asyncio.sleep(0.02)
