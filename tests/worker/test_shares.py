"""Links that take of one worker's free places: in turn, by what they want, and together no more than there is."""

from __future__ import annotations

import asyncio
import random

import pytest

from services.worker.shares import Share, Shares
from tests.worker.conftest import Rig, a_request
from tests.worker.test_attach import Gateway
from trimtab.v1 import inference_pb2 as pb


class Worker:
    """So many places, and links whose messages arrive when the test says so."""

    def __init__(self, free: int) -> None:
        self.free = free
        self.shares = Shares(lambda: self.free)
        self.due: list[Share] = []

    def link(self, wants: int | None = 0) -> Share:
        share = self.shares.join(lambda: self.due.append(share))
        if wants is not None:
            self.shares.want(share, wants)
        self.shares.promise(share)
        return share

    def settle(self) -> None:
        """Whoever was woken says what he may take."""
        for _ in range(100):
            if not self.due:
                return
            self.shares.promise(self.due.pop(0))
        raise AssertionError("links wake each other for ever")

    def take(self, share: Share) -> None:
        self.free -= 1
        self.shares.started(share)

    def frees(self) -> None:
        self.free += 1
        self.shares.moved()


def test_a_gateway_with_nothing_waiting_takes_nothing_away():
    worker = Worker(16)
    quiet, busy = worker.link(), worker.link()
    worker.shares.want(busy, 16)
    worker.settle()
    assert (quiet.promised, busy.promised) == (0, 16)


def test_two_that_want_have_half_each_and_one_that_stops_leaves_its_half():
    worker = Worker(16)
    a, b = worker.link(50), worker.link(50)
    worker.settle()
    assert (a.promised, b.promised) == (8, 8)
    worker.shares.want(b, 0)
    worker.settle()
    assert (a.promised, b.promised) == (16, 0)


def test_one_place_goes_round():
    worker = Worker(1)
    links = [worker.link(50) for _ in range(3)]
    got = []
    for _ in range(9):
        worker.settle()
        (one,) = [i for i, link in enumerate(links) if link.promised]
        got.append(one)
        worker.take(links[one])
        worker.frees()
    assert got == [*got[:3]] * 3 and sorted(got[:3]) == [0, 1, 2]


def test_nobody_is_woken_where_nobody_wants():
    worker = Worker(4)
    worker.link(), worker.link()
    worker.frees()
    assert worker.due == []


def test_a_gateway_that_does_not_say_what_it_wants_is_promised_all_as_ever():
    worker = Worker(6)
    old, new = worker.link(None), worker.link(6)
    assert (worker.shares.promise(old), new.promised) == (6, 6)


def test_who_left_holds_nothing():
    worker = Worker(6)
    gone, stays = worker.link(6), worker.link(6)
    worker.settle()
    worker.shares.leave(gone)
    worker.settle()
    assert stays.promised == 6


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_promises_are_kept_and_no_place_stays_empty_while_somebody_wants_it(seed):
    rng = random.Random(seed)
    worker, running = Worker(rng.randint(1, 12)), 0
    links = [worker.link() for _ in range(rng.randint(1, 5))]
    for _ in range(300):
        match rng.choice(("want", "take", "take", "free", "say")):
            case "want":
                worker.shares.want(rng.choice(links), rng.choice((0, 1, 3, 20)))
            case "take":
                if able := [link for link in links if link.promised]:
                    worker.take(rng.choice(able))
                    running += 1
            case "free" if running:
                running -= 1
                worker.frees()
            case "say":
                worker.shares.promise(rng.choice(links))
        assert sum(link.promised for link in links) <= worker.free
        worker.settle()
        wanted = sum(link.wants or 0 for link in links)
        assert sum(min(link.promised, link.wants or 0) for link in links) == min(worker.free, wanted)


async def test_two_links_share_the_places_of_a_real_worker(rig: Rig):
    """One asks for all; the other's idle part goes to it, and comes back half when the other wants too."""
    await rig.obey({"batch.active": 4, "batch.hard_cap": 4, "admission.engine_queue": 0})
    links = [Gateway(rig.stub) for _ in range(2)]
    for i, link in enumerate(links):
        await link.send(hello=pb.AttachHello(gateway_id=f"g{i}", tells_wants=True))

    async def granted(a: int, b: int) -> None:
        async with asyncio.timeout(20):
            while [link.steps[-1].credits.batch if link.steps else None for link in links] != [a, b]:
                await asyncio.gather(*(link.read() for link in links))

    await granted(2, 2)
    assert all(link.steps[-1].hears_wants for link in links)
    # The first takes all while it is alone; the second one's very first message promises nothing that the first may use.
    assert sum(link.steps[0].credits.batch for link in links) <= 4
    await links[0].send(wants=pb.Wants(batch=10))
    await granted(4, 0)
    await links[1].send(wants=pb.Wants(batch=10))
    await granted(2, 2)
    for link, name in zip(links, "ab", strict=True):
        for i in range(2):
            await link.start(f"{name}{i}", a_request(max_tokens=3000, workload=pb.WORKLOAD_BATCH), window=5000)
    await granted(0, 0)
    assert rig.gate.waiting == 0
    await links[0].send(cancel=pb.Cancel(request_id="a0", attempt=1))
    # Who was served longest ago is first.
    await granted(1, 0)
    for link in links:
        link.call.cancel()
    await rig.idle()
