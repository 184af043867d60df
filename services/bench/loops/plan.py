"""What `bench loops` does: its arms, its load, and how long each part lasts. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from trimtab.messages import Workload
from trimtab.policy import FIELDS

CONTROLLERS = tuple(path.removeprefix("loops.") for path in FIELDS if path.startswith("loops."))
REALTIME_SHARE = 0.3
"""Of the load's tokens, in a step of load."""
PHASES = ("before", "step", "after")


@dataclass(frozen=True, slots=True)
class Arm:
    """`policy` is set before its turn; every arm sets the same fields, so that none is left of the one before."""

    name: str
    mode: str
    loops: frozenset[str] = field(default_factory=frozenset)

    @property
    def policy(self) -> Mapping[str, str]:
        return {
            "scheduler.mode": self.mode,
            **{f"loops.{name}": "on" if name in self.loops else "off" for name in CONTROLLERS},
        }


DEFAULT = frozenset(name for name in CONTROLLERS if FIELDS[f"loops.{name}"].default == "on")
FOUR = (
    Arm("neither", "fcfs"),
    Arm("loops", "fcfs", DEFAULT),
    Arm("scheduler", "trimtab"),
    Arm("both", "trimtab", DEFAULT),
)
"""DESIGN's ablation: no loop is credited with the scheduler's work."""
WITHOUT = tuple(Arm(f"without {name}", "trimtab", DEFAULT - {name}) for name in CONTROLLERS if name in DEFAULT)
WITH = tuple(Arm(f"with {name}", "trimtab", DEFAULT | {name}) for name in CONTROLLERS if name not in DEFAULT)
"""Each controller's own part: both, less one that acts by default, or with one more that does not."""


@dataclass(frozen=True, slots=True)
class Course:
    """Seconds of each phase, and its load as a share of what the engine can do."""

    before_s: float = 30.0
    step_s: float = 60.0
    after_s: float = 60.0
    low: float = 0.5
    high: float = 1.5
    realtime_prompt: tuple[int, int] = (20, 80)
    realtime_output: tuple[int, int] = (8, 16)
    batch_prompt: tuple[int, int] = (100, 600)
    batch_output: tuple[int, int] = (32, 96)
    realtime_share: float = REALTIME_SHARE

    @property
    def whole_s(self) -> float:
        return self.before_s + self.step_s + self.after_s

    def phase(self, at_s: float) -> str:
        return PHASES[(at_s >= self.before_s) + (at_s >= self.before_s + self.step_s)]

    def load(self, at_s: float) -> float:
        return self.high if self.phase(at_s) == "step" else self.low


FULL = Course()
QUICK = Course(before_s=10.0, step_s=20.0, after_s=15.0)


@dataclass(frozen=True, slots=True)
class Arrival:
    """`at_s` from the beginning of the block; lengths in tokens."""

    at_s: float
    workload: Workload
    prompt: int
    output: int


def mean(low_high: tuple[int, int]) -> float:
    return sum(low_high) / 2.0


def arrivals(course: Course, capacity: float, seed: str) -> list[Arrival]:
    """Both sources of a block: Poisson, at rates that make `load` times `capacity` tokens a second, `realtime_share` of them realtime."""
    found = []
    for workload, share, prompts, outputs in (
        (Workload.REALTIME, course.realtime_share, course.realtime_prompt, course.realtime_output),
        (Workload.BATCH, 1.0 - course.realtime_share, course.batch_prompt, course.batch_output),
    ):
        rng = random.Random(f"{seed}/{workload.value}")
        per_s = capacity * share / (mean(prompts) + mean(outputs))
        moments = list(_poisson(random.Random(f"{seed}/{workload.value}/when"), course, per_s))
        found += [Arrival(at_s, workload, rng.randint(*prompts), rng.randint(*outputs)) for at_s in moments]
    return sorted(found, key=lambda a: a.at_s)


def _poisson(rng: random.Random, course: Course, per_s: float) -> Iterator[float]:
    """By thinning, so that the step is where it is to be."""
    most = per_s * max(course.low, course.high)
    at_s = 0.0
    while most > 0 and math.isfinite(at_s):
        at_s += rng.expovariate(most)
        if at_s >= course.whole_s:
            return
        if rng.random() * max(course.low, course.high) < course.load(at_s):
            yield at_s
