"""What a bench is asked for, whichever it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Options:
    """`resume` is the directory of raw results to go on in; None takes a new one. `rounds` None takes the bench's own number."""

    quick: bool = False
    resume: Path | None = None
    rounds: int | None = None
    model: str = "default"
    seed: int = 1
    png: Path | None = None
    """Where a picture goes, from benches that draw one. What follows only some benches know; each says which in `cli.BENCHES`."""
    arms: tuple[str, ...] = ()
    block_s: float | None = None
    realtime_per_arm: int | None = None
    itl_budgets_ms: tuple[int, ...] = ()
    step_tokens: int | None = None
    trace: Path | None = None
    smg: Path | None = None
    scenario: str | None = None
