"""The worker's queue: order, bounds, and places that always come back."""

import asyncio

import pytest

from services.worker.gate import Gate
from trimtab.errors import QueueFull
from trimtab.messages import Workload
from trimtab.policy import Policy, with_fields

RT, BATCH = Workload.REALTIME, Workload.BATCH


def a_policy(active=1, engine_queue=0, realtime=2, batch=2):
    return with_fields(
        Policy(),
        {
            "batch.active": active,
            "admission.engine_queue": engine_queue,
            "admission.realtime_queue": realtime,
            "admission.batch_queue": batch,
        },
    )


async def test_the_engine_gets_no_more_than_its_bound_and_the_rest_wait():
    gate = Gate(a_policy(active=2, engine_queue=1))
    tickets = [gate.enter(RT, 10)[0] for _ in range(5)]
    assert [t.admitted.done() for t in tickets] == [True, True, True, False, False]
    assert (gate.handed, gate.waiting, gate.waiting_tokens) == (3, 2, 20)


async def test_realtime_overtakes_waiting_batch():
    gate = Gate(a_policy())
    running = gate.enter(BATCH, 1)[0]
    batch, ahead_of_batch = gate.enter(BATCH, 1)
    realtime, ahead = gate.enter(RT, 1)
    assert (ahead_of_batch, ahead) == (0, 0)
    gate.leave(running)
    assert realtime.admitted.done()
    assert not batch.admitted.done()


async def test_each_workload_is_bounded_by_itself():
    gate = Gate(a_policy(realtime=1, batch=2))
    for _ in range(3):
        gate.enter(BATCH, 1)
    with pytest.raises(QueueFull, match="2 batch requests"):
        gate.enter(BATCH, 1)
    gate.enter(RT, 1)
    with pytest.raises(QueueFull, match="1 realtime requests"):
        gate.enter(RT, 1)
    assert (gate.room(RT), gate.room(BATCH)) == (0, 0)


async def test_a_waiter_that_is_cancelled_gives_its_place_back():
    gate = Gate(a_policy())
    gate.enter(RT, 1)
    ticket = gate.enter(RT, 7)[0]

    async def wait():
        try:
            await ticket.admitted
        finally:
            gate.leave(ticket)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (gate.handed, gate.waiting, gate.waiting_tokens) == (1, 0, 0)


async def test_leaving_twice_frees_one_place():
    gate = Gate(a_policy(active=2))
    first, second = gate.enter(RT, 1)[0], gate.enter(RT, 1)[0]
    gate.leave(first)
    gate.leave(first)
    assert gate.handed == 1
    gate.leave(second)
    assert gate.handed == 0


async def test_a_cancelled_waiter_that_has_not_left_yet_is_passed_over():
    gate = Gate(a_policy())
    running = gate.enter(RT, 1)[0]
    gone, here = gate.enter(RT, 5)[0], gate.enter(RT, 6)[0]
    gone.admitted.cancel()
    gate.leave(running)
    assert here.admitted.done()
    gate.leave(gone)
    assert (gate.handed, gate.waiting, gate.waiting_tokens) == (1, 0, 0)


async def test_raising_the_running_set_admits_at_once_and_lowering_sends_nobody_away():
    gate = Gate(a_policy(active=1))
    tickets = [gate.enter(RT, 1)[0] for _ in range(3)]
    gate.set_policy(a_policy(active=3))
    assert all(t.admitted.done() for t in tickets)
    gate.set_policy(a_policy(active=1))
    assert gate.handed == 3


async def test_those_who_left_do_not_pile_up_behind_others_who_wait():
    gate = Gate(a_policy(realtime=10, batch=10))
    gate.enter(RT, 1)
    for _ in range(5):
        gate.enter(RT, 1)
    for _ in range(2000):
        gate.leave(gate.enter(BATCH, 1)[0])
    assert len(gate._heap) < 200
    assert gate.waiting == 5
