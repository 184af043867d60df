"""Requests that stream side by side from an engine, with every token and the moment at which it came. Times are of time.monotonic()."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from services.bench.mixed.workload import prompt
from services.worker.engines import Engine, Job
from trimtab.messages import Sampling, Workload
from trimtab.policy import with_fields
from trimtab.snapshot import Document, Node, resolve

POLL_S = 0.02
SETTLE_S = 10.0
"""Within this an engine has given back what ended requests held: a step takes a few seconds at most."""


@dataclass(slots=True)
class Stream:
    """`times[i]` is when token i came. `error` is why it ended too early, empty where it did not."""

    job: Job
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    cached: int = 0
    error: str = ""

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "error": self.error}


class Broken(Exception):
    """A stream failed while its tokens were waited for."""


class Streams:
    """All of them run from `async with` on; leaving it closes those that still do."""

    def __init__(self, engine: Engine, jobs: Sequence[Job]) -> None:
        self.all = [Stream(job) for job in jobs]
        self._engine = engine
        self._news = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def running(self) -> bool:
        """None of them has come to its end."""
        return not any(task.done() for task in self._tasks)

    async def more(self, tokens: int) -> None:
        """Until each has given so many more than now, or all it was to give. Broken when one fails before."""
        wanted = [min(s.job.max_tokens, len(s.tokens) + tokens) for s in self.all]
        while any(len(s.tokens) < n for s, n in zip(self.all, wanted, strict=True)):
            for s, n, task in zip(self.all, wanted, self._tasks, strict=True):
                if task.done() and len(s.tokens) < n:
                    raise Broken(f"{s.job.request_id} ended after {len(s.tokens)} tokens: {s.error}")
            await self._news.wait()
            self._news.clear()

    async def ended(self) -> None:
        """Until each has come to its end, a good one or not."""
        await asyncio.gather(*self._tasks)

    async def _run(self, stream: Stream) -> None:
        try:
            async with aclosing(self._engine.generate(stream.job)) as outputs:
                async for output in outputs:
                    now = time.monotonic()
                    stream.tokens += output.token_ids
                    stream.times += [now] * len(output.token_ids)
                    stream.cached = max(stream.cached, output.cached_prompt_tokens)
                    self._news.set()
        except Exception as e:  # whatever ends a stream is a finding, not the end of the bench
            stream.error = f"{type(e).__name__}: {e}"
        finally:
            self._news.set()

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._run(s), name=s.job.request_id) for s in self.all]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


FCFS = {"scheduler.mode": "fcfs"}
"""vLLM's own order: nothing is held back for anybody, and every step is as large as it can be."""


async def steer(engine: Engine, fields: Mapping[str, Any]) -> None:
    """The policy that the engine has by default, but for these fields."""
    policy = resolve(Document(), Node(engine.model, limits=engine.limits), now_unix_ms=0).policy
    await engine.apply(with_fields(policy, fields))


def a_job(
    engine: Engine, name: str, tokens: Sequence[int] | int, output: int, workload: Workload = Workload.REALTIME
) -> Job:
    """Greedy and of exactly `output` tokens; a number of `tokens` makes a prompt of so many that no other name has."""
    ids = prompt(name, tokens, engine.tokenizer.vocab_size) if isinstance(tokens, int) else tuple(tokens)
    greedy = Sampling(temperature=0.0, ignore_eos=True)
    return Job(name, ids, output, greedy, workload, arrival_ms=time.monotonic() * 1000.0)


def held_blocks(engine: Engine) -> int:
    """Blocks that are neither free nor the engine's own."""
    load = engine.load()
    return load.total_blocks - engine.own_blocks - load.free_blocks


async def leaked_blocks(
    engine: Engine, *, patience_s: float = SETTLE_S, clock: Callable[[], float] = time.monotonic
) -> int:
    """Blocks that are still held once nobody runs and `patience_s` is over; 0 as soon as all are free."""
    until = clock() + patience_s
    while engine.owes() or held_blocks(engine):
        if clock() >= until:
            return held_blocks(engine)
        await asyncio.sleep(POLL_S)
    return 0
