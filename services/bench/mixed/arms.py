"""The arms: by which policy the one engine runs, and which of the two sources send. Pure.

Each arm names only what sets it apart; `fields` spells out every field that any arm sets, so that nothing is left over from the arm before.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trimtab.policy import Partial, check, text

MODE = "scheduler.mode"
BUDGET = "prefill.itl_budget_ms"
OVERTAKE = "priority.max_overtake_ms"
COMMON: Partial = {"paths.hot_below": 1024}
"""The model's window is 8192: with the default of 4096, which is for 128K windows, no batch prompt would be cold."""
BUDGETS_MS = (36, 100, 200)
LONGEST = "prefill.max_step_ms"
SMALL_STEP = 256
HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Arm:
    """`realtime` and `batch` say which sources send. An ablation is asked for less: P50 and P90, and fewer blocks."""

    name: str
    policy: Partial
    says: str
    realtime: bool = True
    batch: bool = True
    ablation: bool = False


FCFS = Arm("fcfs", {MODE: "fcfs"}, "vLLM's first come, first served, all priorities equal")
PRIORITY = Arm("priority", {MODE: "priority"}, "vLLM's fixed priority, realtime first")
REALTIME_ALONE = Arm("realtime-alone", {MODE: "fcfs"}, "the realtime source on an idle engine", batch=False)
BATCH_ALONE = Arm("batch-alone", {MODE: "fcfs"}, "the backlog without realtime, by FCFS", realtime=False)

OFF: Partial = {
    MODE: "trimtab",
    BUDGET: 0,
    "prefill.max_step_ms": 0,
    "prefill.max_suspend_ms": 0,
    "prefill.concurrent": 32,
    "paths.realtime_reserve": 0,
    "batch.hard_cap": 32,
    "preemption.mode": "none",
    "clusters.spread_limit": 1.0,
}
"""Our scheduler with everything off that can be: what stays is its order, and the express path of realtime through it."""


def _only(name: str, says: str, policy: Partial) -> Arm:
    return Arm(f"only-{name}", {**OFF, **policy}, says, ablation=True)


ABLATIONS = (
    _only("express", "order, and realtime prompts before all others", {}),
    _only("governor", "no step longer than 200 ms, as predicted", {"prefill.max_step_ms": 200, BUDGET: 200}),
    _only(
        "suspension",
        "batch held back beside realtime to keep 100 ms, unbounded without it",
        {BUDGET: 100, "prefill.max_step_ms": HOUR_MS, "prefill.max_suspend_ms": 5000},
    ),
    _only("shares", "two cold prompts in prefill at a time", {"prefill.concurrent": 2}),
    _only("clusters", "of two cold prompts, alike lengths", {"prefill.concurrent": 2, "clusters.spread_limit": 0.3}),
    # There are slots for all otherwise, and nobody would have to make room.
    _only("preemption", "16 slots, and who waits preempts", {"batch.active": 16, "preemption.mode": "conservative"}),
    _only("reserve", "16 slots, one of them kept for realtime", {"batch.active": 16, "paths.realtime_reserve": 1}),
    Arm(
        "only-slots",
        {**OFF, "batch.active": 16},
        "16 slots and nothing else: what the two before compare with",
        ablation=True,
    ),
    Arm(
        "fcfs-small-steps",
        {MODE: "fcfs", "prefill.step_tokens": SMALL_STEP},
        f"stock FCFS with {SMALL_STEP} tokens a step",
        ablation=True,
    ),
    Arm(
        "priority-small-steps",
        {MODE: "priority", "prefill.step_tokens": SMALL_STEP},
        f"stock priority with {SMALL_STEP} tokens a step",
        ablation=True,
    ),
)


def longest_ms(budget_ms: int) -> int:
    """How long a step may last without realtime, beside this budget: its constant part (some 30 ms on these CPUs) makes short ones dear."""
    return 10 * budget_ms


def ours(budget_ms: int) -> Arm:
    """Our scheduler as it is by default, with this budget."""
    longest = longest_ms(budget_ms)
    policy: Partial = {MODE: "trimtab", BUDGET: budget_ms, LONGEST: longest}
    return Arm(f"ours-{budget_ms}", policy, f"ours, {BUDGET} = {budget_ms}, {LONGEST} = {longest}")


def is_ours(name: str) -> bool:
    return name.startswith("ours-")


def budget_ms(name: str) -> int:
    """Of one of ours."""
    return int(name.removeprefix("ours-"))


def every(budgets_ms: Iterable[int]) -> tuple[Arm, ...]:
    """All arms, those that goals need first."""
    return (FCFS, PRIORITY, *map(ours, sorted(set(budgets_ms))), REALTIME_ALONE, BATCH_ALONE, *ABLATIONS)


def chosen(names: Sequence[str], budgets_ms: Iterable[int]) -> tuple[Arm, ...]:
    """Those named, in the order of `every`; `main` and `ablations` name several, nothing names all. ValueError with the nearest name."""
    named = {budget_ms(name) for name in names if is_ours(name) and name.removeprefix("ours-").isdigit()}
    all_arms = every({*budgets_ms, *named})
    groups = {"main": [a.name for a in all_arms if not a.ablation], "ablations": [a.name for a in ABLATIONS]}
    known = [a.name for a in all_arms]
    wanted: set[str] = set()
    for name in names:
        if name not in known and name not in groups:
            near = difflib.get_close_matches(name, [*known, *groups], n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"no arm is called {name!r}{hint} (there are {', '.join([*groups, *known])})")
        wanted.update(groups.get(name, [name]))
    return tuple(a for a in all_arms if not names or a.name in wanted)


def fields(arm: Arm) -> dict[str, str]:
    """What `trimtab policy set` is given to run by this arm and by nothing else."""
    policy = {**COMMON, **arm.policy}
    known = {path for a in every(BUDGETS_MS) for path in a.policy} | set(policy)
    return {path: text(check(path, policy[path])) if path in policy else "default" for path in sorted(known)}
