"""The figures of a drill of the loops: who found the fault and healed it, how soon, and what clients noticed. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound
from services.drill.figures import Outcome
from trimtab.kit.cli import table


@dataclass(slots=True)
class Trial:
    """One fault, once. `expected` is the controller that is to find it; None where nobody is to act.

    Times are seconds from the moment at which there is something to find. `within_s` is what the loop may take.
    """

    name: str
    engine: str
    expected: str | None
    within_s: float = 0.0
    controller: str = ""
    did: str = ""
    reason: str = ""
    evidence: str = ""
    detected_s: float | None = None
    healed_s: float | None = None
    told: bool = False
    """`trimtab why` tells of it."""
    outcomes: list[Outcome] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """What controllers did beside what they were to do, and may not have done."""
    beside: list[str] = field(default_factory=list)
    """The same of what they may do."""
    held: list[str] = field(default_factory=list)
    """Why controllers decided nothing meanwhile, where a drill looks for that."""
    figures: dict[str, float] = field(default_factory=dict)
    """Of this drill alone."""
    more: list[Goal] = field(default_factory=list)

    def detected(self, controller: str, after_s: float, reason: str, evidence: str) -> None:
        self.controller, self.detected_s, self.reason, self.evidence = controller, after_s, reason, evidence

    @property
    def lost(self) -> Counter[str]:
        return Counter(o.lost for o in self.outcomes if o.lost)

    @property
    def wrong(self) -> list[Outcome]:
        return [o for o in self.outcomes if o.faults]


def goals(trials: Sequence[Trial]) -> list[Goal]:
    found: list[Goal] = []
    for trial in trials:
        if trial.expected is not None:
            found += _healed(trial)
        found += [
            counted(trial, "streams_lost", sum(trial.lost.values())),
            counted(trial, "streams_wrong", len(trial.wrong)),
            *trial.more,
        ]
    return found


def counted(trial: Trial, what: str, value: float, *, most: float = 0.0) -> Goal:
    """At most so many of something."""
    return Goal(f"{trial.name}: {what}", most, Bound.AT_MOST, value, value <= most)


def present(trial: Trial, what: str, there: bool) -> Goal:
    """Something that has to be there."""
    return Goal(f"{trial.name}: {what}", 1, Bound.AT_LEAST, float(there), there)


def _healed(trial: Trial) -> list[Goal]:
    soon = trial.detected_s is not None and trial.detected_s <= trial.within_s
    return [
        Goal(f"{trial.name}: detected_s", trial.within_s, Bound.AT_MOST, trial.detected_s, soon),
        present(trial, f"by_{trial.expected}", trial.controller == trial.expected),
        present(trial, "healed", trial.healed_s is not None),
        present(trial, "told_by_why", trial.told),
        counted(trial, "other_decisions", len(trial.others)),
    ]


def as_json(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.name,
        "engine": trial.engine,
        "expected": trial.expected,
        "controller": trial.controller,
        "did": trial.did,
        "reason": trial.reason,
        "evidence": trial.evidence,
        "detected_s": trial.detected_s,
        "healed_s": trial.healed_s,
        "within_s": trial.within_s,
        "told_by_why": trial.told,
        "streams": len(trial.outcomes),
        "tokens": sum(o.tokens for o in trial.outcomes),
        "moved": sum(bool(o.moves) for o in trial.outcomes),
        "lost": dict(trial.lost),
        "wrong": len(trial.wrong),
        "others": trial.others,
        "beside": trial.beside,
        "held": trial.held,
        "figures": dict(trial.figures),
    }


def sections(trials: Sequence[Trial]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    head = ("TRIAL", "ENGINE", "DETECTED S", "AT MOST", "HEALED S", "STREAMS", "MOVED", "LOST", "WRONG", "DONE")
    rows = [
        (
            t.name,
            t.engine,
            _seconds(t.detected_s),
            f"{t.within_s:g}" if t.expected is not None else "",
            _seconds(t.healed_s),
            str(len(t.outcomes)),
            str(sum(bool(o.moves) for o in t.outcomes)),
            str(sum(t.lost.values())),
            str(len(t.wrong)),
            # The last, since it wraps.
            (f"{t.controller}: {t.did}" if t.controller else t.did) or "nothing",
        )
        for t in trials
    ]
    found = [("Faults", table(head, rows, right=(2, 3, 4, 5, 6, 7, 8)))]
    own = [(t.name, name, f"{value:.4g}") for t in trials for name, value in t.figures.items()]
    if own:
        found.append(("Figures", table(("TRIAL", "FIGURE", "VALUE"), own, right=(2,))))
    return found


def notes(trials: Sequence[Trial]) -> list[str]:
    """What else a reader needs, and the first of everything that is wrong."""
    said = []
    for t in trials:
        if t.reason:
            said.append(f"{t.name}: {t.controller} says: {t.reason}; {t.evidence}")
        said += [f"{t.name}: beside it, {what}" for what in [*t.others, *t.beside]]
        said += [f"{t.name}: holds, {words}" for words in t.held]
        said += sorted({f"{t.name}: lost, {o.lost}: {o.message}" for o in t.outcomes if o.lost})[:5]
        said += [f"{t.name}, case {o.case}: {'; '.join(o.faults)}" for o in t.wrong[:5]]
    return said


def policy_words(policy: Mapping[str, str]) -> str:
    return "policy: " + ", ".join(f"{name}={value}" for name, value in policy.items())


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
