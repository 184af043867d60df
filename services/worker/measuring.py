"""What a worker's requests were like, as it is reported: sketches, counters and outliers by the names of `trimtab.measures`.

It is told of each request as things happen, and has no clock of its own: moments are seconds of the clock that the engine stamps by. A
request that goes on here after another worker has a first token, a prompt and a wait that were the other one's to measure: of it only
gaps, counters and its end are taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from services.worker.engines import Stamps
from trimtab import measures
from trimtab.errors import Outcome
from trimtab.interval import Intervals
from trimtab.measures import COLD, HOT
from trimtab.messages import Outlier, Request, Timings, Workload
from trimtab.policy import Policy
from trimtab.reuse import Reuse
from trimtab.scheduling import LengthClass, edges_of

LATE_SHARE = 0.01
"""An objective for the P99 of gaps is missed where more than this share of them is above it."""
GAP_EDGES_MS = (5.0, 10.0, 20.0, 35.0, 50.0, 75.0, 100.0, 150.0, 200.0, 350.0, 500.0, 1000.0, 2000.0, 5000.0)


class Buckets:
    """How many values there were up to each edge. Costs a binary search a value, where a Prometheus histogram costs microseconds."""

    __slots__ = ("_counts", "sum")

    def __init__(self) -> None:
        self._counts = [0] * (len(GAP_EDGES_MS) + 1)
        self.sum = 0.0

    def add(self, value_ms: float) -> None:
        self._counts[bisect_left(GAP_EDGES_MS, value_ms)] += 1
        self.sum += value_ms

    def up_to(self) -> list[int]:
        """At each edge, and in all."""
        return list(accumulate(self._counts))


@dataclass(slots=True, eq=False)
class Ongoing:
    """One request from its acceptance to its end. Objectives are those in force when it came; infinite where it has none."""

    request_id: str
    workload: Workload
    prompt_tokens: int
    length: LengthClass
    cold: bool
    arrival: float
    age_s: float
    """How long the mesh had it then."""
    before: int | None
    """Tokens that another worker has delivered; None where it begins here."""
    ttft_ms: float
    itl_ms: float
    queue_ms: float
    itl_name: str
    last_at: float = 0.0
    """When its newest output came; 0.0 before the first."""
    gaps: int = 0
    late: int = 0
    """Gaps above the objective."""
    longest_gap_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class End:
    """How a request ended. `output_tokens` are those delivered here."""

    workload: Workload
    outcome: str
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    timings: Timings
    at: float
    out_of_memory: bool = False


class Measuring:
    """Belongs to one event loop. `around` says how many requests run in the engine now, and the longest prompt in prefill there."""

    def __init__(self, policy: Callable[[], Policy], around: Callable[[], tuple[int, int]], now: float) -> None:
        self._policy = policy
        self._around = around
        self.intervals = Intervals(now)
        self._running: set[Ongoing] = set()
        """Those that have had an output here and have not ended."""
        self.counters: dict[str, int] = dict.fromkeys(measures.OWN_COUNTERS, 0)
        """Since this incarnation began; they go up with the report."""
        self.gaps: dict[Workload, Buckets] = {w: Buckets() for w in Workload}
        """Of all time, for Prometheus."""
        self.reuse = Reuse()
        """What requests had in common with those before."""

    def accepted(self, request: Request, prompt_tokens: int, arrival: float, age_s: float) -> Ongoing:
        """It has its place here. `arrival` is when this worker got it."""
        policy, workload = self._policy(), request.workload or Workload.REALTIME
        realtime, slo, o = workload is Workload.REALTIME, request.slo, policy.objectives
        infinite = float("inf")
        if request.resume is None:
            self.intervals.add(measures.PROMPT, prompt_tokens)
            self.reuse.sessions.request(request.session_id, arrival)
        return Ongoing(
            request.request_id,
            workload,
            prompt_tokens,
            LengthClass.of(prompt_tokens, edges_of(policy)),
            prompt_tokens >= policy.paths.hot_below,
            arrival,
            age_s,
            None if request.resume is None else len(request.resume.token_ids),
            ttft_ms=float(slo.ttft_ms or (o.ttft_p99_ms if realtime else infinite)),
            itl_ms=float(slo.itl_ms or (o.itl_p99_ms if realtime else infinite)),
            queue_ms=infinite if realtime else o.max_queue_s * 1000.0,
            itl_name=measures.itl(workload),
        )

    def output(self, one: Ongoing, stamps: Stamps, now: float) -> None:
        """The engine gave a token of it, or several together: that is one gap. `now` stands in where the engine stamps nothing."""
        at = stamps.last_token or now
        last, one.last_at = one.last_at, at
        if not last:
            self._running.add(one)
            if one.before is None:
                ttft_ms = max(0.0, ((stamps.first_token or now) - one.arrival) * 1000.0)
                self.intervals.add(measures.ttft(one.workload, COLD if one.cold else HOT), ttft_ms)
                self.intervals.add(measures.ttft_by_length(one.length), ttft_ms)
            return
        gap_ms = max(0.0, (at - last) * 1000.0)
        one.gaps += 1
        one.late += gap_ms > one.itl_ms
        if gap_ms > one.longest_gap_ms:
            one.longest_gap_ms = gap_ms
        self.intervals.add(one.itl_name, gap_ms)
        self.gaps[one.workload].add(gap_ms)

    def ended(self, end: End, one: Ongoing | None) -> None:
        """However it ended. `one` is None where it was never accepted."""
        counters, workload = self.counters, end.workload
        counters[measures.REQUESTS] += 1
        counters[measures.requests_of(workload)] += 1
        counters[measures.ERRORS] += end.outcome == Outcome.ENGINE_FAULT.value
        counters[measures.OUT_OF_MEMORY] += end.out_of_memory
        counters[measures.PROMPT_TOKENS] += end.prompt_tokens
        counters[measures.OUTPUT_TOKENS] += end.output_tokens
        counters[measures.CACHED_TOKENS] += end.cached_tokens
        self.reuse.prefixes.hit(end.cached_tokens, end.at)
        if one is None:
            return
        self._running.discard(one)
        counters[measures.requests_of_length(one.length)] += 1
        if end.outcome == Outcome.OK.value:
            self.intervals.add(measures.TOTAL, one.prompt_tokens + (one.before or 0) + end.output_tokens)
            if one.before is None and end.timings.total_ms:
                self.intervals.add(measures.e2e(workload), end.timings.total_ms)
        badness = _badness(one, end)
        if badness > 1.0:
            counters[measures.over(workload)] += 1
            if self.intervals.keeps(badness):
                self.intervals.keep(badness, self._outlier(one, end))

    def _outlier(self, one: Ongoing, end: End) -> Outlier:
        running, in_prefill = self._around()
        longest = max((other.prompt_tokens for other in self._running), default=0)
        if one.last_at or in_prefill != one.prompt_tokens:
            # One that left in the middle of its prompt may still be there itself.
            longest = max(longest, in_prefill)
        return Outlier(
            one.request_id,
            one.workload,
            one.prompt_tokens,
            output_tokens=end.output_tokens,
            ttft_ms=_ttft_ms(one, end),
            itl_ms=one.longest_gap_ms,
            queued_ms=_queued_ms(one, end),
            preemptions=end.timings.preemptions,
            neighbours=max(running, len(self._running)),
            longest_neighbour_tokens=longest,
        )


def _ttft_ms(one: Ongoing, end: End) -> float:
    """Who left before the first token has waited at least so long. 0.0 where it had its first one elsewhere."""
    if one.before is not None:
        return 0.0
    return end.timings.first_token_ms if one.last_at else max(0.0, (end.at - one.arrival) * 1000.0)


def _queued_ms(one: Ongoing, end: End) -> float:
    """Since it came to the mesh; 0.0 where it had its first step elsewhere."""
    if one.before is not None:
        return 0.0
    here_ms = end.timings.queued_ms if one.last_at else (end.at - one.arrival) * 1000.0
    return max(0.0, here_ms + one.age_s * 1000.0)


def _badness(one: Ongoing, end: End) -> float:
    """How many times its objective it took, of the objective that it missed most; 1.0 or less where it missed none."""
    gap = one.longest_gap_ms / one.itl_ms if one.late > LATE_SHARE * one.gaps else 0.0
    return max(_ttft_ms(one, end) / one.ttft_ms, _queued_ms(one, end) / one.queue_ms, gap)
