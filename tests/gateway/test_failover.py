"""A worker that fails before the first token: another one takes the request. What comes after it is in test_resume.py."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

import pytest

from tests.gateway.builders import a_request, read, until
from tests.gateway.fake_worker import Running, hang, hello_world
from trimtab import messages as m
from trimtab.errors import (
    Draining,
    EngineDead,
    Internal,
    Outcome,
    QueueFull,
    SlowReader,
    StreamCut,
    TrimtabError,
    WrongPool,
)


async def two_tokens_then_hang(r: Running) -> None:
    r.accept()
    r.token("Hel")
    r.token("lo")
    await hang(r)


def failing(error):
    async def script(r: Running) -> None:
        r.accept()
        r.fail(error)

    return script


@pytest.fixture
def first_then_other(start_worker, start_gateway):
    """Two workers, of which the first is picked first: the other has more to do."""

    async def start(script, other=hello_world):
        first, second = await start_worker("w0", script=script), await start_worker("w1", script=other)
        second.load = m.Load(running=5)
        gateway = await start_gateway(first, second)
        await until(lambda: gateway.endpoints.get(second.address).load.running == 5)
        return first, second, gateway

    return start


@pytest.mark.parametrize("error", [EngineDead("gone"), Draining("leaving"), Internal("odd"), WrongPool("isolated")])
async def test_a_fault_before_the_first_token_is_retried_elsewhere(first_then_other, client_of, error):
    first, second, gateway = await first_then_other(failing(error))
    events = [e async for e in client_of(gateway).generate(a_request(request_id="r"))]
    assert [type(e) for e in events].count(m.Accepted) == 1
    assert "".join(e.text for e in events if isinstance(e, m.Delta)) == "Hello world!"
    start = await second.hears("start")
    assert (start.request_id, start.attempt) == ("r", 2)
    assert first.count("start") == 1
    assert gateway.metrics.counters["retries"] == 1


@pytest.mark.parametrize("error", [QueueFull("full"), SlowReader("slow")])
async def test_back_pressure_is_the_clients_to_handle(first_then_other, client_of, error):
    async def at_once(r: Running) -> None:
        r.fail(error)

    _, second, gateway = await first_then_other(at_once)
    with pytest.raises(type(error)):
        await client_of(gateway).complete(a_request())
    assert second.count("start") == 0


@pytest.mark.slow
async def test_a_silent_link_is_dead_after_a_second_and_a_half(first_then_other, client_of):
    first, second, gateway = await first_then_other(hang)
    begun = time.monotonic()
    async with aclosing(client_of(gateway).generate(a_request())) as events:
        assert isinstance(await anext(events), m.Accepted)
        first.silent = True
        rest = [e async for e in events]
    assert 1.2 < time.monotonic() - begun < 10
    assert "".join(e.text for e in rest if isinstance(e, m.Delta)) == "Hello world!"
    assert (await second.hears("start")).attempt == 2
    assert "said nothing for 1.5 s" in gateway.endpoints.get(first.address).why_down


async def test_a_killed_worker_before_the_first_token(first_then_other, client_of):
    first, _, gateway = await first_then_other(hang)
    async with aclosing(client_of(gateway).generate(a_request())) as events:
        await anext(events)
        await first.die()
        rest = [e async for e in events]
    assert isinstance(rest[-1], m.Finish)


async def test_with_resuming_off_a_killed_worker_cuts_the_stream_with_the_count(first_then_other, client_of, policy):
    first, second, gateway = await first_then_other(two_tokens_then_hang)
    policy(gateway, {"resume.attempts": 1})
    events = []

    async def each(event):
        if isinstance(event, m.Delta) and event.first_index + len(event.token_ids) == 2:
            await first.die()

    with pytest.raises(StreamCut) as caught:
        await read(client_of(gateway).generate(a_request()), events, each)
    assert "".join(e.text for e in events if isinstance(e, m.Delta)) == "Hello"
    assert caught.value.grpc_code == "ABORTED"
    assert caught.value.metadata["tokens_delivered"] == "2"
    assert second.count("start") == 0


@pytest.mark.slow
async def test_the_last_fault_is_told_when_nobody_else_is_there(start_worker, start_gateway, client_of, policy):
    gateway = await start_gateway(await start_worker(script=failing(Draining("leaving"))))
    policy(gateway, {"resume.wait_ms": 50})
    with pytest.raises(Draining, match="leaving"):
        await client_of(gateway).complete(a_request())


async def test_a_request_that_no_pool_takes_ends_as_the_last_worker_said(start_worker, start_gateway, client_of):
    gateway = await start_gateway(await start_worker(script=failing(WrongPool("prompt is 70000 tokens long"))))
    with pytest.raises(WrongPool, match="70000 tokens"):
        await client_of(gateway).complete(a_request())


async def test_three_attempts_are_the_most(start_worker, start_gateway, client_of):
    workers = [await start_worker(f"w{i}", script=failing(Internal("odd"))) for i in range(4)]
    gateway = await start_gateway(*workers)
    with pytest.raises(Internal):
        await client_of(gateway).complete(a_request())
    assert sum(w.count("start") for w in workers) == 3


async def test_pieces_of_an_older_attempt_are_dropped_and_counted(first_then_other, client_of):
    async def babbling(r: Running) -> None:
        """Fails, and goes on talking."""
        r.accept()
        r.fail(EngineDead("gone"))
        r.token("stale")

    async def after_stale(r: Running) -> None:
        r.accept()
        r.event(m.Delta(0, (9,), "older"), attempt=r.start.attempt - 1)
        await hello_world(r)

    _, _, gateway = await first_then_other(babbling, after_stale)
    text, _ = await client_of(gateway).complete(a_request())
    assert text == "Hello world!"
    assert b"trimtab_gateway_dropped_pieces_total 2.0" in gateway.metrics.text()


async def test_an_id_used_again_never_hears_the_request_before(start_worker, start_gateway, client_of):
    """The id is the client's; what its first request's worker still says must not reach its second."""
    earlier: list[Running] = []

    async def first_hangs_second_hears_it(r: Running) -> None:
        r.accept()
        if not earlier:
            earlier.append(r)
            r.token("A")
            await hang(r)
        earlier[0].event(m.Delta(0, (9,), "of the request before"))
        await r.tokens(("B", "C"))
        r.finish()

    worker = await start_worker(script=first_hangs_second_hears_it)
    gateway = await start_gateway(worker)
    client = client_of(gateway)
    async with aclosing(client.generate(a_request(request_id="same"))) as events:
        async for event in events:
            if isinstance(event, m.Delta):
                break
    await worker.hears("cancel")
    text, _ = await client.complete(a_request(request_id="same"))
    assert text == "BC"


async def test_a_request_too_large_for_a_link_harms_nobody_else(start_worker, start_gateway, client_of):
    go_on = asyncio.Event()

    async def waits(r: Running) -> None:
        r.accept()
        r.token("Hello")
        await go_on.wait()
        r.token(" world!")
        r.finish()

    worker = await start_worker(script=waits)
    gateway = await start_gateway(worker)
    client = client_of(gateway)
    async with aclosing(client.generate(a_request())) as events:
        assert isinstance(await anext(events), m.Accepted)
        for prompt in ("a" * (16 << 20), "a" * ((4 << 20) + 1), tuple([1] * 300_000)):
            with pytest.raises(TrimtabError) as caught:
                await client.complete(a_request(prompt=prompt))
            assert caught.value.outcome is not Outcome.ENGINE_FAULT
        go_on.set()
        rest = [e async for e in events]
    assert "".join(e.text for e in rest if isinstance(e, m.Delta)) == "Hello world!"
    assert worker.count("start") == 1


async def test_a_missing_or_doubled_index_never_reaches_the_client(start_worker, start_gateway, client_of):
    async def skipping(r: Running) -> None:
        r.accept()
        r.token("a")
        r.event(m.Delta(2, (9,), "c"))
        await hang(r)

    worker = await start_worker(script=skipping)
    gateway = await start_gateway(worker)
    events = []
    with pytest.raises(StreamCut) as caught:
        await read(client_of(gateway).generate(a_request()), events)
    assert [e.text for e in events if isinstance(e, m.Delta)] == ["a"]
    assert caught.value.metadata["tokens_delivered"] == "1"
    await worker.hears("cancel")


async def test_a_restarted_worker_on_the_same_address_is_used_again(start_worker, start_gateway, client_of):
    worker = await start_worker()
    gateway = await start_gateway(worker)
    address = worker.address
    await worker.die()
    await until(lambda: not gateway.endpoints.can_serve)
    await worker.start(address)
    await until(lambda: gateway.endpoints.can_serve)
    text, _ = await client_of(gateway).complete(a_request())
    assert text == "Hello world!"
