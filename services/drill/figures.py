"""The figures of `streams`: from what clients saw and what was struck to goals and tables. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, quantile
from services.drill.strikes import SILENT, Kind, Struck
from services.drill.witness import Move, Seen, faults
from trimtab.kit.cli import table

STRIKES, OFF, UNDISTURBED = "strikes", "off", "undisturbed"
"""Arms."""
GOAL_STREAMS, GOAL_REAL_STREAMS, GOAL_KILL_GAP_S = 1000, 60, 1.0
ENOUGH_GAPS = 100
"""Below this a P99 of gaps decides nothing."""
AFTERMATH_S = 5.0
"""So long after a strike, a stream's move away from that worker is counted as its doing."""
UNPROVOKED, SEVERAL = "nobody struck", "two at once"
BLIND_S, NOTICED_S = 2.0, 0.5
"""So long a gateway may send streams to a worker that was struck: in silence, and by a blow that closes connections."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one stream of a case. `lost` is a reason, `faults` are words for everything else that is wrong."""

    case: int
    tokens: int
    lost: str
    faults: tuple[str, ...]
    repeated: int
    missing: int
    moves: tuple[Move, ...]
    message: str = ""


@dataclass(slots=True)
class Arm:
    """One part of a drill. `counts` are the gateways' counters by metric and label; `wall_s` is how long it took."""

    name: str
    engine: str
    outcomes: list[Outcome] = field(default_factory=list)
    struck: list[Struck] = field(default_factory=list)
    counts: dict[str, dict[str, float]] = field(default_factory=dict)
    wall_s: float = 0.0

    @property
    def lost(self) -> Counter[str]:
        return Counter(o.lost for o in self.outcomes if o.lost)

    @property
    def wrong(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.faults]

    @property
    def repeated(self) -> int:
        return sum(o.repeated for o in self.outcomes)

    @property
    def missing(self) -> int:
        return sum(o.missing for o in self.outcomes)


def outcome(case: int, seen: Seen, right: Seen | None) -> Outcome:
    wrong = tuple(faults(seen, right))
    return Outcome(
        case, len(seen.token_ids), seen.lost, wrong, seen.repeated, seen.missing, tuple(seen.moves), seen.message
    )


def provoked(move: Move, struck: Sequence[Struck]) -> Struck | None:
    """The strike that made the stream move: the last one on the worker that it left, if not long over; of any worker where that is unknown."""
    near = [
        s
        for s in struck
        if s.worker == (move.origin or s.worker) and s.begun <= move.told <= (s.back or s.ended) + AFTERMATH_S
    ]
    return max(near, key=lambda s: s.begun, default=None)


def label(move: Move, struck: Sequence[Struck]) -> tuple[str, Struck | None]:
    """By which kind of strike it goes in a table, and the strike. Where another one came within the gap, or so shortly before that the
    stream may have been sent there, it says nothing of either kind.
    """
    cause = provoked(move, struck)
    if cause is None:
        return UNPROVOKED, None
    until = move.told if move.first is None else move.first
    if any(s is not cause and move.last - _blind_s(s.kind) <= s.begun <= until for s in struck):
        return SEVERAL, cause
    return cause.kind.value, cause


def _blind_s(kind: Kind) -> float:
    return BLIND_S if kind in SILENT else NOTICED_S


def by_kind(arm: Arm) -> list[dict[str, Any]]:
    """For each kind of strike: how many, the gaps of streams that moved, and how soon the first of them had gone on elsewhere."""
    moves = [(move, *label(move, arm.struck)) for o in arm.outcomes for move in o.moves]
    rows = []
    for kind in [*(k.value for k in Kind), SEVERAL, UNPROVOKED]:
        struck = [s for s in arm.struck if s.kind == kind]
        mine = [m for m, of, _ in moves if of == kind]
        if not struck and not mine:
            continue
        gaps = [gap for m in mine if (gap := m.gap_s) is not None]
        firsts = [min((m.told for m, _, s in moves if s is one), default=None) for one in struck]
        noticed = [told - one.begun for told, one in zip(firsts, struck, strict=True) if told is not None]
        rows.append(
            {
                "kind": kind,
                "strikes": len(struck),
                "moves": len(mine),
                "gaps": len(gaps),
                "gap_p50_s": _quantile(gaps, 0.5),
                "gap_p99_s": _quantile(gaps, 0.99),
                "gap_max_s": max(gaps, default=None),
                "noticed_p50_s": _quantile(noticed, 0.5),
                "noticed_max_s": max(noticed, default=None),
                "back_p50_s": _quantile([s.back - s.ended for s in struck if s.back is not None], 0.5),
            }
        )
    return rows


def as_json(arm: Arm) -> dict[str, Any]:
    return {
        "arm": arm.name,
        "engine": arm.engine,
        "wall_s": arm.wall_s,
        "streams": len(arm.outcomes),
        "tokens": sum(o.tokens for o in arm.outcomes),
        "lost": dict(arm.lost),
        "wrong": len(arm.wrong),
        "indexes_repeated": arm.repeated,
        "indexes_missing": arm.missing,
        "moved": sum(bool(o.moves) for o in arm.outcomes),
        "moves_most": max((len(o.moves) for o in arm.outcomes), default=0),
        "counts": arm.counts,
        "by_kind": by_kind(arm),
    }


def goals(arms: Sequence[Arm]) -> list[Goal]:
    """Of each arm that was run. An arm that was cut short is judged by what it has, but for its numbers."""
    found: list[Goal] = []
    for arm in arms:
        if arm.name == STRIKES:
            found += [*_zeros(arm), *_enough(arm)]
        elif arm.name == OFF:
            found += [
                _goal("lost_with_moving_off", 1, Bound.AT_LEAST, sum(arm.lost.values())),
                _goal("wrong_with_moving_off", 0, Bound.AT_MOST, len(arm.wrong)),
            ]
    return found


def _enough(arm: Arm) -> list[Goal]:
    """How many streams there were, and, of simulated engines, how long they stood still: a real one's recomputing is its own affair."""
    if arm.engine != "simulated":
        return [_goal(f"streams_on_{arm.engine}", GOAL_REAL_STREAMS, Bound.AT_LEAST, len(arm.outcomes))]
    kill: Mapping[str, Any] = next((row for row in by_kind(arm) if row["kind"] == Kind.KILL), {})
    gap = kill.get("gap_p99_s")
    met = gap <= GOAL_KILL_GAP_S if gap is not None and kill["gaps"] >= ENOUGH_GAPS else None
    return [
        _goal("streams", GOAL_STREAMS, Bound.AT_LEAST, len(arm.outcomes)),
        Goal("gap_p99_s_after_a_kill", GOAL_KILL_GAP_S, Bound.AT_MOST, gap, met),
    ]


def _zeros(arm: Arm) -> list[Goal]:
    of = "" if arm.engine == "simulated" else f"_on_{arm.engine}"
    return [
        _goal(f"{what}{of}", 0, Bound.AT_MOST, count)
        for what, count in (
            ("lost", sum(arm.lost.values())),
            ("wrong", len(arm.wrong)),
            ("indexes_repeated_or_missing", arm.repeated + arm.missing),
            ("workers_that_did_not_come_back", sum(s.back is None for s in arm.struck)),
        )
    ]


def _goal(name: str, goal: float, bound: Bound, value: float) -> Goal:
    """Of something that is counted: nothing about it is uncertain."""
    return Goal(name, goal, bound, value, value <= goal if bound is Bound.AT_MOST else value >= goal)


def sections(arms: Sequence[Arm]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    rows = [
        (
            arm.name,
            arm.engine,
            str(len(arm.outcomes)),
            str(sum(o.tokens for o in arm.outcomes)),
            f"{arm.wall_s:.0f}",
            str(len(arm.struck)),
            str(sum(arm.lost.values())),
            str(len(arm.wrong)),
            f"{arm.repeated} / {arm.missing}",
            _counts(arm.counts.get("resumes", {})),
        )
        for arm in arms
    ]
    head = (
        "ARM",
        "ENGINE",
        "STREAMS",
        "TOKENS",
        "SECONDS",
        "STRIKES",
        "LOST",
        "WRONG",
        "REPEATED / MISSING",
        "RESUMES",
    )
    found = [("Streams", table(head, rows, right=tuple(range(2, 8))))]
    found += [(f"Gaps of streams that moved: {a.name}, {a.engine}", _gaps(a)) for a in arms if a.struck]
    return found


def _gaps(arm: Arm) -> str:
    rows = [
        (
            row["kind"],
            str(row["strikes"]),
            str(row["moves"]),
            _seconds(row["gap_p50_s"]),
            _seconds(row["gap_p99_s"]),
            _seconds(row["gap_max_s"]),
            _seconds(row["noticed_p50_s"]),
            _seconds(row["noticed_max_s"]),
            _seconds(row["back_p50_s"]),
        )
        for row in by_kind(arm)
    ]
    head = ("STRUCK BY", "STRIKES", "MOVES", "GAP P50 S", "P99", "MAX", "NOTICED P50 S", "MAX", "BACK P50 S")
    return table(head, rows, right=tuple(range(1, len(head))))


def notes(arms: Sequence[Arm]) -> list[str]:
    """What else a reader needs, and the first of everything that is wrong."""
    said = []
    for arm in arms:
        if arm.lost:
            said.append(f"{arm.name}, {arm.engine}: lost by {_counts(arm.lost)}")
            if arm.name != OFF:
                said += sorted({f"lost, {o.lost}: {o.message}" for o in arm.outcomes if o.lost})[:5]
        said += [f"{arm.name}, {arm.engine}, case {o.case}: {'; '.join(o.faults)}" for o in arm.wrong[:5]]
        others = {name: counts for name, counts in arm.counts.items() if name != "resumes" and any(counts.values())}
        if others:
            told = "; ".join(f"{name.replace('_', ' ')} {_counts(counts)}" for name, counts in others.items())
            said.append(f"{arm.name}, {arm.engine}: gateways counted {told}")
    return said


def _counts(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {count:g}".strip() for key, count in sorted(counts.items()) if count)


def _quantile(values: Sequence[float], q: float) -> float | None:
    return quantile(values, q) if values else None


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
