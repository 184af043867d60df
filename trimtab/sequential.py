"""Tests that may be looked at at any time: e-processes, as logarithms. Pure.

An e-process starts at 1 and, while what it doubts is true, is below 1/α for ever with a probability of at least 1 − α (Ville), however often
it is looked at and whenever looking ends. So one number says when to act, and no look costs anything. Two of them are here.

`Odds` compares shares on two sides: of n requests here and m there so many were late. Given how many were late in all, who had them is
hypergeometric when both sides are alike, whatever the load of that moment; each block is compared with its own moment, so that a mesh that
is slow everywhere is no evidence. `Sign` compares rates block by block: how often one side was below the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ODDS = (3.0, 10.0, 50.0, 1000.0)
"""How many times as likely a request is to be late on the side that is doubted: bets on each of them, in equal parts."""
STAKES = (0.5, 0.9)
"""Of what there is, what is bet on the next block."""


@dataclass(frozen=True, slots=True)
class Odds:
    """Whether a share here has odds above `at_most` times those there. One logarithm for each of `ODDS`."""

    logs: tuple[float, ...] = (0.0,) * len(ODDS)

    def after(self, block: Block, at_most: float) -> Odds:
        """With one more block; its sizes must not have been chosen by what was in it."""
        if not block.tells:
            return self
        base = _log_weights(block, math.log(at_most))
        return Odds(
            tuple(
                log + block.here * math.log(odds) - _log_weights(block, math.log(at_most * odds)) + base
                for log, odds in zip(self.logs, ODDS, strict=True)
            )
        )

    @property
    def log(self) -> float:
        return _log_mean(self.logs)


@dataclass(frozen=True, slots=True)
class Block:
    """Of `of_here` and `of_there`, so many were bad."""

    here: int
    of_here: int
    there: int
    of_there: int

    @property
    def tells(self) -> bool:
        """Whether it can be evidence: something was bad, something was not, and there is somebody on each side."""
        bad, of = self.here + self.there, self.of_here + self.of_there
        return 0 < bad < of and self.of_here > 0 and self.of_there > 0


def _log_weights(b: Block, log_odds: float) -> float:
    """log Σ C(n, x) C(m, K − x) ω^x over all x that there can be."""
    bad = b.here + b.there
    low, high = max(0, bad - b.of_there), min(bad, b.of_here)
    return _log_sum([_choose(b.of_here, x) + _choose(b.of_there, bad - x) + x * log_odds for x in range(low, high + 1)])


@dataclass(frozen=True, slots=True)
class Sign:
    """Whether one side is below the other in more than half of all blocks. One logarithm for each of `STAKES`."""

    logs: tuple[float, ...] = (0.0,) * len(STAKES)

    def after(self, below: bool) -> Sign:
        return Sign(
            tuple(
                log + math.log(1.0 + stake if below else 1.0 - stake)
                for log, stake in zip(self.logs, STAKES, strict=True)
            )
        )

    @property
    def log(self) -> float:
        return _log_mean(self.logs)


def _choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _log_sum(logs: Sequence[float]) -> float:
    top = max(logs)
    return top + math.log(sum(math.exp(x - top) for x in logs))


def _log_mean(logs: Sequence[float]) -> float:
    return _log_sum(logs) - math.log(len(logs))
