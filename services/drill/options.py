"""What a drill is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """`real` is the number of streams on real engines; 0 leaves these out. `seed` is that of prompts and of faults.

    `vllm` is for drills that break a real engine: whether they do; None leaves it to the drill.
    """

    quick: bool = False
    real: int = 0
    model: str = "default"
    seed: int = 1
    vllm: bool | None = None
