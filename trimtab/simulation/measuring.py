"""What a simulated node measures, under the names that real ones use (`trimtab.measures`) and by their rules, and its reports.

The rules are those of `services/worker/measuring.py`, which is fed by real engines: a request that goes on after another worker was
measured there, but for gaps, counters and its end.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab import measures
from trimtab.interval import Intervals
from trimtab.messages import Load, NodeState, Outlier, Report, Workload
from trimtab.policy import Policy
from trimtab.scheduling import LengthClass, edges_of
from trimtab.simulation.request import Fate, Request

_ITL = {w: measures.itl(w) for w in Workload}
LATE_SHARE = 0.01
"""An objective for the P99 of gaps is missed where more than this share of them is above it."""


class Measuring:
    """Of one process: counters since it began, sketches and outliers since the last report. A gateway has no `engine`, and says less."""

    def __init__(self, now_ms: float, *, engine: bool = True) -> None:
        self._engine = engine
        self._intervals = Intervals(now_ms / 1000.0)
        self._sequence = 0
        self.counters: dict[str, int] = dict.fromkeys(measures.OWN_COUNTERS, 0)

    def accepted(self, r: Request) -> None:
        if r.attempts == 1:
            self._intervals.add(measures.PROMPT, r.prompt)

    def first_token(self, r: Request, policy: Policy) -> None:
        ttft_ms = r.ttft_ms or 0.0
        path = measures.HOT if r.prompt < policy.paths.hot_below else measures.COLD
        self._intervals.add(measures.ttft(r.workload, path), ttft_ms)
        if self._engine:
            self._intervals.add(measures.ttft_by_length(LengthClass.of(r.prompt, edges_of(policy))), ttft_ms)

    def gap(self, workload: Workload, ms: float) -> None:
        self._intervals.add(_ITL[workload], ms)

    def ended(self, r: Request, policy: Policy, now_ms: float, neighbours: int = 0, longest: int = 0) -> None:
        """However it ended. `neighbours` run beside it, the longest prompt among them has `longest` tokens."""
        c = self.counters
        c[measures.REQUESTS] += 1
        c[measures.ERRORS] += r.fate is Fate.FAILED
        c[measures.OUTPUT_TOKENS] += r.delivered - r.delivered_before
        if r.fate is Fate.SERVED and r.attempts == 1:
            self._intervals.add(measures.e2e(r.workload), now_ms - r.arrival_ms)
        if not self._engine:
            return
        c[measures.requests_of(r.workload)] += 1
        c[measures.requests_of_length(LengthClass.of(r.prompt, edges_of(policy)))] += 1
        c[measures.PROMPT_TOKENS] += r.prompt
        if r.fate is Fate.SERVED:
            self._intervals.add(measures.TOTAL, r.prompt + r.output)
        badness = missed(r, policy)
        if badness > 1.0:
            c[measures.over(r.workload)] += 1
            found = Outlier(
                r.request_id, r.workload, r.prompt, r.delivered, r.ttft_ms or 0.0, r.longest_gap_ms, r.queued_ms, r.preemptions,
                neighbours, longest,
            )  # fmt: skip
            self._intervals.keep(badness, found)

    def report(
        self,
        now_ms: float,
        state: NodeState,
        load: Load,
        steps: int,
        more: Mapping[str, int],
        gauges: Mapping[str, float],
    ) -> Report:
        """What there is since the last one; the next interval starts here."""
        self._sequence += 1
        taken = self._intervals.take(now_ms / 1000.0)
        return Report(
            self._sequence,
            state,
            load,
            steps,
            {**self.counters, **more},
            taken.sketches,
            taken.interval_ms,
            gauges,
            taken.outliers,
        )


def missed(r: Request, policy: Policy) -> float:
    """How many times its objective it took, of the objective that it missed most; 1.0 or less where it missed none."""
    o = policy.objectives
    if r.workload is Workload.BATCH:
        return r.queued_ms / (1000.0 * o.max_queue_s)
    gap = r.longest_gap_ms / o.itl_p99_ms if r.late_gaps > LATE_SHARE * r.gaps else 0.0
    return max((r.ttft_ms or 0.0) / o.ttft_p99_ms, gap)
