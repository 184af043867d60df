"""The load generator, before an `Ask` that a test holds in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from services.bench.load import closed_loop, pairs, prompts, timed


def test_a_seed_gives_the_same_prompts_again() -> None:
    assert prompts("1/0/8", 5) == prompts("1/0/8", 5)
    assert prompts("1/0/8", 5) != prompts("1/1/8", 5)
    assert len(set(prompts("x", 100))) == 100


async def test_a_closed_loop_sends_every_prompt_once_and_never_more_than_its_concurrency() -> None:
    running, most, seen = 0, 0, []

    async def ask(prompt: str) -> AsyncGenerator[int, None]:
        nonlocal running, most
        running += 1
        most = max(most, running)
        seen.append(prompt)
        await asyncio.sleep(0.001)
        yield 1
        yield 3
        running -= 1

    burst = await closed_loop(ask, [f"p{i}" for i in range(10)], 4)
    assert (most, running, sorted(seen)) == (4, 0, sorted(f"p{i}" for i in range(10)))
    assert [s.tokens for s in burst.samples] == [4] * 10
    assert burst.wall_s >= 0.003


async def test_ttft_is_to_the_first_tokens_and_not_to_what_comes_before_or_after() -> None:
    async def ask(_: str) -> AsyncGenerator[int, None]:
        await asyncio.sleep(0.02)
        yield 1
        await asyncio.sleep(0.05)
        yield 1

    sample = await timed(ask, "p")
    assert sample.ttft_ms >= 20
    assert sample.total_ms - sample.ttft_ms >= 49


async def test_a_failed_request_fails_the_burst_with_its_own_error() -> None:
    closed = []

    async def ask(prompt: str) -> AsyncGenerator[int, None]:
        try:
            yield 1
            if prompt == "bad":
                raise OSError("gone")
            await asyncio.sleep(10)
        finally:
            closed.append(prompt)

    with pytest.raises(OSError, match="gone"):
        await closed_loop(ask, ["a", "bad", "b"], 3)
    assert sorted(closed) == ["a", "b", "bad"]


async def test_a_request_without_a_token_is_an_error() -> None:
    async def ask(_: str) -> AsyncGenerator[int, None]:
        for _ in ():
            yield 1

    with pytest.raises(ValueError, match="without a token"):
        await timed(ask, "p")


async def test_pairs_take_turns_at_going_first() -> None:
    order: list[str] = []

    def asking(name: str):
        async def ask(prompt: str) -> AsyncGenerator[int, None]:
            order.append(name + prompt)
            yield 1

        return ask

    found = await pairs(asking("a"), asking("b"), ["0", "1", "2"])
    assert order == ["a0", "b0", "b1", "a1", "a2", "b2"]
    assert len(found) == 3
