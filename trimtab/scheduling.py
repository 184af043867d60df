"""What runs in the next engine step, and in which order requests wait; pure, and shared by every place that asks.

The worker's queue, the vLLM scheduler and the simulated engine call these same functions, so what is simulated is what is served.
Keys do not depend on the present time, so a sorted queue stays sorted.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import PolicyRefused
from trimtab.messages import Workload
from trimtab.policy import Policy
from trimtab.snapshot import Limits

CLASS_BASE = {Workload.REALTIME: 0, Workload.BATCH: 10}
"""Smaller goes first. The gap leaves room for deltas of a policy between the classes."""


def key(workload: Workload, arrival: int) -> tuple[int, int]:
    """Sort key of a waiting request: class first, then arrival (any growing integer, such as a sequence number)."""
    return CLASS_BASE[workload], arrival


@dataclass(frozen=True, slots=True)
class StepCaps:
    """What the next step may hold: running requests, and tokens (decodes included)."""

    active: int
    step_tokens: int


def step_caps(policy: Policy, limits: Limits) -> StepCaps:
    """The policy's caps for an engine of these limits; PolicyRefused when they can't be met, so that nothing is half-applied."""
    for path, value, limit, name in (
        ("batch.active", policy.batch.active, limits.max_num_seqs, "max_num_seqs"),
        ("prefill.step_tokens", policy.prefill.step_tokens, limits.max_step_tokens, "max_step_tokens"),
    ):
        if limit and value > limit:
            raise PolicyRefused(
                f"{path} = {value} is above the engine's {name} = {limit}", reason="ABOVE_ENGINE_LIMIT", field=path
            )
        if value < 1:
            raise PolicyRefused(f"{path} = {value} would stop the engine", reason="OUT_OF_RANGE", field=path)
    return StepCaps(active=policy.batch.active, step_tokens=policy.prefill.step_tokens)


def handover_bound(policy: Policy) -> int:
    """Requests that a worker lets its engine hold: the running set and a few steps' supply; the rest stay re-orderable."""
    return policy.batch.active + policy.admission.engine_queue


def queue_bound(policy: Policy, workload: Workload) -> int:
    """Requests of this workload that may wait in one process."""
    return policy.admission.realtime_queue if workload is Workload.REALTIME else policy.admission.batch_queue
