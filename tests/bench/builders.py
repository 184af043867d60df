"""Blocks with sane numbers, arms that answer from a table, and processes that are only counted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.bench.figures import ARMS, OUTSIDE, Block, Cell
from services.bench.load import Burst, Sample
from services.bench.overhead import Parts
from services.bench.plan import MAX_TOKENS
from services.bench.start import Shape


def a_cell(arm: str = "bare", *, tokens_per_s: float = 100.0, ttft_ms: float = 50.0, cpu_s: float = 0.1) -> Cell:
    """1,000 tokens; each process around the engine took `cpu_s`."""
    spent = {**dict.fromkeys(OUTSIDE[arm], cpu_s), "engine": 9.0, "client": 0.2}
    return Cell(1000 / tokens_per_s, 1000, (ttft_ms, ttft_ms), spent, 0.01, 0.02)


def a_block(round_: int = 0, concurrency: int = 32, **cells: Cell) -> Block:
    return Block(round_, concurrency, {arm: cells.get(arm, a_cell(arm)) for arm in ARMS})


def blocks(rounds: int = 6, concurrency: int = 32, **cells: Cell) -> list[Block]:
    return [a_block(r, concurrency, **cells) for r in range(rounds)]


class FakeArm:
    """Answers at once with one token a millisecond. `bursts` records the (arm, concurrency, max_tokens) of each, of all arms."""

    def __init__(self, name: str, bursts: list[tuple[str, int, int]]) -> None:
        self.name = name
        self.roles: Mapping[str, str] = {role: f"{name} {role}" for role in (*OUTSIDE[name], "engine")}
        self._bursts = bursts

    async def burst(self, texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
        self._bursts.append((self.name, concurrency, max_tokens))
        await asyncio.sleep(0)
        return Burst(tuple(Sample(50.0, 100.0, max_tokens) for _ in texts), len(texts) * max_tokens / 1000)


class FakeProcesses:
    """CPU seconds that never grow, and nobody who dies."""

    def cpu_s(self) -> dict[str, float]:
        names = [f"{arm} {role}" for arm in ARMS for role in (*OUTSIDE[arm], "engine")]
        return dict.fromkeys([*names, "client"], 1.0)

    def check(self) -> None: ...


class FakeParts:
    """Both measurements of `overhead` without a process. `on_burst` is called with the number of each burst."""

    def __init__(self, on_burst: Any = None) -> None:
        self.bursts: list[tuple[str, int, int]] = []
        self.pairings = 0
        self.starts = 0
        self._on_burst = on_burst

    def parts(self) -> Parts:
        return Parts(self._pairs, self._arms)

    @property
    def measured(self) -> list[tuple[str, int]]:
        """The arm and concurrency of each turn: what is short is its primer, or for TTFT alone."""
        return [(arm, concurrency) for arm, concurrency, max_tokens in self.bursts if max_tokens == MAX_TOKENS]

    async def _pairs(self, directory: Path, count: int, seed: int) -> list[tuple[float, float]]:
        self.pairings += 1
        return [(6.0 + i % 3 / 10, 5.0 + i % 3 / 10) for i in range(count)]

    @asynccontextmanager
    async def _arms(
        self, directory: Path, shape: Shape, names: Sequence[str]
    ) -> AsyncIterator[tuple[FakeProcesses, dict[str, Any]]]:
        self.starts += 1
        yield FakeProcesses(), {name: self._watched(name) for name in names}

    def _watched(self, name: str) -> FakeArm:
        arm, burst = FakeArm(name, self.bursts), FakeArm.burst

        async def watched(texts: Sequence[str], concurrency: int, max_tokens: int) -> Burst:
            if self._on_burst is not None:
                await self._on_burst(len(self.bursts))
            return await burst(arm, texts, concurrency, max_tokens)

        arm.burst = watched  # type: ignore[method-assign]
        return arm
