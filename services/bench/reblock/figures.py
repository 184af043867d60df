"""The figures of `reblock`: from bouts, changes and refusals to goals. Pure; times in milliseconds unless they say otherwise.

A stream's pause is its longest gap around a change less its own median gap: what the change alone added to what a reader waits anyway.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, median, quantile

CHANGE_GOAL_MS = 10.0
"""Of the engine's own time, where no KV is carried over: what is carried takes as long as it takes to copy."""
PREDICTED = (0.7, 1.3)
"""Predicted to measured recomputation."""
CHANGES, SOAK_CHANGES, REFERENCES = 20, 200, 2
MIN_NOISE_KB = 1024.0
"""Allocators take memory by the megabyte: less is no growth."""
NEVER = (0, -1, 10**9)
ODD = (16, 24, 48)
"""Sizes that a CPU refuses; another engine may take one of them, and is then not asked for it here."""

Tokens = Sequence[Sequence[int]]


def median_gap_ms(times: Sequence[float]) -> float | None:
    """Between neighbouring tokens; `times` in seconds."""
    gaps = [(b - a) * 1000.0 for a, b in itertools.pairwise(times)]
    return median(gaps) if gaps else None


def pause_ms(times: Sequence[float], put_s: float, until_s: float) -> float | None:
    """The longest gap that reaches into the time from `put_s` to `until_s`, less the median of all gaps; None where there is none."""
    around = [(b - a) * 1000.0 for a, b in itertools.pairwise(times) if b > put_s and a < until_s]
    usual = median_gap_ms(times)
    return max(0.0, max(around) - usual) if around and usual is not None else None


def order(sizes: Sequence[int], count: int, first: int, seed: str, used: Sequence[int] = ()) -> list[int]:
    """So many sizes: each is drawn of those least often `used` so far, and differs from the one before it; `first` is before the first one."""
    rng, times, found = random.Random(seed), Counter(used), [first]
    while len(found) <= count:
        others = [s for s in sizes if s != found[-1]]
        least = min(times[s] for s in others)
        found.append(rng.choice([s for s in others if times[s] == least]))
        times[found[-1]] += 1
    return found[1:]


def refused_sizes(accepted: Sequence[int]) -> list[int]:
    """Those that this engine must refuse."""
    return [*(s for s in ODD if s not in accepted), *NEVER]


def compare(reference: Tokens, found: Tokens) -> tuple[int, int]:
    """(wrong, lost) tokens over all streams: those that differ at their place, and those that are not there. One too many is wrong too."""
    wrong = lost = 0
    for wanted, got in itertools.zip_longest(reference, found, fillvalue=()):
        wrong += sum(a != b for a, b in zip(wanted, got, strict=False)) + max(0, len(got) - len(wanted))
        lost += max(0, len(wanted) - len(got))
    return wrong, lost


@dataclass(slots=True)
class Found:
    """The raw parts so far, as they were kept."""

    references: list[Mapping[str, Any]] = field(default_factory=list)
    bouts: list[Mapping[str, Any]] = field(default_factory=list)
    carried: list[Mapping[str, Any]] = field(default_factory=list)
    refusals: Mapping[str, Any] | None = None
    soak: Mapping[str, Any] | None = None
    restarts: list[Mapping[str, Any]] = field(default_factory=list)
    served: Mapping[str, Any] | None = None
    """A bout under the engine's default policy."""

    @staticmethod
    def of(parts: Sequence[Mapping[str, Any]]) -> Found:
        found = Found()
        for part in parts:
            match part["kind"]:
                case "reference":
                    found.references.append(part)
                case "bout":
                    found.bouts.append(part)
                case "carried":
                    found.carried.append(part)
                case "refusals":
                    found.refusals = part
                case "soak":
                    found.soak = part
                case "restart":
                    found.restarts.append(part)
                case "served":
                    found.served = part
        return found

    @property
    def changes(self) -> list[Mapping[str, Any]]:
        """Those that had KV computed anew."""
        return [c for b in self.bouts for c in b["changes"]]

    @property
    def carried_changes(self) -> list[Mapping[str, Any]]:
        """Those that were told to carry it over."""
        return [c for b in self.carried for c in b["changes"]]

    @property
    def disturbed(self) -> list[Mapping[str, Any]]:
        """Whatever had streams that are held against the first reference."""
        return [*self.bouts, *self.carried, *(p for p in (self.refusals, self.served) if p is not None)]


def tokens_of(part: Mapping[str, Any]) -> list[list[int]]:
    return [s["tokens"] for s in part["streams"]]


def against_reference(found: Found) -> tuple[int, int] | None:
    """(wrong, lost) of all disturbed streams; None without a reference, or without any of them."""
    if not found.references or not found.disturbed:
        return None
    first, wrong, lost = tokens_of(found.references[0]), 0, 0
    for part in found.disturbed:
        # One that was to give more than the reference is held against as much of it as there is.
        cut = [got[: len(wanted)] for wanted, got in zip(first, tokens_of(part), strict=True)]
        wrong += compare(first, cut)[0]
        lost += sum(part["output"] - len(got) for got in tokens_of(part))
    return wrong, lost


def control(found: Found) -> int | None:
    """Tokens in which undisturbed runs differ from each other: where that is not 0, the comparison says nothing."""
    if len(found.references) < REFERENCES:
        return None
    first, *others = map(tokens_of, found.references)
    return sum(sum(compare(first, other)) for other in others)


def growth_kb(resident_kb: Sequence[float]) -> tuple[float, float] | None:
    """(growth, noise): the last quarter's median less the second's, and the wider range of the two, MIN_NOISE_KB at least.

    The first quarter does not count: allocators find their size. Steady growth moves the medians by twice what it widens a quarter, and
    so does not hide in the noise that it makes. None below 8 samples.
    """
    n = len(resident_kb) // 4
    if n < 2:
        return None
    early, late = resident_kb[n : 2 * n], resident_kb[-n:]
    noise = max(MIN_NOISE_KB, max(early) - min(early), max(late) - min(late))
    return median(late) - median(early), noise


def ratios(changes: Sequence[Mapping[str, Any]]) -> list[float]:
    """Predicted to measured recomputation, of changes after which anything was computed anew or was to be."""
    counted = [c for c in changes if c["predicted_tokens"] or c["measured_tokens"]]
    return [c["predicted_tokens"] / max(1, c["measured_tokens"]) for c in counted]


def pauses(changes: Sequence[Mapping[str, Any]]) -> list[float]:
    """Of every stream at every change."""
    return [p for c in changes for p in c["pauses_ms"] if p is not None]


def restart_over_pause(found: Found) -> dict[str, float] | None:
    """How many times longer a restart of the whole engine is than the engine's own time of a change, and than the median stream's pause."""
    changes, paused = found.changes, pauses(found.changes)
    if not found.restarts or not changes:
        return None
    restart_ms = median([r["stop_s"] + r["start_s"] for r in found.restarts]) * 1000.0
    over = {"restart_ms": restart_ms, "over_change": restart_ms / max(1e-3, median([c["change_ms"] for c in changes]))}
    return {**over, "over_pause": restart_ms / max(1.0, median(paused))} if paused else over


def leaked(found: Found) -> int | None:
    """The most blocks that were held while nobody ran, after any part."""
    seen = [p["leaked"] for p in (*found.references, *found.disturbed)] + list(
        found.soak["leaked"] if found.soak else []
    )
    return max(map(abs, seen)) if seen else None


def unrefused(found: Found) -> int | None:
    """Sizes that were taken though they can't be, or whose refusal left another engine behind."""
    if found.refusals is None:
        return None
    return sum(not t["cause"] or not t["unchanged"] for t in found.refusals["tried"])


def goals(found: Found, *, quick: bool) -> list[Goal]:
    """All of them, measured or not. `quick` decides only what is missed: it has too few changes to say that a goal is met."""
    changes = found.changes
    own = [c["change_ms"] for c in changes]
    shares = ratios(changes)
    compared = against_reference(found)
    growth = growth_kb(found.soak["resident_kb"]) if found.soak else None
    many = sum(map(len, found.soak["change_ms"].values())) if found.soak else None

    def goal(name: str, wanted: float, bound: Bound, value: float | None, *, enough: bool = True) -> Goal:
        if value is None:
            return Goal(name, wanted, bound)
        good = value <= wanted if bound is Bound.AT_MOST else value >= wanted
        return Goal(name, wanted, bound, float(value), good if not good or (enough and not quick) else None)

    enough = len(changes) >= CHANGES
    carried = [c for c in found.carried_changes if c["carried_tokens"]]
    anew = sum(c["measured_tokens"] + c["predicted_tokens"] for c in carried) if carried else None
    return [
        goal("changes_under_load", CHANGES, Bound.AT_LEAST, _unless_quick(len(changes), quick)),
        goal("change_p50_ms", CHANGE_GOAL_MS, Bound.AT_MOST, median(own) if own else None, enough=enough),
        goal("change_max_ms", CHANGE_GOAL_MS, Bound.AT_MOST, max(own) if own else None, enough=enough),
        goal("predicted_to_measured_lowest", PREDICTED[0], Bound.AT_LEAST, min(shares, default=None), enough=enough),
        goal("predicted_to_measured_highest", PREDICTED[1], Bound.AT_MOST, max(shares, default=None), enough=enough),
        goal("carried_yet_recomputed_tokens", 0, Bound.AT_MOST, anew, enough=len(carried) >= CHANGES),
        goal("control_differing_tokens", 0, Bound.AT_MOST, control(found)),
        goal("wrong_tokens", 0, Bound.AT_MOST, compared[0] if compared else None, enough=enough),
        goal("lost_tokens", 0, Bound.AT_MOST, compared[1] if compared else None, enough=enough),
        goal("refusals_not_kept", 0, Bound.AT_MOST, unrefused(found)),
        goal("changes_in_a_row", SOAK_CHANGES, Bound.AT_LEAST, _unless_quick(many, quick)),
        goal("errors_in_a_row", 0, Bound.AT_MOST, len(found.soak["errors"]) if found.soak else None),
        goal("leaked_blocks", 0, Bound.AT_MOST, leaked(found), enough=found.soak is not None),
        goal("memory_growth_kb", growth[1] if growth else MIN_NOISE_KB, Bound.AT_MOST, growth[0] if growth else None),
    ]


def _unless_quick(value: int | None, quick: bool) -> int | None:
    return None if quick else value


def arms(found: Found) -> list[dict[str, Any]]:
    """One object for each part that was measured."""
    made: list[dict[str, Any]] = []
    if found.changes:
        made.append({"arm": "under load", "changes": found.changes, **_summary(found)})
    if found.carried_changes:
        one = replace(found, bouts=found.carried)
        made.append({"arm": "carried over", "changes": found.carried_changes, **_summary(one), **_shorter(found)})
    if found.served and found.served["changes"]:
        one = replace(found, bouts=[found.served])
        made.append({"arm": "as served", "changes": found.served["changes"], **_summary(one)})
    if found.soak:
        rows = {k: _spread(v) for k, v in found.soak["change_ms"].items() if v}
        grown = growth_kb(found.soak["resident_kb"])
        made.append(
            {
                "arm": "in a row",
                "change_ms": rows,
                "resident_kb": found.soak["resident_kb"],
                "growth_kb": grown[0] if grown else None,
                "noise_kb": grown[1] if grown else None,
            }
        )
    if found.refusals:
        made.append({"arm": "refusals", "tried": found.refusals["tried"]})
    if found.restarts:
        made.append(
            {"arm": "restart", "restarts": [dict(r) for r in found.restarts], **(restart_over_pause(found) or {})}
        )
    return made


def _summary(found: Found) -> dict[str, Any]:
    changes = found.changes
    known = {"change_ms": [c["change_ms"] for c in changes], "call_ms": [c["call_ms"] for c in changes],
             "pause_ms": pauses(changes), "predicted_to_measured": ratios(changes)}  # fmt: skip
    gaps = [g for r in found.references for g in r["median_gaps_ms"] if g is not None]
    return {
        "undisturbed_gap_ms": median(gaps) if gaps else None,
        **{name: _spread(values) for name, values in known.items() if values},
    }


def _shorter(found: Found) -> dict[str, float]:
    """How many times shorter the median stream's pause is where KV is carried over."""
    anew, carried = pauses(found.changes), pauses(found.carried_changes)
    return {"pause_anew_over_carried": median(anew) / max(1.0, median(carried))} if anew and carried else {}


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {
        "n": len(values),
        "min": min(values),
        "p50": median(values),
        "p95": quantile(values, 0.95),
        "max": max(values),
    }
