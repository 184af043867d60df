"""A gateway of several processes: one port, each connection with one of them, and none is missed when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.processes import held
from services.gateway.settings import GatewaySettings
from services.gateway.siblings import merged
from tests.gateway.builders import a_request, read
from tests.gateway.fake_worker import WORDS, Running, Script
from trimtab import messages as m
from trimtab.client import Client
from trimtab.errors import TrimtabError
from trimtab.kit.process import free_port
from trimtab.kit.rpc import PortTaken
from trimtab.kit.tls import Caller, speaks_for

CLIENTS = 24


KEYS = f'tenants:\n  acme:\n    keys: ["sha256:{"0" * 64}"]\n'


@asynccontextmanager
async def two_processes(worker, *flags: str):
    """(the one that was started, gRPC address, HTTP address) once both serve."""
    listen, http = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.gateway", "--listen", listen, "--http", http, "--control", "", "--processes", "2",
        "--workers", worker.address, *flags,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    said: list[bytes] = []
    async with asyncio.timeout(60):
        while b"gateway processes ready" not in (said[-1] if said else b""):
            said.append(await process.stdout.readline())
            assert said[-1], b"".join(said).decode()
    drained = asyncio.create_task(process.stdout.read())
    children = psutil.Process(process.pid).children()
    try:
        yield process, listen, http
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                await process.wait()
        await drained
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, timeout=20)
        assert not alive, "a process of the gateway outlived the one that started it"


async def samples(http: str) -> list[tuple[str, dict[str, str], float]]:
    """Also while one of them is dying, or slow to answer the other."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.get(f"http://{http}/metrics") as answer:
                text = await answer.text()
                break
        await asyncio.sleep(0.1)
    return [(s.name, s.labels, s.value) for family in text_string_to_metric_families(text) for s in family.samples]


async def value(http: str, name: str) -> float:
    return next(v for n, _, v in await samples(http) if n == name)


async def both_up(http: str) -> None:
    async with asyncio.timeout(60):
        while await value(http, "trimtab_gateway_processes_up") < 2:
            await asyncio.sleep(0.1)


async def linked(http: str) -> None:
    """Each has its link to the worker."""
    async with asyncio.timeout(60):
        while [v for n, _, v in await samples(http) if n == "trimtab_gateway_links_up"] != [1.0, 1.0]:
            await asyncio.sleep(0.1)


def held_up_by(go_on: asyncio.Event) -> Script:
    """Two tokens, and the others once it is set."""

    async def script(r: Running) -> None:
        r.accept()
        await r.tokens(WORDS[:2])
        await go_on.wait()
        await r.tokens(WORDS[2:])
        r.finish()

    return script


@pytest.mark.slow
async def test_processes_share_the_address_of_their_metrics_too(start_worker):
    worker, own = await start_worker(), f"127.0.0.1:{free_port()}"
    async with two_processes(worker, "--metrics", own) as (_, _, http):
        await linked(own)
        async with aiohttp.ClientSession() as session, session.get(f"http://{http}/metrics") as answer:
            assert answer.status == 404


@pytest.mark.slow
async def test_connections_are_spread_and_any_process_tells_of_all(start_worker):
    worker = await start_worker()
    async with two_processes(worker) as (_, listen, http), AsyncExitStack() as stack:
        await linked(http)
        clients = [await stack.enter_async_context(Client(listen)) for _ in range(CLIENTS)]
        answers = await asyncio.gather(
            *(client.complete(a_request(request_id=f"r{i}")) for i, client in enumerate(clients))
        )
        assert [text for text, _ in answers] == ["Hello world!"] * CLIENTS
        served = Counter[str]()
        async with asyncio.timeout(60):
            while served.total() != CLIENTS:  # it is counted after its end was told
                served.clear()
                for name, labels, number in await samples(http):
                    if name == "trimtab_gateway_requests_total":
                        served[labels["process"]] += int(number)
        assert set(served) == {"1", "2"}
        assert {start.start.request_id for start in worker.heard if start.HasField("start")} == {
            f"r{i}" for i in range(CLIENTS)
        }
        one = await stack.enter_async_context(Client(listen, connections=16))
        await asyncio.gather(*(one.complete(a_request(request_id=f"s{i}")) for i in range(CLIENTS)))
        before = served.copy()
        async with asyncio.timeout(60):
            while served.total() != 2 * CLIENTS:
                served.clear()
                for name, labels, number in await samples(http):
                    if name == "trimtab_gateway_requests_total":
                        served[labels["process"]] += int(number)
        assert min((served - before).values()) > 0 and len(served - before) == 2, "one client, and both have had some"


@pytest.mark.slow
async def test_one_that_is_killed_comes_back_and_the_others_streams_go_on(start_worker):
    go_on = asyncio.Event()
    worker = await start_worker(script=held_up_by(go_on))
    async with two_processes(worker) as (process, listen, http), AsyncExitStack() as stack:
        await linked(http)
        clients = [await stack.enter_async_context(Client(listen, attempts=1)) for _ in range(CLIENTS)]
        begun = [asyncio.Event() for _ in clients]

        async def one(i: int, client: Client) -> str | None:
            async def each(event):
                if isinstance(event, m.Delta):
                    begun[i].set()

            seen: list[m.Event] = []
            try:
                await read(client.generate(a_request(request_id=f"r{i}")), seen, each)
            except TrimtabError:
                return None
            return "".join(event.text for event in seen if isinstance(event, m.Delta))

        running = [asyncio.create_task(one(i, client)) for i, client in enumerate(clients)]
        async with asyncio.timeout(60):
            await asyncio.gather(*(event.wait() for event in begun))
        of: dict[str, int] = {}
        async with asyncio.timeout(60):
            while sum(of.values()) != CLIENTS:
                found = await samples(http)
                of = {labels["process"]: int(v) for n, labels, v in found if n == "trimtab_gateway_in_flight" and v}
        victim = next(
            child for child in psutil.Process(process.pid).children() if child.cmdline()[-2:] == ["--process", "1"]
        )
        victim.send_signal(signal.SIGKILL)
        await both_up(http)
        go_on.set()
        async with asyncio.timeout(60):
            texts = await asyncio.gather(*running)
        assert Counter(texts) == Counter({"Hello world!": of["2"], None: of["1"]})
        assert process.returncode is None


@pytest.mark.slow
async def test_one_that_can_not_come_back_ends_nobody_else(start_worker, tmp_path):
    """The key file became faulty since: who has read it holds the last good one, and so is served; who starts now would refuse it."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    worker = await start_worker()
    async with two_processes(worker, "--keys", str(keys)) as (process, _, http):
        await linked(http)
        keys.write_text("tenants: 7")
        children = psutil.Process(process.pid).children()
        victim = next(child for child in children if child.cmdline()[-2:] == ["--process", "1"])
        victim.send_signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            while await value(http, "trimtab_gateway_processes_up") != 1:
                await asyncio.sleep(0.1)
        tried: set[int] = set()
        async with asyncio.timeout(60):
            while len(tried) < 2:  # the first of them has ended with exit code 2
                now = {child.pid for child in psutil.Process(process.pid).children()}
                tried |= now - {child.pid for child in children}
                await asyncio.sleep(0.05)
        assert process.returncode is None
        keys.write_text(KEYS)
        await both_up(http)


async def test_nobody_else_gets_a_port_that_is_held():
    with held("127.0.0.1:0") as address, pytest.raises(PortTaken), held(address):
        raise AssertionError("two have it")


@pytest.mark.slow
async def test_sigterm_drains_them_all(start_worker):
    go_on = asyncio.Event()
    worker = await start_worker(script=held_up_by(go_on))
    async with two_processes(worker) as (process, listen, http), AsyncExitStack() as stack:
        await linked(http)
        clients = [await stack.enter_async_context(Client(listen)) for _ in range(8)]
        running = [asyncio.create_task(c.complete(a_request(request_id=f"r{i}"))) for i, c in enumerate(clients)]
        async with asyncio.timeout(60):
            while sum(heard.HasField("start") for heard in worker.heard) < len(running):
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        go_on.set()
        async with asyncio.timeout(60):
            assert [text for text, _ in await asyncio.gather(*running)] == ["Hello world!"] * 8
            assert await process.wait() == 0


@pytest.mark.slow
async def test_a_taken_port_is_exit_2_and_names_the_holder(start_worker):
    worker = await start_worker()
    for flags in (("--listen", worker.address), ("--listen", "127.0.0.1:0", "--http", worker.address)):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.gateway", "--control", "", "--processes", "2", *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, err = await process.communicate()
        assert process.returncode == 2
        assert f"pid {os.getpid()}" in err.decode()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"processes": 0}, "between 1 and"),
        ({"processes": 65}, "between 1 and"),
        ({"node_id": "g0.1"}, "must not end in a dot and a number"),
        ({"process": 1}, "set processes alone"),
        ({"processes": 2, "process": 3, "siblings": "/d"}, "set processes alone"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        GatewaySettings(**changes)


def test_each_process_is_a_node_of_its_own():
    assert GatewaySettings(processes=2, process=2, siblings="/d").name == "g0.2"
    assert GatewaySettings(processes=2).name == "g0"


def test_a_certificate_speaks_for_a_gateways_own_processes_alone():
    def may(kind: str, name: str, node_id: str, as_kind: str = "gateway") -> bool:
        return speaks_for(Caller(kind, name, "certificate"), as_kind, node_id)

    assert may("gateway", "g0", "g0.1")
    assert may("gateway", "*", "g0.1")
    assert not may("gateway", "g1", "g0.1")
    assert not may("gateway", "g0", "g0.1.2")
    assert not may("gateway", "g0", "g0.x")
    assert not may("worker", "w0", "w0.1", "worker")
    assert not may("gateway", "w0", "w0.1", "worker")


def test_samples_of_several_processes_are_told_apart():
    one = b'# HELP a_total of a\n# TYPE a_total counter\na_total{x="1"} 2.0\n'.decode()
    one += (
        '# HELP b with words\n# TYPE b gauge\nb{y="two words, {and} more"} 1.0\n# HELP c of c\n# TYPE c gauge\nc 7.0\n'
    )
    other = one.replace("2.0", "3.0")
    text = merged({1: one, 2: other}).decode()
    assert 'a_total{process="1",x="1"} 2.0' in text
    assert 'a_total{process="2",x="1"} 3.0' in text
    assert text.count("# TYPE a_total counter") == 1
    assert {(f.name, s.value, *s.labels.values()) for f in text_string_to_metric_families(text) for s in f.samples} == {
        ("a", 2.0, "1", "1"), ("a", 3.0, "2", "1"), ("b", 1.0, "1", "two words, {and} more"),
        ("b", 1.0, "2", "two words, {and} more"), ("c", 7.0, "1"), ("c", 7.0, "2"), ("trimtab_gateway_processes_up", 2.0),
    }  # fmt: skip
    assert text.endswith("trimtab_gateway_processes_up 2\n")
