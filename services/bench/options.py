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
