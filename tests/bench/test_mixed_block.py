"""One block: what counts in it, and what it leaves behind."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest

from services.bench.mixed import workload
from services.bench.mixed.arms import BATCH_ALONE, FCFS, REALTIME_ALONE
from services.bench.mixed.block import Block, Timing, measure, overtake_ms
from services.bench.mixed.sources import Served
from services.bench.mixed.workload import Arrival, Lengths
from services.bench.processes import BenchError
from tests.bench.mixed_builders import FakeEngine, a_block
from trimtab.messages import Workload

TIMING = Timing(0.1, 0.5, 1.0)
ROOMY = Timing(0.1, 1.6, 10.0)
"""Where something is to happen within the window although the machine stalls for a while."""
SMALL = Lengths(30, 8)
ARRIVALS = [Arrival(at, SMALL) for at in (0.05, 0.15, 0.3, 0.4, 1.8)]


def prompt_of(name: str, tokens: int) -> tuple[int, ...]:
    return workload.prompt(name, tokens)


async def block(engine: FakeEngine, arm: Any = FCFS, timing: Timing = TIMING) -> Block:
    return await measure(engine, arm, 0, timing, ARRIVALS, workload.backlog("1"), prompt_of)


def test_a_block_survives_its_json() -> None:
    raw = json.loads(json.dumps({"kind": "block", "at_unix_s": 1.0, **a_block().as_json()}))
    assert Block.from_json(raw) == a_block()


@pytest.mark.slow
async def test_requests_that_are_due_in_the_window_count_and_are_waited_for() -> None:
    begun = time.monotonic()
    found = await block(FakeEngine(), timing=ROOMY)
    took_s = time.monotonic() - begun
    assert [r.index for r in found.realtime] == [1, 2, 3]
    for r in found.realtime:
        assert r.ended
        assert len(r.itl_ms) == 7
        assert 0 < r.ttft_ms + sum(r.itl_ms) <= r.e2e_ms + 1
        assert r.e2e_ms <= (took_s - ARRIVALS[r.index].at_s) * 1000.0


@pytest.mark.slow
async def test_tokens_are_those_between_two_ends_of_steps_within_the_window() -> None:
    engine = FakeEngine()
    found = await block(engine, timing=ROOMY)
    assert ROOMY.window_s / 3 <= found.measured_s <= ROOMY.window_s
    assert 0 < found.tokens < engine.counts()["computed_tokens"]
    assert found.counters["steps"] > 0
    assert found.batch_ended > 0


@pytest.mark.slow
async def test_each_arm_sends_what_it_is_there_for() -> None:
    alone, batch = FakeEngine(), FakeEngine()
    await block(alone, REALTIME_ALONE)
    found = await block(batch, BATCH_ALONE)
    assert {w for w, _, _ in alone.served} == {Workload.REALTIME}
    assert {w for w, _, _ in batch.served} == {Workload.BATCH}
    assert (found.realtime, found.busy_share, found.realtime_tokens) == ((), 0.0, 0.0)


@pytest.mark.slow
async def test_with_nobody_to_wait_for_the_window_is_still_measured_to_its_end() -> None:
    found = await block(FakeEngine(), BATCH_ALONE, ROOMY)
    assert ROOMY.window_s / 3 <= found.measured_s <= ROOMY.window_s
    assert found.tokens > 100


async def test_the_backlog_is_always_as_deep_and_is_gone_afterwards() -> None:
    engine = FakeEngine()
    most = 0
    send = engine.send

    async def watched(workload: Workload, prompt: tuple[int, ...], output: int) -> Any:
        nonlocal most
        most = max(most, int(engine.counts()["running"]) + 1)
        async for event in send(workload, prompt, output):
            yield event

    engine.send = watched  # type: ignore[method-assign]
    await block(engine, BATCH_ALONE)
    assert most == workload.OUTSTANDING
    assert engine.counts()["running"] == 0


@pytest.mark.slow
async def test_one_that_does_not_end_counts_with_its_age() -> None:
    engine = FakeEngine()
    slow = [Arrival(0.2, Lengths(30, 5000))]
    begun = time.monotonic()
    found = await measure(engine, REALTIME_ALONE, 0, Timing(0.1, 1.0, 0.1), slow, itertools.repeat(SMALL), prompt_of)
    took_s = time.monotonic() - begun
    (request,) = found.realtime
    assert not request.ended
    assert 1100 - 200 - 1 <= request.e2e_ms <= took_s * 1000 - 200 + 1
    assert engine.counts()["running"] == 0


async def test_a_failed_request_ends_the_block_in_words() -> None:
    engine = FakeEngine()
    engine.fails = OSError("connection reset")
    begun = time.monotonic()
    with pytest.raises(BenchError, match="a request of arm fcfs failed: connection reset"):
        await block(engine, timing=Timing(0.1, 60.0, 1.0))
    assert time.monotonic() - begun < 30


def a_request(workload: Workload, sent_s: float, queued_s: float | None) -> Served:
    one = Served(workload, 0, sent_s, SMALL, sent_s=sent_s)
    one.queued_ms = None if queued_s is None else queued_s * 1000.0
    return one


def test_overtaking_is_by_how_much_later_one_came_who_was_scheduled_before_a_batch_request() -> None:
    batch, realtime = Workload.BATCH, Workload.REALTIME
    sent = [
        a_request(batch, 0.0, 9.0),
        a_request(realtime, 2.0, 0.1),
        a_request(realtime, 7.0, 0.5),
        a_request(batch, 8.0, 3.0),
    ]
    assert overtake_ms(sent) == 7000.0
    assert overtake_ms([a_request(batch, 0.0, 0.5), a_request(realtime, 2.0, 0.1)]) == 0.0
    assert overtake_ms([a_request(batch, 0.0, None), a_request(realtime, 2.0, 0.1)]) == 0.0
    assert overtake_ms([]) == 0.0
