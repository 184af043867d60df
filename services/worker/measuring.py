"""What a worker's requests were like, by what its engine stamps and its service sees; the rules are those of `trimtab/measuring.py`.

It is told of each request as things happen, and has no clock of its own: moments are seconds of the clock that the engine stamps by. Of a
request that goes on here after another worker only gaps, counters and its end are taken.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from services.worker.engines import Stamps
from trimtab.errors import Outcome
from trimtab.measuring import Ended, Gaps, Measured, Targets, badness, is_cold, length_of, targets_of
from trimtab.messages import Outlier, Request, Timings, Workload
from trimtab.policy import Policy
from trimtab.reuse import Reuse
from trimtab.scheduling import LengthClass

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
    """One request from its acceptance to its end. Objectives are those in force when it came."""

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
    targets: Targets
    last_at: float = 0.0
    """When its newest output came; 0.0 before the first."""
    gaps: Gaps = field(default_factory=Gaps)


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
        self._measured = Measured(now)
        self.intervals = self._measured.intervals
        self.counters = self._measured.counters
        """Since this incarnation began; they go up with the report."""
        self._running: set[Ongoing] = set()
        """Those that have had an output here and have not ended."""
        self.gaps: dict[Workload, Buckets] = {w: Buckets() for w in Workload}
        """Of all time, for Prometheus."""
        self.reuse = Reuse()
        """What requests had in common with those before."""

    def accepted(self, request: Request, prompt_tokens: int, arrival: float, age_s: float) -> Ongoing:
        """It has its place here. `arrival` is when this worker got it."""
        policy, workload = self._policy(), request.workload or Workload.REALTIME
        if request.resume is None:
            self._measured.prompt(prompt_tokens)
            self.reuse.sessions.request(request.session_id, arrival)
        return Ongoing(
            request.request_id,
            workload,
            prompt_tokens,
            length_of(policy, prompt_tokens),
            is_cold(policy, prompt_tokens),
            arrival,
            age_s,
            None if request.resume is None else len(request.resume.token_ids),
            targets_of(policy, workload, request.slo),
        )

    def output(self, one: Ongoing, stamps: Stamps, now: float) -> None:
        """The engine gave a token of it, or several together: that is one gap. `now` stands in where the engine stamps nothing."""
        at = stamps.last_token or now
        last, one.last_at = one.last_at, at
        if not last:
            self._running.add(one)
            if one.before is None:
                ttft_ms = max(0.0, ((stamps.first_token or now) - one.arrival) * 1000.0)
                self._measured.first_token(one.workload, one.length, ttft_ms, cold=one.cold)
            return
        gap_ms = max(0.0, (at - last) * 1000.0)
        one.gaps.add(gap_ms, one.targets.itl_ms)
        self._measured.gap(one.workload, gap_ms)
        self.gaps[one.workload].add(gap_ms)

    def ended(self, end: End, one: Ongoing | None) -> None:
        """However it ended. `one` is None where it was never accepted."""
        self.reuse.prefixes.hit(end.cached_tokens, end.at)
        failed = end.outcome == Outcome.ENGINE_FAULT.value
        counted = (end.workload, failed, end.output_tokens, end.prompt_tokens, end.cached_tokens, end.out_of_memory)
        if one is None:
            self._measured.ended(Ended(*counted))
            return
        self._running.discard(one)
        well = end.outcome == Outcome.OK.value
        how_bad = badness(one.targets, _ttft_ms(one, end), _queued_ms(one, end), one.gaps)
        found = Ended(
            *counted,
            one.length,
            one.prompt_tokens + (one.before or 0) + end.output_tokens if well else None,
            (end.timings.total_ms or None) if well and one.before is None else None,
            how_bad,
        )
        if self._measured.ended(found):
            self.intervals.keep(how_bad, self._outlier(one, end))

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
            itl_ms=one.gaps.longest_ms,
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
