"""Pools whose engines change their KV block size as they are told, second by second in virtual time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.controllers import blocks
from controlplane.controllers.decision import BlockPlan, PolicyOf, Reblock
from controlplane.seen import NodeSeen, PlanSeen, Seen
from tests.controlplane.controllers.builders import a_node, a_window, policy_of
from tests.controlplane.controllers.run import Run
from trimtab.blocks import LADDER
from trimtab.measures import (
    ALLOCATION_FAILURES,
    KV_USED,
    STORED_TOKENS,
    block_waste,
)
from trimtab.policy import Value
from trimtab.snapshot import Limits

CPU = (32, 64, 96, 128, 192, 256, 512, 1024)
OLD = -100_000.0
"""Joined so long ago that nothing is new about it."""


def limits(size: int = 128, sizes: tuple[int, ...] = CPU, *, live: bool = True, carries: bool = False) -> Limits:
    return Limits(64, 8192, 131_072, size, 160_000 // size, "vllm", sizes, live, carries_blocks=carries)


def a_worker(
    node_id: str = "w0",
    size: int = 128,
    *,
    sizes: tuple[int, ...] = CPU,
    live: bool = True,
    carries: bool = False,
    joined_at: float = OLD,
    **more: Any,
) -> NodeSeen:
    """Idle but for what a test says."""
    gauges = {STORED_TOKENS: 0.0, **more.pop("gauges", {})}
    return a_node(
        node_id, limits=limits(size, sizes, live=live, carries=carries), joined_at=joined_at, gauges=gauges, **more
    )


def policy(choose_by: str = "measured", **more: Value) -> PolicyOf:
    return policy_of(
        {"block_plan.choose_by": choose_by, **{f"block_plan.{name}": value for name, value in more.items()}}
    )


@dataclass
class Pools(Run):
    """Engines do as they are told where `obeys`; windows close each five seconds with the counters and peaks of `load`."""

    obeys: bool = True
    plans: Mapping[str, PlanSeen] = field(default_factory=dict)
    restarting: frozenset[str] = frozenset()
    counters: Mapping[str, int] = field(default_factory=dict)
    peaks: Mapping[str, float] = field(default_factory=dict)
    number: int = 10

    def seen(self) -> Seen:
        seen = super().seen()
        seen.plans, seen.restarting = self.plans, self.restarting
        return seen

    def run(self, seconds: int) -> list[Reblock]:
        """The commands of that time."""
        before = len(self.commands)
        for _ in range(seconds):
            done = len(self.commands)
            self.tick(before=self._windows)
            for command in self.commands[done:]:
                assert isinstance(command, Reblock)
                if self.obeys:
                    reblocked(self.of(command.node_id), command.block_size)
        return [c for c in self.commands[before:] if isinstance(c, Reblock)]

    def _windows(self) -> None:
        if round(self.now) % 5 == 0:
            self.number += 1
            for n in self.nodes:
                n.windows.append(a_window(self.number, ended=self.now, counters=self.counters, peaks=self.peaks))
                n.totals[ALLOCATION_FAILURES] = n.totals.get(ALLOCATION_FAILURES, 0) + self.counters.get(
                    ALLOCATION_FAILURES, 0
                )

    def plan(self, pool: str = "default") -> BlockPlan:
        return next(p for p in self.decision.plans if p.pool == pool)


def reblocked(n: NodeSeen, size: int) -> None:
    """Its engine has another size from now on."""
    n.node = replace(n.node, limits=replace(n.node.limits, block_size=size))


def a_run(*nodes: NodeSeen, policy: PolicyOf = policy(), **more: Any) -> Pools:  # noqa: B008
    return Pools(blocks, list(nodes) or [a_worker()], policy, **more)


STARVED: Mapping[str, Any] = {
    "counters": {ALLOCATION_FAILURES: 3},
    "peaks": {KV_USED: 0.7, "waiting": 4.0},
}
WASTEFUL = {block_waste(size): size / 1000.0 for size in LADDER if size <= 512} | {
    block_waste(1024): 0.9,
    block_waste(64): 0.1,
    block_waste(96): 0.12,
}
"""128 tokens waste 12.8 %, 64 hardly less, 32 only 3.2 %."""
