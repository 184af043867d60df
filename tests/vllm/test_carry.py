"""KV that is carried over a change of the block size, on a real vLLM engine. One engine for all; in float32, so that tokens can be compared."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from services.worker.engines import Job
from services.worker.engines.vllm import OWN_BLOCKS, VllmEngine
from services.worker.engines.vllm_carry import BYTES_PER_MS
from tests.vllm.reblock_rig import (
    GREEDY,
    LENGTHS,
    START,
    Runner,
    Stream,
    all_of,
    at_rest,
    jobs,
    layouts,
    learn_layouts,
    note_pulse,
    noted_pulse,
    odd_jobs,
    prompt,
    resize,
    running,
    there,
    under_way,
    unlearn_layouts,
)
from trimtab.blocks import Reblock, When
from trimtab.messages import Workload


@pytest.fixture(scope="module")
def run(model_path: str) -> Iterator[Runner]:
    yield from running(model_path)


@pytest.fixture
def engine(run: Runner) -> VllmEngine:
    return run.engine


def test_who_finds_no_room_is_computed_anew_and_all_others_are_carried(engine: VllmEngine, run: Runner) -> None:
    """In blocks of 2,048 tokens this memory has one for each of ten requests, and eleven run."""

    async def crowded() -> tuple[list[list[int]], Reblock, Reblock]:
        async with under_way(engine, jobs("w") + odd_jobs("w")) as (streams, end):
            await asyncio.gather(*(stream.at(5) for stream in streams))
            dry = await engine.reblock(2048, when=When.NOW, dry_run=True)
            was = engine.stats()["recomputed_tokens"]
            done = await resize(engine, 2048)
            told = await end
        await at_rest(engine)
        assert engine.stats()["recomputed_tokens"] - was == done.recompute_tokens > 0
        await resize(engine, START)
        return told, dry, done

    told, dry, done = run(crowded())
    assert done.after.total_blocks - OWN_BLOCKS == len(told) - 1 == done.requests - 1
    assert done.carried_tokens > 10 * done.recompute_tokens and not done.carried
    assert 0 <= done.carried_tokens - dry.carried_tokens <= 8 * 11
    assert told == run(all_of(engine, jobs("v") + odd_jobs("v")))


def test_a_prefix_that_several_have_is_carried_once_and_found_by_who_comes_later(
    engine: VllmEngine, run: Runner
) -> None:
    shared = prompt(400, 8)
    wanted = [Job(f"h{i}", shared + prompt(20, i), 60, GREEDY, Workload.REALTIME) for i in range(4)]

    async def try_it() -> tuple[list[list[int]], Reblock, int]:
        async with under_way(engine, wanted[:1]) as (_, first), under_way(engine, wanted[1:]) as (streams, others):
            await asyncio.gather(*(stream.at(4) for stream in streams))
            done = await resize(engine, 32)
            late = Stream(Job("h-late", shared + prompt(20, 99), 4, GREEDY, Workload.REALTIME))
            await late.follow(engine)
            told = await first + await others
        await at_rest(engine)
        await resize(engine, START)
        return told, done, late.cached

    told, done, cached = run(try_it())
    # Each has 420 tokens of its prompt and a few of its own; 384 of the 400 that they have in common fill blocks of 128, and of 32 too.
    assert done.carried and cached == 384
    assert 4 * 420 - 3 * 384 <= done.carried_tokens <= 4 * 460 - 3 * 384
    assert told == run(all_of(engine, [Job(f"k{i}", *_rest(job)) for i, job in enumerate(wanted)]))


def _rest(job: Job) -> tuple[Any, ...]:
    return job.token_ids, job.max_tokens, job.sampling, job.workload


def test_an_engine_finds_out_by_itself_which_sizes_it_can_carry_to(engine: VllmEngine, run: Runner) -> None:
    assert run(there(engine, layouts)) == {"keys across"}


def test_a_layout_that_is_not_known_has_everything_computed_anew(engine: VllmEngine, run: Runner) -> None:
    async def try_it() -> list[list[int]]:
        await there(engine, unlearn_layouts)
        try:
            async with under_way(engine, jobs("q")) as (streams, end):
                await asyncio.gather(*(stream.at(3) for stream in streams))
                done = await resize(engine, 64)
                assert (done.carried_tokens, done.requests) == (0, len(LENGTHS)) and done.recompute_tokens > sum(
                    LENGTHS
                )
                return await end
        finally:
            await there(engine, learn_layouts)
            await at_rest(engine)
            await resize(engine, START)

    assert run(try_it()) == run(all_of(engine, jobs("r")))


def test_while_kv_is_moved_the_board_says_that_it_takes_a_while(engine: VllmEngine, run: Runner) -> None:
    """Else an engine that moves for more than two seconds is taken for one that hangs."""

    async def try_it() -> tuple[float, float, float]:
        async with under_way(engine, jobs("t")) as (streams, end):
            await asyncio.gather(*(stream.at(3) for stream in streams))
            await there(engine, note_pulse)
            done = await resize(engine, 64)
            await end
        await at_rest(engine)
        await resize(engine, START)
        return await there(engine, noted_pulse), done.carried_tokens, done.change_ms

    (ended, predicted_ms), tokens, took_ms = run(try_it())
    assert ended == 0 and predicted_ms == pytest.approx(tokens * engine.kv_bytes_per_token / BYTES_PER_MS, rel=0.1)
    assert took_ms < 4 * max(500.0, predicted_ms)
    assert engine.pulse().ended
