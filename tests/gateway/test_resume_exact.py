"""Two real workers with simulated engines behind a real gateway: a stream cut after any of its tokens is, byte for byte, the undisturbed one.

The text has an emoji, CJK and characters of several tokens each (a simulated token is a byte), and stop strings that straddle cuts.
"""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from services.gateway.stream import Stream
from tests.gateway.builders import until
from tests.worker.conftest import running_worker
from trimtab import messages as m
from trimtab.errors import EngineDead
from trimtab.messages import Request, Sampling

pytestmark = pytest.mark.slow

PROMPT = "r"
"""With this a simulated engine begins at the beginning of what it has to say."""
TOKENS = 90
AT_ONCE = 8
STOPS = [(), ("舵 🚢",), ("ship — 小",), ("turns the ship", "never")]


@pytest.fixture
async def mesh(tmp_path, start_gateway, policy):
    """A gateway before two workers; what it is made of is real but for the engines."""
    async with contextlib.AsyncExitStack() as stack:
        rigs = [
            await stack.enter_async_context(running_worker(tmp_path / f"policy{i}.json", step_ms=0.2)) for i in range(2)
        ]
        gateway = await start_gateway(workers=tuple(rig.address for rig in rigs))
        await until(lambda: gateway.endpoints.links_up == 2)
        policy(gateway, {"breaker.min_outcomes": 100_000})  # what is cut here is no fault of theirs
        yield gateway, rigs
        for rig in rigs:
            await rig.idle()


@pytest.fixture
def _cuts(monkeypatch):
    """The first attempt of request "cut-N" ends after its N-th token, as if its worker had died."""
    push = Stream.push
    counts: dict[str, int] = {}
    dead: set[Stream] = set()

    def cutting(stream: Stream, event) -> None:
        if stream in dead:
            return
        push(stream, event)
        name, _, number = stream.request_id.partition("-")
        if name != "cut" or not event.HasField("delta"):
            return
        counts[stream.request_id] = counts.get(stream.request_id, 0) + len(event.delta.token_ids)
        if counts[stream.request_id] == int(number):
            stream.fail(EngineDead("cut by the test"))
            dead.add(stream)

    monkeypatch.setattr(Stream, "push", cutting)


async def told(client, stop, request_id=""):
    sampling = Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, stop=stop)
    text, tokens, moves, finish = "", [], 0, None
    async for event in client.generate(Request(request_id, "sim", PROMPT, sampling)):
        match event:
            case m.Delta():
                assert event.first_index == len(tokens)
                text += event.text
                tokens += event.token_ids
            case m.Notice(kind=m.NoticeKind.RESUMED):
                moves += 1
            case m.Finish():
                finish = event
    return text.encode(), tokens, (finish.reason, finish.stop, finish.usage.completion_tokens), moves


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: "/".join(stop) or "no stop")
@pytest.mark.usefixtures("_cuts")
async def test_a_stream_cut_at_any_token_is_byte_for_byte_the_undisturbed_one(mesh, client_of, stop):
    gateway, _ = mesh
    client = client_of(gateway)
    *whole, moves = await told(client, stop)
    assert moves == 0
    assert stop or {len(c.encode()) for c in whole[0].decode()} == {1, 3, 4}
    assert whole[2][1] == (stop[0] if stop else "")
    cuts = range(1, len(whole[1]))
    for begin in range(0, len(cuts), AT_ONCE):
        some = cuts[begin : begin + AT_ONCE]
        found = await asyncio.gather(*(told(client, stop, f"cut-{cut}") for cut in some))
        assert [(cut, *each) for cut, each in zip(some, found, strict=True)] == [(cut, *whole, 1) for cut in some]
