"""What a drill is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DrillOptions:
    """`real` is the number of streams on real engines; 0 leaves these out. `seed` is that of prompts and of faults.

    `vllm` is for drills that break a real engine: whether they do; None leaves it to the drill. `tokens`, of a giant's prompt, and
    `plugin_path`, a directory with plug-ins of vLLM, are for `giants --v4`.
    """

    quick: bool = False
    real: int = 0
    model: str = "default"
    seed: int = 1
    vllm: bool | None = None
    tokens: int | None = None
    plugin_path: Path | None = None
