"""What every process leans on: ending tasks."""

from __future__ import annotations

import asyncio

import pytest

from trimtab.kit import rpc
from trimtab.kit.rpc import cancel_and_wait


async def test_a_task_that_swallows_a_cancellation_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "CANCEL_AGAIN_S", 0.01)
    swallowed = 0

    async def stubborn() -> None:
        nonlocal swallowed
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                swallowed += 1
                if swallowed == 3:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()


async def test_what_a_task_raises_at_its_end_is_over_with_it() -> None:
    async def failing() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("too late")

    task = asyncio.create_task(failing())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    await cancel_and_wait(task)
    assert task.done()
