"""One worker's try at a request, from its Start to its end: the stream, its span, and what it says of the worker."""

from __future__ import annotations

import time
from collections.abc import Callable

from opentelemetry.trace import Span

from services.gateway.endpoint import Endpoint
from services.gateway.stream import Stream
from trimtab.errors import (
    ClientFault,
    Draining,
    EngineDead,
    EngineFault,
    Outcome,
    QueueFull,
    ResumeRefused,
    StreamCut,
    TrimtabError,
    WrongPool,
)
from trimtab.kit import telemetry
from trimtab.resuming import Cause

ELSEWHERE = (EngineFault, Draining, WrongPool, QueueFull, ResumeRefused)
"""Ends of an attempt that need not be the request's."""

Observe = Callable[[Endpoint, Outcome, bool, float | None], None]
"""Hears of each attempt's end, and of a probe's success: the worker, what it says of it, whether it was a probe yet, and the milliseconds to its
first token.
"""


class Attempt:
    """`index` is how many tokens the client had when it began; `key` says which worker it has, in which of its lives."""

    def __init__(
        self,
        endpoint: Endpoint,
        stream: Stream,
        span: Span,
        observe: Observe,
        *,
        probe: bool,
        compared: bool,
        index: int,
    ) -> None:
        self.compared = compared
        """Whether it was one of several that could have taken it, and had no more to do (`routing.Pick`)."""
        self.endpoint = endpoint
        # As it began: a reader may hear of its end only when the worker lives anew.
        self.key = endpoint.node_id, endpoint.life
        # A link that was silent for a moment makes a new life of the same process; one that nobody named is known by its lives alone.
        self.process = f"{endpoint.node_id}/{endpoint.incarnation or endpoint.life}"
        self.stream = stream
        self.index = index
        self.began = time.monotonic()
        self._span = span
        self._observe = observe
        self._probe = probe
        self._first_ms: float | None = None

    def token(self) -> None:
        """Some came. A probe's first one is its success: its last may be an hour away, and many may wait for what it shows."""
        if self._first_ms is None:
            self._first_ms = (time.monotonic() - self.began) * 1000.0
        if self._probe:
            self._probe = False
            self._observe(self.endpoint, Outcome.OK, True, None)

    def end(self, error: BaseException | None, *, finished: bool, superseded: bool, comparable: bool) -> None:
        """Leave the worker. `comparable`: its first token says something of the worker, not of the request."""
        self.stream.close(superseded=superseded)
        outcome = Outcome.UNKNOWN
        if isinstance(error, TrimtabError):
            many = self.stream.one_of_many and isinstance(error, EngineDead)
            outcome = Outcome.UNKNOWN if many else error.outcome
            telemetry.fail(self._span, error, error.reason)
        elif finished:
            outcome = Outcome.OK
        self._observe(self.endpoint, outcome, self._probe, self._first_ms if comparable else None)
        self._span.end()


def cause_of(fault: TrimtabError) -> Cause:
    """Why it ended, of those in `ELSEWHERE`."""
    match fault:
        case EngineDead():
            return Cause.DIED
        case QueueFull():
            return Cause.FULL
        case ResumeRefused():
            return Cause.DIFFERS
        case Draining():
            return Cause.LEFT
        case WrongPool():
            return Cause.MISPLACED
        case _:
            return Cause.BROKE


def cut(delivered: int, fault: TrimtabError, why: str, *, here: int) -> TrimtabError:
    """What a client is told whose stream can't go on, with the tokens that it has; `here` of them are from this gateway."""
    if isinstance(fault, ClientFault) and not here:
        return fault  # what the client brought can't be taken: no stream of ours was cut
    return StreamCut(
        f"the stream was cut after {delivered} tokens: {fault.message}; {why}",
        metadata={"tokens_delivered": str(delivered), "cause": fault.reason},
    )
