"""The figures of `long-prompt`: from rounds to arms, goals and tables. Pure.

The goal is held against the worst gap of all rounds, so one bad gap misses it; the median of the rounds' worst stands beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, bootstrap, median, quantile
from trimtab.kit.cli import table

OURS, FCFS = "ours", "fcfs"
ARMS = (OURS, FCFS)
GOAL_BUDGETS = 2.0
"""So many times `prefill.itl_budget_ms` may the worst gap last."""
ENOUGH_ROUNDS = 5
"""Fewer without a gap beyond the goal leave it undecided; a single gap beyond it decides."""
BUDGET_OVER_ALONE = 2.0
BUDGET_STEP_MS = 10


@dataclass(frozen=True, slots=True)
class Round:
    """One arm's turn. Raw; seconds count from the arrival of the long prompt.

    `first_token_s` is None where the watch ended before it; `ended` says why it did: "first token", "time" or "stream".
    `computed_tokens` of the prompt were computed by then, in `steps` engine steps.
    """

    arm: str
    round: int
    gaps_ms: tuple[float, ...]
    watched_s: float
    first_token_s: float | None
    computed_tokens: int
    steps: int
    ended: str
    foreign_cores: float = 0.0

    @property
    def worst_ms(self) -> float:
        return max(self.gaps_ms)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Round:
        known = {k: v for k, v in raw.items() if k in Round.__slots__}
        return Round(**{**known, "gaps_ms": tuple(raw["gaps_ms"])})


def gaps_ms(moments: Sequence[float], begin: float, end: float) -> list[float]:
    """Gaps between one stream's tokens, of which any part lies between `begin` and `end`; each counts whole. Moments in seconds."""
    return [(b - a) * 1000.0 for a, b in itertools.pairwise(moments) if b > begin and a < end]


def budget_for(alone_ms: float) -> int:
    """The budget for streams whose median gap is this one without a prompt beside them: twice that, rounded up to 10 ms."""
    return math.ceil(BUDGET_OVER_ALONE * alone_ms / BUDGET_STEP_MS) * BUDGET_STEP_MS


def by_arm(rounds: Sequence[Round]) -> dict[str, list[Round]]:
    """Arms that have rounds, in the order of ARMS."""
    return {arm: found for arm in ARMS if (found := sorted((r for r in rounds if r.arm == arm), key=lambda r: r.round))}


def arms(rounds: Sequence[Round], budget_ms: int, prompt_tokens: int) -> list[dict[str, Any]]:
    """One object for each arm."""
    return [_arm(found, budget_ms, prompt_tokens) for found in by_arm(rounds).values()]


def _arm(rounds: Sequence[Round], budget_ms: int, prompt_tokens: int) -> dict[str, Any]:
    pooled = [ms for r in rounds for ms in r.gaps_ms]
    firsts = [r.first_token_s for r in rounds if r.first_token_s is not None]
    return {
        "arm": rounds[0].arm,
        "rounds": len(rounds),
        "gaps": len(pooled),
        "gap_p50_ms": _spread(quantile(pooled, 0.5), [quantile(r.gaps_ms, 0.5) for r in rounds]),
        "gap_p99_ms": _spread(quantile(pooled, 0.99), [quantile(r.gaps_ms, 0.99) for r in rounds]),
        "gap_worst_ms": _spread(max(pooled), [r.worst_ms for r in rounds]),
        "worst_over_budget": max(pooled) / budget_ms,
        "first_tokens": len(firsts),
        "first_token_s": _spread(median(firsts), firsts) if firsts else None,
        "watched_s": max(r.watched_s for r in rounds),
        "computed_share": median([r.computed_tokens / prompt_tokens for r in rounds]),
        "steps": _spread(median([float(r.steps) for r in rounds]), [float(r.steps) for r in rounds]),
        "ended": {why: sum(r.ended == why for r in rounds) for why in sorted({r.ended for r in rounds})},
        "foreign_cores": max(r.foreign_cores for r in rounds),
    }


def _spread(value: float, rounds: Sequence[float]) -> dict[str, float]:
    """A figure with the least and the most of the rounds' own."""
    return {"value": value, "least": min(rounds), "most": max(rounds)}


def goals(rounds: Sequence[Round], budget_ms: int | None, seed: int) -> list[Goal]:
    ours = by_arm(rounds).get(OURS)
    name = "worst_gap_over_itl_budget"
    if not ours or not budget_ms:
        return [Goal(name, GOAL_BUDGETS, Bound.AT_MOST)]
    ratios = [r.worst_ms / budget_ms for r in ours]
    worst = max(ratios)
    met = False if worst > GOAL_BUDGETS else True if len(ours) >= ENOUGH_ROUNDS else None
    return [Goal(name, GOAL_BUDGETS, Bound.AT_MOST, worst, met, bootstrap(ratios, median, seed=seed))]


def compared(rounds: Sequence[Round], seed: int) -> dict[str, Any] | None:
    """FCFS's worst gap over ours: of all rounds, and the median of those that both have, with its interval."""
    found = by_arm(rounds)
    if len(found) < len(ARMS):
        return None
    ours = {r.round: r for r in found[OURS]}
    pairs = [r.worst_ms / ours[r.round].worst_ms for r in found[FCFS] if r.round in ours]
    worst = {arm: max(r.worst_ms for r in found[arm]) for arm in ARMS}
    within = asdict(bootstrap(pairs, median, seed=seed)) if pairs else None
    return {"worst_fcfs_over_ours": worst[FCFS] / worst[OURS], "within_rounds": within}


def sections(rows: Sequence[Mapping[str, Any]], ratio: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """(title, table) of each. From the objects that the JSON has too."""
    if not rows:
        return []
    found = [
        ("Gaps between the streams' tokens while the long prompt is there, ms [least, most of a round]", _gaps(rows)),
        ("The long prompt [least, most of a round]", _prompt(rows)),
    ]
    if ratio is not None:
        text, within = f"{ratio['worst_fcfs_over_ours']:.1f}", ratio["within_rounds"]
        if within is not None:
            text += (
                f"; within rounds {within['value']:.1f} [{within['low']:.1f}, {within['high']:.1f}], n = {within['n']}"
            )
        found.append(("The worst gap by FCFS over the worst by ours, and the median within rounds [95 %]", text))
    return found


def _gaps(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = [
        (
            a["arm"], *(_words(a[k], 1) for k in ("gap_p50_ms", "gap_p99_ms", "gap_worst_ms")),
            f"{a['worst_over_budget']:.2f}", str(a["gaps"]), str(a["rounds"]), f"{a['foreign_cores']:.2f} cores",
        )
        for a in rows
    ]  # fmt: skip
    return table(
        ("ARM", "P50", "P99", "WORST", "OVER BUDGET", "GAPS", "ROUNDS", "OTHER PROGRAMS"), cells, right=(4, 5, 6)
    )


def _prompt(rows: Sequence[Mapping[str, Any]]) -> str:
    cells = []
    for a in rows:
        first = a["first_token_s"]
        when = _words(first, 1) if first is not None else f"not within {a['watched_s']:.0f}"
        came = f"{a['first_tokens']} of {a['rounds']}"
        cells.append((a["arm"], when, came, f"{a['computed_share']:.0%}", _words(a["steps"], 0), ""))
    return table(("ARM", "FIRST TOKEN S", "CAME IN", "COMPUTED", "STEPS", ""), cells, right=(2, 3))


def _words(spread: Mapping[str, float], digits: int) -> str:
    return f"{spread['value']:.{digits}f} [{spread['least']:.{digits}f}, {spread['most']:.{digits}f}]"
