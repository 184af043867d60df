"""How much of `overhead` is measured, in which order, and how long that should take. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.bench.figures import ARMS

MAX_TOKENS = 64
LONE_ARMS, LONE_REQUESTS = ("mesh", "http"), 8
START_S, PAIR_S, FIRST_S, ASIDE_S = 25.0, 0.05, 0.2, 2.3
"""Expected, for the forecast only; `ASIDE_S` is what a turn spends besides its burst."""
TOKENS_PER_S = {1: 20, 8: 140, 32: 330}
"""Expected likewise: SmolLM2-135M on two cores."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`requests` by concurrency, for one arm in one round; `firsts` likewise, of short ones that count for TTFT alone.

    `lone_rounds` more, of `LONE_REQUESTS` short ones at 1 stream, are of `LONE_ARMS` only.

    `budget_s` bounds the measuring; what it leaves undone is left out of the report.
    """

    rounds: int
    requests: Mapping[int, int]
    pairs: int
    firsts: Mapping[int, int] = field(default_factory=dict)
    lone_rounds: int = 0
    arms: tuple[str, ...] = ARMS
    budget_s: float | None = None
    left_out: str = ""

    def cell_s(self, concurrency: int) -> float:
        bursts = self.requests[concurrency] * MAX_TOKENS / TOKENS_PER_S[concurrency]
        return bursts + self.firsts.get(concurrency, 0) * FIRST_S + ASIDE_S

    def block_s(self, concurrency: int) -> float:
        return self.cell_s(concurrency) * len(self.arms)

    def pairs_s(self) -> float:
        return 4.0 + PAIR_S * self.pairs

    def start_s(self) -> float:
        """Mesh and worker share an engine."""
        return START_S * len({*self.arms} - {"worker"})

    def expected_s(self) -> float:
        blocks = self.rounds * sum(self.block_s(c) for c in self.requests)
        return self.pairs_s() + self.start_s() + blocks + self.lone_rounds * self.lone_s()

    def lone_s(self) -> float:
        return len(LONE_ARMS) * (LONE_REQUESTS * FIRST_S + 1.5)

    def order(self, round_: int) -> list[str]:
        """Who goes when: every second round runs backwards, and each pair of rounds begins with another arm."""
        first = round_ // 2 % len(self.arms)
        arms = [*self.arms[first:], *self.arms[:first]]
        return arms[::-1] if round_ % 2 else arms


# Short turns and many rounds: a shared machine's speed drifts within seconds, and only neighbours in time are comparable.
FULL = Plan(rounds=10, requests={1: 3, 8: 16, 32: 32}, pairs=400, firsts={1: 20}, lone_rounds=240)
QUICK = Plan(
    rounds=2,
    requests={32: 32},
    pairs=60,
    arms=("mesh", "worker", "bare"),
    budget_s=160.0,
    left_out="--quick leaves out vLLM's HTTP server, concurrency 1 and 8, and all but 2 rounds of one wave of requests each; "
    "goals that need more rounds stay undecided",
)
