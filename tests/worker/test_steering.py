"""An operator moves, isolates and releases requests wherever they are: in the worker's queue or in the engine."""

import asyncio

import grpc
import pytest

from tests.worker.conftest import a_request
from trimtab import errors
from trimtab.kit import rpc
from trimtab.messages import RequestMatch, Workload
from trimtab.v1 import inference_pb2 as pb

ALONE = {"batch.active": 1, "paths.realtime_reserve": 0, "preemption.mode": "none"}
LONG = 2000
"""Tokens of a request that does not end by itself while a test looks at it."""


async def a_stream(rig, name, order, *, tokens=20, workload=pb.WORKLOAD_BATCH, tenant=""):
    """Runs it to its end; `order` collects names as first tokens come."""
    request = a_request("x", max_tokens=tokens)
    request.request_id, request.workload, request.tenant = name, workload, tenant
    seen = False
    call = rig.stub.Generate(request)
    try:
        async for r in call:
            if r.WhichOneof("event") == "delta" and not seen:
                seen = True
                order.append(name)
    finally:
        # A reader that is cancelled before its first answer leaves the call open.
        call.cancel()


async def begin(rig, name, order, **kw):
    task = asyncio.create_task(a_stream(rig, name, order, **kw))
    async with asyncio.timeout(20):
        while name not in {held.request_id for held in rig.steering._held.values()}:
            await asyncio.sleep(0.002)
    return task


async def begin_and_run(rig, name, order, **kw):
    """It has the engine: its first token has come."""
    task = await begin(rig, name, order, tokens=LONG, **kw)
    async with asyncio.timeout(20):
        while name not in order:
            await asyncio.sleep(0.002)
    return task


async def leave(*tasks):
    """Their readers do."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("engine_queue", [0, 8], ids=["in the worker's queue", "in the engine's"])
async def test_a_delta_moves_a_waiting_request_before_those_that_came_earlier(rig, engine_queue):
    await rig.obey({**ALONE, "admission.engine_queue": engine_queue})
    order = []
    first = await begin_and_run(rig, "runs", order)
    tasks = [await begin(rig, name, order) for name in ("a", "b", "c")]
    assert await rig.steering.reprioritise(RequestMatch(frozenset({"c"})), 2) == 1
    await leave(first)
    await asyncio.gather(*tasks)
    assert order == ["runs", "c", "a", "b"]
    await rig.idle()


async def test_released_requests_end_and_say_so_whether_they_run_or_wait(rig):
    await rig.obey({**ALONE, "admission.engine_queue": 0})
    order = []
    running = await begin_and_run(rig, "running", order, tenant="t")
    waiting = await begin(rig, "waiting", order, tenant="t")
    other = await begin(rig, "other", order, tenant="u")
    assert await rig.steering.release(RequestMatch(tenant="t")) == 2
    for task in (running, waiting):
        with pytest.raises(grpc.aio.AioRpcError) as e:
            await task
        assert isinstance(rpc.from_call(e.value), errors.Released)
        assert e.value.code() is grpc.StatusCode.ABORTED
    await other
    assert order == ["running", "other"]
    await rig.idle()


async def test_isolated_requests_run_one_at_a_time(rig):
    await rig.obey({"batch.active": 1, "preemption.mode": "none", "admission.engine_queue": 8})
    order = []
    blocker = await begin_and_run(rig, "blocker", order)
    waiting = [await begin(rig, name, order, tokens=40) for name in ("a", "b", "c")]
    assert await rig.steering.isolate(RequestMatch(frozenset({"a", "b"})), True) == 2
    await rig.obey({"batch.active": 8, "preemption.mode": "none"})
    most = 0
    while not all(t.done() for t in waiting):
        alone = [i for i in rig.engine._value.planner.running.values() if i.isolated]
        most = max(most, len(alone))
        await asyncio.sleep(0.001)
    await asyncio.gather(*waiting)
    await leave(blocker)
    assert most == 1
    assert order.index("c") < order.index("b"), "nobody waits for those who are kept apart"


def test_a_match_means_nobody_until_it_says_something():
    assert not RequestMatch().covers("a", Workload.BATCH, "", 5)
    assert RequestMatch(workload=Workload.BATCH, min_prompt_tokens=4).covers("a", Workload.BATCH, "", 5)
    assert not RequestMatch(workload=Workload.BATCH, min_prompt_tokens=6).covers("a", Workload.BATCH, "", 5)
    assert not RequestMatch(frozenset({"b"}), tenant="t").covers("a", Workload.BATCH, "t", 5)
