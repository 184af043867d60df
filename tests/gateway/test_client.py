"""The client over several gateways, and over one that comes back: streams go on, with every index once."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.cli import mesh as fakes
from tests.cli.mesh import FakeGateway, accepted, finish
from tests.gateway.builders import a_request, read, until
from tests.gateway.fake_worker import Running
from tests.gateway.test_process import a_gateway, serving
from trimtab import client_stream
from trimtab import messages as m
from trimtab.client import Client, Unreachable
from trimtab.errors import DeadlineExceeded, Draining, InvalidRequest, NoWorker, QueueFull, StreamCut, Violation
from trimtab.kit.process import free_port

TEXT = ("Hel", "lo", " 🚢", "小", "!")
LOST = "Socket closed"
HELD = InvalidRequest("it still runs here", violations=(Violation("request_id", "runs"),))
READY = health_pb2.HealthCheckResponse.SERVING


class InTurn(FakeGateway):
    """Plays one script for each call, and the last one again; words at a script's end are those of a connection that breaks."""

    def __init__(self, *scripts: list[object]) -> None:
        super().__init__()
        self.scripts = list(scripts)

    async def Generate(self, request, context):
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        broken = script[-1] if isinstance(script[-1], str) else ""
        self.script = script[:-1] if broken else script
        async for event in super().Generate(request, context):
            yield event
        if broken:
            await context.abort(grpc.StatusCode.UNAVAILABLE, broken)


def tokens(first: int, end: int) -> list[m.Delta]:
    return [m.Delta(i, (100 + i,), TEXT[i]) for i in range(first, end)]


def told(events):
    """(text, indexes, kinds of notices, Accepteds) as a caller got them."""
    deltas = [e for e in events if isinstance(e, m.Delta)]
    indexes = [d.first_index + i for d in deltas for i in range(len(d.token_ids))]
    notices = [e.kind for e in events if isinstance(e, m.Notice)]
    return "".join(d.text for d in deltas), indexes, notices, sum(isinstance(e, m.Accepted) for e in events)


WHOLE = ("".join(TEXT), list(range(len(TEXT))))
RESUMED = (*WHOLE, [m.NoticeKind.RESUMED], 1)


@pytest.fixture
async def serve():
    """serve(script, …): a fake gateway that plays them in turn."""
    async with AsyncExitStack() as stack:

        async def start(*scripts):
            return await stack.enter_async_context(fakes.serving(InTurn(*scripts)))

        yield start


@pytest.fixture
async def client_to():
    async with AsyncExitStack() as stack:

        def make(*gateways, **arguments):
            addresses = [g if isinstance(g, str) else g.address for g in gateways]
            client = Client(addresses, **arguments)
            stack.push_async_callback(client.close)
            return client

        yield make


@pytest.fixture
def quick(monkeypatch):
    """Short pauses."""
    monkeypatch.setattr(client_stream, "FIRST_PAUSE_MS", 20)


@pytest.fixture
def no_pause(monkeypatch):
    """A pause would outlast the test."""
    monkeypatch.setattr(client_stream, "FIRST_PAUSE_MS", 1 << 30)
    monkeypatch.setattr(client_stream, "MAX_PAUSE_MS", 1 << 30)


async def all_of(client, **arguments):
    return [e async for e in client.generate(a_request(), **arguments)]


@pytest.mark.parametrize("cut", range(1, len(TEXT) + 1))
async def test_a_stream_goes_on_at_the_next_index_and_byte(serve, client_to, no_pause, cut):
    first = await serve([accepted(prompt_digest=b"p"), *tokens(0, cut), LOST])
    second = await serve([accepted(worker_id="w1"), *tokens(cut, len(TEXT)), finish()])
    client = client_to(first, second)
    client._places._turn = 1  # begins with the first
    assert told(await all_of(client)) == RESUMED
    (asked,) = second.requests
    text_bytes = len("".join(TEXT[:cut]).encode())
    assert asked.resume == m.Resume(tuple(100 + i for i in range(cut)), text_bytes, 2, b"p")
    assert asked.request_id == "r1"


async def test_the_notice_tells_where_and_why(serve, client_to, quick):
    gateway = await serve([accepted(), *tokens(0, 2), LOST], [accepted(worker_id="w7"), *tokens(2, 5), finish()])
    events = await all_of(client_to(gateway))
    (notice,) = [e for e in events if isinstance(e, m.Notice)]
    assert notice.detail == "goes on at token 2 on w7: Socket closed"


@pytest.mark.parametrize("script", [[LOST], [accepted(), LOST]])
async def test_what_is_lost_before_the_first_token_begins_anew(serve, client_to, quick, script):
    gateway = await serve(script, [accepted(), *tokens(0, 5), finish()])
    assert told(await all_of(client_to(gateway))) == (*WHOLE, [], 1)
    assert [r.resume for r in gateway.requests] == [None, None]


async def test_a_stream_goes_on_as_often_as_it_is_allowed_to(serve, client_to, quick):
    scripts = [[accepted(), *tokens(i, i + 1), LOST] for i in range(4)] + [[accepted(), *tokens(4, 5), finish()]]
    gateway = await serve(*scripts)
    events = await all_of(client_to(gateway), attempts=5)
    assert told(events)[:2] == WHOLE
    gateway.scripts = [list(s) for s in scripts]
    with pytest.raises(StreamCut) as caught:
        await all_of(client_to(gateway))
    assert caught.value.metadata == {"tokens_delivered": "4", "cause": "UNAVAILABLE"}
    assert len(gateway.requests) == 5 + 4


@pytest.mark.parametrize("refusal", [Draining("leaving"), NoWorker("none has joined yet"), QueueFull("full"), HELD])
async def test_a_gateway_that_can_not_take_it_on_yet_is_asked_again(serve, client_to, quick, refusal):
    refusal.retry_after_ms = 1
    gateway = await serve([accepted(), *tokens(0, 2), LOST], [refusal], [accepted(), *tokens(2, 5), finish()])
    assert told(await all_of(client_to(gateway))) == RESUMED


async def test_what_can_not_be_continued_exactly_is_cut(serve, client_to, no_pause):
    first = await serve([accepted(resumable=False), *tokens(0, 2), LOST])
    second = await serve([accepted(), *tokens(0, 5), finish()])
    client = client_to(first, second)
    client._places._turn = 1
    with pytest.raises(StreamCut) as caught:
        await all_of(client)
    assert caught.value.metadata == {"tokens_delivered": "2", "cause": "UNAVAILABLE"}
    assert second.requests == []


@pytest.mark.parametrize("first_index", [0, 1, 3])
async def test_a_server_that_goes_on_at_another_index_is_a_cut(serve, client_to, quick, first_index):
    """Repeated or missing, it is told, and no such token is shown."""
    gateway = await serve([accepted(), *tokens(0, 2), LOST], [accepted(), *tokens(first_index, 5), finish()])
    events = []
    with pytest.raises(StreamCut, match=f"token {first_index} came where 2 was due"):
        await read(client_to(gateway).generate(a_request()), events)
    assert told(events)[1] == [0, 1]


async def test_one_call_is_all_where_no_more_are_allowed(serve, client_to, no_pause):
    gateway = await serve([accepted(), *tokens(0, 2), LOST])
    with pytest.raises(StreamCut):
        await all_of(client_to(gateway, attempts=1))
    assert len(gateway.requests) == 1


async def test_the_time_limit_is_for_all_calls_together(serve, client_to, quick, monkeypatch):
    gateway = await serve([accepted(), *tokens(0, 1), LOST], [accepted(), *tokens(1, 5), finish()])
    passed_s = 0.0
    clock = time.monotonic
    monkeypatch.setattr("trimtab.client.time", SimpleNamespace(monotonic=lambda: clock() + passed_s))
    async for event in client_to(gateway).generate(a_request(), timeout_s=600.0):
        if isinstance(event, m.Delta) and event.first_index == 0:
            passed_s = 500.0
    # gRPC rounds what it writes into a header.
    assert 500.0 < gateway.deadlines[0] < 700.0
    assert gateway.deadlines[1] < 150.0


async def test_no_pause_outlasts_the_time_limit(serve, client_to, no_pause):
    gateway = await serve([accepted(), *tokens(0, 2), LOST])
    with pytest.raises(StreamCut):
        await all_of(client_to(gateway), timeout_s=60.0)


@pytest.mark.slow
async def test_a_deadline_that_passes_is_told_as_such(serve, client_to, quick):
    gateway = await serve([accepted(), *tokens(0, 2), LOST], [accepted(), asyncio.Event()])
    client = client_to(gateway)
    await client.models()
    with pytest.raises(DeadlineExceeded):
        await all_of(client, timeout_s=1.0)


async def test_leaving_while_it_waits_leaves_nothing(serve, client_to, no_pause):
    gateway = await serve([accepted(), *tokens(0, 1), LOST])
    shown = asyncio.Event()

    async def reads():
        async for event in client_to(gateway).generate(a_request()):
            if isinstance(event, m.Delta):
                shown.set()

    task = asyncio.create_task(reads())
    await shown.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(gateway.requests) == 1


async def test_nobody_who_ever_answered_is_told_at_once(client_to, no_pause):
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    client = client_to(*addresses)
    with pytest.raises(Unreachable, match="nothing answers"):
        await all_of(client)
    with pytest.raises(Unreachable):
        await client.models()


async def test_addresses_take_turns_and_a_lost_one_is_passed_over(serve, client_to, no_pause):
    answer = [accepted(), *tokens(0, 5), finish()]
    one, other = await serve(answer), await serve(answer)
    client = client_to(one, other, f"127.0.0.1:{free_port()}")
    for _ in range(9):
        assert told(await all_of(client)) == (*WHOLE, [], 1)
    assert len(one.requests) + len(other.requests) == 9
    assert min(len(one.requests), len(other.requests)) >= 3
    assert [x.name for x in await client.models()] == ["tiny"]


async def test_addresses_may_have_commas_between_them(serve):
    one = await serve([accepted(), *tokens(0, 5), finish()])
    async with Client(f"{one.address}, {one.address},") as client:
        assert client.address == one.address
        assert (await client.complete(a_request()))[0] == WHOLE[0]
    with pytest.raises(ValueError, match="no address"):
        Client(" , ")


async def test_a_key_travels_as_a_bearer(serve, client_to):
    gateway = await serve([accepted(), *tokens(0, 5), finish()])
    client = client_to(gateway, key="sk-1")
    await client.complete(a_request(), traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    assert gateway.metadata[0]["authorization"] == "Bearer sk-1"
    assert gateway.metadata[0]["traceparent"].startswith("00-aaaa")


async def test_a_key_goes_nowhere_in_plain_text_unless_told_to(client_to):
    with pytest.raises(ValueError, match=r"the key would go to gw\.example:7070 in plain text") as caught:
        Client("127.0.0.1:7070,gw.example:7070", key="sk-secret")
    assert "sk-secret" not in str(caught.value)
    client_to("gw.example:7070", key="sk-1", insecure_key=True)
    with pytest.raises(ValueError, match="printable ASCII"):
        Client("127.0.0.1:7070", key="sk\n1")


async def test_what_a_server_asks_to_wait_is_in_the_error(serve, client_to):
    gateway = await serve([QueueFull("full", retry_after_ms=1234)])
    with pytest.raises(QueueFull) as caught:
        await client_to(gateway).complete(a_request())
    assert caught.value.retry_after_ms == 1234


async def paced(r: Running) -> None:
    """A token for each time that the test says so (`r.worker.go`), from where the stream stands."""
    r.index = len(r.request.resume.token_ids) if r.request.resume else 0
    r.accept()
    for text in TEXT[r.index :]:
        await r.worker.go.acquire()
        r.token(text)
    r.finish(m.FinishReason.STOP)


def go_on(worker):
    """To the end, also where an attempt that nobody listens to takes its part."""
    for _ in range(10 * len(TEXT)):
        worker.go.release()


@pytest.fixture
async def worker(start_worker):
    it = await start_worker(script=paced)
    it.go = asyncio.Semaphore(2)
    return it


@pytest.mark.slow
@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
async def test_a_stream_outlives_its_gateway(worker, client_to, sig):
    flags = ("--workers", worker.address, "--drain-s", "0.2")
    async with a_gateway(*flags) as (one, first, _), a_gateway(*flags, "--node-id", "g1") as (other, second, _):
        await serving(first, READY)
        await serving(second, READY)
        client = client_to(first, second)
        client._places._turn = 1
        events = []
        async for event in client.generate(a_request(), timeout_s=60.0):
            events.append(event)
            if isinstance(event, m.Delta) and event.first_index + len(event.token_ids) == 2:
                one.send_signal(sig)
            if isinstance(event, m.Notice):
                go_on(worker)
        assert told(events) == RESUMED
        assert isinstance(events[-1], m.Finish)
        assert events[-1].usage.completion_tokens == len(TEXT)
        assert other.returncode is None


@pytest.mark.slow
async def test_a_stream_waits_for_its_only_gateway_to_come_back(worker, client_to):
    listen = f"127.0.0.1:{free_port()}"
    flags = ("--workers", worker.address, "--listen", listen)
    events = []

    async with a_gateway(*flags) as (process, _, _):
        await serving(listen, READY)
        stream = client_to(listen, attempts=1000).generate(a_request(), timeout_s=100.0)
        task = asyncio.create_task(read(stream, events))
        await until(lambda: told(events)[1] == [0, 1])
        process.kill()
        await process.wait()
    go_on(worker)
    async with a_gateway(*flags):
        await task
    assert told(events) == RESUMED
