"""How much of `blocks` is measured, in which order, and how long that should take. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.bench.blocks.prefixes import Talk
from services.bench.options import Options

START_S, LIKELY_SIZES = 30.0, 12
"""Expected, for the forecast only."""
SERVED, LONG = "served", "long"


@dataclass(frozen=True, slots=True)
class Cell:
    """`streams` side by side, each of `context` tokens in and `output` out; `expected_s` for the forecast."""

    context: int
    streams: int
    output: int
    expected_s: float

    def within(self, window: int) -> Cell:
        """The same in a window that may be too short for it."""
        return replace(self, context=min(self.context, window - self.output - 1))


@dataclass(frozen=True, slots=True)
class Plan:
    """`served` cells are of the model that was asked for, `long` ones of the small model with the long window."""

    rounds: int
    served: tuple[Cell, ...]
    long: tuple[Cell, ...]
    talk: Talk
    talk_s: float
    quick: bool = False
    budget_s: float | None = None
    left_out: str = ""

    @staticmethod
    def of(options: Options) -> Plan:
        plan = QUICK if options.quick else FULL
        return replace(plan, rounds=options.rounds or plan.rounds)

    def cells(self, model: str) -> tuple[Cell, ...]:
        return self.served if model == SERVED else self.long

    def models(self) -> tuple[str, ...]:
        return tuple(m for m in (SERVED, LONG) if self.cells(m))

    def chosen(self, accepted: Sequence[int], default: int) -> list[int]:
        """The sizes that are measured; when it must be quick, the ends and what the engine has by default."""
        found = sorted({*accepted, default})
        return sorted({found[0], default, found[-1]}) if self.quick else found

    def order(self, sizes: Sequence[int], round_: int, seed: int) -> list[int]:
        """Who goes when. Every second round runs backwards, so that what drifts slowly weighs on none of a pair more than on the other."""
        turn = list(sizes)
        random.Random(f"{seed}/order/{round_ // 2}").shuffle(turn)
        return turn[::-1] if round_ % 2 else turn

    def visit_s(self, model: str) -> float:
        return sum(c.expected_s for c in self.cells(model))

    def expected_s(self) -> float:
        sizes = 3 if self.quick else LIKELY_SIZES
        visits = sum(self.visit_s(m) for m in self.models()) * sizes * self.rounds
        return len(self.models()) * START_S + visits + sizes * self.talk_s


# Two streams of long contexts, not eight: their prompts are what takes time, and each size has to compute them anew in each round.
FULL = Plan(
    rounds=3,
    served=(Cell(256, 8, 96, 12.0), Cell(7500, 2, 64, 50.0)),
    long=(Cell(32_000, 2, 64, 30.0),),
    talk=Talk(sessions=4, turns=3, system=400, user=(60, 160), output=24),
    talk_s=25.0,
)
QUICK = Plan(
    rounds=1,
    served=(Cell(256, 8, 48, 9.0), Cell(2000, 2, 32, 13.0)),
    long=(),
    talk=Talk(sessions=2, turns=2, system=300, user=(40, 80), output=8),
    talk_s=5.0,
    quick=True,
    budget_s=170.0,
    left_out="--quick: 1 round of 3 sizes, contexts of 256 and 2,000 tokens, without the long model; no verdict",
)
