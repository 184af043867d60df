"""Direct clients that read slowly, or not at all."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from services.worker.attach import SLOW_READER_TOKENS
from services.worker.reading import Reading
from tests.worker.conftest import Rig, a_request
from trimtab import messages as m
from trimtab.errors import Cancelled, EngineDead, SlowReader
from trimtab.kit import rpc
from trimtab.v1 import inference_pb2_grpc

WITHIN_S = 20.0


class Made:
    """A stream of one-token events; what became of it is to be seen."""

    def __init__(self, n: int, error: Exception | None = None) -> None:
        self.n, self.error = n, error
        self.made = 0
        self.ended: BaseException | str = ""
        self.over = asyncio.Event()

    async def stream(self):
        try:
            while self.made < self.n:
                await asyncio.sleep(0)
                self.made += 1
                yield m.Delta(self.made - 1, (self.made,), "x", ())
            if self.error is not None:
                raise self.error
            self.ended = "whole"
        except BaseException as e:
            self.ended = e
            raise
        finally:
            self.over.set()


async def takes_one(made: Made, **bounds: float) -> None:
    """And no more."""
    async with Reading(made.stream(), **bounds) as events:
        await anext(events)
        await asyncio.Event().wait()


async def to_the_end(call) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_all_is_read_in_order():
    made = Made(1000)
    async with asyncio.timeout(WITHIN_S), Reading(made.stream()) as events:
        assert [e.first_index async for e in events] == list(range(1000))
    assert made.ended == "whole"


async def test_a_stream_that_is_cancelled_within_is_no_stream_that_ended_well():
    made = Made(3, asyncio.CancelledError())  # type: ignore[arg-type]
    seen: list[int] = []

    async def reads() -> None:
        async with asyncio.timeout(WITHIN_S), Reading(made.stream()) as events:
            async for e in events:
                await made.over.wait()
                seen.append(e.first_index)

    with pytest.raises(Cancelled):
        await reads()
    assert seen == [0, 1, 2]


async def test_an_error_comes_after_all_that_was_made_before_it():
    made, seen = Made(5, EngineDead("gone")), []

    async def reads() -> None:
        async with Reading(made.stream()) as events:
            async for e in events:
                await made.over.wait()
                seen.append(e.first_index)

    with pytest.raises(EngineDead):
        await reads()
    assert seen == list(range(5))


async def test_a_stream_is_made_to_its_end_beside_a_reader_who_waits():
    made = Made(SLOW_READER_TOKENS)
    async with asyncio.timeout(WITHIN_S), Reading(made.stream(), behind_s=0.0) as events:
        await anext(events)
        await made.over.wait()
        assert [e.first_index async for e in events] == list(range(1, SLOW_READER_TOKENS))


async def test_who_stays_far_behind_is_ended_and_the_stream_says_why():
    made = Made(100 * SLOW_READER_TOKENS)
    with pytest.raises(SlowReader, match="more than 256 tokens unread"):
        await takes_one(made, behind_s=0.01)
    assert isinstance(made.ended, SlowReader)
    assert made.made < made.n
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0


async def test_who_catches_up_is_not_ended():
    made = Made(3 * SLOW_READER_TOKENS)
    async with asyncio.timeout(WITHIN_S), Reading(made.stream(), behind_s=WITHIN_S) as events:
        first = await anext(events)
        await made.over.wait()
        assert (first.first_index, [e.first_index async for e in events][-1]) == (0, made.n - 1)


async def test_who_takes_nothing_is_ended_however_little_there_is():
    with pytest.raises(SlowReader, match=r"took nothing for 0\.05 s"):
        await takes_one(Made(2), stall_s=0.05)


async def test_who_waits_for_the_stream_is_not_slow():
    go_on = asyncio.Event()

    async def late():
        yield m.Delta(0, (1,), "x", ())
        await go_on.wait()
        yield m.Delta(1, (2,), "y", ())

    async with asyncio.timeout(WITHIN_S), Reading(late(), stall_s=0.02) as events:
        await anext(events)
        asyncio.get_running_loop().call_later(0.2, go_on.set)
        assert (await anext(events)).first_index == 1


async def test_a_cancellation_from_outside_stays_one():
    made = Made(10**9)
    task = asyncio.create_task(takes_one(made, behind_s=WITHIN_S))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert isinstance(made.ended, asyncio.CancelledError)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [{"behind_s": 0.05}, {"behind_s": 3600.0, "stall_s": 0.3}], ids=["tokens", "time"])
async def test_a_direct_client_that_stops_reading_gives_its_place_back(rig: Rig, monkeypatch, bounds):
    """He sets no deadline, and his connection takes little."""
    for name, seconds in bounds.items():
        monkeypatch.setitem(Reading.__init__.__kwdefaults__, name, seconds)
    options = [*rpc.CHANNEL_OPTIONS, ("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(rig.address, options=options) as channel, asyncio.timeout(60):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(a_request(max_tokens=4000))
        await call.read()
        # It fails where so many steps go by that the request may have come to its own end.
        await rig.idle(within_steps=3500)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end(call)
        assert isinstance(rpc.from_call(caught.value), SlowReader)
