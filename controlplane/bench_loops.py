"""`trimtab simulate loops`: what the controllers are worth, on a simulated mesh in virtual time.

Four arms (scheduler mode fcfs or trimtab, loops off or as they are by default), one with every controller on, and, of those that did
anything by default, the mesh without each. All arms of a scenario get the same arrivals; a controller that did nothing in an arm changed
nothing in it, so its own arm would be the same course.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from controlplane.controllers.decision import Controller
from controlplane.rehearsal import Rehearsal, most_a_minute, turns
from controlplane.scenarios import Scenario
from trimtab.policy import Policy, Value
from trimtab.simulation import Fate, Mesh, Outcome, Request, realtime
from trimtab.simulation.measuring import missed
from trimtab.snapshot import Document
from trimtab.workload import arrivals

WINDOW_S = 5.0
INSIDE_AFTER, BACK_AFTER = 6, 12
"""Windows after the step within which P99 has to be inside, and after its end within which BATCH has to be back."""
BACK_SHARE = 0.95
MODES = ("fcfs", "trimtab")
MOVES = ("move", "back")


@dataclass(frozen=True, slots=True)
class Arm:
    """`loops` says whether controllers are as they are by default, `without` which of them is off all the same; `every`: all are on."""

    mode: str
    loops: bool
    without: str = ""
    every: bool = False

    @property
    def name(self) -> str:
        which = "every loop" if self.every else "loops" if self.loops else "no loops"
        return f"{self.mode}, {which}" + (f" without {self.without}" if self.without else "")


@dataclass(slots=True)
class Course:
    """One arm of one scenario with one seed."""

    scenario: str
    arm: Arm
    seed: int
    outcome: Outcome
    rehearsal: Rehearsal


@dataclass(frozen=True, slots=True)
class Row:
    """One arm of one scenario, all seeds together. P99 of TTFT in ms; `violations` is of REALTIME requests; tokens of BATCH per second."""

    scenario: str
    arm: Arm
    p99_ms: float
    violations: float
    batch_tokens_s: float
    recomputed: float
    refused: int
    adjustments: int
    commands: int
    wants: int
    turns_a_minute: int
    acted: tuple[str, ...]
    inside: float | None = None
    """P99 from the sixth window of the step on."""
    inside_hot: float | None = None
    """The same of prompts below `paths.hot_below` alone."""
    back: float | None = None
    """BATCH tokens done until BACK_AFTER windows after the step."""


@dataclass(frozen=True, slots=True)
class Goal:
    name: str
    goal: float
    at_most: bool
    value: float | None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def as_json(self) -> dict[str, Any]:
        bound = "at_most" if self.at_most else "at_least"
        return {"name": self.name, "goal": self.goal, "bound": bound, "value": self.value, "met": self.met}


@dataclass(slots=True)
class Result:
    rows: list[Row] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)


def document_of(scenario: Scenario, arm: Arm, names: Iterable[str]) -> Document:
    """The policy that an arm begins with."""
    words = {n: "off" if not arm.loops or n == arm.without else "on" if arm.every else "" for n in names}
    loops: dict[str, Value] = {f"loops.{n}": word for n, word in words.items() if word}
    return Document({"scheduler.mode": arm.mode, **scenario.policy, **loops})


def course(scenario: Scenario, arm: Arm, seed: int, controllers: Sequence[Controller]) -> Iterator[float | Course]:
    """Now and then the share of its virtual time that is over, at last the course."""
    document = document_of(scenario, arm, [c.name for c in controllers])
    rehearsal = Rehearsal(controllers, document)
    mesh = Mesh(
        replace(scenario.fleet, document=document),
        arrivals(scenario.sources, scenario.until_s, seed),
        control=rehearsal,
        faults=scenario.faults,
        seed=seed,
    )
    at = 0.0
    while at < scenario.until_s:
        at = min(scenario.until_s, at + 10.0)
        mesh.run(at)
        yield at / scenario.until_s
    mesh.outcome.computed_tokens, mesh.outcome.recomputed_tokens = mesh.total_tokens()
    yield Course(scenario.name, arm, seed, mesh.outcome, rehearsal)


def row(scenario: Scenario, arm: Arm, courses: Sequence[Course]) -> Row:
    """All seeds of one arm."""
    people = [r for c in courses for r in realtime(c.outcome.requests)]
    policy = Policy()
    judged = [r for r in people if r.fate is not Fate.OPEN or r.first_ms is not None]
    over = sum(missed(r, policy) > 1.0 or r.fate in (Fate.REFUSED, Fate.FAILED) for r in judged)
    notes = [n for c in courses for n in c.rehearsal.notes]
    seconds = scenario.until_s * len(courses)
    computed = sum(c.outcome.computed_tokens for c in courses)
    lines = [line for c in courses for line in c.rehearsal.factors.values()]
    inside, inside_hot, back = None, None, None
    if scenario.step_s is not None:
        begun, ended = scenario.step_s
        later = [r for r in people if begun + INSIDE_AFTER * WINDOW_S <= r.arrival_ms / 1000.0 < ended]
        inside, inside_hot = p99(later), p99(r for r in later if r.prompt < policy.paths.hot_below)
        until = ended + BACK_AFTER * WINDOW_S
        back = float(sum(_batch(c, 0.0, until) for c in courses)) if until <= scenario.until_s else None
    return Row(
        scenario.name,
        arm,
        p99(people),
        over / max(1, len(judged)),
        sum(sum(c.outcome.batch_tokens.values()) for c in courses) / seconds,
        sum(c.outcome.recomputed_tokens for c in courses) / max(1, computed),
        sum(r.fate in (Fate.REFUSED, Fate.SHED, Fate.FAILED) for c in courses for r in c.outcome.requests),
        sum(n.kind in MOVES for n in notes),
        sum(n.kind == "command" for n in notes),
        sum(n.kind == "want" for n in notes),
        max((most_a_minute(turns(line)) for line in lines), default=0),
        tuple(sorted({n.controller for n in notes})),
        inside,
        inside_hot,
        back,
    )


def _batch(c: Course, begin_s: float, end_s: float) -> int:
    return sum(n for second, n in c.outcome.batch_tokens.items() if begin_s <= second < end_s)


def p99(requests: Iterable[Request]) -> float:
    """Of TTFT in ms, of those that had a first token; 0 of nobody. Who was refused is counted among the violations."""
    found = sorted(r.ttft_ms for r in requests if r.ttft_ms is not None)
    return found[min(len(found) - 1, int(0.99 * len(found)))] if found else 0.0


def arms(rows: Sequence[Row]) -> list[Arm]:
    """Those that are still to be run of a scenario: without each controller that acted when all were on."""
    full = next((r for r in rows if r.arm == Arm("trimtab", True)), None)
    return [] if full is None else [Arm("trimtab", True, name) for name in full.acted]


def run(
    scenarios: Sequence[Scenario], seeds: Sequence[int], controllers: Sequence[Controller]
) -> Iterator[tuple[str, float] | Result]:
    """(what runs, its share that is over) as it goes, at last the result."""
    result = Result()
    for scenario in scenarios:
        mine: list[Row] = []
        pending = [*(Arm(mode, loops) for mode in MODES for loops in (False, True)), Arm("trimtab", True, every=True)]
        while pending:
            arm = pending.pop(0)
            courses = []
            for i, seed in enumerate(seeds):
                for step in course(scenario, arm, seed, controllers):
                    if isinstance(step, Course):
                        courses.append(step)
                    else:
                        yield f"{scenario.name}: {arm.name}", (i + step) / len(seeds)
            mine.append(row(scenario, arm, courses))
            if arm == Arm("trimtab", True):
                pending += arms(mine)
        result.rows += mine
    result.goals = goals(result.rows)
    yield result


def goals(rows: Sequence[Row]) -> list[Goal]:
    """DESIGN §10's shape; one that no scenario decided has no value."""
    on = {r.scenario: r for r in rows if r.arm == Arm("trimtab", True)}
    off = {r.scenario: r for r in rows if r.arm == Arm("trimtab", False)}
    found = []
    if "step" in on:
        r, o = on["step"], off["step"]
        limit = Policy().objectives.ttft_p99_ms
        found.append(Goal("step: REALTIME P99 from window 6 on, ms", limit, True, r.inside))
        found.append(Goal("step: REALTIME and hot, the same, ms", limit, True, r.inside_hot))
        # Of the same arrivals: what loops put off during the step is made up for by then. Against what was done before the step, the
        # few long documents of half a minute would decide.
        made_up = r.back / o.back if r.back is not None and o.back else None
        found.append(Goal("step: BATCH until 12 windows after it, of loops off", BACK_SHARE, False, made_up))
        found.append(
            Goal(
                "step: BATCH over all of it, of loops off",
                BACK_SHARE,
                False,
                r.batch_tokens_s / max(1.0, o.batch_tokens_s),
            )
        )
    found += [
        Goal(f"{name}: anything done", 0.0, True, float(on[name].adjustments + on[name].commands + on[name].wants))
        for name in ("idle", "healthy")
        if name in on
    ]
    if on:
        found.append(
            Goal(
                "an adjustment's changes of direction in a minute",
                1.0,
                True,
                float(max(r.turns_a_minute for r in on.values())),
            )
        )
    return found
