"""What requests were like, as a node reports it: sketches, counters and outliers under the names of `trimtab.measures`.

These are the rules, and they have no clock: what a figure counts as, what an objective is, when it is missed and by how much. Real engines
feed them in `services/worker/measuring.py`, simulated ones in `trimtab/simulation/measuring.py`, each by the moments that it knows. A request
that goes on at a node after another one has a first token, a prompt and a wait that were the other one's to measure: whoever feeds leaves
those out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab import measures
from trimtab.interval import Intervals
from trimtab.messages import SloTargets, Workload
from trimtab.policy import Policy
from trimtab.scheduling import LengthClass, edges_of

LATE_SHARE = 0.01
"""An objective for the P99 of gaps is missed where more than this share of them is above it."""
_ITL = {w: measures.itl(w) for w in Workload}
_NO_TARGETS = SloTargets()


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request is measured against, in milliseconds; infinite where it has no objective."""

    ttft_ms: float
    itl_ms: float
    queue_ms: float


def targets_of(policy: Policy, workload: Workload, slo: SloTargets = _NO_TARGETS) -> Targets:
    """A request's own objectives, else the policy's: of REALTIME for first tokens and gaps, of BATCH for its wait."""
    realtime, o = workload is Workload.REALTIME, policy.objectives
    return Targets(
        float(slo.ttft_ms or (o.ttft_p99_ms if realtime else math.inf)),
        float(slo.itl_ms or (o.itl_p99_ms if realtime else math.inf)),
        math.inf if realtime else o.max_queue_s * 1000.0,
    )


def is_cold(policy: Policy, prompt_tokens: int) -> bool:
    return prompt_tokens >= policy.paths.hot_below


def length_of(policy: Policy, prompt_tokens: int) -> LengthClass:
    return LengthClass.of(prompt_tokens, edges_of(policy))


@dataclass(slots=True)
class Gaps:
    """Between one request's outputs; `late` are above the objective."""

    count: int = 0
    late: int = 0
    longest_ms: float = 0.0

    def add(self, gap_ms: float, target_ms: float) -> None:
        self.count += 1
        self.late += gap_ms > target_ms
        if gap_ms > self.longest_ms:
            self.longest_ms = gap_ms


def badness(targets: Targets, ttft_ms: float, queued_ms: float, gaps: Gaps) -> float:
    """How many times its objective it took, of the objective that it missed most; 1.0 or less where it missed none."""
    gap = gaps.longest_ms / targets.itl_ms if gaps.late > LATE_SHARE * gaps.count else 0.0
    return max(ttft_ms / targets.ttft_ms, queued_ms / targets.queue_ms, gap)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a request ended. `prompt_tokens` and `cached_tokens` are its prompt's, `output_tokens` were delivered here. `length` is None where it
    was never accepted; the totals are None where they are not this node's to measure, or it did not end well."""

    workload: Workload
    failed: bool
    output_tokens: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    out_of_memory: bool = False
    length: LengthClass | None = None
    total_tokens: int | None = None
    e2e_ms: float | None = None
    badness: float = 0.0


class Measured:
    """Of one process: counters since it began, and what there is since its last report. A gateway has no `engine`, and says less. Times are
    seconds of one clock.
    """

    def __init__(self, now: float, *, engine: bool = True) -> None:
        self.intervals = Intervals(now)
        self.counters: dict[str, int] = dict.fromkeys(measures.OWN_COUNTERS, 0)
        self._engine = engine

    def prompt(self, tokens: int) -> None:
        """It was accepted here, and had not been anywhere else."""
        self.intervals.add(measures.PROMPT, tokens)

    def first_token(self, workload: Workload, length: LengthClass, ttft_ms: float, *, cold: bool) -> None:
        self.intervals.add(measures.ttft(workload, measures.COLD if cold else measures.HOT), ttft_ms)
        if self._engine:
            self.intervals.add(measures.ttft_by_length(length), ttft_ms)

    def gap(self, workload: Workload, ms: float) -> None:
        self.intervals.add(_ITL[workload], ms)

    def ended(self, end: Ended) -> bool:
        """However it ended. True where it is among the worst that missed an objective: then `intervals` keeps an outlier of it."""
        c, workload = self.counters, end.workload
        c[measures.REQUESTS] += 1
        c[measures.ERRORS] += end.failed
        c[measures.OUTPUT_TOKENS] += end.output_tokens
        if end.e2e_ms is not None:
            self.intervals.add(measures.e2e(workload), end.e2e_ms)
        if not self._engine:
            return False
        c[measures.requests_of(workload)] += 1
        c[measures.OUT_OF_MEMORY] += end.out_of_memory
        c[measures.PROMPT_TOKENS] += end.prompt_tokens
        c[measures.CACHED_TOKENS] += end.cached_tokens
        if end.length is None:
            return False
        c[measures.requests_of_length(end.length)] += 1
        if end.total_tokens is not None:
            self.intervals.add(measures.TOTAL, end.total_tokens)
        if end.badness <= 1.0:
            return False
        c[measures.over(workload)] += 1
        return self.intervals.keeps(end.badness)
