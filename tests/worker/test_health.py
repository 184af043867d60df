"""Health by progress."""

import asyncio

from grpc_health.v1 import health_pb2

from tests.worker.conftest import a_request
from trimtab.messages import NodeState
from trimtab.progress import Pulse


async def status(rig):
    return (await rig.health.servicer.Check(health_pb2.HealthCheckRequest(service=""), None)).status


async def test_states_follow_progress(rig):
    now = 1000.0
    assert rig.health.judge(now) is NodeState.SERVING
    call = rig.stub.Generate(a_request(max_tokens=3000))
    await call.read()
    await call.read()
    rig.engine.pulse = lambda: Pulse(5, begun=now, predicted_ms=10.0, ended=False)
    assert rig.health.judge(now) is NodeState.SERVING
    assert rig.health.judge(now + 1.9) is NodeState.SERVING
    assert rig.health.judge(now + 2.1) is NodeState.HUNG
    rig.engine.pulse = lambda: Pulse(6, begun=now + 2.2, predicted_ms=10.0, ended=False)
    assert rig.health.judge(now + 2.3) is NodeState.SERVING
    rig.serving.draining = True
    assert rig.health.judge(now + 2.3) is NodeState.DRAINING
    call.cancel()


async def test_a_hung_engine_whose_work_has_gone_elsewhere_is_hung_until_it_shows_life(rig):
    now, answered = 1000.0, asyncio.Event()
    rig.engine.ping = answered.wait
    rig.engine.owes = lambda: 1
    rig.engine.pulse = lambda: Pulse(5, begun=now, predicted_ms=10.0, ended=True)  # stuck between two steps
    assert rig.health.judge(now) is NodeState.SERVING
    assert rig.health.judge(now + 2.1) is NodeState.HUNG
    rig.engine.owes = lambda: 0
    for later in (2.6, 3.1, 60.0):
        assert rig.health.judge(now + later) is NodeState.HUNG
        await asyncio.sleep(0)
    answered.set()
    async with asyncio.timeout(20):
        while rig.health.judge(now + 61.0) is NodeState.HUNG:
            await asyncio.sleep(0)
    assert rig.health.judge(now + 99.0) is NodeState.SERVING


async def test_it_says_for_how_long_it_has_been_hung(rig):
    rig.engine.owes = lambda: 0
    rig.engine.pulse = lambda: Pulse(5, begun=1000.0, predicted_ms=10.0, ended=False)
    assert rig.health.judge(1001.0) is NodeState.SERVING
    assert rig.health.hung_s(1001.0) == 0.0
    for now, hung_s in ((1003.0, 0.0), (1005.0, 2.0), (1015.5, 12.5)):
        assert rig.health.judge(now) is NodeState.HUNG
        assert rig.health.hung_s(now) == hung_s
    rig.engine.pulse = lambda: Pulse(6, begun=1016.0, predicted_ms=10.0, ended=False)
    assert rig.health.judge(1016.1) is NodeState.SERVING
    assert rig.health.hung_s(1016.1) == 0.0


async def test_a_step_in_flight_that_overstays_is_hung_with_or_without_work(rig):
    rig.engine.owes = lambda: 0
    rig.engine.pulse = lambda: Pulse(5, begun=1000.0, predicted_ms=10.0, ended=False)
    assert rig.health.judge(1001.9) is NodeState.SERVING
    assert rig.health.judge(1002.1) is NodeState.HUNG
    rig.engine.pulse = lambda: Pulse(5, begun=1000.0, predicted_ms=10.0, ended=True)
    assert rig.health.judge(1003.0) is NodeState.SERVING


async def test_a_client_that_reads_nothing_is_no_stuck_engine(rig):
    call = rig.stub.Generate(a_request(max_tokens=200))
    await call.read()
    async with asyncio.timeout(20):
        while rig.engine.owes() or not rig.engine.pulse().ended:
            await asyncio.sleep(0.01)
    assert rig.health.judge(1e9) is NodeState.SERVING
    call.cancel()


async def test_the_health_service_says_what_was_judged(rig):
    assert rig.health.state is NodeState.STARTING
    task = asyncio.create_task(rig.health.run())
    async with asyncio.timeout(20):
        while await status(rig) != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
        rig.serving.draining = True
        while await status(rig) != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)
    task.cancel()


async def test_a_dead_engine_is_not_serving_and_ends_the_process(rig):
    ended = asyncio.Event()
    rig.health._on_death = ended.set
    task = asyncio.create_task(rig.health.run())
    async with asyncio.timeout(20):
        while await status(rig) != health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
        await rig.engine.stop()
        rig.engine._task = asyncio.create_task(asyncio.sleep(0))
        await ended.wait()
        assert await status(rig) == health_pb2.HealthCheckResponse.NOT_SERVING
    await task
