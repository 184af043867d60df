"""A reader's window, when several steps' tokens come as one piece: nobody who reads waits for ever, and who does not read is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from services.worker.attach import SLOW_READER_TOKENS, Link
from services.worker.gate import Gate
from services.worker.shares import Shares
from trimtab import codec
from trimtab import messages as m
from trimtab.policy import Policy
from trimtab.snapshot import Identity
from trimtab.v1 import inference_pb2 as pb

WINDOW = 256


class Serving:
    """Gives one request's output in pieces of these sizes."""

    draining = False
    load = m.Load()

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    async def stream(self, request: m.Request, traceparent: str, *, age_s: float, left_s: float | None, cap: int):
        yield m.Accepted("r", "w", Identity(1, 1), 0, 3, b"", True, "m", True)
        index = 0
        for size in self.sizes:
            await asyncio.sleep(0)
            yield m.Delta(index, tuple(range(size)), "x" * size)
            index += size
        yield m.Finish(m.FinishReason.STOP, m.Usage(3, index, 0), m.Timings(0, 0, 0, 0, 0))


async def read(sizes: list[int], *, grants: bool) -> tuple[list[int], str]:
    """(first indexes and a last one, how it ended), by a gateway that asks for more whenever half of a window is read."""
    gate = Gate(Policy())
    link = Link(Serving(sizes), gate, Shares(lambda: gate.supply(m.Workload.BATCH)), lambda: 1)  # type: ignore[arg-type]
    said: asyncio.Queue[pb.AttachRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[pb.AttachRequest]:
        while True:
            yield await said.get()

    reading = asyncio.create_task(link.read(requests()))
    request = codec.encode_request(m.Request(request_id="r", model="m", prompt="x"))
    said.put_nowait(
        pb.AttachRequest(start=pb.Start(request_id="r", attempt=1, generate_request=request, window=WINDOW))
    )
    got, unread, expected = 0, 0, []
    try:
        async with asyncio.timeout(30):
            async for step in link.steps():
                for piece in step.pieces:
                    if piece.WhichOneof("content") == "status":
                        return expected, piece.status.message
                    match piece.event.WhichOneof("event"):
                        case "delta":
                            expected.append(piece.event.delta.first_index)
                            tokens = len(piece.event.delta.token_ids)
                            got, unread = got + tokens, unread + tokens
                            if grants and unread >= WINDOW // 2:
                                window = pb.Window(request_id="r", attempt=1, n=unread)
                                said.put_nowait(pb.AttachRequest(window=window))
                                unread = 0
                        case "finish":
                            return [*expected, got], "finish"
        raise AssertionError("the link ended")
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await link.aclose()


@pytest.mark.parametrize(
    "sizes",
    [
        [1] * 127 + [130, 1, 1],
        [300],
        [1] * 127 + [130] + [1] * 200,
        [1] * 100 + [120] + [1] * 30,
        [1] * 256 + [400, 1],
        [256, 700, 1],
    ],
    ids=lambda sizes: f"{len(sizes)} pieces, {max(sizes)} at once",
)
async def test_who_reads_gets_all_whatever_comes_together(sizes: list[int]) -> None:
    indexes, end = await read(sizes, grants=True)
    assert end == "finish"
    assert indexes == [sum(sizes[:i]) for i in range(len(sizes) + 1)]


@pytest.mark.parametrize("sizes", [[1] * 2000, [200] * 10])
async def test_who_reads_nothing_more_is_ended(sizes: list[int]) -> None:
    indexes, end = await read(sizes, grants=False)
    assert "unread" in end
    assert len(indexes) <= WINDOW + 2 * SLOW_READER_TOKENS
