"""The goals of `mixed`, each beside its figure. Pure.

P1 and P2 ask for *a* point of ours (one `itl_budget_ms`) that meets several conditions at once: each is judged at the point whose weakest
condition is best, and a note says which that is. P2b looks at all points. A P95 decides nothing below 200 requests in 6 rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.bench.goals import Goal
from services.bench.mixed.arms import FCFS, OVERTAKE, PRIORITY, REALTIME_ALONE, budget_ms, is_ours
from services.bench.mixed.figures import Found, e2e_ratio, names, share_ratio, shared, tail_decides, tokens_ratio
from services.bench.stats import MIN_GROUPS, Bound, Estimate, verdict
from trimtab.policy import FIELDS

P1_E2E, P1_TOKENS = 1.5, 0.90
P2_FCFS, P2_PRIORITY, P2_TOKENS = 8.0, 3.0, 0.97
SHARE = 0.9
Q = "p95"


@dataclass(frozen=True, slots=True)
class Condition:
    name: str
    goal: float
    bound: Bound
    estimate: Estimate | None
    decides: bool

    @property
    def slack(self) -> float:
        """Above 1 on the good side of the goal."""
        if self.estimate is None:
            return 0.0
        value = max(self.estimate.value, 1e-9)
        return self.goal / value if self.bound is Bound.AT_MOST else value / self.goal

    def as_goal(self) -> Goal:
        if self.estimate is None:
            return Goal(self.name, self.goal, self.bound)
        met = verdict(self.estimate, self.goal, self.bound) if self.decides else None
        return Goal(self.name, self.goal, self.bound, self.estimate.value, met, self.estimate)


def goals(found: Found, seed: int, *, quick: bool) -> tuple[list[Goal], list[str]]:
    """All of them, measured or not, and what there is to say about them. `quick` says nothing of tails."""
    if quick:
        found = {arm: [replace(b, realtime=()) for b in blocks] for arm, blocks in found.items()}
    points = sorted((name for name in found if is_ours(name)), key=budget_ms)
    judged: list[Goal] = []
    notes: list[str] = []
    for name, make in (("P1", _p1), ("P2", _p2)):
        made = {point: make(found, point, seed) for point in points}
        merits = {point: _merit(conditions) for point, conditions in made.items()}
        at = max(merits, key=merits.__getitem__, default=None)
        if at is not None:
            notes.append(f"{name} is judged at {at}, the point whose weakest condition is best")
        judged += [c.as_goal() for c in (made[at] if at is not None else make(found, "", seed))]
    judged += [_not_dominated(found, points, seed), _monotone(found, points, seed)]
    judged += [_share(found, point, seed) for point in points]
    return [*judged, _overtaking(found, points)], notes


def _ratio(found: Found, arm: str, other: str, seed: int) -> Estimate | None:
    """Of the P95, where requests enough lie beyond it."""
    if Q not in names(None, sum(len(mine.realtime) for mine, _ in shared(found, arm, other)), quick=False):
        return None
    return e2e_ratio(found, arm, other, [Q], seed).get(Q)


def _p1(found: Found, point: str, seed: int) -> list[Condition]:
    alone, tokens = REALTIME_ALONE.name, tokens_ratio(found, point, FCFS.name, seed)
    return [
        Condition(
            "p1_realtime_e2e_p95_over_realtime_alone", P1_E2E, Bound.AT_MOST,
            _ratio(found, point, alone, seed), tail_decides(found, point, alone),
        ),
        Condition("p1_tokens_per_s_over_fcfs", P1_TOKENS, Bound.AT_LEAST, tokens, True),
    ]  # fmt: skip


def _p2(found: Found, point: str, seed: int) -> list[Condition]:
    conditions = [
        Condition(
            f"p2_realtime_e2e_p95_{other.name}_over_ours", goal, Bound.AT_LEAST,
            _ratio(found, other.name, point, seed), tail_decides(found, point, other.name),
        )
        for other, goal in ((FCFS, P2_FCFS), (PRIORITY, P2_PRIORITY))
    ]  # fmt: skip
    tokens = tokens_ratio(found, point, FCFS.name, seed)
    return [*conditions, Condition("p2_tokens_per_s_over_fcfs", P2_TOKENS, Bound.AT_LEAST, tokens, True)]


def _merit(conditions: Sequence[Condition]) -> tuple[int, float]:
    """Measured conditions first, then how good the weakest of them is."""
    slacks = [c.slack for c in conditions if c.estimate is not None]
    return len(slacks), min(slacks, default=0.0)


def _not_dominated(found: Found, points: Sequence[str], seed: int) -> Goal:
    """The value is how many of our points some baseline beats or equals in latency and in throughput, by the estimates."""
    name = "p2b_our_points_dominated_by_fcfs_or_priority"
    verdicts: list[bool | None] = []
    beaten: set[str] = set()
    for point in points:
        for other in (FCFS.name, PRIORITY.name):
            latency, tokens = _ratio(found, other, point, seed), tokens_ratio(found, other, point, seed)
            if latency is None or tokens is None:
                continue
            if latency.value <= 1.0 and tokens.value >= 1.0:
                beaten.add(point)
            decides = tail_decides(found, point, other) and tokens.n >= MIN_GROUPS
            safe, lost = latency.low > 1.0 or tokens.high < 1.0, latency.high <= 1.0 and tokens.low >= 1.0
            verdicts.append((True if safe else False if lost else None) if decides else None)
    if not verdicts:
        return Goal(name, 0, Bound.AT_MOST)
    met = False if False in verdicts else None if None in verdicts else True
    return Goal(name, 0, Bound.AT_MOST, float(len(beaten)), met)


def _monotone(found: Found, points: Sequence[str], seed: int) -> Goal:
    """The value is how often a larger budget is certainly faster for realtime, or certainly slower for all, than the one before it."""
    name, against, decides, pairs = "p2b_steps_against_the_order_of_budgets", 0, True, 0
    for small, large in itertools.pairwise(points):
        latency, tokens = _ratio(found, large, small, seed), tokens_ratio(found, large, small, seed)
        if latency is None or tokens is None:
            continue
        pairs += 1
        decides &= tail_decides(found, large, small) and tokens.n >= MIN_GROUPS
        against += (latency.high < 1.0) + (tokens.high < 1.0)
    if not pairs:
        return Goal(name, 0, Bound.AT_MOST)
    return Goal(name, 0, Bound.AT_MOST, float(against), against == 0 if decides else None)


def _share(found: Found, point: str, seed: int) -> Goal:
    name = f"tokens_per_s_over_batch_alone_in_time_left_at_{budget_ms(point)}_ms"
    return Goal.judged(name, SHARE, Bound.AT_LEAST, share_ratio(found, point, seed))


def _overtaking(found: Found, points: Sequence[str]) -> Goal:
    bound = float(FIELDS[OVERTAKE].default)  # type: ignore[arg-type]
    most = max((b.max_overtake_ms for point in points for b in found[point]), default=math.nan)
    if math.isnan(most):
        return Goal("max_overtake_ms", bound, Bound.AT_MOST)
    return Goal("max_overtake_ms", bound, Bound.AT_MOST, most, most <= bound)


def like_stock(same: int, of: int) -> Goal:
    """How many requests of the check our FCFS serves as stock FCFS does."""
    return Goal("requests_that_fcfs_serves_as_stock", of, Bound.AT_LEAST, float(same), same >= of)
