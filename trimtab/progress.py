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
    engine which never begins a step for it is found too. A step in flight that overstays is hung also when its work has gone elsewhere.
    """
    if not work_waiting and pulse.ended:
        return Progress.IDLE
    patience_ms = max(HUNG_AFTER_MS, 0.0 if pulse.ended else HUNG_FACTOR * pulse.predicted_ms)
    since = max(pulse.begun, idle_since)
    return Progress.HUNG if (now - since) * 1000.0 > patience_ms else Progress.MOVING
