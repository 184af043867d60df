"""What a pool's telemetry says of its KV block size: which phase the pool is in, whether its KV cache is badly used, and the figures that
say what another size would save.

What the signals miss: use and waiting are looked at by windows of five seconds, so a cache that is full for a moment between two reports
counts as not full; failures are scaled up from two minutes to an hour; the spread of decode steps is that of any cause, block sizes being
one of the rarer ones; waste is that of the requests that are there now, not of those to come; and lengths are those of a model, whichever
of its pools has the long ones.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from controlplane.controllers.recent import since
from controlplane.seen import WINDOW_S, Lengths, NodeSeen, counted
from controlplane.telemetry import WAITING
from trimtab.blocks import Figures
from trimtab.measures import (
    ALLOCATION_FAILURES,
    CACHED_TOKENS,
    COMPUTED_TOKENS,
    DECODE_DEVIATION,
    KV_USED,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    SESSION_TURNS,
    STORED_TOKENS,
    block_waste,
    prefix_kept,
)
from trimtab.policy_rollouts import BlockPlanPart

SUSTAINED = 3
"""Windows in a row."""
SPAN_S = 120.0
"""What is counted is of the last two minutes."""
MIN_SPAN_S = 60.0
"""From less, nothing is scaled up to an hour."""
MIN_PROMPTS = 20
BACK = 0.9
"""A phase is left once what called for it is a tenth below its mark."""
MOST_WASTE = 0.999
SAMPLE = 64
"""Workers of a pool, at most about twice as many, that its figures are taken from: a mean needs no thousand."""


class Phase(enum.StrEnum):
    """Of a pool, by the field guides."""

    WARM_UP = "warm-up"
    MIXED = "mixed"
    LONG = "long-session"
    STEADY = "steady"


@dataclass(frozen=True, slots=True)
class Sign:
    """That a KV cache is badly used: `what` in words that stay the same, and the figures. `binds`: requests lack KV."""

    what: str
    figures: str
    binds: bool


def present_size(workers: Iterable[NodeSeen]) -> int:
    """The block size that most of them have, the smallest of several; 0 where none says it."""
    sizes = Counter(size for n in workers if (size := n.node.limits.block_size))
    return min(sizes, key=lambda size: (-sizes[size], size), default=0)


def named_size(phase: Phase, rule: BlockPlanPart) -> int:
    """The field guides' for it."""
    return {
        Phase.WARM_UP: rule.warm_up,
        Phase.MIXED: rule.mixed,
        Phase.LONG: rule.long_sessions,
        Phase.STEADY: rule.steady,
    }[phase]


def phase_of(
    workers: Sequence[NodeSeen],
    lengths: Lengths | None,
    age_s: float,
    before: Phase | None,
    rule: BlockPlanPart,
    now: float,
) -> tuple[Phase, str]:
    """And the figures for it. Sessions or prompts that nobody sends are not long ones."""
    if age_s < rule.warm_up_s:
        return Phase.WARM_UP, f"its first worker joined {age_s:.0f} s ago (limit {rule.warm_up_s} s)"
    if lengths is not None and lengths.recent_prompts.count >= MIN_PROMPTS:
        median = lengths.recent_prompts.quantile(0.5)
        if median >= rule.mixed_from * (BACK if before is Phase.MIXED else 1.0):
            return Phase.MIXED, f"median prompt {median:,.0f} tokens (limit {rule.mixed_from:,})"
    turns = turns_of(workers, now)
    if turns is not None and turns > rule.turns_above * (BACK if before is Phase.LONG else 1.0):
        return Phase.LONG, f"sessions have {turns:.1f} turns (limit {rule.turns_above})"
    return Phase.STEADY, "neither new nor with long sessions or prompts"


def turns_of(workers: Iterable[NodeSeen], now: float) -> float | None:
    """Turns a session, of the pool's workers on average; None where no session has two."""
    found = [turns for n in workers if (turns := n.gauge(SESSION_TURNS, now)) is not None]
    return sum(found) / len(found) if found else None


def signs_of(workers: Iterable[NodeSeen], rule: BlockPlanPart, now: float) -> tuple[list[Sign], list[str]]:
    """What any of them shows, and what is missing to say so."""
    fresh = [n for n in workers if n.fresh(now)]
    found, missing = [], []
    for n in fresh:
        if n.totals.get(ALLOCATION_FAILURES):
            starving, unknown = _starving(n, rule, now)
            found += starving
            missing += unknown
            found += _failing(n, rule, now)
        deviation = n.gauge(DECODE_DEVIATION, now)
        if deviation is not None and n.load.running and deviation > rule.deviation_above:
            figures = f"{n.node_id}: {deviation:.0%} of the mean (limit {rule.deviation_above:.0%})"
            found.append(Sign("the time of decode steps varies", figures, binds=False))
    turns = turns_of(fresh, now)
    if turns is not None and turns > rule.turns_above:
        found.append(Sign("sessions are long", f"{turns:.1f} turns (limit {rule.turns_above})", binds=False))
    return found, missing


def _starving(n: NodeSeen, rule: BlockPlanPart, now: float) -> tuple[list[Sign], list[str]]:
    windows = since(n, now - (SUSTAINED + 1) * WINDOW_S)[:SUSTAINED]
    if len(windows) < SUSTAINED or not all(w.peaks.get(WAITING, 0.0) > 0.0 for w in windows):
        return [], []
    failed = counted(windows, ALLOCATION_FAILURES)
    if not failed:
        return [], []
    uses = [w.peaks.get(KV_USED) for w in windows]
    if None in uses:
        return [], [f"{n.node_id} does not say how much of its KV cache is used"]
    use = max(u for u in uses if u is not None)
    if use >= rule.use_below:
        return [], []
    figures = f"{n.node_id}: at most {use:.0%} used in {SUSTAINED} windows (limit {rule.use_below:.0%}), {failed} allocations failed"
    return [Sign("requests wait for KV beside blocks that are free", figures, binds=True)], []


def _failing(n: NodeSeen, rule: BlockPlanPart, now: float) -> list[Sign]:
    windows = since(n, now - SPAN_S)
    failed, span_s = counted(windows, ALLOCATION_FAILURES), sum(w.ended - w.begun for w in windows)
    per_h = failed * 3600.0 / span_s if span_s >= MIN_SPAN_S else 0.0
    if per_h <= rule.failures_per_h:
        return []
    figures = f"{n.node_id}: {failed} in {span_s:.0f} s, {per_h:,.0f} an hour (limit {rule.failures_per_h})"
    return [Sign("allocations fail for running requests", figures, binds=True)]


def figures_of(
    workers: Sequence[NodeSeen], lengths: Lengths | None, sizes: Iterable[int], now: float, *, binds: bool
) -> Figures:
    """Of the pool; each worker counts by the tokens that it stores. What nobody says is not in it."""
    some, sizes = workers[:: max(1, len(workers) // SAMPLE)], list(sizes)
    windows = [w for n in some for w in since(n, now - SPAN_S)]
    computed, prompts = counted(windows, COMPUTED_TOKENS), counted(windows, PROMPT_TOKENS)
    waste = {size: _mean(some, block_waste(size), now) for size in sizes}
    kept = {size: _mean(some, prefix_kept(size), now) for size in sizes}
    return Figures(
        waste={size: min(MOST_WASTE, max(0.0, x)) for size, x in waste.items() if x is not None},
        kept={size: x for size, x in kept.items() if x is not None},
        hits=min(1.0, counted(windows, CACHED_TOKENS) / prompts) if prompts else 0.0,
        # By tokens. One of a prompt costs less than a decode's, so prompts are at most this share, and hits are worth at most what it says.
        prefill=min(1.0, max(0.0, 1.0 - counted(windows, OUTPUT_TOKENS) / computed)) if computed else 0.0,
        context=round(lengths.recent_totals.quantile(0.5)) if lengths and lengths.recent_totals.count else 0,
        binds=binds,
    )


def _mean(workers: Iterable[NodeSeen], name: str, now: float) -> float | None:
    found = [(n.gauge(STORED_TOKENS, now) or 0.0, x) for n in workers if (x := n.gauge(name, now)) is not None]
    weight = sum(w for w, _ in found)
    if weight > 0.0:
        return sum(w * x for w, x in found) / weight
    return sum(x for _, x in found) / len(found) if found else None
