"""A goal: the figure that is wanted, the one that was found, and whether that settles it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from services.bench.stats import Bound, Estimate, verdict

HEAD = ("GOAL", "WANTED", "VALUE", "MET", "N", "MEDIAN [95 %]")


@dataclass(frozen=True, slots=True)
class Goal:
    """`value` is what is held against `goal`; `estimate` is where it comes from. None where it was not measured."""

    name: str
    goal: float
    bound: Bound
    value: float | None = None
    met: bool | None = None
    estimate: Estimate | None = None

    @staticmethod
    def judged(name: str, goal: float, bound: Bound, estimate: Estimate | None, *, show_end: bool = False) -> Goal:
        """Met where the whole interval is on the good side. `show_end` takes that end of the interval for the value which decides."""
        if estimate is None:
            return Goal(name, goal, bound)
        value = estimate.value
        if show_end:
            value = estimate.high if bound is Bound.AT_MOST else estimate.low
        return Goal(name, goal, bound, value, verdict(estimate, goal, bound), estimate)

    def as_json(self) -> dict[str, Any]:
        e = self.estimate
        known = {"estimate": e.value, "interval": [e.low, e.high], "n": e.n} if e else {}
        return {
            "name": self.name,
            "goal": self.goal,
            "bound": self.bound.value,
            "value": self.value,
            "met": self.met,
            **known,
        }

    def row(self) -> tuple[str, ...]:
        """Under `HEAD`."""
        sign = "≤" if self.bound is Bound.AT_MOST else "≥"
        e = self.estimate
        value = "not measured" if self.value is None else f"{self.value:.3g}"
        interval = f"{e.value:.3g} [{e.low:.3g}, {e.high:.3g}]" if e else ""
        met = {True: "yes", False: "NO", None: "-" if self.value is None else "undecided"}[self.met]
        return (self.name, f"{sign} {self.goal:g}", value, met, str(e.n) if e else "", interval)
