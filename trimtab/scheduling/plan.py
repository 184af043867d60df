"""The plan of a step, and the memory that it is made for."""

from __future__ import annotations

from dataclasses import dataclass, field

from trimtab.kv_shape import KvShape
from trimtab.scheduling.item import Item
from trimtab.scheduling.steptime import Shape


@dataclass(frozen=True, slots=True)
class Memory:
    """The engine's KV cache now; `kv` says what a request takes of it."""

    free_blocks: int
    total_blocks: int
    kv: KvShape

    @property
    def use(self) -> float:
        return 1.0 - self.free_blocks / max(1, self.total_blocks)


@dataclass(slots=True)
class Plan:
    """`admit` in this order; `allowance` bounds the tokens of those named in it (0: not in this step), all others take what they want.

    `held` are running decodes that sit this step out, the first `held_protected` of them protected; they have an allowance of 0.
    """

    admit: list[Item] = field(default_factory=list)
    allowance: dict[str, int] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    held_protected: int = 0
    shape: Shape = field(default_factory=Shape)
    """What the step holds if vLLM finds nothing in its prefix cache."""
    rest_ran: bool = True
    """Unprotected work got its share, or there was none."""
    forced: int = 0
    """What `Counters.forced` grows by when the plan is carried out."""
