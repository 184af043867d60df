"""What sends: realtime at its due times whatever becomes of it (open loop), batch as soon as the one before has ended (closed loop).

Latencies count from the moment when a request was *due*, so a generator that comes late shows in the figures instead of flattering them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from services.bench.mixed.workload import OUTSTANDING, Arrival, Lengths
from trimtab.client import Client
from trimtab.messages import Delta, Event, Finish, Request, Sampling, Workload

Send = Callable[[Workload, tuple[int, ...], int], AsyncGenerator[Event, None]]
"""One request of so many output tokens, as events; closing the generator cancels it."""
PromptOf = Callable[[str, int], tuple[int, ...]]
"""Token ids, by a name that is unique in the run and a length."""


@dataclass(slots=True)
class Served:
    """What came of one request; moments in seconds of the block. `queued_ms` is the engine's own word, once it has ended."""

    workload: Workload
    index: int
    due_s: float
    lengths: Lengths
    sent_s: float = 0.0
    first_s: float | None = None
    last_s: float | None = None
    ended_s: float | None = None
    tokens: int = 0
    gaps_ms: list[float] = field(default_factory=list)
    queued_ms: float | None = None


def grpc_send(client: Client, model: str) -> Send:
    """Generate at a worker: greedy, to the last token."""

    def send(workload: Workload, prompt: tuple[int, ...], output_tokens: int) -> AsyncGenerator[Event, None]:
        sampling = Sampling(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
        return client.generate(Request("", model, prompt, sampling, workload=workload))

    return send


async def serve(send: Send, one: Served, prompt: tuple[int, ...], clock: Callable[[], float]) -> None:
    """Send it and note when its tokens come. ValueError when it ends with another number of tokens than it asked for."""
    one.sent_s = clock()
    async with aclosing(send(one.workload, prompt, one.lengths.output)) as events:
        async for event in events:
            if isinstance(event, Delta) and event.token_ids:
                now = clock()
                if one.last_s is None:
                    one.first_s = now
                else:
                    one.gaps_ms.append((now - one.last_s) * 1000.0)
                one.last_s = now
                one.tokens += len(event.token_ids)
            elif isinstance(event, Finish):
                one.queued_ms = event.timings.queued_ms
    one.ended_s = clock()
    if one.tokens != one.lengths.output:
        raise ValueError(f"a request gave {one.tokens} tokens where {one.lengths.output} were asked for")


class Sources:
    """Both, over one way to the engine. `sent` has every request so far, in the order of sending."""

    def __init__(self, send: Send, prompt_of: PromptOf, clock: Callable[[], float]) -> None:
        self.sent: list[Served] = []
        self._send = send
        self._prompt_of = prompt_of
        self._clock = clock

    async def realtime(self, arrivals: Sequence[Arrival]) -> None:
        """Each at its time. Ends with the last one."""
        async with asyncio.TaskGroup() as group:
            for i, arrival in enumerate(arrivals):
                # Made beforehand, so that it costs nothing at the moment that counts.
                prompt = self._prompt_of(f"realtime/{i}", arrival.lengths.prompt)
                await asyncio.sleep(arrival.at_s - self._clock())
                one = Served(Workload.REALTIME, i, arrival.at_s, arrival.lengths)
                self.sent.append(one)
                group.create_task(serve(self._send, one, prompt, self._clock))

    async def batch(self, lengths: Iterator[Lengths]) -> None:
        """OUTSTANDING at a time, for as long as there are more."""
        numbered = enumerate(lengths)

        async def caller() -> None:
            for i, wanted in numbered:
                prompt = self._prompt_of(f"batch/{i}", wanted.prompt)
                one = Served(Workload.BATCH, i, self._clock(), wanted)
                self.sent.append(one)
                await serve(self._send, one, prompt, self._clock)

        async with asyncio.TaskGroup() as group:
            for _ in range(OUTSTANDING):
                group.create_task(caller())
