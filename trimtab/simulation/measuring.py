"""What a simulated node measures, and its reports; the rules are those of `trimtab/measuring.py`.

It measures by virtual time since a request came to the mesh, against the objectives that are in force when something happens.
"""

from __future__ import annotations

from collections.abc import Mapping

from trimtab.measuring import Ended, Measured, badness, is_cold, length_of, targets_of
from trimtab.messages import Load, NodeState, Outlier, Report, Workload
from trimtab.policy import Policy
from trimtab.simulation.request import Fate, Request


class Measuring:
    """Of one process. A gateway has no `engine`, and says less."""

    def __init__(self, now_ms: float, *, engine: bool = True) -> None:
        self._measured = Measured(now_ms / 1000.0, engine=engine)
        self._sequence = 0
        self._policy: Policy | None = None
        self._itl_ms: dict[Workload, float] = {}
        """The objectives of this policy: gaps are many."""

    def accepted(self, r: Request) -> None:
        if r.attempts == 1:
            self._measured.prompt(r.prompt)

    def first_token(self, r: Request, policy: Policy) -> None:
        length, cold = length_of(policy, r.prompt), is_cold(policy, r.prompt)
        self._measured.first_token(r.workload, length, r.ttft_ms or 0.0, cold=cold)

    def gap(self, r: Request, policy: Policy, ms: float) -> None:
        if policy is not self._policy:
            self._policy, self._itl_ms = policy, {w: targets_of(policy, w).itl_ms for w in Workload}
        r.gaps.add(ms, self._itl_ms[r.workload])
        self._measured.gap(r.workload, ms)

    def ended(self, r: Request, policy: Policy, now_ms: float, neighbours: int = 0, longest: int = 0) -> None:
        """However it ended. `neighbours` run beside it, the longest prompt among them has `longest` tokens."""
        served = r.fate is Fate.SERVED
        found = Ended(
            r.workload, r.fate is Fate.FAILED, r.delivered - r.delivered_before, r.prompt,
            length=length_of(policy, r.prompt),
            total_tokens=r.prompt + r.output if served else None,
            e2e_ms=now_ms - r.arrival_ms if served and r.attempts == 1 else None,
            badness=missed(r, policy),
        )  # fmt: skip
        if self._measured.ended(found):
            outlier = Outlier(
                r.request_id, r.workload, r.prompt, r.delivered, r.ttft_ms or 0.0, r.gaps.longest_ms, r.queued_ms,
                r.preemptions, neighbours, longest,
            )  # fmt: skip
            self._measured.intervals.keep(found.badness, outlier)

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
        taken = self._measured.intervals.take(now_ms / 1000.0)
        return Report(
            self._sequence,
            state,
            load,
            steps,
            {**self._measured.counters, **more},
            taken.sketches,
            taken.interval_ms,
            gauges,
            taken.outliers,
        )


def missed(r: Request, policy: Policy) -> float:
    """How many times its objective it took, of the objective that it missed most; 1.0 or less where it missed none."""
    return badness(targets_of(policy, r.workload), r.ttft_ms or 0.0, r.queued_ms, r.gaps)
