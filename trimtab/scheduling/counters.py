"""What the scheduler counts, and under which names it goes out with a report."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trimtab.blocks import LADDER
from trimtab.messages import Workload
from trimtab.scheduling.lengths import LengthClass


@dataclass(slots=True)
class Waits:
    """How long requests of one workload or length class waited for their first step, in milliseconds."""

    count: int = 0
    sum_ms: float = 0.0
    max_ms: float = 0.0

    def add(self, ms: float) -> None:
        self.count += 1
        self.sum_ms += ms
        self.max_ms = max(self.max_ms, ms)


ENOUGH_STEPS = 50
"""Decode steps of one length class, before their spread says anything."""
OLD_STEPS = 1000
"""A class that was part of none of the last so many decode steps says nothing of now."""
_SHARE = 1.0 / 64.0
"""What the newest step counts: some hundred of the last make the figure."""


@dataclass(slots=True)
class Spread:
    """Mean and variance of a class's steps, with forgetting. `at` is the number of the last one among all decode steps."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    at: int = 0


@dataclass(slots=True)
class Steadiness:
    """How much the time of decode steps varies, by the length class of the longest request in them; each step costs the same few sums.

    A step is measured in what was predicted for it: the number of decodes and the KV that they read change from step to step, and would look
    like a spread that no block size has to do with. Buckets of equal numbers would need no prediction, but a busy engine seldom has the same
    number for fifty steps. What the fit gets wrong by the same factor each time drops out, since the spread is a share of the mean; what it
    gets wrong by another factor each time counts as spread, so the figure is at most too high.
    """

    steps: int = 0
    spreads: dict[LengthClass, Spread] = field(default_factory=lambda: {c: Spread() for c in LengthClass})

    def add(self, length: LengthClass, ms: float, predicted_ms: float) -> None:
        """A step without a prompt in it took `ms`; `predicted_ms` is above 0."""
        self.steps += 1
        s = self.spreads[length]
        s.count, s.at = s.count + 1, self.steps
        # The first ones are a plain mean: forgetting begins once there is something to forget.
        share = max(_SHARE, 1.0 / s.count)
        off = ms / predicted_ms - s.mean
        s.mean += share * off
        s.variance = (1.0 - share) * (s.variance + share * off * off)

    @property
    def deviation(self) -> float:
        """The largest of all classes, as a share of the mean; 0 while none is known."""
        square, oldest = 0.0, self.steps - OLD_STEPS
        for s in self.spreads.values():
            if s.count >= ENOUGH_STEPS and s.at > oldest and s.variance > square * s.mean * s.mean:
                square = s.variance / (s.mean * s.mean) if s.mean else 0.0
        return math.sqrt(square)


@dataclass(slots=True)
class Counters:
    """Since the engine's start."""

    preemptions: int = 0
    """By choice, for a protected request."""
    memory_preemptions: int = 0
    slices_broken: int = 0
    """Preempted for want of KV blocks before its guaranteed time slice was over."""
    slices_denied: int = 0
    """Steps in which a protected request waited because everybody who could have made room still had his slice."""
    recomputed_tokens: int = 0
    aborted_tokens: int = 0
    """Computed for requests that were then aborted."""
    computed_tokens: int = 0
    held_decodes: int = 0
    """Decodes left out of a step for the sake of a protected one."""
    forced: int = 0
    """Requests scheduled past soft limits because they would have been overtaken by too much, and steps that ended a suspension."""
    max_overtake_ms: float = 0.0
    """The most by which a request that was first scheduled had arrived after a BATCH request that had not been."""
    waits: dict[Workload, Waits] = field(default_factory=lambda: {w: Waits() for w in Workload})
    waits_by_length: dict[LengthClass, Waits] = field(default_factory=lambda: {c: Waits() for c in LengthClass})
    steadiness: Steadiness = field(default_factory=Steadiness)

    def started(self, workload: Workload, length: LengthClass, waited_ms: float) -> None:
        """A request was scheduled for the first time, `waited_ms` after its arrival."""
        self.waits[workload].add(waited_ms)
        self.waits_by_length[length].add(waited_ms)


BY_LENGTH = ("waits", "wait_ms", "max_wait_ms", "waiting")
"""What is known of each length class: requests that started, their waits in all and the longest, and how many the engine lets wait now."""


STATS = (
    "preemptions",
    "memory_preemptions",
    "slices_broken",
    "slices_denied",
    "recomputed_tokens",
    "aborted_tokens",
    "computed_tokens",
    "held_decodes",
    "forced",
    "max_overtake_ms",
    "realtime_waits",
    "realtime_wait_ms",
    "realtime_max_wait_ms",
    "batch_waits",
    "batch_wait_ms",
    "batch_max_wait_ms",
    *(f"{length}_{what}" for length in LengthClass for what in BY_LENGTH),
    "step_error_ms",
    "step_constant_ms",
    "step_ms_per_prefill_token",
    "step_ms_per_1000_context",
    "step_ms_per_decode",
    "step_ms_per_1000_kv",
    "step_ms_above_first_knee",
    "step_ms_above_last_knee",
    "realtime_running",
    "batch_running",
    "realtime_waiting",
    "batch_waiting",
    "cold_waiting",
    "stored_tokens",
    "longest_prefill",
    "busy_ms",
    "decode_deviation",
    *(f"waste_{size}" for size in LADDER),
)
"""The names of `Planner.stats`, in its order."""

NOW = frozenset(
    (
        *(f"{length}_waiting" for length in LengthClass),
        *("realtime_running", "batch_running", "realtime_waiting", "batch_waiting", "cold_waiting"),
        *("stored_tokens", "longest_prefill", "decode_deviation"),
        *(name for name in STATS if name.startswith(("step_", "waste_"))),
    )
)
"""Those of them that say how it is now; all others never fall."""
