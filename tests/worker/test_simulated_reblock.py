"""The block size of a simulated engine, changed while it serves."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.worker.engines import Job, Output
from services.worker.engines.faults import FaultyEngine, Switches
from services.worker.engines.reblocks import moves
from services.worker.engines.simulated import SimulatedEngine
from trimtab.blocks import LADDER, Geometry, When
from trimtab.errors import EngineDead, ReblockRefused
from trimtab.kit.process import write_atomically
from trimtab.messages import Sampling, Workload

HOW: dict[str, Any] = {
    "model": "sim",
    "max_num_seqs": 8,
    "max_step_tokens": 2048,
    "max_model_len": 4096,
    "step_ms": 1.0,
    "token_us": 0.0,
}
PATIENCE_S = 30.0
KV_TOKENS = 4096 * 16
ALL = 7 * 300
"""Prompt tokens of the streams below."""


@contextlib.asynccontextmanager
async def an_engine(engine: SimulatedEngine | None = None) -> AsyncIterator[SimulatedEngine]:
    engine = engine or SimulatedEngine(**HOW)
    await engine.start()
    yield engine
    await engine.stop()


async def asked(
    engine: SimulatedEngine, name: str, tokens: int, begun: asyncio.Semaphore | None = None
) -> list[Output]:
    found: list[Output] = []
    job = Job(name, tuple(range(300)), tokens, Sampling(ignore_eos=True), Workload.REALTIME)
    async with asyncio.timeout(PATIENCE_S):
        async for output in engine.generate(job):
            found.append(output)
            if begun is not None and len(found) == 1:
                begun.release()
    return found


@contextlib.asynccontextmanager
async def seven_streams(engine: SimulatedEngine, tokens: int) -> AsyncIterator[list[asyncio.Task[list[Output]]]]:
    """All of them have given a token."""
    begun = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(asked(engine, f"r{i}", tokens, begun)) for i in range(7)]
    for _ in tasks:
        await asyncio.wait_for(begun.acquire(), PATIENCE_S)
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def state(engine: SimulatedEngine) -> tuple[object, ...]:
    value = engine._value
    return engine.limits, value.block_size, value.total_blocks, value.free_blocks, [s.blocks for s in value.running]


@pytest.mark.slow
async def test_streams_go_on_with_the_same_tokens_and_what_they_had_is_computed_anew() -> None:
    async with an_engine() as engine:
        undisturbed = [[o.token_ids for o in await asked(engine, f"u{i}", 400)] for i in range(2)]
        before = engine.stats()["recomputed_tokens"]
        async with seven_streams(engine, 400) as tasks:
            result = await engine.reblock(64, when=When.NOW)
            again = await engine.reblock(512, when=When.NOW)
            outputs = [await task for task in tasks]
    assert (result.before, result.after) == (Geometry(16, 4096), Geometry(64, 1024))
    assert (again.before, again.after) == (Geometry(64, 1024), Geometry(512, 128))
    assert result.requests == 7 and result.recompute_tokens >= ALL and not result.dry_run
    assert [[o.token_ids for o in found] for found in outputs] == [undisturbed[0]] * 7
    assert all(found[-1].stamps.preemptions >= 1 and found[-1].finish == "length" for found in outputs)
    assert engine.stats()["recomputed_tokens"] - before == result.recompute_tokens + again.recompute_tokens
    assert (engine.stats()["preemptions"], engine.stats()["memory_preemptions"]) == (0, 0), (
        "nobody's choice, and no lack"
    )
    assert (engine.limits.block_size, engine.limits.total_blocks) == (512, 128)
    load = engine.load()
    assert (load.running, load.free_blocks, load.total_blocks) == (0, 128, 128)


async def test_nothing_is_lost_of_the_memory_by_going_there_and_back() -> None:
    async with an_engine() as engine:
        for size in (48, 1536, 24, 16):
            assert (await engine.reblock(size)).after == Geometry(size, KV_TOKENS // size)
        assert engine.load().free_blocks == 4096


@pytest.mark.parametrize(
    ("size", "cause"),
    [(0, "SIZE"), (-1, "SIZE"), (12, "SIZE"), (2049, "SIZE"), (10**9, "SIZE"), (True, "SIZE"), (64.0, "SIZE"), ("64", "SIZE")],
)  # fmt: skip
async def test_a_size_that_it_can_not_have_is_refused_with_those_that_it_can(size: Any, cause: str) -> None:
    async with an_engine() as engine, seven_streams(engine, 100_000):
        at = engine._value.steps
        was = state(engine)
        with pytest.raises(ReblockRefused) as refused:
            await engine.reblock(size, when=When.NOW)
        assert engine._value.steps == at and state(engine) == was
    assert (refused.value.cause, refused.value.accepted) == (cause, LADDER)


async def test_blocks_so_few_that_the_longest_request_does_not_fit_are_refused() -> None:
    async with an_engine(SimulatedEngine(**(HOW | {"kv_blocks": 260}))) as engine:
        assert engine.limits.block_sizes == tuple(s for s in LADDER if 4160 // s * s >= 4096)
        assert 768 not in engine.limits.block_sizes and 2048 in engine.limits.block_sizes
        with pytest.raises(ReblockRefused, match="4096 tokens does not fit") as refused:
            await engine.reblock(1536)
        assert refused.value.cause == "TOO_LONG"
        assert (await engine.reblock(2048)).after == Geometry(2048, 2)


async def test_a_change_that_may_wait_is_refused_while_too_much_is_resident() -> None:
    async with an_engine() as engine:
        async with seven_streams(engine, 100_000):
            with pytest.raises(ReblockRefused) as refused:
                await engine.reblock(64, max_recompute_tokens=ALL)
            assert refused.value.cause == "NOT_IDLE" and "of 7 requests" in refused.value.message
            assert (await engine.reblock(64, max_recompute_tokens=1 << 40)).requests == 7
        assert (await engine.reblock(32, max_recompute_tokens=0)).after.block_size == 32, "nothing is lost"


async def test_a_dry_run_says_the_same_and_touches_nothing() -> None:
    async with an_engine() as engine, seven_streams(engine, 100_000):
        was = state(engine)
        dry = await engine.reblock(64, when=When.NOW, dry_run=True)
        assert state(engine) == was
        done = await engine.reblock(64, when=When.NOW)
    assert dry.dry_run and not done.dry_run
    assert (dry.before, dry.after, dry.recompute_tokens, dry.requests) == (
        done.before, done.after, done.recompute_tokens, done.requests,
    )  # fmt: skip


async def test_the_size_that_it_has_costs_nothing() -> None:
    async with an_engine() as engine, seven_streams(engine, 100_000):
        was = state(engine)
        result = await engine.reblock(16)
        assert state(engine) == was
    assert (result.before, result.after, result.recompute_tokens) == (Geometry(16, 4096), Geometry(16, 4096), 0)


async def test_what_had_leaked_stays_lost(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    write_atomically(path, json.dumps({"w0": {"leak_blocks": 96}}).encode())
    async with an_engine(FaultyEngine(Switches(path, "w0"), **HOW)) as engine:
        async with asyncio.timeout(PATIENCE_S):
            while engine.load().free_blocks == 4096:
                await asyncio.sleep(0.01)
        await engine.reblock(64)
        assert (engine.load().free_blocks, engine.load().total_blocks) == (1000, 1024)


async def test_an_engine_that_does_not_run_changes_nothing() -> None:
    with pytest.raises(EngineDead):
        await SimulatedEngine(**HOW).reblock(64)


@pytest.mark.parametrize(
    ("size", "expected"),
    [(4, 10 + 2 + 10 + 2), (8, 10 + 2 + 10 + 2), (16, 40), (1, 10 + 1 + 10 + 0)],
)
def test_a_prefix_that_several_have_in_common_is_computed_once_as_far_as_it_fills_blocks(
    size: int, expected: int
) -> None:
    head = list(range(9))
    requests = [("a", [*head, 50], 10), ("a", [*head, 60], 10), ("b", [*head, 50], 10), ("a", [*head, 50, 70], 10)]
    assert moves(requests, size, 0)[:2] == (0, expected)
    assert moves(requests, size, 1000)[:2] == (expected, 0)


def test_nothing_is_shared_behind_the_first_difference() -> None:
    requests = [("a", [1, 2, 3, 4], 4), ("a", [9, 2, 3, 4], 4), ("a", [1, 2, 9, 4], 3)]
    assert moves(requests, 1, 0)[:2] == (0, 4 + 4 + 1)


def test_who_finds_no_room_is_computed_anew_and_shares_nothing_but_what_is_there() -> None:
    head = list(range(8))
    requests = [("a", [*head, 50], 9), ("a", [*range(20, 40)], 20), ("a", [*range(20, 40)], 20), ("a", [*head, 60], 9)]
    # Blocks of 4, with a slot for the next token: three for the first; six for the second, one for its like; one for the last.
    assert moves(requests, 4, 4)[:2] == (9 + 1, 20 + 0)
    assert moves(requests, 4, 10)[:2] == (9 + 20 + 0, 0 + 1)
    assert moves(requests, 4, 11)[:2] == (9 + 20 + 0 + 1, 0)


def test_a_request_that_fills_its_last_block_needs_another_one_for_its_next_token() -> None:
    assert moves([("a", list(range(512)), 512), ("b", list(range(512)), 512)], 512, 2)[:2] == (512, 512)
    assert moves([("a", list(range(512)), 512), ("b", list(range(512)), 512)], 512, 4)[:2] == (1024, 0)


def test_what_is_computed_anew_is_told_with_its_context() -> None:
    one, other = ("a", list(range(9)), 9), ("a", list(range(20, 40)), 20)
    assert moves([one], 4, 0) == (0, 9, 81 // 2)
    assert moves([other, other], 4, 0) == (0, 20, 400 // 2), "what is shared is computed once"
    assert moves([one, other], 4, 3) == (9, 20, 400 // 2), "what is carried costs nothing"
