"""One arm's turn: what its requests saw, and what the control plane wrote meanwhile. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from services.bench.loops.plan import Course
from services.bench.stats import quantile


@dataclass(frozen=True, slots=True)
class Request:
    """A realtime request; times in ms, from when it was due. None where no token came. `reason` is that of its error."""

    at_s: float
    ttft_ms: float | None
    worst_gap_ms: float
    e2e_ms: float | None
    reason: str = ""

    def over(self, ttft_ms: float, itl_ms: float) -> bool:
        """It missed an objective, or got nothing."""
        return self.ttft_ms is None or self.ttft_ms > ttft_ms or self.worst_gap_ms > itl_ms or bool(self.reason)


@dataclass(frozen=True, slots=True)
class Written:
    """An adjustment of a controller, as the history has it. `value` is what its factor or delta says; None: taken back."""

    at_s: float
    controller: str
    what: str
    value: float | None


@dataclass(frozen=True, slots=True)
class Block:
    """`batch_tokens` are (when, prompt and output tokens) of BATCH requests that ended; seconds count from the block's beginning."""

    arm: str
    round: int
    realtime: tuple[Request, ...]
    batch_tokens: tuple[tuple[float, int], ...]
    batch_failed: int
    written: tuple[Written, ...]
    drained_s: float
    """When everything had ended."""
    restarts: tuple[float, ...] = ()
    """When a worker served again whose process had ended."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def of_json(said: Mapping[str, Any]) -> Block:
    return Block(
        said["arm"],
        said["round"],
        tuple(Request(**r) for r in said["realtime"]),
        tuple((float(at), int(n)) for at, n in said["batch_tokens"]),
        said["batch_failed"],
        tuple(Written(**w) for w in said["written"]),
        said["drained_s"],
        tuple(said.get("restarts", ())),
    )


def violations(blocks: Iterable[Block], ttft_ms: float, itl_ms: float, course: Course, phase: str = "") -> float:
    """The share of realtime requests that missed an objective."""
    mine = [r.over(ttft_ms, itl_ms) for b in blocks for r in b.realtime if phase in ("", course.phase(r.at_s))]
    return sum(mine) / len(mine) if mine else 0.0


def batch_speed(blocks: Sequence[Block], course: Course) -> float:
    """Tokens a second of BATCH requests, of what ended while the load lasted."""
    done = sum(n for b in blocks for at, n in b.batch_tokens if at <= course.whole_s)
    return done / (len(blocks) * course.whole_s)


def ttft(blocks: Iterable[Block], q: float, course: Course, phase: str) -> float | None:
    found = [r.ttft_ms for b in blocks for r in b.realtime if r.ttft_ms is not None and course.phase(r.at_s) == phase]
    return quantile(found, q) if found else None


def turns_per_minute(block: Block) -> float:
    """How often the busiest knob changed its direction, a minute; a shorter block counts as one. Taking back is a move towards where people
    have it."""
    by_knob: dict[tuple[str, str], list[float]] = {}
    for w in block.written:
        by_knob.setdefault((w.controller, w.what), []).append(1.0 if w.value is None else w.value)
    most = 0
    for values in by_knob.values():
        steps = [b - a for a, b in zip([1.0, *values], values, strict=False) if b != a]
        most = max(most, sum((a > 0) != (b > 0) for a, b in pairwise(steps)))
    return most / max(1.0, block.drained_s / 60.0)
