"""The KV block size of a real vLLM engine, changed while it serves. One engine for all; in float32, so that tokens can be compared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from services.worker.engines import Job
from services.worker.engines.vllm import VllmEngine
from tests.vllm.reblock_rig import (
    ACCEPTED,
    GREEDY,
    LENGTHS,
    RSS_SLACK,
    START,
    TOKENS,
    Runner,
    Stream,
    alive,
    all_of,
    at_rest,
    fail_always,
    fail_once,
    jobs,
    odd_jobs,
    prompt,
    refused,
    resize,
    running,
    seen,
    there,
    touch,
    under_way,
)
from trimtab.blocks import Geometry, Reblock, When
from trimtab.errors import EngineDead, EngineFault
from trimtab.messages import Workload


@pytest.fixture(scope="module")
def run(model_path: str) -> Iterator[Runner]:
    yield from running(model_path)


@pytest.fixture
def engine(run: Runner) -> VllmEngine:
    return run.engine


# The rules.


def test_an_engine_says_which_sizes_it_takes(engine: VllmEngine, run: Runner) -> None:
    assert (engine.limits.block_size, engine.limits.live_blocks, engine.limits.carries_blocks) == (START, True, True)
    assert engine.limits.block_sizes == ACCEPTED
    assert run(there(engine, seen))["blocks"] == engine.limits.total_blocks


@pytest.mark.parametrize("carry", [True, False])
def test_streams_go_on_with_the_very_tokens_that_they_would_have_had(
    engine: VllmEngine, run: Runner, carry: bool
) -> None:
    async def disturbed() -> list[list[int]]:
        async with under_way(engine, jobs("d") + odd_jobs("d")) as (streams, end):
            for tokens, size in ((3, 32), (12, 512), (21, 64), (30, 1024)):
                await asyncio.gather(*(stream.at(tokens) for stream in streams))
                done = await resize(engine, size, carry=carry)
                assert done.requests > 0 and done.carried == carry == (not done.recompute_tokens)
                assert tokens > 12 or done.requests == len(streams)
                found = await there(engine, seen)
                assert (found["blocks"], found["block_size"]) == (done.after.total_blocks, size)
            return await end

    before = run(there(engine, seen))
    choices = {k: v for k, v in engine.stats().items() if k in ("preemptions", "memory_preemptions", "slices_broken")}
    told = run(disturbed())
    run(at_rest(engine))
    after = run(there(engine, seen))
    assert (after["where"], after["bytes"]) == (before["where"], before["bytes"]), "the same memory"
    assert {k: engine.stats()[k] for k in choices} == choices, "put back by nobody's choice and for no lack of blocks"
    run(resize(engine, START))
    undisturbed = run(all_of(engine, jobs("u") + odd_jobs("u")))
    assert told == undisturbed
    assert [len(tokens) for tokens in told] == [TOKENS] * len(told)
    assert run(there(engine, seen))["biased"] <= 1, "rows of a batch that is gone are forgotten"


def test_what_is_said_to_be_computed_anew_is_what_then_is(engine: VllmEngine, run: Runner) -> None:
    """Half of them share a prefix, which is computed once."""
    shared = prompt(400, 7)
    wanted = [Job(f"s{i}", shared + prompt(20, i), 40, GREEDY, Workload.REALTIME) for i in range(4)]
    wanted += [Job(f"p{i}", prompt(150 + i, i), 40, GREEDY, Workload.REALTIME) for i in range(4)]

    async def change(size: int) -> tuple[Reblock, Reblock, float]:
        async with under_way(engine, [wanted[0]]) as (_, first):
            async with under_way(engine, wanted[1:]) as (streams, end):
                await asyncio.gather(*(stream.at(4) for stream in streams))
                dry = await engine.reblock(size, when=When.NOW, carry=False, dry_run=True)
                was = engine.stats()["recomputed_tokens"]
                done = await resize(engine, size, carry=False)
                await end
            await first
        await at_rest(engine)
        return dry, done, engine.stats()["recomputed_tokens"] - was

    for size in (512, START):
        dry, done, measured = run(change(size))
        assert dry.dry_run and (dry.before, dry.after) == (done.before, done.after)
        assert done.requests == 8
        assert abs(measured - done.recompute_tokens) <= 0.3 * measured, (size, measured, done)
        # A step may have ended between the two.
        assert 0 <= done.recompute_tokens - dry.recompute_tokens <= 8 * 8


def test_a_size_that_can_not_be_leaves_everything_as_it_was(engine: VllmEngine, run: Runner) -> None:
    async def try_them() -> list[list[int]]:
        async with under_way(engine, jobs("x")) as (_, end):
            was, cut = engine.limits, await there(engine, seen)
            preempted = engine.row().preemptions
            for size in (16, 24, 48, 0, -1, 10**9, 10**40, True, 64.0, "64", None):
                no = await refused(engine, size)  # type: ignore[arg-type]
                assert (no.cause, no.accepted) == ("SIZE", ACCEPTED), size
            found = await there(engine, seen)
            assert (found["blocks"], found["block_size"], found["where"]) == (cut["blocks"], START, cut["where"])
            assert engine.limits == was and engine.row().preemptions == preempted
            return await end

    assert run(try_them()) == run(all_of(engine, jobs("y")))


def test_the_size_that_it_has_and_a_dry_run_change_nothing(engine: VllmEngine, run: Runner) -> None:
    async def try_them() -> None:
        async with under_way(engine, jobs("n", tokens=1000)):
            was, preempted = engine.limits, engine.row().preemptions
            same = await engine.reblock(START)
            assert (same.before, same.after) == (Geometry(START, was.total_blocks),) * 2
            for carry in (True, False):
                dry = await engine.reblock(64, when=When.NOW, carry=carry, dry_run=True)
                assert dry.after in (Geometry(64, 2 * was.total_blocks), Geometry(64, 2 * was.total_blocks + 1))
                assert (dry.recompute_tokens, dry.carried_tokens)[carry] >= sum(LENGTHS) and dry.carried == carry
            assert engine.limits == was and engine.row().preemptions == preempted
        await at_rest(engine)

    run(try_them())


def test_a_change_that_may_wait_waits_until_little_is_resident(engine: VllmEngine, run: Runner) -> None:
    async def try_it() -> None:
        async with under_way(engine, jobs("i", tokens=1000)):
            no = await refused(engine, 64, when=When.IDLE, max_recompute_tokens=500, carry=False)
            assert no.cause == "NOT_IDLE" and f"{len(LENGTHS)} requests" in no.message
            patient = await engine.reblock(64, when=When.IDLE, max_recompute_tokens=1 << 30, carry=False)
            assert patient.requests == len(LENGTHS) and not patient.carried
            # What is carried costs little.
            no = await refused(engine, 32, when=When.IDLE, max_recompute_tokens=20)
            assert no.cause == "NOT_IDLE" and "carried over" in no.message
            assert (await engine.reblock(32, when=When.IDLE, max_recompute_tokens=200)).carried
        await at_rest(engine)
        idle = await engine.reblock(START, when=When.IDLE, max_recompute_tokens=0)
        assert (idle.requests, idle.recompute_tokens) == (0, 0)

    run(try_it())


def test_a_second_change_is_refused_while_one_is_under_way(engine: VllmEngine, run: Runner) -> None:
    async def both() -> None:
        async with under_way(engine, jobs("b", tokens=1000)):
            first = asyncio.create_task(resize(engine, 64))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert (await refused(engine, 256)).cause == "BUSY"
            # Nobody waits for it any more; it comes all the same, and is known here.
            first.cancel()
            while engine.limits.block_size != 64:
                await asyncio.sleep(0.01)
            assert engine.load().total_blocks == engine.limits.total_blocks
        await at_rest(engine)
        await resize(engine, START)

    run(both())


def test_the_prefix_cache_works_with_the_new_size(engine: VllmEngine, run: Runner) -> None:
    async def cached(name: str) -> int:
        stream = Stream(Job(name, prompt(300, 55), 4, GREEDY, Workload.REALTIME))
        await stream.follow(engine)
        return stream.cached

    async def try_it() -> None:
        await cached("c0")
        lost = await resize(engine, 32)
        assert lost.cached_tokens >= 300 // START * START and lost.recompute_tokens == 0
        assert [await cached("c1"), await cached("c2")] == [0, 288]
        await resize(engine, 256)
        assert [await cached("c3"), await cached("c4")] == [0, 256]
        await at_rest(engine)
        await resize(engine, START)

    run(try_it())


def test_requests_that_come_in_between_are_served_as_well(engine: VllmEngine, run: Runner) -> None:
    """Some were read, and hashed with the old size, while the change was waiting for its step."""

    async def try_it() -> list[list[int]]:
        tasks = []
        sizes = [64, 256, 32, START]
        for i, job in enumerate(jobs("m")):
            tasks.append(asyncio.create_task(Stream(job).follow(engine)))
            if i % 2:
                await resize(engine, sizes[i // 2])
        return await asyncio.gather(*tasks)

    assert run(try_it()) == run(all_of(engine, jobs("o")))


STAGES = [
    ("services.worker.engines.vllm_reblock_worker", "_forget_requests"),
    ("services.worker.engines.vllm_reblock_worker", "create_kv_cache_views"),
    ("services.worker.engines.vllm_reblock", "_agree"),
    ("services.worker.engines.vllm_reblock", "_manager"),
    ("services.worker.engines.vllm_scheduler", "TrimtabScheduler._rehash"),
    ("services.worker.engines.vllm_carry", "place"),
    ("services.worker.engines.vllm_reblock_worker", "move"),
]


def test_a_change_that_fails_is_rolled_back_wherever_it_fails(engine: VllmEngine, run: Runner) -> None:
    async def try_them() -> list[list[int]]:
        async with under_way(engine, jobs("f") + odd_jobs("f")) as (streams, end):
            was, cut = engine.limits, await there(engine, seen)
            for i, (module, path) in enumerate(STAGES):
                await asyncio.gather(*(stream.at(3 + 5 * i) for stream in streams))
                await there(engine, fail_once, module, path)
                no = await refused(engine, 64)
                assert no.cause == "FAILED" and "was made to fail" in no.message and no.accepted == ACCEPTED
                found = await there(engine, seen)
                assert (found["blocks"], found["block_size"], found["where"]) == (cut["blocks"], START, cut["where"])
                assert engine.limits is was and engine.load().total_blocks == was.total_blocks
            return await end

    told = run(try_them())
    run(at_rest(engine))
    assert told == run(all_of(engine, jobs("g") + odd_jobs("g")))


def test_fifty_changes_leak_neither_blocks_nor_memory(engine: VllmEngine, run: Runner) -> None:
    """Memory at rest: with streams, PyTorch keeps something for each new length of a step, whoever brings it about."""
    (process,) = engine._processes

    def rss() -> int:
        return int(psutil.Process(process.pid).memory_info().rss)

    async def change(times: int, wanted: list[Job]) -> None:
        async with under_way(engine, wanted):
            for i in range(times):
                await resize(engine, (32, 256, 64, 512)[i % 4], carry=i % 3 > 0)
        await at_rest(engine)

    # Short ones: each change waits for the step in which the one before it is made good.
    run(change(25, jobs("l", tokens=1000)[:3]))
    run(there(engine, touch))
    # What was written over is forgotten by this one.
    run(resize(engine, 1024))
    run(change(5, []))
    was = rss()
    run(change(50, []))
    assert rss() - was < RSS_SLACK
    run(resize(engine, START))
    found = run(there(engine, seen))
    assert (found["blocks"], found["rows"]) == (engine.limits.total_blocks, 0)
    assert run(there(engine, alive)) == {"InputBatch": 1, "KVCacheManager": 1, "BlockPool": 1}


def test_an_engine_that_finds_no_way_back_ends_and_serves_no_token_more(engine: VllmEngine, run: Runner) -> None:
    """The last one: it leaves a dead engine behind."""

    async def try_it() -> None:
        streams = [Stream(job) for job in jobs("z", tokens=1000)]
        tasks = [asyncio.create_task(stream.follow(engine)) for stream in streams]
        await asyncio.gather(*(stream.at(1) for stream in streams))
        await there(engine, fail_always, "services.worker.engines.vllm_reblock", "_manager")
        with pytest.raises(EngineDead, match="and so did its way back"):
            await engine.reblock(64, when=When.NOW)
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(end, EngineDead | EngineFault) for end in ends), ends
        while not engine.dead:
            await asyncio.sleep(0.01)
        assert "way back" in str(engine.death())

    run(try_it())
