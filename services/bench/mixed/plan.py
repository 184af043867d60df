"""What runs, how often and in which order, and how long that should take. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.bench.mixed.arms import BUDGETS_MS, FCFS, Arm, chosen, ours
from services.bench.mixed.block import Timing
from services.bench.mixed.workload import arrivals, counted
from services.bench.options import Options
from services.bench.stats import MIN_GROUPS

REALTIME_PER_ARM, ABLATION_REALTIME = 200, 60
ABLATION_ROUNDS = 2
MOST_ROUNDS = 60
STEP_TOKENS = 2048
"""What vLLM's own server takes for a step by default on a CPU."""
START_S, CHECK_S, DRAIN_S = 35.0, 80.0, 8.0
"""Expected, for the forecast only; so is the tail, which most arms do not use up."""
EXPECTED_RATE = 0.32
QUICK_BUDGET_S = 168.0
ASIDE_S = 7.0
"""For the switch before a block and the drain after it, where time is short."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`rounds` None takes as many as the wanted requests need. `capacity` and `check` are left out where they are None or False."""

    arms: tuple[Arm, ...]
    timing: Timing
    rounds: int | None = None
    realtime_per_arm: int = REALTIME_PER_ARM
    calibration: int = 20
    alone: Timing | None = None
    """A block of realtime alone that corrects the rate: requests that come as they come are slower than one at a time."""
    capacity: Timing | None = None
    check: bool = True
    quick: bool = False
    budget_s: float | None = None
    left_out: str = ""

    @staticmethod
    def of(options: Options) -> Plan:
        """ValueError names an arm that there is not."""
        budgets = sorted(options.itl_budgets_ms or BUDGETS_MS)
        if options.quick:
            middle = ours(budgets[len(budgets) // 2])
            return Plan(
                chosen(options.arms, budgets) if options.arms else (FCFS, middle),
                _timing(options.block_s or 60.0, 4.0),
                options.rounds or 1,
                calibration=8,
                check=False,
                quick=True,
                budget_s=QUICK_BUDGET_S,
                left_out="--quick leaves out capacity, the check that this FCFS is stock FCFS, every quantile but P50, and, unless --arms names "
                "others, all arms but FCFS and one of ours: what goals ask of the tail stays undecided",
            )
        return Plan(
            chosen(options.arms, budgets),
            _timing(options.block_s or 120.0, 90.0),
            options.rounds,
            options.realtime_per_arm or REALTIME_PER_ARM,
            alone=Timing(5.0, 65.0, 20.0),
            capacity=Timing(90.0, 180.0, 0.0),
        )

    def fitted(self, left_s: float) -> float:
        """Seconds that a block may take, for all of them to end within the time that is left."""
        blocks = len(self.arms) * (self.rounds or 1)
        return max(5.0, min(self.timing.block_s, left_s / blocks - self.timing.tail_s - ASIDE_S))

    def timed(self, block_s: float | None) -> Plan:
        """With blocks of this length; None leaves them."""
        return self if block_s is None else replace(self, timing=_timing(block_s, self.timing.tail_s))

    def rounds_of(self, arm: Arm, rate_per_s: float, seed: int) -> int:
        """As many as give the requests wanted of it: the arrivals are known beforehand. Batch alone has as many as the others."""
        if self.rounds is not None:
            return min(self.rounds, ABLATION_ROUNDS) if arm.ablation else self.rounds
        wanted = min(ABLATION_REALTIME, self.realtime_per_arm) if arm.ablation else self.realtime_per_arm
        least, have = (ABLATION_ROUNDS if arm.ablation else MIN_GROUPS), 0
        for round_ in range(MOST_ROUNDS):
            if have >= wanted and round_ >= least:
                return round_
            t = self.timing
            have += counted(arrivals(f"{seed}/{round_}", rate_per_s, t.block_s), t.warm_up_s, t.block_s)
        return MOST_ROUNDS

    def order(self, rate_per_s: float, seed: int) -> Iterator[tuple[int, Arm]]:
        """(round, arm), round after round; within each the arms are shuffled."""
        rounds = {arm.name: self.rounds_of(arm, rate_per_s, seed) for arm in self.arms}
        for round_ in range(max(rounds.values(), default=0)):
            arms = [arm for arm in self.arms if rounds[arm.name] > round_]
            random.Random(f"{seed}/order/{round_}").shuffle(arms)
            yield from ((round_, arm) for arm in arms)

    def block_s(self) -> float:
        return self.timing.block_s + min(self.timing.tail_s, 10.0) + DRAIN_S

    def calibration_s(self) -> float:
        return 1.0 * self.calibration + (self.alone.block_s + DRAIN_S if self.alone else 0.0)

    def capacity_s(self) -> float:
        return self.capacity.block_s + DRAIN_S if self.capacity else 0.0

    def expected_s(self, rate_per_s: float = EXPECTED_RATE, seed: int = 1) -> float:
        blocks = sum(1 for _ in self.order(rate_per_s, seed))
        return START_S + CHECK_S * self.check + self.calibration_s() + self.capacity_s() + blocks * self.block_s()


def _timing(block_s: float, tail_s: float) -> Timing:
    return Timing(min(15.0, block_s / 6), block_s, tail_s)
