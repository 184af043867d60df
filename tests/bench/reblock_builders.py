"""The host of `reblock` and `blocks` without its process: the simulated engine here, asked through the same JSON."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from services.bench.processes import BenchError
from services.bench.reblock import host
from services.bench.start import Shape
from services.worker.engines.simulated import SimulatedEngine


def an_engine(**fields: Any) -> SimulatedEngine:
    """Steps of a millisecond, and room for whatever a test asks."""
    known = {"max_num_seqs": 32, "max_step_tokens": 1024, "max_model_len": 4096, "step_ms": 1.0, "token_us": 0.0}
    return SimulatedEngine(model="simulated", **{**known, **fields})


class LocalHost:
    """`asked` records the parts in their order. `on_ask` is called before each, and may raise."""

    def __init__(self, engine: SimulatedEngine, on_ask: Callable[[str], None] = lambda _: None) -> None:
        self.engine = engine
        self.facts: Mapping[str, Any] = host.facts(engine)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self._on_ask = on_ask

    async def ask(self, part: str, **args: Any) -> dict[str, Any]:
        self._on_ask(part)
        self.asked.append((part, args))
        answer = json.loads(json.dumps(await host.answer(self.engine, json.dumps({"part": part, "args": args}))))
        if "error" in answer:
            raise BenchError(answer["error"])
        done: dict[str, Any] = answer["done"]
        return done

    async def restart(self) -> dict[str, float]:
        await self.engine.stop()
        await self.engine.start()
        return {"stop_s": 4.0, "start_s": 20.0}


class Hosts:
    """What a course is given: a host each time it asks for one. `all` are those so far."""

    def __init__(self, on_ask: Callable[[str], None] = lambda _: None, **fields: Any) -> None:
        self.all: list[LocalHost] = []
        self.shapes: list[Shape] = []
        self._on_ask = on_ask
        self._fields = fields

    @asynccontextmanager
    async def engine(self, directory: Path, shape: Shape) -> AsyncIterator[LocalHost]:
        engine = an_engine(**self._fields)
        await engine.start()
        self.shapes.append(shape)
        self.all.append(LocalHost(engine, self._on_ask))
        try:
            yield self.all[-1]
        finally:
            await engine.stop()

    @property
    def parts(self) -> list[str]:
        return [part for h in self.all for part, _ in h.asked]
