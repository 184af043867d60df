"""Which faults strike, in which order, and whom. Pure.

Invariant: a worker is struck only while another one is well, so that every stream has somewhere to go.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass

PAUSE_S = (0.5, 5.0)
"""Between the beginnings of two, at least: some fall together, most do not."""


class Kind(enum.StrEnum):
    KILL = "kill"
    """SIGKILL; it is started again at once, on the same address."""
    STOP = "stop"
    """SIGSTOP, and SIGCONT after STOPPED_S: it comes back with everything that it had to say."""
    CUT = "cut"
    """Its connections are reset, and new ones refused for CUT_S."""
    STALL = "stall"
    """Its connections stay and carry nothing for STALL_S; what was sent meanwhile arrives afterwards."""
    DRAIN = "drain"
    """SIGTERM, with DRAIN_S for what runs; it is started again once it has ended."""
    HANG = "hang"
    """SIGSTOP for its engine's process alone, of a real engine, and SIGCONT after HANG_S: the worker answers, and nothing moves."""


STOPPED_S, CUT_S, STALL_S, DRAIN_S, HANG_S = 4.0, 3.0, 3.0, 0.5, 8.0
ANY = (Kind.KILL, Kind.STOP, Kind.CUT, Kind.STALL, Kind.DRAIN)
"""What can happen to any worker, whatever its engine."""
SILENT = (Kind.STOP, Kind.STALL, Kind.HANG)
"""Those of which nobody tells gateways: they have to notice."""


@dataclass(frozen=True, slots=True)
class Strike:
    """`draw` in [0, 1) says which of those that may be struck; `pause_s` goes before it."""

    kind: Kind
    pause_s: float
    draw: float


@dataclass(frozen=True, slots=True)
class Struck:
    """What was done, in seconds of one monotonic clock: the blow, its end (a restart, a SIGCONT, a healed link), and until all gateways
    counted the worker as serving again. `back` is None where none did in time.
    """

    kind: Kind
    worker: str
    begun: float
    ended: float
    back: float | None


def plan(seed: int, rounds: int, kinds: Sequence[Kind] = ANY) -> tuple[Strike, ...]:
    """Each kind once in every round, in random order."""
    rng = random.Random(f"{seed}/strikes")
    return tuple(
        Strike(kind, rng.uniform(*PAUSE_S), rng.random())
        for _ in range(rounds)
        for kind in rng.sample(list(kinds), len(kinds))
    )


def victim(strike: Strike, well: Sequence[str]) -> str | None:
    """One of those that are well, as long as another one stays so."""
    return sorted(well)[int(strike.draw * len(well))] if len(well) > 1 else None
