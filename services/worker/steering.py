"""Requests that are here now, and what an operator does to some of them: move them in the order, keep them apart, let them go.

Which are meant is said by id or by what they have in common. A request is found wherever it is: in the worker's queue or in the engine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from services.worker.engines import Engine, Job
from services.worker.gate import Gate, Ticket
from trimtab.errors import Released, TrimtabError
from trimtab.messages import RequestMatch


@dataclass(slots=True, eq=False)
class Held:
    """One request that is here. `job` is as it came; what was changed since stands beside it."""

    request_id: str
    job: Job
    delta: int = 0
    isolated: bool = False
    ticket: Ticket | None = None
    ended: TrimtabError | None = None
    """What its client is told, where somebody other than the engine ended it."""


class Steering:
    """Belongs to one event loop."""

    def __init__(self, engine: Engine, gate: Gate) -> None:
        self._engine = engine
        self._gate = gate
        self._held: dict[str, Held] = {}

    @contextmanager
    def hold(self, request_id: str, job: Job) -> Iterator[Held]:
        """Known here for as long as the block runs."""
        held = Held(request_id, job)
        self._held[job.request_id] = held
        try:
            yield held
        finally:
            del self._held[job.request_id]

    async def reprioritise(self, match: RequestMatch, delta: int) -> int:
        """`delta` levels for each request that matches, within the policy's `priority.max_priority_diff`; how many there are."""
        found = self._matching(match)
        for held in found:
            held.delta = delta
        self._reorder(found)
        await self._engine.steer(self._in_engine(found), delta=delta)
        return len(found)

    async def isolate(self, match: RequestMatch, isolated: bool) -> int:
        """Each that matches runs with no other isolated one beside it; or no longer so."""
        found = self._matching(match)
        for held in found:
            held.isolated = isolated
        await self._engine.steer(self._in_engine(found), isolated=isolated)
        return len(found)

    async def release(self, match: RequestMatch) -> int:
        """Each that matches ends now, and its client is told why."""
        return await self.end(match, released)

    async def end(self, match: RequestMatch, error: Callable[[], TrimtabError]) -> int:
        """Each that matches ends now, with its own `error`; how many there were."""
        found = [held for held in self._matching(match) if held.ended is None]
        await self._end(found, error)
        return len(found)

    async def end_all(self, error: Callable[[], TrimtabError]) -> int:
        """Everything that is here ends now, with its own `error`; how many there were."""
        found = [held for held in self._held.values() if held.ended is None]
        await self._end(found, error)
        return len(found)

    async def _end(self, found: list[Held], error: Callable[[], TrimtabError]) -> None:
        for held in found:
            held.ended = error()
            if held.ticket is not None and not held.ticket.admitted.done():
                held.ticket.admitted.set_exception(held.ended)
        await self._engine.abort(self._in_engine(found))

    def _matching(self, match: RequestMatch) -> list[Held]:
        now_ms = time.monotonic() * 1000.0
        return [held for held in self._held.values() if _covers(match, held, now_ms)]

    def _reorder(self, found: list[Held]) -> None:
        deltas = {held.job.request_id: held.delta for held in found}

        def change(ticket: Ticket) -> None:
            ticket.delta = deltas.get(ticket.request_id, ticket.delta)

        self._gate.reorder(change)

    @staticmethod
    def _in_engine(found: list[Held]) -> list[str]:
        return [held.job.request_id for held in found if held.ticket is None or held.ticket.admitted.done()]


def _covers(match: RequestMatch, held: Held, now_ms: float) -> bool:
    job = held.job
    return match.covers(held.request_id, job.workload, job.tenant, len(job.token_ids), now_ms - job.arrival_ms)


def released() -> Released:
    return Released("an operator released this request to make room; it can be sent again later")
