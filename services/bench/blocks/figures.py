"""The figures of `blocks`: from visits to what each size is worth. Pure.

A visit is one size's turn in one round: its speed at each context length. Invariant: sizes are compared within rounds only, each with the
size that the engine has by default. An interval is the lowest and the highest of the rounds.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, Estimate, median
from trimtab.blocks import waste

WORTH = 0.05
"""Of the work: what a change of the size must save."""
ROUNDS, PREFIX_TOLERANCE = 3, 0.01
ENTRY_BYTES = 4
"""Of a block table: one number of 32 bits for each block."""

Speeds = Mapping[str, float | None]
"""`prefill_tokens_per_s`, `decode_tokens_per_s`."""
PREFILL, DECODE = "prefill_tokens_per_s", "decode_tokens_per_s"


def speeds(times: Sequence[Sequence[float]], begun: float, context: int) -> dict[str, float | None]:
    """Of streams that were sent at `begun`, all of one context length; `times` in seconds, of each token of each stream.

    Decoding is timed while all of them decode, by the median of their gaps: a pause of this machine's must not count as the size's.
    """
    first, last = max(t[0] for t in times), min(t[-1] for t in times)
    gaps = [b - a for t in times for a, b in itertools.pairwise(t) if a >= first and b <= last]
    usual = median(gaps) if gaps else 0.0
    return {
        PREFILL: context * len(times) / (first - begun) if first > begun else None,
        DECODE: len(times) / usual if usual > 0.0 else None,
    }


def table_bytes(tokens: int, block_size: int) -> int:
    """Of the block table of one request of so many tokens."""
    return -(-tokens // block_size) * ENTRY_BYTES


@dataclass(frozen=True, slots=True)
class Visit:
    """`speeds` by context length in tokens. `cached` are prompt tokens that were found in the cache, where none should be."""

    round: int
    size: int
    blocks: int
    speeds: Mapping[int, Speeds]
    cached: int = 0

    @staticmethod
    def from_json(raw: Mapping[str, Any]) -> Visit:
        by_context = {int(c): s for c, s in raw["speeds"].items()}
        cached = sum(int(s.get("cached_tokens", 0)) for s in by_context.values())
        return Visit(raw["round"], raw["size"], raw["total_blocks"], by_context, cached)


def by_round(visits: Sequence[Visit], context: int, what: str) -> dict[int, dict[int, float]]:
    """Round → size → speed, where it was measured."""
    found: dict[int, dict[int, float]] = {}
    for v in visits:
        value = v.speeds.get(context, {}).get(what)
        if value is not None:
            found.setdefault(v.round, {})[v.size] = value
    return found


def ratio(visits: Sequence[Visit], context: int, what: str, size: int, default: int) -> Estimate | None:
    """How many times as fast as the default size; None where no round has both."""
    rounds = by_round(visits, context, what).values()
    found = [r[size] / r[default] for r in rounds if size in r and default in r]
    return Estimate(median(found), min(found), max(found), len(found)) if found else None


def speed(visits: Sequence[Visit], context: int, what: str, size: int) -> float | None:
    found = [r[size] for r in by_round(visits, context, what).values() if size in r]
    return median(found) if found else None


def contexts(visits: Sequence[Visit]) -> list[int]:
    return sorted({c for v in visits for c in v.speeds})


def sizes(visits: Sequence[Visit]) -> list[int]:
    return sorted({v.size for v in visits})


def drift(visits: Sequence[Visit], context: int, what: str, default: int) -> float | None:
    """By how much the default size's own speed differs between rounds, of its median: differences below it are this machine's."""
    found = [r[default] for r in by_round(visits, context, what).values() if default in r]
    return (max(found) - min(found)) / median(found) if len(found) > 1 else None


def calibration(visits: Sequence[Visit], default: int) -> dict[str, dict[str, dict[str, float]]]:
    """`decode` and `prefill`: context → size → speed next to the default size, of sizes with enough rounds, as far as all rounds agree on it:
    the least difference that any of them has, and none where they differ in its sign. Else a planner would act on noise.

    `decode` is what `trimtab.blocks.SPEED` takes.
    """
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, what in (("decode", DECODE), ("prefill", PREFILL)):
        for context in contexts(visits):
            ratios = {s: ratio(visits, context, what, s, default) for s in sizes(visits)}
            known = {str(s): round(_agreed(r), 3) for s, r in ratios.items() if r is not None and r.n >= ROUNDS}
            if known:
                found.setdefault(name, {})[str(context)] = known
    return found


def _agreed(r: Estimate) -> float:
    return r.low if r.low > 1.0 else min(1.0, r.high)


# What a size is worth to a workload.


@dataclass(frozen=True, slots=True)
class Work:
    """A workload by its means in tokens, and the share of slots that each size wastes on it. `hits` is by size too, of its prompts."""

    name: str
    prompt: float
    output: float
    context: int
    wasted: Mapping[int, float]
    hits: Mapping[int, float] | None = None

    @staticmethod
    def of(name: str, requests: Sequence[tuple[int, int]], measured: Sequence[int], of_sizes: Sequence[int]) -> Work:
        """`measured` are the context lengths that there are speeds of; the one nearest to the median request by ratio stands for it."""
        n = len(requests)
        held = [prompt + output - 1 for prompt, output in requests]
        middle = max(1.0, median(held))
        nearest = min(measured, key=lambda c: abs(math.log(c / middle)))
        wasted = {s: waste(held, s) for s in of_sizes}
        return Work(name, sum(p for p, _ in requests) / n, sum(o for _, o in requests) / n, nearest, wasted)


def gains(visits: Sequence[Visit], work: Work, size: int, default: int) -> list[float]:
    """By round: the share of the engine's time that this size saves. A request's time is its prompt's and its output's at their speeds."""
    prefill, decode = (by_round(visits, work.context, what) for what in (PREFILL, DECODE))

    def seconds(round_: int, s: int) -> float | None:
        p, d = prefill.get(round_, {}).get(s), decode.get(round_, {}).get(s)
        if p is None or d is None:
            return None
        return work.prompt * (1.0 - (work.hits or {}).get(s, 0.0)) / p + work.output / d

    found = []
    for round_ in sorted(prefill):
        mine, usual = seconds(round_, size), seconds(round_, default)
        if mine is not None and usual is not None:
            found.append(1.0 - mine / usual)
    return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """The best size for a workload. `worth` says whether it saves WORTH of the work: None where rounds disagree or are too few."""

    workload: str
    binds: bool
    best: int
    gain: Estimate
    worth: bool | None


def verdict(visits: Sequence[Visit], work: Work, default: int, *, binds: bool) -> Verdict | None:
    """Among all sizes measured. Where memory `binds`, slots that a size does not waste are work too. None without speeds of the default."""
    if default not in sizes(visits):
        return None
    each: dict[int, Estimate] = {}
    for size in sizes(visits):
        room = 1.0 - (1.0 - work.wasted[default]) / (1.0 - work.wasted[size]) if binds else 0.0
        found = [g + room for g in gains(visits, work, size, default)]
        if found:
            each[size] = Estimate(median(found), min(found), max(found), len(found))
    if default not in each:
        return None
    best = max(each, key=lambda s: (each[s].value, s == default))
    return Verdict(work.name, binds, best, each[best], _worth(each, default))


def _worth(each: Mapping[int, Estimate], default: int) -> bool | None:
    others = [e for s, e in each.items() if s != default]
    if not others or min(e.n for e in others) < ROUNDS:
        return None
    if any(e.low >= WORTH for e in others):
        return True
    return None if any(e.high >= WORTH for e in others) else False


# Goals.


def prefix_errors(parts: Sequence[Mapping[str, Any]]) -> list[float]:
    """By how much the measured share of prompt tokens found again differs from the computed one, for each size."""
    return [abs(p["cached_tokens"] - p["computed_cached_tokens"]) / max(1, p["prompt_tokens"]) for p in parts]


def goals(
    visits: Sequence[Visit],
    prefixes: Sequence[Mapping[str, Any]],
    accepted: int,
    verdicts: Sequence[Verdict],
    *,
    quick: bool,
) -> list[Goal]:
    """All of them, measured or not; with `quick` only what is missed is decided, and what it leaves out is not."""

    def goal(name: str, wanted: float, bound: Bound, value: float | None, *, whole: bool = False) -> Goal:
        if value is None or (quick and whole):
            return Goal(name, wanted, bound)
        good = value <= wanted if bound is Bound.AT_MOST else value >= wanted
        return Goal(name, wanted, bound, float(value), None if good and quick else good)

    rounds = {
        (c, s): sum(v.size == s and c in v.speeds for v in visits) for c in contexts(visits) for s in sizes(visits)
    }
    whole_ones = [s for s in sizes(visits) if all(rounds[c, s] for c in contexts(visits))]
    errors = prefix_errors(prefixes)
    undecided = sum(v.worth is None for v in verdicts) if verdicts else None
    return [
        goal("sizes_measured", accepted, Bound.AT_LEAST, len(whole_ones) if visits else None, whole=True),
        goal("rounds_of_each_size", ROUNDS, Bound.AT_LEAST, min(rounds.values(), default=None), whole=True),
        goal("prompt_tokens_found_in_cache", 0, Bound.AT_MOST, sum(v.cached for v in visits) if visits else None),
        goal("prefix_hits_off_computed", PREFIX_TOLERANCE, Bound.AT_MOST, max(errors, default=None)),
        goal("workloads_undecided", 0, Bound.AT_MOST, undecided, whole=True),
    ]
