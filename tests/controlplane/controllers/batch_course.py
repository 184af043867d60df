"""One worker in virtual time before the batch controller, and what its policy comes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.controllers import batch
from controlplane.controllers.decision import Decision, Move, PolicyOf
from controlplane.seen import NodeSeen, Seen
from controlplane.spec import adjust
from controlplane.tick import changes
from tests.controlplane.controllers.builders import (
    NOW,
    a_node,
    a_seen,
    a_window,
    policy_of,
)
from trimtab.measures import BATCH_RUNNING
from trimtab.snapshot import Adjustment, Document, resolve

GOOD, BAD = 100.0, 800.0
MIXED = {"running": 10.0, BATCH_RUNNING: 6.0}


@dataclass
class Course:
    """One worker through virtual time: each window is five ticks."""

    node: NodeSeen
    policy: PolicyOf = field(default_factory=policy_of)
    live: Iterable[Adjustment] = ()
    others: tuple[Adjustment, ...] = ()
    now: float = NOW
    number: int = 0
    decision: Decision = field(init=False)

    def __post_init__(self) -> None:
        self.decision = Decision(batch.start(self.live))
        self.tick()

    def tick(self) -> Decision:
        self.node.reported_at = self.now
        self.decision = batch.step(self.decision.state, self.seen(), self.policy, self.now)
        return self.decision

    def seen(self) -> Seen:
        return a_seen(self.node, now=self.now, adjustments=self.others)

    def window(self, ttft_ms: float, n: int = 30, *, peaks: Mapping[str, float] = MIXED, **more: Any) -> Decision:
        self.number += 1
        self.now += 5.0
        w = a_window(self.number, ttfts_ms=[ttft_ms] * n, peaks=peaks, ended=self.now, **more)
        self.node.windows.append(w)
        return self.tick()

    def active(self) -> int:
        """What the worker's running set comes to, by the very code that the worker resolves with."""
        put = changes("batch", self.decision.moves, {}, set(), 1000).put
        document = adjust((*put, *self.others))(Document(), [self.node.node], 1000).document
        return resolve(document, self.node.node, now_unix_ms=1000).policy.batch.active


def only(decision: Decision, path: str = "batch.active") -> Move:
    (found,) = [m for m in decision.moves if m.field == path]
    return found


def lowered(**more: Any) -> Course:
    course = Course(a_node(), **more)
    for _ in range(3):
        course.window(BAD)
    return course
