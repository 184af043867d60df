"""One request on its way through a simulated mesh, and what became of it. Times in milliseconds of virtual time."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from trimtab.measuring import Gaps
from trimtab.messages import Workload


class Fate(enum.StrEnum):
    """How a request ended, or that it has not."""

    OPEN = "open"
    SERVED = "served"
    REFUSED = "refused"
    """Full, or nobody there."""
    SHED = "shed"
    """Refused by policy, to make room for others."""
    FAILED = "failed"
    """By an engine, or for want of another worker after its own was gone."""
    RELEASED = "released"
    """By a command."""


@dataclass(slots=True, eq=False)
class Request:
    """`arrival_ms` is when it came to the mesh, whatever it went through since. `order` is its place in the line where it waits."""

    request_id: str
    workload: Workload
    prompt: int
    output: int
    arrival_ms: float
    tenant: str = ""
    source: str = ""
    order: float = 0.0
    fate: Fate = Fate.OPEN
    attempts: int = 0
    delivered: int = 0
    delivered_before: int = 0
    """By workers before the one that has it."""
    given_ms: float = 0.0
    """When its worker got it."""
    scheduled_ms: float | None = None
    first_ms: float | None = None
    last_ms: float = 0.0
    gaps: Gaps = field(default_factory=Gaps)
    preemptions: int = 0
    orphaned_ms: float | None = None
    """Since when it has been looking for another worker."""

    @property
    def tokens(self) -> int:
        """That a worker computes before the next token comes: the prompt, and what was delivered elsewhere."""
        return self.prompt + self.delivered

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_ms is None else self.first_ms - self.arrival_ms

    @property
    def queued_ms(self) -> float:
        """Until it was first scheduled."""
        return 0.0 if self.scheduled_ms is None else self.scheduled_ms - self.arrival_ms
