"""One round of `long-prompt`: streams decode, a long prompt arrives beside them, and each gap between their tokens is timed.

The watch goes from the prompt's arrival to its first token, or to a bound: by a small budget its prefill may take minutes. A gap of which
any part lies in the watch counts whole, so that neither the step in flight at the arrival nor the last one is missed.
Invariant: when `measure` or `alone_ms` returns, the engine holds nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from services.bench.long_prompt_figures import Round, gaps_ms
from services.bench.mixed.block import Engine, drained, first_of
from services.bench.mixed.sources import PromptOf, Send
from services.bench.processes import BenchError
from services.bench.stats import median
from services.bench.turns import busy_s
from trimtab.errors import TrimtabError
from trimtab.messages import Delta, Workload

STREAMS = 8
STREAM_PROMPT, STREAM_OUTPUT = 50, 2000
LONG_PROMPT, LONG_OUTPUT = 6000, 8
SETTLED_TOKENS = 10
"""Each stream has given so many before anything is timed."""
ALONE_TOKENS = 40
"""Of each stream, for the gap without a prompt beside it."""
POLL_S = 0.01
WARM_UP = -1
AROUND_S = 120.0
"""What a round may take beyond its watch: the streams' start, and the end of the step that is under way when the watch ends."""


@dataclass(slots=True)
class Stream:
    """One request: the moments at which its tokens came."""

    moments: list[float] = field(default_factory=list)
    ended: bool = False

    async def run(self, send: Send, workload: Workload, prompt: tuple[int, ...], output_tokens: int) -> None:
        async with aclosing(send(workload, prompt, output_tokens)) as events:
            async for event in events:
                if isinstance(event, Delta) and event.token_ids:
                    self.moments.append(time.monotonic())
        self.ended = True


async def alone_ms(engine: Engine, prompt_of: PromptOf) -> float:
    """The median gap of the streams with nothing beside them, by the policy in force."""
    async with _decoding(engine, prompt_of, AROUND_S, "while the streams decoded alone") as (streams, _):
        begin = time.monotonic()
        await _until(lambda: all(len(s.moments) > SETTLED_TOKENS + ALONE_TOKENS for s in streams))
        end = time.monotonic()
    return median([ms for s in streams for ms in gaps_ms(s.moments, begin, end)])


async def measure(engine: Engine, arm: str, round_: int, watch_s: float, prompt_of: PromptOf) -> Round:
    """A round of the arm whose policy is in force; the warm-up is round WARM_UP. BenchError when a request fails or no tokens come.

    The engine's counts have `queued_prefill_tokens` too.
    """
    prompt = prompt_of("long", LONG_PROMPT)
    long = Stream()
    where = "in the warm-up" if round_ == WARM_UP else f"in round {round_ + 1} of {arm}"
    async with _decoding(engine, prompt_of, watch_s + AROUND_S, where) as (streams, group):
        before, cpu, busy = engine.counts(), engine.cpu_s(), busy_s()
        begin = time.monotonic()
        arriving = group.create_task(long.run(engine.send, Workload.BATCH, prompt, LONG_OUTPUT))
        await _until(lambda: bool(long.moments) or time.monotonic() - begin >= watch_s or any(s.ended for s in streams))
        after = engine.counts()
        end = long.moments[0] if long.moments else time.monotonic()
        ended = "first token" if long.moments else "stream" if any(s.ended for s in streams) else "time"
        await _until(lambda: all(s.ended or s.moments[-1] >= end for s in streams))
        wall_s, spent = time.monotonic() - begin, sum(engine.cpu_s().values()) - sum(cpu.values())
        foreign_s = max(0.0, busy_s() - busy - spent)
        arriving.cancel()
    came = ended == "first token"
    # Nobody but the long one has a prompt to compute by then; before the engine has it, nothing of it is queued or computed.
    there = after["running"] + after["waiting"] > len(streams)
    computed = LONG_PROMPT - int(after["queued_prefill_tokens"]) if there else 0
    return Round(
        arm=arm,
        round=round_,
        gaps_ms=tuple(round(ms, 2) for s in streams for ms in gaps_ms(s.moments, begin, end)),
        watched_s=end - begin,
        first_token_s=end - begin if came else None,
        computed_tokens=LONG_PROMPT if came else computed,
        steps=int(after["steps"] - before["steps"]),
        ended=ended,
        foreign_cores=foreign_s / wall_s,
    )


@asynccontextmanager
async def _decoding(
    engine: Engine, prompt_of: PromptOf, limit_s: float, where: str
) -> AsyncIterator[tuple[list[Stream], asyncio.TaskGroup]]:
    """STREAMS that decode, each past its first tokens; cancelled on leaving, and gone from the engine."""
    streams = [Stream() for _ in range(STREAMS)]
    prompts = [prompt_of(f"stream/{i}", STREAM_PROMPT) for i in range(STREAMS)]
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(s.run(engine.send, Workload.REALTIME, prompt, STREAM_OUTPUT))
                for s, prompt in zip(streams, prompts, strict=True)
            ]
            await _until(lambda: all(len(s.moments) > SETTLED_TOKENS for s in streams))
            yield streams, group
            for task in tasks:
                task.cancel()
    except TimeoutError as e:
        engine.check()  # a dead process explains it better
        raise BenchError(
            f"{where} not every stream gave its tokens within {limit_s:g} s: nothing can be measured on a machine so slow or so busy; "
            "stop what else runs on it and start again"
        ) from e
    except ExceptionGroup as failures:
        failure = first_of(failures)
        if not isinstance(failure, TrimtabError | OSError | ValueError):
            raise failure from None
        engine.check()
        raise BenchError(f"a request failed {where}: {failure}") from failure
    await drained(engine)


async def _until(done: Callable[[], bool]) -> None:
    while not done():
        await asyncio.sleep(POLL_S)
