"""The figures of `policy-latency`: from calls to goals and tables. Pure.

A call beside running steps is *late* when more than one step has ended between its putting and its acknowledgement: it then waited longer
than for the step in flight. A step that ends while the call is still on its way to the engine is not the one that it waits for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, Estimate, bootstrap, quantile
from trimtab.kit.cli import table

GOAL_IDLE_MS = 3.0
ON_ITS_WAY_MS = GOAL_IDLE_MS
"""A call may be on its way to the engine for so long: an idle engine has answered by then."""
ENOUGH_IDLE, ENOUGH_BUSY = 400, 100
"""Calls below which a P99 decides nothing, and below which none being late decides nothing; a single late one does."""


@dataclass(frozen=True, slots=True)
class Call:
    """One policy put beside running steps, acknowledged after `ms`. Steps count as ended when the board says so.

    `applied_before` is the step before which the engine took it, in its own words. `first_end_ms` is when the first step after the putting
    ended, None where that was not seen.
    """

    ms: float
    ended_at_put: int
    ended_at_ack: int
    applied_before: int
    first_end_ms: float | None = None

    @property
    def ends(self) -> int:
        """Steps that ended between putting and acknowledgement."""
        return self.ended_at_ack - self.ended_at_put

    @property
    def ends_until_applied(self) -> int:
        """Steps that ended between putting and taking effect."""
        return self.applied_before - 1 - self.ended_at_put

    @property
    def crossed(self) -> bool:
        """A step ended just as it was put."""
        return self.first_end_ms is not None and self.first_end_ms <= ON_ITS_WAY_MS

    @property
    def late(self) -> bool:
        return self.ends - self.crossed > 1


def p99(values: Sequence[float]) -> float:
    return quantile(values, 0.99)


def idle_p99(idle_ms: Sequence[float], seed: int) -> Estimate | None:
    return bootstrap(idle_ms, p99, seed=seed) if idle_ms else None


def arms(idle_ms: Sequence[float], calls: Sequence[Call], steps_ms: Sequence[float], seed: int) -> list[dict[str, Any]]:
    """One object for each of `idle` and `busy`, where it was measured."""
    found = []
    if (tail := idle_p99(idle_ms, seed)) is not None:
        found.append({"arm": "idle", **_latency(idle_ms), "p99_interval_ms": [tail.low, tail.high]})
    if calls:
        ends = Counter(c.ends for c in calls)
        found.append(
            {
                "arm": "busy", **_latency([c.ms for c in calls]),
                "step_p50_ms": quantile(steps_ms, 0.5) if steps_ms else None, "steps": len(steps_ms),
                "step_ends": {str(n): ends[n] for n in sorted(ends)},
                "late": sum(c.late for c in calls),
                "crossed": sum(c.crossed and c.ends > 1 for c in calls),
                "applied_after_more_than_one_end": sum(c.ends_until_applied > 1 for c in calls),
            }
        )  # fmt: skip
    return found


def _latency(values: Sequence[float]) -> dict[str, Any]:
    return {"calls": len(values), "p50_ms": quantile(values, 0.5), "p99_ms": p99(values), "max_ms": max(values)}


def goals(idle_ms: Sequence[float], calls: Sequence[Call], seed: int) -> list[Goal]:
    name, late_name = "idle_p99_ms", "busy_later_than_the_step_in_flight"
    tail = Goal.judged(name, GOAL_IDLE_MS, Bound.AT_MOST, idle_p99(idle_ms, seed))
    if len(idle_ms) < ENOUGH_IDLE:
        tail = Goal(name, GOAL_IDLE_MS, Bound.AT_MOST, tail.value, None, tail.estimate)
    if not calls:
        return [tail, Goal(late_name, 0, Bound.AT_MOST)]
    late = sum(c.late for c in calls)
    met = False if late else True if len(calls) >= ENOUGH_BUSY else None
    return [tail, Goal(late_name, 0, Bound.AT_MOST, float(late), met)]


def sections(rows: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    """(title, table) of each. From the objects that the JSON has too."""
    if not rows:
        return []
    cells = [
        (a["arm"], *(f"{a[k]:.2f}" for k in ("p50_ms", "p99_ms", "max_ms")), str(a["calls"]), _beside(a)) for a in rows
    ]
    title = "Put on the engine's channel until acknowledged, ms"
    found = [(title, table(("ENGINE", "P50", "P99", "MAX", "CALLS", "BESIDE"), cells, right=(1, 2, 3, 4)))]
    found += [
        ("Steps that ended between a busy call's putting and its acknowledgement", _ends(a))
        for a in rows
        if "late" in a
    ]
    return found  # fmt: skip


def _beside(a: dict[str, Any]) -> str:
    if "steps" not in a:
        return "nothing"
    if a["step_p50_ms"] is None:
        return "steps of unknown length"
    return f"steps of {a['step_p50_ms']:.1f} ms (P50 of {a['steps']})"


def _ends(a: dict[str, Any]) -> str:
    lines = [f"{n} step{'' if n == '1' else 's'}: {count} calls" for n, count in a["step_ends"].items()]
    return "; ".join(lines) + (
        f"\nlate: {a['late']}; not counted as late because a step ended within {ON_ITS_WAY_MS:g} ms of the putting: {a['crossed']}"
        f"\ntaken by the engine after more than one step's end, in its own count: {a['applied_after_more_than_one_end']}"
    )


def as_json(call: Call) -> dict[str, Any]:
    return asdict(call)
