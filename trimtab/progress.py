"""Is an engine making progress? Health is judged by steps that end, not by processes that answer."""

from __future__ import annotations

import enum
from dataclasses import dataclass

HUNG_AFTER_MS = 2000.0
HUNG_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class Pulse:
    """What the engine announces before each step. Times are seconds on one monotonic clock.

    `step_no` counts steps begun; `ended` says that the newest one is over; `predicted_ms` is what it was expected to take.
    """

    step_no: int = 0
    begun: float = 0.0
    predicted_ms: float = 0.0
    ended: bool = True


class Progress(enum.Enum):
    IDLE = "idle"
    MOVING = "moving"
    HUNG = "hung"


def judge(pulse: Pulse, *, work_waiting: bool, idle_since: float, now: float) -> Progress:
    """DESIGN §3: hung = work is there and the step counter stands for max(2 s, 4 × the predicted time of the step in flight).

    `work_waiting` is whether the front process has handed over anything unfinished; `idle_since` when that last became true, so that an
    engine which never begins a step for it is found too.
    """
    if not work_waiting:
        return Progress.IDLE
    patience_ms = max(HUNG_AFTER_MS, 0.0 if pulse.ended else HUNG_FACTOR * pulse.predicted_ms)
    since = max(pulse.begun, idle_since)
    return Progress.HUNG if (now - since) * 1000.0 > patience_ms else Progress.MOVING


@dataclass(slots=True)
class StepTime:
    """Predicts a step's time as ms ≈ a + b × tokens, by least squares with forgetting; clamped to be non-negative.

    Until it has seen enough it predicts `unknown_ms`, which covers a first compile.
    """

    unknown_ms: float = 15_000.0
    forget: float = 0.98
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0
    _seen: int = 0

    def observe(self, tokens: int, ms: float) -> None:
        f = self.forget
        self._n = self._n * f + 1.0
        self._x = self._x * f + tokens
        self._y = self._y * f + ms
        self._xx = self._xx * f + tokens * tokens
        self._xy = self._xy * f + tokens * ms
        self._seen += 1

    def predict(self, tokens: int) -> float:
        """Milliseconds. Never below the recent mean for a step that is larger than the recent mean."""
        if self._seen < 3:
            return self.unknown_ms
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        slope = (self._xy / self._n - mean_x * mean_y) / spread if spread > 1e-9 else 0.0
        # Steps of one size say nothing of others: then time is taken as proportional to tokens, which errs on the long side.
        if spread <= 1e-9 and tokens > mean_x > 0:
            return mean_y * tokens / mean_x
        slope = max(0.0, slope)
        return max(0.0, mean_y + slope * (tokens - mean_x))
