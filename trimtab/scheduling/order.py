"""In which order requests wait. One key serves the gateway's, the worker's and the engine's queue.

Ageing is part of the key: a request's place is its arrival plus a handicap of its class, so that the key does not depend on the present
time and a sorted queue stays sorted. No handicap exceeds `priority.max_overtake_ms`; that alone bounds by how much anybody is overtaken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimtab.messages import Workload
from trimtab.policy import Mode, Policy

if TYPE_CHECKING:
    from trimtab.scheduling.rules import Rules

LEVELS = {Workload.REALTIME: 2, Workload.BATCH: 12}
"""Smaller goes first. There is room for two levels of delta on either side of each."""
LOWEST = 14
STRICT_MS = 1e15
"""A handicap that no arrival makes up for: vLLM's fixed priority."""


def order_ms(rules: Rules, workload: Workload, arrival_ms: float, delta: int = 0) -> float:
    """Sort key in milliseconds; `delta` moves one request by levels, up when positive."""
    if rules.mode is Mode.FCFS:
        return arrival_ms
    if rules.mode is Mode.PRIORITY:
        return arrival_ms + (0.0 if workload is Workload.REALTIME else STRICT_MS)
    moved = delta + (rules.realtime_delta if workload is Workload.REALTIME else rules.batch_delta)
    moved = max(-rules.max_priority_diff, min(rules.max_priority_diff, moved))
    level = max(0, min(LOWEST, LEVELS[workload] - moved))
    return arrival_ms + level * rules.max_overtake_ms / LOWEST


def handover_bound(policy: Policy, workload: Workload) -> int:
    """Requests of this workload that a worker lets its engine hold: what may run and a few steps' supply; the rest stay re-orderable.

    Each workload has its own, so that no backlog of the one keeps the other out of the engine.
    """
    runs = policy.batch.active
    if workload is Workload.BATCH and policy.scheduler.mode == Mode.TRIMTAB:
        runs = min(runs, policy.batch.hard_cap)
    return runs + policy.admission.engine_queue


def queue_bound(policy: Policy, workload: Workload) -> int:
    """Requests of this workload that may wait in one process."""
    return policy.admission.realtime_queue if workload is Workload.REALTIME else policy.admission.batch_queue
