"""An engine that a change of its block size has torn is dead as soon as it says so, though its process is there until its next step."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.engines.vllm import VllmEngine
from services.worker.health import Health
from trimtab.blocks import When
from trimtab.errors import EngineDead, ReblockRefused
from trimtab.messages import NodeState

TORN = "a change of the block size failed (A), and so did its way back (B)"
REFUSED = {"refused": {"message": "no", "cause": "SIZE", "accepted": [16, 32]}}


class Core:
    """vLLM's client of an engine process that runs on, and says this of a change."""

    def __init__(self, *says: dict[str, Any]) -> None:
        self.says = list(says)

    async def call_utility_async(self, name: str, *args: Any) -> dict[str, Any]:
        assert name == "trimtab_reblock"
        return self.says.pop(0)


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    made = VllmEngine(
        model_path="m", model="m", max_num_seqs=1, max_step_tokens=8, max_model_len=None, dtype="auto", kv_cache_gib=1
    )
    yield made
    made._llm = None
    asyncio.run(made.stop())


def says(engine: VllmEngine, *answers: dict[str, Any]) -> None:
    engine._llm = SimpleNamespace(errored=False, engine_core=Core(*answers), get_num_unfinished_requests=lambda: 0)


async def test_it_is_dead_without_a_step_and_says_of_what(engine: VllmEngine) -> None:
    says(engine, {"dead": TORN}, REFUSED)
    with pytest.raises(EngineDead, match="way back"):
        await engine.reblock(32, when=When.NOW)
    assert engine.dead
    assert TORN in engine.death().words
    with pytest.raises(ReblockRefused):
        await engine.reblock(32, when=When.NOW)
    assert engine.dead, "it stays so, whatever it says later"


async def test_what_was_refused_or_rolled_back_is_no_death(engine: VllmEngine) -> None:
    says(engine, REFUSED)
    with pytest.raises(ReblockRefused):
        await engine.reblock(32, when=When.NOW)
    assert not engine.dead


async def test_the_worker_stops_of_it_while_nobody_asks_anything_of_it(engine: VllmEngine) -> None:
    says(engine, {"dead": TORN})
    ended = asyncio.Event()
    health = Health(engine, lambda: False, ended.set)
    watching = asyncio.create_task(health.run())
    async with asyncio.timeout(60):
        while health.state is not NodeState.SERVING:
            await asyncio.sleep(0.01)
        with pytest.raises(EngineDead):
            await engine.reblock(32, when=When.NOW)
        await ended.wait()
        await watching
