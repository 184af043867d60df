"""How fast pushes may follow each other: a whole fleet at once after a rest, and no more than so many a second for long.

A push costs both sides some hundred microseconds, so a storm of changes to a thousand nodes would take all of a replica's time, and the
changes themselves would wait. What a node skips meanwhile it does not need: only the newest counts. Pure; time comes with the call.
"""

from __future__ import annotations

PER_S = 1500.0
BURST = 4000.0


class Pace:
    """A bucket of pushes: full at first, refilled with `per_s`, holding `burst` at most."""

    def __init__(self, *, per_s: float = PER_S, burst: float = BURST) -> None:
        self._per_s = per_s
        self._burst = burst
        self._left = burst
        self._at = 0.0

    def took(self, pushes: int, now: float) -> float:
        """So many were sent at `now` (seconds of one clock): how long the next must wait."""
        self._left = min(self._burst, self._left + max(0.0, now - self._at) * self._per_s) - pushes
        self._at = max(self._at, now)
        return max(0.0, -self._left / self._per_s)
