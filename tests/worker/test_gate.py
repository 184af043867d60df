"""The worker's queue: order, bounds, and places that always come back."""

import asyncio
import itertools

import pytest

from services.worker.gate import Gate
from trimtab.errors import QueueFull, Released
from trimtab.messages import Workload
from trimtab.policy import Policy, with_fields

RT, BATCH = Workload.REALTIME, Workload.BATCH
OVERTAKE_MS = 14_000
"""With this bound one level of priority is worth 1000 ms, and BATCH stands 10 levels behind REALTIME."""


def a_policy(active=1, engine_queue=0, realtime=2, batch=2, **more):
    fields = {
        "batch.active": active,
        "batch.hard_cap": active,
        "admission.engine_queue": engine_queue,
        "admission.realtime_queue": realtime,
        "admission.batch_queue": batch,
        "priority.max_overtake_ms": OVERTAKE_MS,
    }
    return with_fields(Policy(), fields | {k.replace("__", "."): v for k, v in more.items()})


class Desk:
    """A gate, and requests that come one millisecond after another unless they say when."""

    def __init__(self, policy):
        self.gate = Gate(policy)
        self._ids = map(str, itertools.count())
        self._ms = itertools.count()

    def enter(self, workload, tokens=1, at_ms=None):
        arrival = next(self._ms) if at_ms is None else at_ms
        return self.gate.enter(next(self._ids), workload, tokens, float(arrival))

    def comes(self, workload, tokens=1, at_ms=None):
        return self.enter(workload, tokens, at_ms)[0]

    def served(self, running, waiting):
        """The waiting in the order in which they get to the engine, as one after another leaves it."""
        order, left = [], list(waiting)
        while left:
            self.gate.leave(running)
            (running,) = [t for t in left if t.admitted.done()]
            left.remove(running)
            order.append(waiting.index(running))
        return order


async def test_the_engine_gets_no_more_than_its_bound_and_the_rest_wait():
    desk = Desk(a_policy(active=2, engine_queue=1))
    tickets = [desk.comes(RT, 10) for _ in range(5)]
    assert [t.admitted.done() for t in tickets] == [True, True, True, False, False]
    assert (desk.gate.handed, desk.gate.waiting, desk.gate.waiting_tokens) == (3, 2, 20)


async def test_a_batch_backlog_never_keeps_realtime_out_of_the_engine():
    desk = Desk(a_policy(active=4, engine_queue=2, batch=100))
    backlog = [desk.comes(BATCH) for _ in range(100)]
    assert sum(t.admitted.done() for t in backlog) == 6
    realtime = [desk.comes(RT) for _ in range(6)]
    assert all(t.admitted.done() for t in realtime)
    assert not desk.comes(RT).admitted.done()


async def test_batch_is_bounded_by_the_hard_cap_where_that_is_less():
    desk = Desk(a_policy(active=8, engine_queue=1, batch__hard_cap=2))
    assert sum(desk.comes(BATCH).admitted.done() for _ in range(5)) == 3


async def test_neither_workload_takes_the_places_that_the_other_leaves():
    desk = Desk(a_policy())
    realtime, batch = desk.comes(RT), desk.comes(BATCH)
    waiting = {w: desk.comes(w) for w in (RT, BATCH)}
    desk.gate.leave(batch)
    assert (waiting[RT].admitted.done(), waiting[BATCH].admitted.done()) == (False, True)
    desk.gate.leave(realtime)
    assert waiting[RT].admitted.done()


async def test_each_workload_is_bounded_by_itself():
    desk = Desk(a_policy(realtime=1, batch=2))
    for _ in range(3):
        desk.comes(BATCH)
    with pytest.raises(QueueFull, match=r"2 batch requests wait here already \(admission.batch_queue\)"):
        desk.comes(BATCH)
    desk.comes(RT)
    desk.comes(RT)
    with pytest.raises(QueueFull, match="1 realtime requests") as e:
        desk.comes(RT)
    assert e.value.metadata == {"workload": "realtime", "bound": "1"}
    assert (desk.gate.room(RT), desk.gate.room(BATCH)) == (0, 0)


async def test_room_counts_the_engines_supply_and_the_queue():
    desk = Desk(a_policy(active=2, engine_queue=1, realtime=4, batch=5))
    assert (desk.gate.room(RT), desk.gate.room(BATCH)) == (7, 8)
    for _ in range(4):
        desk.comes(RT)
    assert (desk.gate.room(RT), desk.gate.room(BATCH)) == (3, 8)


async def test_within_a_workload_the_earlier_goes_first_whatever_the_order_of_entering():
    desk = Desk(a_policy(realtime=9))
    running = desk.comes(RT, at_ms=0)
    assert desk.served(running, [desk.comes(RT, at_ms=ms) for ms in (30, 10, 20)]) == [1, 2, 0]


@pytest.mark.parametrize(("later_ms", "ahead"), [(9_999, 0), (10_001, 1)])
async def test_realtime_stands_before_a_batch_request_until_that_has_aged(later_ms, ahead):
    desk = Desk(a_policy(realtime=9, batch=9))
    for workload in (RT, BATCH):
        desk.comes(workload, at_ms=0)
    desk.comes(BATCH, at_ms=100)
    assert desk.enter(RT, at_ms=100 + later_ms)[1] == ahead


@pytest.mark.parametrize(("delta", "ahead"), [(0, 1), (1, 1), (2, 0)])
async def test_a_workloads_delta_moves_it_by_levels(delta, ahead):
    desk = Desk(a_policy(realtime=9, batch=9, priority__realtime_delta=delta))
    for workload in (RT, BATCH):
        desk.comes(workload, at_ms=0)
    desk.comes(BATCH, at_ms=0)
    assert desk.enter(RT, at_ms=11_500)[1] == ahead


async def test_the_position_counts_those_ahead_in_both_queues():
    desk = Desk(a_policy(realtime=9, batch=9))
    assert [desk.enter(w, at_ms=0)[1] for w in (RT, BATCH)] == [0, 0]
    assert [desk.enter(RT, at_ms=ms)[1] for ms in (10, 20, 15)] == [0, 1, 1]
    assert [desk.enter(BATCH, at_ms=ms)[1] for ms in (30, 40)] == [3, 4]


async def test_a_delta_moves_one_waiter_and_reorders_the_queue():
    desk = Desk(a_policy(realtime=9, batch=9))
    running = desk.comes(BATCH, at_ms=0)
    waiting = [desk.comes(BATCH, at_ms=ms) for ms in (0, 500, 900)]

    def change(ticket):
        if ticket is waiting[2]:
            ticket.delta = 1

    desk.gate.reorder(change)
    assert desk.served(running, waiting) == [2, 0, 1]


async def test_a_delta_beyond_the_policys_bound_counts_as_the_bound():
    desk = Desk(a_policy(batch=9, priority__max_priority_diff=1))
    running = desk.comes(BATCH, at_ms=0)
    waiting = [desk.comes(BATCH, at_ms=ms) for ms in (0, 1_500)]

    def change(ticket):
        ticket.delta = 2 if ticket is waiting[1] else 0

    desk.gate.reorder(change)
    assert desk.served(running, waiting) == [0, 1]


async def test_fcfs_is_one_queue_in_order_of_arrival():
    desk = Desk(a_policy(realtime=9, batch=9, scheduler__mode="fcfs"))
    running = desk.comes(BATCH, at_ms=0)
    waiting = [desk.comes(w, at_ms=ms) for w, ms in ((BATCH, 10), (RT, 30), (BATCH, 20), (RT, 40), (RT, 5))]
    assert not any(t.admitted.done() for t in waiting)
    assert desk.served(running, waiting) == [4, 0, 2, 1, 3]


async def test_in_fcfs_a_newcomer_never_passes_one_who_waits():
    desk = Desk(a_policy(active=1, scheduler__mode="fcfs"))
    running, batch = desk.comes(RT), desk.comes(BATCH)
    assert desk.enter(RT)[1] == 1
    desk.gate.leave(running)
    assert batch.admitted.done()
    assert desk.gate.handed == 1


async def test_vllms_priority_serves_every_realtime_request_first():
    desk = Desk(a_policy(realtime=9, batch=9, scheduler__mode="priority"))
    for workload in (RT, BATCH):
        desk.comes(workload, at_ms=0)
    desk.comes(BATCH, at_ms=0)
    assert desk.enter(RT, at_ms=3_600_000)[1] == 0


async def test_a_waiter_that_is_cancelled_gives_its_place_back():
    desk = Desk(a_policy())
    desk.comes(RT)
    ticket = desk.comes(RT, 7)

    async def wait():
        try:
            await ticket.admitted
        finally:
            desk.gate.leave(ticket)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert (desk.gate.handed, desk.gate.waiting, desk.gate.waiting_tokens) == (1, 0, 0)


def cancel(ticket):
    ticket.admitted.cancel()


def release(ticket):
    ticket.admitted.set_exception(Released("an operator"))
    assert ticket.admitted.exception()


@pytest.mark.parametrize("end", [cancel, release])
async def test_a_waiter_that_ended_but_has_not_left_yet_is_passed_over(end):
    desk = Desk(a_policy(active=1))
    running = desk.comes(RT)
    gone, here = desk.comes(RT, 5), desk.comes(RT, 6)
    end(gone)
    desk.gate.leave(running)
    assert not here.admitted.done()
    desk.gate.leave(gone)
    assert here.admitted.done()
    assert (desk.gate.handed, desk.gate.waiting, desk.gate.waiting_tokens) == (1, 0, 0)


async def test_leaving_twice_frees_one_place():
    desk = Desk(a_policy(active=2))
    first, second = desk.comes(RT), desk.comes(RT)
    desk.gate.leave(first)
    desk.gate.leave(first)
    assert desk.gate.handed == 1
    desk.gate.leave(second)
    assert desk.gate.handed == 0


async def test_raising_the_running_set_admits_at_once_and_lowering_sends_nobody_away():
    desk = Desk(a_policy(active=1))
    tickets = [desk.comes(RT) for _ in range(3)]
    desk.gate.set_policy(a_policy(active=3))
    assert all(t.admitted.done() for t in tickets)
    desk.gate.set_policy(a_policy(active=1))
    assert desk.gate.handed == 3
    waiting = desk.comes(RT)
    for ticket in tickets:
        assert not waiting.admitted.done()
        desk.gate.leave(ticket)
    assert waiting.admitted.done()


async def test_a_smaller_queue_sends_nobody_away_and_takes_nobody_more():
    desk = Desk(a_policy(realtime=3))
    tickets = [desk.comes(RT) for _ in range(4)]
    desk.gate.set_policy(a_policy(realtime=1))
    assert (desk.gate.waiting, desk.gate.room(RT)) == (3, 0)
    desk.gate.leave(tickets[1])
    with pytest.raises(QueueFull):
        desk.comes(RT)


async def test_the_order_of_those_who_wait_follows_the_mode_live():
    desk = Desk(a_policy(realtime=9, batch=9, scheduler__mode="fcfs"))
    running = desk.comes(RT, at_ms=0)
    batch, realtime = desk.comes(BATCH, at_ms=1), desk.comes(RT, at_ms=2)
    desk.gate.set_policy(a_policy(realtime=9, batch=9))
    assert (batch.admitted.done(), realtime.admitted.done()) == (True, False)
    desk.gate.leave(running)
    assert realtime.admitted.done()
    back = a_policy(realtime=9, batch=9, scheduler__mode="fcfs")
    first, second = desk.comes(BATCH, at_ms=3), desk.comes(RT, at_ms=4)
    desk.gate.set_policy(back)
    assert (first.admitted.done(), second.admitted.done()) == (False, False)
    for ticket in (batch, realtime):
        desk.gate.leave(ticket)
    assert (first.admitted.done(), second.admitted.done()) == (True, False)


@pytest.mark.parametrize("mode", ["trimtab", "priority", "fcfs"])
async def test_whatever_comes_and_goes_the_counts_agree_and_nobody_is_forgotten(mode):
    desk = Desk(a_policy(active=3, engine_queue=1, realtime=20, batch=20, scheduler__mode=mode))
    here = []
    for i in range(600):
        if i % 3 == 2 or len(here) > 30:
            desk.gate.leave(here.pop(i * 7 % len(here)))
        else:
            here.append(desk.comes((RT, BATCH)[i * 5 % 7 > 2], tokens=i))
        waiting = [t for t in here if not t.admitted.done()]
        assert desk.gate.handed == len(here) - len(waiting)
        assert (desk.gate.waiting, desk.gate.waiting_tokens) == (len(waiting), sum(t.prompt_tokens for t in waiting))
        if waiting:
            assert desk.gate.handed >= 4
    for ticket in here:
        desk.gate.leave(ticket)
    assert (desk.gate.handed, desk.gate.waiting, desk.gate.waiting_tokens) == (0, 0, 0)
