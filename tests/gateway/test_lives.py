"""A node that comes back as another process is another worker: whoever had tried it before may go there."""

from __future__ import annotations

import asyncio

import pytest

from tests.gateway.builders import a_request, read, until
from tests.gateway.test_endpoints import a_view
from tests.gateway.test_resume import TEXT, dies, giving, rest, told
from trimtab import messages as m


@pytest.mark.parametrize("missed", [False, True])
async def test_a_stream_whose_only_worker_was_started_anew_goes_on_there(
    start_worker, start_gateway, client_of, missed
):
    """`missed`: the node has left the gateway's view before it is back."""
    first, gateway = await start_worker(script=giving(2, dies)), await start_gateway()
    gateway.endpoints._leave_grace_s = 0.01
    gateway.endpoints.on_fleet(a_view(first, incarnation="i1"))
    await until(lambda: gateway.endpoints.can_serve)
    seen: list[m.Event] = []
    reading = asyncio.create_task(read(client_of(gateway).generate(a_request()), seen))
    await first.hears("start")
    await until(lambda: not gateway.endpoints.can_serve)
    if missed:
        gateway.endpoints.on_fleet(a_view())
        await until(lambda: not gateway.endpoints.states())
    second = await start_worker(script=rest)
    gateway.endpoints.on_fleet(a_view(second, incarnation="i2"))
    async with asyncio.timeout(20):
        await reading
    assert told(seen) == ("".join(TEXT), list(range(len(TEXT))), [m.NoticeKind.RESUMED])
    assert (first.node_id, first.count("start")) == (second.node_id, second.count("start")) == ("w0", 1)
