"""The figures of `hosts`: from what clients saw and when each part noticed, let go and was back, to goals and tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, quantile
from services.drill.figures import Outcome
from services.drill.witness import Move
from trimtab.kit.cli import table

NOTICED, MISSED, FREED = "gateway noticed", "control plane noticed", "requests let go"
BACK, AGREED = "gateway sends again", "one policy everywhere"
WITHIN_S = {NOTICED: 3.0, MISSED: 4.0, FREED: 4.0, BACK: 10.0, AGREED: 15.0}
"""The first three count from the cut, the others from its end. The rules: 1.5 s without a message, 2.5 s without a report, 2 s without the
gateway (DESIGN §3); as much again for slow machines. Of the last two: a back-off of 2 s, and a breaker's first 2 s; then 5 s for a control
stream that nobody has closed.
"""
AFTERMATH_S = 15.0
"""So long after a link is healed, streams may still be on their way from a worker behind it."""
OF_CUT, OF_HEALING = (NOTICED, MISSED, FREED), (BACK, AGREED)


@dataclass(slots=True)
class Cut:
    """One link that was cut and healed. `seconds` are None for what did not come about in time; `ran_on` counts requests that ended well
    at workers while nobody could hear of it.
    """

    name: str
    engine: str
    behind: frozenset[str] = frozenset()
    """Workers that the gateway did not reach."""
    begun: float = 0.0
    ended: float = 0.0
    """Of the monotonic clock, as are a stream's moves."""
    outcomes: list[Outcome] = field(default_factory=list)
    seconds: dict[str, float | None] = field(default_factory=dict)
    begun_there: int = 0
    """Requests that ran behind the cut when it fell."""
    ran_on: int | None = None
    whole: bool = False
    """It was seen to its end."""

    @property
    def lost(self) -> Counter[str]:
        return Counter(o.lost for o in self.outcomes if o.lost)

    @property
    def wrong(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.faults]

    @property
    def indexes(self) -> int:
        """Repeated or missing."""
        return sum(o.repeated + o.missing for o in self.outcomes)

    @property
    def lasted_s(self) -> float:
        return self.ended - self.begun

    @property
    def moves(self) -> list[Move]:
        """Those that the cut brought about."""
        return [m for o in self.outcomes for m in o.moves if self._provoked(m)]

    @property
    def others(self) -> int:
        """Moves for which something else was the reason, such as an engine that was found hung on a machine that is too busy."""
        return sum(len(o.moves) for o in self.outcomes) - len(self.moves)

    @property
    def gaps(self) -> list[float]:
        return [gap for move in self.moves if (gap := move.gap_s) is not None]

    def _provoked(self, move: Move) -> bool:
        return move.origin in self.behind and self.begun <= move.told <= self.ended + AFTERMATH_S


def goals(cuts: Sequence[Cut]) -> list[Goal]:
    """A cut that was not seen to its end is judged by its streams alone."""
    found: list[Goal] = []
    for cut in cuts:
        found += [
            _at_most(cut, "streams lost", 0, sum(cut.lost.values())),
            _at_most(cut, "streams wrong", 0, len(cut.wrong)),
            _at_most(cut, "indexes repeated or missing", 0, cut.indexes),
        ]
        if not cut.whole:
            continue
        found.append(Goal(f"{cut.name}: moves of streams", 1, Bound.AT_LEAST, len(cut.moves), bool(cut.moves)))
        if cut.ran_on is not None:
            found.append(_at_most(cut, "requests that ran on to their end", 0, cut.ran_on))
        for what, within_s in WITHIN_S.items():
            took = cut.seconds.get(what)
            met = took is not None and took <= within_s
            found.append(Goal(f"{cut.name}: {what}, s", within_s, Bound.AT_MOST, took, met))
    return found


def _at_most(cut: Cut, what: str, most: int, value: int) -> Goal:
    return Goal(f"{cut.name}: {what}", most, Bound.AT_MOST, value, value <= most)


def as_json(cut: Cut) -> dict[str, Any]:
    gaps = cut.gaps
    return {
        "cut": cut.name,
        "engine": cut.engine,
        "lasted_s": cut.lasted_s,
        "streams": len(cut.outcomes),
        "tokens": sum(o.tokens for o in cut.outcomes),
        "lost": dict(cut.lost),
        "wrong": len(cut.wrong),
        "indexes_repeated_or_missing": cut.indexes,
        "moves": len(cut.moves),
        "other_moves": cut.others,
        "begun_there": cut.begun_there,
        "ran_on": cut.ran_on,
        "gap_p50_s": quantile(gaps, 0.5) if gaps else None,
        "gap_max_s": max(gaps, default=None),
        "seconds": dict(cut.seconds),
        "whole": cut.whole,
    }


def sections(cuts: Sequence[Cut]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    rows = [
        (
            c.name,
            c.engine,
            f"{c.lasted_s:.1f}",
            str(len(c.outcomes)),
            str(c.begun_there),
            str(len(c.moves)),
            str(c.others),
            str(sum(c.lost.values())),
            str(len(c.wrong)),
            _seconds(quantile(c.gaps, 0.5) if c.gaps else None),
            _seconds(max(c.gaps, default=None)),
        )
        for c in cuts
    ]
    head = ("CUT", "ENGINE", "FOR S", "STREAMS", "RAN THERE", "MOVES", "OTHERS", "LOST", "WRONG", "GAP P50 S", "MAX")
    found = [("Streams", table(head, rows, right=tuple(range(2, 11))))]
    times = [(c.name, *(_seconds(c.seconds.get(what)) for what in (*OF_CUT, *OF_HEALING))) for c in cuts]
    named = ("CUT", "GATEWAY NOTICED", "CONTROL PLANE", "LET GO", "SENT TO AGAIN", "ONE POLICY")
    found.append(
        ("Seconds from the cut (three), and from its end (two)", table(named, times, right=tuple(range(1, 6))))
    )
    return found


def notes(cuts: Sequence[Cut]) -> list[str]:
    """The first of everything that is wrong."""
    said = []
    for c in cuts:
        said += sorted({f"{c.name}: lost, {o.lost}: {o.message}" for o in c.outcomes if o.lost})[:5]
        said += [f"{c.name}, case {o.case}: {'; '.join(o.faults)}" for o in c.wrong[:5]]
    return said


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
