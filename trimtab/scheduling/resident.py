"""What requests that hold KV leave empty in their last blocks, by block size. Each of them is visited for that: now and then, and not all at
once where there are many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trimtab.blocks import LADDER

LOOK_EVERY_MS = 100.0
"""On the busy clock."""
VISITS = 4000
"""Of requests in one look, some 0.3 ms: of a thousand requests four sizes, of a hundred all. The next look goes on with the next sizes."""
NOBODY = -1.0
"""No request holds a token; 0 would say that nothing is wasted."""


@dataclass(slots=True)
class Wastes:
    """By the sizes of LADDER, in its order; what `blocks.waste` says of each."""

    shares: list[float] = field(default_factory=lambda: [NOBODY] * len(LADDER))
    _next: int = 0
    _looked_ms: float = -LOOK_EVERY_MS
    _running: int = 0

    def of(self, lengths: Callable[[], list[int]], running: int, busy_ms: float) -> Sequence[float]:
        """The newest; `lengths` are tokens whose KV is there, of each of the `running`."""
        came_or_went = bool(running) != bool(self._running)
        if came_or_went or busy_ms - self._looked_ms >= LOOK_EVERY_MS:
            self._looked_ms, self._running = busy_ms, running
            self._look([n for n in lengths() if n > 0])
        return self.shares

    def _look(self, held: list[int]) -> None:
        if not held:
            self.shares = [NOBODY] * len(LADDER)
            return
        tokens = sum(held)
        for _ in range(min(len(LADDER), max(1, VISITS // len(held)))):
            size = LADDER[self._next]
            slots = size * (len(held) + sum([(n - 1) // size for n in held]))
            self.shares[self._next] = (slots - tokens) / slots
            self._next = (self._next + 1) % len(LADDER)
