"""Two workers behind one gateway, in virtual time: the rules that route and those that open breakers, together."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from trimtab import breaking, routing
from trimtab.errors import Outcome
from trimtab.messages import Load
from trimtab.policy_tree import BreakerPart

RULES = BreakerPart()
STEP_MS = 5.0


@dataclass
class Worker:
    """Serves one request after the other."""

    name: str
    service_ms: float
    joins_ms: float = 0.0
    breaker: breaking.Breaker = field(default_factory=breaking.Breaker)
    queue: deque[tuple[float, routing.Pick]] = field(default_factory=deque)
    """When each came, and why it came here."""
    free_ms: float = 0.0

    def candidate(self, now_ms: float) -> routing.Candidate:
        n = len(self.queue)
        return routing.Candidate(
            self.name, 1, now_ms >= self.joins_ms, Load(running=min(1, n), waiting=max(0, n - 1)), n,
            gate=breaking.gate(self.breaker, now_ms), doubtful=breaking.doubtful(self.breaker, now_ms), room=10_000,
        )  # fmt: skip


def run(
    workers: list[Worker], per_s: float, seconds: float, counts: Callable[[routing.Pick], bool] = lambda p: p.compared
) -> list[tuple[float, str, breaking.Trip]]:
    """What trips, and when. `counts` says whose first tokens are compared with others'."""
    rng, trips = random.Random(7), []
    now_ms, next_ms = 0.0, 0.0
    by_name = {w.name: w for w in workers}
    while now_ms < seconds * 1000.0:
        now_ms += STEP_MS
        for w in workers:
            while w.queue and w.free_ms <= now_ms - w.service_ms:
                came_ms, pick = w.queue.popleft()
                ended_ms = max(w.free_ms, came_ms) + w.service_ms
                w.free_ms = ended_ms
                others = [o for o in workers if o is not w and o.breaker.phase is breaking.Phase.CLOSED]
                medians = [breaking.median_ttft_ms(o.breaker, RULES, now_ms) for o in others]
                w.breaker, trip = breaking.observe(
                    w.breaker,
                    Outcome.OK,
                    RULES,
                    now_ms,
                    probe=pick.probe,
                    ttft_ms=ended_ms - came_ms if counts(pick) else None,
                    peers_median_ms=breaking.median_of_peers(
                        len(others), len(workers) - 1, sorted(m for m in medians if m is not None)
                    ),
                )
                if trip is not None:
                    trips.append((now_ms, w.name, trip))
        while next_ms <= now_ms:
            next_ms += rng.expovariate(per_s / 1000.0)
            fleet = [w.candidate(now_ms) for w in workers]
            pick = routing.pick(fleet, routing.Want(), [rng.random() for _ in range(routing.draws(len(fleet)))])
            w = by_name[pick.node_id]
            if pick.probe:
                w.breaker = breaking.probing(w.breaker, RULES, now_ms)
            if not w.queue:
                w.free_ms = max(w.free_ms, now_ms)
            w.queue.append((now_ms, pick))
    return trips


def two_of_which_one_comes_late() -> list[Worker]:
    return [Worker("w0", 50.0), Worker("w1", 50.0, joins_ms=15_000.0)]


def test_a_worker_with_a_backlog_is_not_taken_for_a_slow_one() -> None:
    """More than one can do, less than both: shut, the one with the backlog would leave all to the other, who would look slow next."""
    assert run(two_of_which_one_comes_late(), 28.0, 120.0) == []


def test_what_would_happen_if_every_first_token_were_compared() -> None:
    """The two shut each other in turn, for good."""
    trips = run(two_of_which_one_comes_late(), 28.0, 120.0, counts=lambda pick: True)
    assert {name for _, name, _ in trips} == {"w0", "w1"}
    assert len(trips) >= 3


def test_an_overload_of_equals_opens_nothing() -> None:
    assert run([Worker("w0", 50.0), Worker("w1", 50.0)], 48.0, 60.0) == []


def test_a_worker_that_is_slow_by_itself_is_still_found() -> None:
    trips = run([Worker("w0", 50.0), Worker("w1", 400.0)], 15.0, 60.0)
    assert trips and {name for _, name, _ in trips} == {"w1"}
    assert trips[0][2].dimension is breaking.Dimension.LATENCY


def test_a_worker_that_is_slow_by_itself_is_found_under_load_too() -> None:
    trips = run([Worker("w0", 50.0), Worker("w1", 50.0), Worker("w2", 400.0)], 36.0, 60.0)
    assert trips and {name for _, name, _ in trips} == {"w2"}
