"""From turns to the report: who kept the objectives, what batch got done, and how often a knob turned round. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.bench.goals import Goal
from services.bench.loops.block import Block, batch_speed, ttft, turns_per_minute, violations
from services.bench.loops.plan import PHASES, Arm, Course
from services.bench.report import Report
from services.bench.stats import Bound, Estimate, bootstrap
from trimtab.kit.cli import table

if TYPE_CHECKING:
    from services.bench.loops.course import Found

BATCH_KEPT = 0.95
TURNS_PER_MIN = 1.0
SEED = 1


def report(
    arms: Sequence[Arm],
    blocks: Sequence[Block],
    found: Found | None,
    course: Course,
    facts: Mapping[str, Any],
    typed: str,
    directory: Path,
    whole: bool,
    said: Sequence[str] = (),
) -> Report:
    """`said` are more notes."""
    by_arm = {a.name: [b for b in blocks if b.arm == a.name] for a in arms}
    by_arm = {name: mine for name, mine in by_arm.items() if mine}
    notes = [f"raw turns: {directory}", *said]
    if found is None:
        return Report("loops", [], [], [], notes, False, facts, typed)
    ttft_ms, itl_ms = found.objectives
    notes.append(
        f"the engine gets {found.capacity:.0f} tokens/s done; a request alone: TTFT {found.ttft_ms:.0f} ms, gap {found.itl_ms:.0f} ms; "
        f"objectives: TTFT {ttft_ms} ms, gap {itl_ms} ms; load {course.low:g} → {course.high:g} → {course.low:g} of it"
    )
    figures = [_figures(name, mine, ttft_ms, itl_ms, course) for name, mine in by_arm.items()]
    goals = []
    for on, off in (("both", "scheduler"), ("loops", "neither")):
        if on in by_arm and off in by_arm:
            goals += _goals(on, off, by_arm, ttft_ms, itl_ms, course)
    return Report(
        "loops", figures, goals, [("arms", _table(figures)), ("what controllers wrote", _written(by_arm))], notes, whole, facts, typed,
        setup={"capacity_tokens_per_s": found.capacity, "ttft_objective_ms": ttft_ms, "itl_objective_ms": itl_ms},
    )  # fmt: skip


def _figures(name: str, blocks: Sequence[Block], ttft_ms: float, itl_ms: float, course: Course) -> dict[str, Any]:
    return {
        "arm": name,
        "rounds": len(blocks),
        "realtime": sum(len(b.realtime) for b in blocks),
        "violations": violations(blocks, ttft_ms, itl_ms, course),
        **{f"violations_{p}": violations(blocks, ttft_ms, itl_ms, course, p) for p in PHASES},
        **{f"ttft_p95_{p}_ms": ttft(blocks, 0.95, course, p) for p in PHASES},
        "ttft_p99_step_ms": ttft(blocks, 0.99, course, "step"),
        "batch_tokens_per_s": batch_speed(blocks, course),
        "batch_failed": sum(b.batch_failed for b in blocks),
        "realtime_failed": sum(bool(r.reason) for b in blocks for r in b.realtime),
        "restarts": sum(len(b.restarts) for b in blocks),
        "writes": sum(len(b.written) for b in blocks),
        "turns_per_min": max(turns_per_minute(b) for b in blocks),
    }


def _goals(
    on: str, off: str, by_arm: Mapping[str, Sequence[Block]], ttft_ms: float, itl_ms: float, course: Course
) -> list[Goal]:
    """Loops against no loops under the same scheduler, over the rounds that both have."""
    other = {b.round: b for b in by_arm[off]}
    both = [(b, other[b.round]) for b in by_arm[on] if b.round in other]
    if not both:
        return []

    def fewer(sample: Sequence[tuple[Block, Block]]) -> float:
        mine, theirs = ([x[i] for x in sample] for i in (0, 1))
        return violations(mine, ttft_ms, itl_ms, course) - violations(theirs, ttft_ms, itl_ms, course)

    def kept(sample: Sequence[tuple[Block, Block]]) -> float:
        mine, theirs = ([x[i] for x in sample] for i in (0, 1))
        return batch_speed(mine, course) / max(1e-9, batch_speed(theirs, course))

    less: Estimate = bootstrap(both, fewer, seed=SEED)
    batch: Estimate = bootstrap(both, kept, seed=SEED)
    turns = max(turns_per_minute(b) for b, _ in both)
    return [
        Goal.judged(f"{on}_less_{off}_violations", 0.0, Bound.AT_MOST, less),
        Goal.judged(f"{on}_to_{off}_batch", BATCH_KEPT, Bound.AT_LEAST, batch),
        Goal(f"{on}_turns_per_min", TURNS_PER_MIN, Bound.AT_MOST, turns, turns <= TURNS_PER_MIN),
    ]


def _table(figures: Sequence[Mapping[str, Any]]) -> str:
    head = ("ARM", "REALTIME", "OVER %", *(f"{p.upper()} %" for p in PHASES), "TTFT P95 STEP MS", "P99", "BATCH TOKENS/S",
            "FAILED", "RESTARTS", "WRITES", "TURNS/MIN")  # fmt: skip
    rows = [
        (
            f["arm"], str(f["realtime"]), _percent(f["violations"]), *(_percent(f[f"violations_{p}"]) for p in PHASES),
            _ms(f["ttft_p95_step_ms"]), _ms(f["ttft_p99_step_ms"]), f"{f['batch_tokens_per_s']:.0f}",
            str(f["batch_failed"] + f["realtime_failed"]), str(f["restarts"]), str(f["writes"]), f"{f['turns_per_min']:.1f}",
        )
        for f in figures
    ]  # fmt: skip
    return table(head, rows, right=tuple(range(1, len(head))))


def _written(by_arm: Mapping[str, Sequence[Block]]) -> str:
    rows = []
    for name, blocks in by_arm.items():
        knobs: dict[tuple[str, str], int] = {}
        for b in blocks:
            for w in b.written:
                knobs[(w.controller, w.what)] = knobs.get((w.controller, w.what), 0) + 1
        rows += [(name, controller, what, str(n)) for (controller, what), n in sorted(knobs.items())]
    return table(("ARM", "CONTROLLER", "WHAT", "WRITES"), rows, right=(3,)) if rows else "nothing"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"
