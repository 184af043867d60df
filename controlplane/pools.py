"""How many workers each pool has, and how many it wants. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from controlplane.controllers.decision import PolicyOf, Want
from controlplane.seen import Seen
from trimtab.snapshot import Node

AS_IT_IS = "scale.max_workers is 0: the pool stays as it is"
NOT_YET = "nobody has decided yet"


@dataclass(frozen=True, slots=True)
class Pool:
    """`surplus` are workers to be drained first, where there are more than wanted."""

    pool: str
    wanted: int
    running: int
    min_workers: int
    max_workers: int
    reason: str
    surplus: tuple[str, ...] = ()

    @property
    def decided(self) -> bool:
        """Whether `wanted` is somebody's word; else it is what runs, of which a new leader may not know all yet."""
        return self.reason not in (AS_IT_IS, NOT_YET)


def pools_of(seen: Seen, wants: Mapping[str, Want], policy: PolicyOf) -> list[Pool]:
    """Of the pools that there are, and of those that are to have workers and have none."""
    found = []
    for name in sorted({*seen.pools(), *wants}):
        workers = list(seen.workers(name))
        # Of the pool, whoever is there: also one whose workers are all lost has bounds of its own.
        want, scale = wants.get(name), policy(Node("", name)).scale
        if want is None or not scale.max_workers:
            reason = NOT_YET if scale.max_workers else AS_IT_IS
            found.append(Pool(name, len(workers), len(workers), scale.min_workers, scale.max_workers, reason))
        else:
            wanted = min(scale.max_workers, max(scale.min_workers, want.workers))
            bounds = (scale.min_workers, scale.max_workers)
            found.append(Pool(name, wanted, len(workers), *bounds, want.reason, want.surplus))
    return found
