"""What waiting costs: the worker's queue and the planner, each with so many requests that wait, per engine step.

A step here is one in a full engine: one request ends, another one of its kind comes, and whoever is first in line takes the free place.
"""

from __future__ import annotations

import random
import time
from dataclasses import replace

from services.worker.gate import Gate, Ticket
from trimtab.kv_shape import KvShape
from trimtab.messages import Workload
from trimtab.policy import Policy
from trimtab.scheduling import Item, Memory, Planner, Rules
from trimtab.snapshot import Limits

SIZES = (250, 500, 1000, 2000)
ROOMY = replace(Policy().admission, realtime_queue=4096, batch_queue=4096)
POLICY = replace(Policy(), admission=ROOMY)
RUNNING = POLICY.batch.active
LENGTHS = (100, 300, 1000, 6000)
"""Of batch prompts; those of realtime requests are the first."""
SETTLE = 60


class GateCost:
    """The worker's queue. Belongs to a running event loop."""

    name = "gate"

    def __init__(self, waiting: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._gate = Gate(POLICY)
        self._handed: list[Ticket] = []
        self._number = 0
        self._waiting: list[Ticket] = []
        while self._gate.waiting < waiting:
            self._enter(self._rng.choice(tuple(Workload)))
        for _ in range(SETTLE):
            self.step()

    def step(self) -> float:
        """Microseconds of CPU."""
        place = self._rng.randrange(len(self._handed))
        leaves, self._handed[place] = self._handed[place], self._handed[-1]
        self._handed.pop()
        begun = time.thread_time_ns()
        self._gate.leave(leaves)
        self._enter(leaves.workload)
        took = time.thread_time_ns() - begun
        admitted = [t for t in self._waiting if t.admitted.done()]
        self._handed += admitted
        self._waiting = [t for t in self._waiting if not t.admitted.done()]
        return took / 1000.0

    def _enter(self, workload: Workload) -> None:
        self._number += 1
        ticket, _ = self._gate.enter(f"r{self._number}", workload, LENGTHS[0], float(self._number))
        (self._handed if ticket.admitted.done() else self._waiting).append(ticket)


class PlannerCost:
    """The planner over an engine that does as it is told."""

    name = "planner"

    def __init__(self, waiting: int, seed: int) -> None:
        self._rng = random.Random(seed)
        self._planner = Planner(Rules.of(POLICY, Limits()))
        self._memory = Memory(50_000, 60_000, KvShape.of(16))
        self._computed: dict[str, int] = {}
        self._number = 0
        self._now_ms = 1e6
        for _ in range(waiting + RUNNING):
            self._arrive(self._rng.choice(tuple(Workload)))
        for _ in range(SETTLE):
            self.step()

    def step(self) -> float:
        """Microseconds of CPU."""
        planner, now_ms = self._planner, self._now_ms
        decodes = [*planner.protected_decodes, *planner.rest_decodes]
        begun = time.thread_time_ns()
        gone = planner.remove(self._rng.choice(decodes)) if decodes else None
        if gone:
            self._arrive(gone.workload)
        for item in planner.victims(now_ms, self._memory, _ready):
            self._computed[item.request_id] = 0
            planner.preempted(item.request_id, goal=item.goal)
        plan = planner.plan(now_ms, self._memory, _ready)
        took = time.thread_time_ns() - begun
        ran = {i.request_id: min(i.left, plan.allowance[i.request_id]) for i in plan.admit}
        for item in planner.running.values():
            wants = item.left if item.request_id in planner.prefilling else 1
            ran[item.request_id] = min(wants, plan.allowance.get(item.request_id, wants))
        ran = {request_id: tokens for request_id, tokens in ran.items() if tokens}
        for request_id, tokens in ran.items():
            self._computed[request_id] = self._computed.get(request_id, 0) + tokens
        total = sum(ran.values())
        begun = time.thread_time_ns()
        planner.began(plan, now_ms, ran, total, lambda i: self._computed[i.request_id])
        if total:
            planner.ended(5.0 + 0.05 * total)
        took += time.thread_time_ns() - begun
        self._now_ms += 5.0
        return took / 1000.0

    def _arrive(self, workload: Workload) -> None:
        self._number += 1
        length = LENGTHS[0] if workload is Workload.REALTIME else self._rng.choice(LENGTHS)
        self._planner.add(Item(f"r{self._number}", workload, length, self._now_ms - self._rng.random()))


def _ready(item: Item) -> bool:
    return True
