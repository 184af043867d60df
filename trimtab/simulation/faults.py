"""What may go wrong in a simulated mesh, as values; `Mesh` carries them out at `at_s`. `node_id` is a worker's."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Die:
    """The process ends at once, and is started anew. `out_of_memory`: the kernel or the engine ended it for want of memory."""

    at_s: float
    node_id: str
    out_of_memory: bool = False


@dataclass(frozen=True, slots=True)
class Hang:
    """Its engine ends no step for `for_s`."""

    at_s: float
    node_id: str
    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Slow:
    """Every step takes `factor` times as long, for `for_s`."""

    at_s: float
    node_id: str
    factor: float
    for_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Leak:
    """So many free blocks of its KV cache are lost until it is restarted."""

    at_s: float
    node_id: str
    blocks: int


@dataclass(frozen=True, slots=True)
class Grow:
    """Its memory grows from now on, with or without work."""

    at_s: float
    node_id: str
    mb_per_min: float


@dataclass(frozen=True, slots=True)
class Silence:
    """Its reports do not arrive for `for_s`, though it serves and stays connected. A gateway may fall silent too."""

    at_s: float
    node_id: str
    for_s: float


@dataclass(frozen=True, slots=True)
class Fail:
    """Its engine fails such a share of its requests, in the place of their first token, for `for_s`."""

    at_s: float
    node_id: str
    share: float
    for_s: float = math.inf


Fault = Die | Fail | Hang | Slow | Leak | Grow | Silence
