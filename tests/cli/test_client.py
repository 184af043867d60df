"""The asyncio client, against a gateway that plays a script."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from tests.cli.mesh import FakeGateway, accepted, an_answer, finish, serving
from trimtab.client import Client, Model, Unreachable
from trimtab.errors import (
    ClientFault,
    DeadlineExceeded,
    InvalidRequest,
    NoWorker,
    Outcome,
    StreamCut,
    TrimtabError,
    Violation,
)
from trimtab.kit.process import free_port
from trimtab.messages import ChatMessage, Delta, Finish, Request, Sampling, Workload

HELLO = Request("r1", "tiny", "hello")


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with serving(FakeGateway()) as fake:
        yield fake


@pytest.fixture
async def client(gateway: FakeGateway) -> AsyncIterator[Client]:
    async with Client(gateway.address) as it:
        yield it


async def test_events_come_as_values_in_order(client: Client, gateway: FakeGateway) -> None:
    assert [e async for e in client.generate(HELLO)] == gateway.script


async def test_the_request_travels_whole(client: Client, gateway: FakeGateway) -> None:
    sampling = Sampling(max_tokens=5, temperature=0.5, seed=7, stop=("a", "b"))
    request = Request("x", "tiny", (ChatMessage("user", "hi"),), sampling, Workload.BATCH)
    await client.complete(request, timeout_s=30.0, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    assert gateway.requests == [request]
    assert gateway.metadata[0]["traceparent"] == "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    # gRPC rounds a deadline up on the wire, to a tenth of a second at this length.
    assert 25.0 < (gateway.deadlines[0] or 0.0) <= 30.2


async def test_complete_joins_the_text(client: Client) -> None:
    assert await client.complete(HELLO) == ("Hello", finish())


async def test_models_are_listed(client: Client) -> None:
    assert await client.models() == (Model("tiny", 4096),)


@pytest.mark.parametrize("leave", ["close", "break", "raise", "cancel"])
async def test_leaving_the_iteration_cancels_the_call(client: Client, gateway: FakeGateway, leave: str) -> None:
    gateway.script = [accepted(), Delta(0, (1,), "a"), asyncio.Event()]
    first_token = asyncio.Event()

    async def read() -> None:
        if leave == "break":
            async for event in client.generate(HELLO):
                if isinstance(event, Delta):
                    break
            return
        async with aclosing(client.generate(HELLO)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    first_token.set()
                    if leave == "close":
                        return
                    if leave == "raise":
                        raise LookupError

    task = asyncio.create_task(read())
    if leave == "cancel":
        await first_token.wait()
        task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.wait_for(gateway.cancelled.wait(), 20.0)


async def test_a_loop_that_is_broken_off_is_over_at_once_also_after_a_lost_connection(gateway: FakeGateway) -> None:
    """Without help of the garbage collector: nothing that a call remembers of its failures keeps it alive."""
    gateway.script = [accepted(), Delta(0, (1,), "a"), asyncio.Event()]
    gc.disable()
    try:
        async with Client([f"127.0.0.1:{free_port()}", gateway.address]) as client:
            for _ in range(2):  # one of them begins at the address where nobody is
                gateway.cancelled.clear()
                async for event in client.generate(HELLO):
                    if isinstance(event, Delta):
                        break
                await asyncio.wait_for(gateway.cancelled.wait(), 10.0)
    finally:
        gc.enable()


async def test_an_error_keeps_its_class_reason_and_details(client: Client, gateway: FakeGateway) -> None:
    gateway.script = [InvalidRequest("no", violations=(Violation("sampling.top_p", "must be at most 1"),))]
    with pytest.raises(ClientFault) as e:
        await client.complete(HELLO)
    assert e.value.reason == "INVALID_REQUEST"
    assert e.value.violations == (Violation("sampling.top_p", "must be at most 1"),)
    gateway.script = [NoWorker("none")]
    with pytest.raises(NoWorker) as e2:
        await client.complete(HELLO)
    assert e2.value.retry_after_ms == 1000


async def test_an_error_after_tokens_is_the_servers_own(client: Client, gateway: FakeGateway) -> None:
    gateway.script = [accepted(), Delta(0, (1,), "a"), StreamCut("worker died")]
    with pytest.raises(StreamCut, match="worker died"):
        await client.complete(HELLO)


@pytest.mark.slow
async def test_the_deadline_is_real(client: Client, gateway: FakeGateway) -> None:
    gateway.script = [accepted(), asyncio.Event()]
    # Connected first: a deadline that passes on the way reaches no gateway.
    await client.models()
    with pytest.raises(TrimtabError) as e:
        await client.complete(HELLO, timeout_s=1.0)
    assert (e.value.grpc_code, e.value.outcome) == (DeadlineExceeded.grpc_code, Outcome.CLIENT_FAULT)
    assert str(e.value.message).startswith("the deadline of ") and " s passed, after " in e.value.message
    await asyncio.wait_for(gateway.cancelled.wait(), 20.0)


async def test_a_stream_without_an_end_is_cut(client: Client, gateway: FakeGateway) -> None:
    gateway.script = [accepted(), Delta(0, (1, 2), "ab")]
    with pytest.raises(StreamCut) as e:
        await client.complete(HELLO)
    assert e.value.metadata == {"tokens_delivered": "2"}


@pytest.mark.slow
async def test_a_lost_gateway_cuts_the_stream() -> None:
    async with serving(FakeGateway([accepted(), Delta(0, (1, 2, 3), "abc"), asyncio.Event()])) as gateway:
        client = Client(gateway.address)
        events = client.generate(HELLO)
        assert [type(await anext(events)) for _ in range(2)][1] is Delta
    with pytest.raises(StreamCut) as e:
        await anext(events)
    assert e.value.metadata == {"tokens_delivered": "3", "cause": "UNAVAILABLE"}
    await client.close()


async def test_a_dead_address_is_unreachable_and_named() -> None:
    address = f"127.0.0.1:{free_port()}"
    async with Client(address) as client:
        with pytest.raises(Unreachable, match=f"nothing answers at {address} .*refused"):
            await client.complete(HELLO)
        with pytest.raises(Unreachable):
            await client.models()


async def test_many_streams_share_one_client(client: Client, gateway: FakeGateway) -> None:
    gateway.script = an_answer("a", "b", "c")
    answers = await asyncio.gather(*(client.complete(HELLO) for _ in range(20)))
    assert {text for text, _ in answers} == {"abc"}
    assert all(isinstance(end, Finish) for _, end in answers)
