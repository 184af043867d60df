"""Blocks with sane numbers, and an engine that answers at once and counts as a scheduler does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.bench.mixed.block import COUNTERS, Block, Request
from services.bench.mixed.course import Parts
from services.bench.start import Shape
from trimtab.messages import Accepted, Delta, Event, Finish, FinishReason, Timings, Usage, Workload
from trimtab.snapshot import Identity


def a_block(
    arm: str = "fcfs",
    round_: int = 0,
    *,
    e2e_ms: float = 1000.0,
    tokens_per_s: float = 400.0,
    requests: int = 40,
    busy_share: float = 0.2,
    **fields: Any,
) -> Block:
    """100 s of it; each request's latency differs a little from the next one's, in the same way in every arm."""
    served = tuple(
        Request(i, e2e_ms / 10 * (1 + i / 100), e2e_ms * (1 + i / 100), (30.0, 31.0 + i)) for i in range(requests)
    )
    known: dict[str, Any] = {
        "realtime_tokens": 2500.0, "batch_ended": 12, "max_overtake_ms": 4000.0, "counters": dict.fromkeys(COUNTERS, 100.0)
    }  # fmt: skip
    return Block(
        arm, round_, 100.0, tokens_per_s * 100.0, realtime=served, busy_share=busy_share, **{**known, **fields}
    )


def rounds(arm: str, count: int = 6, **fields: Any) -> list[Block]:
    return [a_block(arm, r, **fields) for r in range(count)]


def good_blocks(count: int = 6, **fields: Any) -> list[Block]:
    """All goals are met: tokens/s and P95 of ours lie between FCFS and realtime alone, larger budgets further towards FCFS."""
    arms = {
        "fcfs": {"e2e_ms": 40_000.0, "tokens_per_s": 400.0},
        "priority": {"e2e_ms": 20_000.0, "tokens_per_s": 398.0},
        "ours-50": {"e2e_ms": 1_200.0, "tokens_per_s": 370.0},
        "ours-100": {"e2e_ms": 1_800.0, "tokens_per_s": 385.0},
        "ours-200": {"e2e_ms": 3_000.0, "tokens_per_s": 394.0},
        "realtime-alone": {"e2e_ms": 1_000.0, "tokens_per_s": 30.0},
        "batch-alone": {"requests": 0, "tokens_per_s": 405.0},
    }
    return [b for arm, own in arms.items() for b in rounds(arm, count, **{**own, **fields.get(arm, {})})]


class FakeEngine:
    """One token a millisecond. `steered` records every policy; `served` every request, as (workload, prompt tokens, output tokens)."""

    def __init__(self, on_steer: Any = None) -> None:
        self.steered: list[Mapping[str, str]] = []
        self.served: list[tuple[Workload, tuple[int, ...], int]] = []
        self.fails: Exception | None = None
        self._on_steer = on_steer
        self._counts = dict.fromkeys([*COUNTERS, "computed_tokens", "max_overtake_ms", "running", "waiting"], 0.0)

    async def send(
        self, workload: Workload, prompt: tuple[int, ...], output_tokens: int
    ) -> AsyncGenerator[Event, None]:
        self.served.append((workload, prompt, output_tokens))
        self._counts["running"] += 1
        try:
            yield Accepted("r", "w0", Identity(), 0, len(prompt), b"", True, "bench")
            if self.fails is not None:
                raise self.fails
            self._counts["computed_tokens"] += len(prompt)
            for i in range(output_tokens):
                await asyncio.sleep(0.001)
                self._counts["computed_tokens"] += 1
                self._counts["steps"] += 1
                yield Delta(i, (i,), "")
            yield Finish(FinishReason.LENGTH, Usage(), Timings(queued_ms=1.0))
        finally:
            self._counts["running"] -= 1

    async def steer(self, fields: Mapping[str, str]) -> None:
        assert not self._counts["running"], "an arm leaks into the next one"
        self.steered.append(dict(fields))
        if self._on_steer is not None:
            await self._on_steer(len(self.steered))

    def counts(self) -> Mapping[str, float]:
        return dict(self._counts)

    def cpu_s(self) -> Mapping[str, float]:
        return {"client": 1.0, "worker": 2.0}

    def check(self) -> None: ...


class FakeParts:
    def __init__(self, on_steer: Any = None) -> None:
        self.engine = FakeEngine(on_steer)
        self.starts = 0
        self.checks = 0

    def parts(self) -> Parts:
        return Parts(self._check, self._engine)

    async def _check(self, directory: Path, shape: Shape, seed: int) -> dict[str, Any]:
        self.checks += 1
        return {"same": 20, "of": 20}

    @asynccontextmanager
    async def _engine(self, directory: Path, shape: Shape) -> AsyncIterator[FakeEngine]:
        self.starts += 1
        yield self.engine
