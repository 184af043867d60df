"""One measurement: an arm's policy in force, its sources sending, and a window of it in which everything counts.

A block is warm-up, window, tail, drain. Tokens are the engine's own count between the ends of two steps, first computations only. Counted
are the realtime requests that were due in the window; both sources go on until the last of those has ended, so that it fares like the first.
Invariant: when `measure` returns, the engine holds nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import aiohttp

from services.bench.mixed.arms import Arm
from services.bench.mixed.sources import PromptOf, Send, Served, Sources
from services.bench.mixed.workload import Arrival, Lengths, busy_share
from services.bench.processes import BenchError
from services.bench.turns import busy_s
from trimtab.errors import TrimtabError
from trimtab.messages import Workload

COUNTERS = (
    "steps", "preemptions", "memory_preemptions", "slices_broken", "slices_denied", "recomputed_tokens", "held_decodes", "forced", "hook_us",
)  # fmt: skip
"""Of the scheduler, as they grow within a window; `preemptions` are those by choice."""
POLL_S = 0.02
DRAIN_S = 60.0
"""An abort is served when the step in flight is over."""
SLICE_S = 10.0


class Engine(Protocol):
    """The one engine. `counts` has COUNTERS, `computed_tokens`, `max_overtake_ms`, `running` and `waiting`, at the end of its newest step."""

    send: Send

    async def steer(self, fields: Mapping[str, str]) -> None:
        """The policy's fields, in force when this returns."""

    def counts(self) -> Mapping[str, float]: ...
    def cpu_s(self) -> Mapping[str, float]: ...
    def check(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds: the window is what lies between `warm_up_s` and `block_s`; `tail_s` bounds the wait for the last request."""

    warm_up_s: float
    block_s: float
    tail_s: float

    @property
    def window_s(self) -> float:
        return self.block_s - self.warm_up_s


@dataclass(frozen=True, slots=True)
class Request:
    """A counted realtime request. One that had not `ended` when the tail was over has its age so far for what it still lacks."""

    index: int
    ttft_ms: float
    e2e_ms: float
    itl_ms: tuple[float, ...]
    ended: bool = True


@dataclass(frozen=True, slots=True)
class Block:
    """`tokens` in `measured_s`: prompt and output tokens of everybody, computed for the first time. Raw; `figures` makes sense of it."""

    arm: str
    round: int
    measured_s: float
    tokens: float
    realtime_tokens: float
    realtime: tuple[Request, ...]
    busy_share: float
    batch_ended: int
    max_overtake_ms: float
    counters: Mapping[str, float]
    slices_tokens_per_s: tuple[float, ...] = ()
    late_ms: float = 0.0
    """The most by which the generator was late."""
    client_cores: float = 0.0
    foreign_cores: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.measured_s

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Block:
        known = {k: v for k, v in raw.items() if k in Block.__slots__}
        requests = tuple(Request(**{**r, "itl_ms": tuple(r["itl_ms"])}) for r in raw["realtime"])
        return Block(**{**known, "realtime": requests, "slices_tokens_per_s": tuple(raw["slices_tokens_per_s"])})


class Meter:
    """Watches the engine's counts. The window begins and ends where a step ended, so that it holds whole steps only."""

    def __init__(self, engine: Engine, begun: float, timing: Timing) -> None:
        self._engine, self._begun, self._timing = engine, begun, timing
        self.marks: list[tuple[float, Mapping[str, float]]] = []
        """The ends of steps at which a slice of the window began; the last one is the window's end."""
        self._last: tuple[float, Mapping[str, float]] | None = None

    async def run(self) -> None:
        """Until the window is over."""
        seen = self._engine.counts()["computed_tokens"]
        while (now := time.monotonic() - self._begun) < self._timing.block_s:
            counts = self._engine.counts()
            if counts["computed_tokens"] != seen and now >= self._timing.warm_up_s:
                self._last = (now, counts)
                if not self.marks or now - self.marks[-1][0] >= SLICE_S:
                    self.marks.append(self._last)
            seen = counts["computed_tokens"]
            await asyncio.sleep(POLL_S)
        if self._last is not None and self._last is not self.marks[-1]:
            self.marks.append(self._last)

    def grown(self, name: str) -> float:
        return self.marks[-1][1][name] - self.marks[0][1][name] if self.marks else 0.0

    @property
    def measured_s(self) -> float:
        """From the window's first step end to its last; the whole window where the engine did nothing."""
        return self.marks[-1][0] - self.marks[0][0] if len(self.marks) > 1 else self._timing.window_s

    def slices(self) -> tuple[float, ...]:
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return tuple(round(_useful(b) - _useful(a), 1) / (tb - ta) for (ta, a), (tb, b) in pairs if tb > ta)


def _useful(counts: Mapping[str, float]) -> float:
    return counts["computed_tokens"] - counts["recomputed_tokens"]


async def measure(
    engine: Engine,
    arm: Arm,
    round_: int,
    timing: Timing,
    arrivals: Sequence[Arrival],
    backlog: Iterator[Lengths],
    prompt_of: PromptOf,
) -> Block:
    """One block of the arm whose policy is in force. BenchError when a request fails or the engine does not come to rest."""
    begun, before, busy = time.monotonic(), engine.cpu_s(), busy_s()
    overtaken = engine.counts()["max_overtake_ms"]
    sources = Sources(engine.send, prompt_of, lambda: time.monotonic() - begun)
    meter = Meter(engine, begun, timing)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = []
            if arm.realtime:
                tasks.append(group.create_task(sources.realtime(arrivals)))
            if arm.batch:
                tasks.append(group.create_task(sources.batch(backlog)))
            await meter.run()
            while time.monotonic() - begun < timing.block_s + timing.tail_s and any(
                one.ended_s is None for one in _counted(sources.sent, timing)
            ):
                await asyncio.sleep(POLL_S)
            stopped_s = time.monotonic() - begun
            for task in tasks:
                task.cancel()
    except ExceptionGroup as failures:
        e = first_of(failures)
        if not isinstance(e, TrimtabError | aiohttp.ClientError | OSError | ValueError):
            raise e from None
        engine.check()  # a dead process explains it better
        raise BenchError(f"a request of arm {arm.name} failed: {e}") from e
    await drained(engine)
    after, wall_s = engine.cpu_s(), time.monotonic() - begun
    spent = {name: after[name] - before.get(name, 0.0) for name in after}
    counted = _counted(sources.sent, timing)
    now_overtaken = engine.counts()["max_overtake_ms"]
    return Block(
        arm=arm.name,
        round=round_,
        measured_s=meter.measured_s,
        tokens=meter.grown("computed_tokens") - meter.grown("recomputed_tokens"),
        realtime_tokens=_delivered(sources.sent, timing) * meter.measured_s / timing.window_s,
        realtime=tuple(_request(one, stopped_s) for one in counted),
        busy_share=_busy(sources.sent, timing, stopped_s),
        batch_ended=sum(_within(one.ended_s, timing) for one in sources.sent if one.workload is Workload.BATCH),
        # The engine tells its greatest since it started: where that grew it is of this block. Else it is a bound for what the requests' own
        # queueing says, by which who begins in one step with another seems to begin before or after it.
        max_overtake_ms=now_overtaken if now_overtaken > overtaken else min(now_overtaken, overtake_ms(sources.sent)),
        counters={name: meter.grown(name) for name in COUNTERS},
        slices_tokens_per_s=meter.slices(),
        late_ms=max(((one.sent_s - one.due_s) * 1000.0 for one in counted), default=0.0),
        client_cores=spent.get("client", 0.0) / wall_s,
        foreign_cores=max(0.0, busy_s() - busy - sum(spent.values())) / wall_s,
    )


async def drained(engine: Engine, limit_s: float = DRAIN_S) -> None:
    """Until the engine holds nothing."""
    deadline = time.monotonic() + limit_s
    while (counts := engine.counts())["running"] or counts["waiting"]:
        engine.check()
        if time.monotonic() > deadline:
            raise BenchError(
                f"the engine still holds {counts['running']:.0f} + {counts['waiting']:.0f} requests that were cancelled"
            )
        await asyncio.sleep(POLL_S)


def overtake_ms(sent: Sequence[Served]) -> float:
    """The most by which a request that was scheduled first had come after a batch request. Of those that ended, who say when they were."""
    known = (
        sorted((one.sent_s + one.queued_ms / 1000.0, one) for one in sent if one.queued_ms is not None) if sent else []
    )
    most, latest = 0.0, 0.0
    for _, one in known:
        if one.workload is Workload.BATCH:
            most = max(most, latest - one.sent_s)
        latest = max(latest, one.sent_s)
    return most * 1000.0


def _within(moment: float | None, timing: Timing) -> bool:
    return moment is not None and timing.warm_up_s <= moment < timing.block_s


def _counted(sent: Sequence[Served], timing: Timing) -> list[Served]:
    return [one for one in sent if one.workload is Workload.REALTIME and _within(one.due_s, timing)]


def _request(one: Served, stopped_s: float) -> Request:
    first, ended = one.first_s, one.ended_s
    return Request(
        index=one.index,
        ttft_ms=round(((stopped_s if first is None else first) - one.due_s) * 1000.0, 2),
        e2e_ms=round(((stopped_s if ended is None else ended) - one.due_s) * 1000.0, 2),
        itl_ms=tuple(round(ms, 2) for ms in one.gaps_ms),
        ended=ended is not None,
    )


def _delivered(sent: Sequence[Served], timing: Timing) -> float:
    """Realtime tokens of the window: a prompt counts where its first token came, outputs spread evenly from there to the last."""
    total = 0.0
    for one in sent:
        if one.workload is not Workload.REALTIME or one.first_s is None or one.last_s is None:
            continue
        total += one.lengths.prompt * _within(one.first_s, timing)
        span, inside = one.last_s - one.first_s, min(one.last_s, timing.block_s) - max(one.first_s, timing.warm_up_s)
        total += one.tokens * (max(0.0, inside) / span if span > 0 else float(_within(one.first_s, timing)))
    return total


def _busy(sent: Sequence[Served], timing: Timing, stopped_s: float) -> float:
    spans = [
        (one.sent_s, stopped_s if one.ended_s is None else one.ended_s)
        for one in sent
        if one.workload is Workload.REALTIME
    ]
    return busy_share(spans, timing.warm_up_s, timing.block_s)


def first_of(failures: BaseExceptionGroup[Any]) -> BaseException:
    """One failed request spoils the block; what the others say as they are cancelled adds nothing."""
    e: BaseException = failures
    while isinstance(e, BaseExceptionGroup):
        e = e.exceptions[0]
    return e
