"""A rolling restart as a value: what was ordered, where each worker is, and what has happened. It goes through the store as JSON.

Moments are milliseconds of the wall clock, so that whoever leads next goes on from them.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LINES = 400
"""That are kept, the newest."""


class Stage(enum.StrEnum):
    ROLLING = "rolling"
    REVERTING = "reverting"
    """A worker did worse, and gets its settings of before."""
    DONE = "done"
    STOPPED = "stopped"
    ABORTED = "aborted"


class Step(enum.StrEnum):
    """Where one worker is."""

    PENDING = "pending"
    LEAVING = "leaving"
    """It was told to drain, and its process is not gone yet."""
    STARTING = "starting"
    BAKING = "baking"
    """It serves again, and is watched."""
    DONE = "done"
    LEFT_OUT = "left out"
    FAILED = "failed"


UNDER_WAY = (Step.LEAVING, Step.STARTING, Step.BAKING)
TO_COME = (Step.PENDING, *UNDER_WAY)


@dataclass(frozen=True, slots=True)
class Order:
    """What a person asked for. `settings` are the worker's, by their names in trimtab.toml; an empty value takes one back."""

    author: str
    reason: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    max_unavailable: int = 1
    drain_ms: int = 30_000
    ready_ms: int = 300_000
    bake_ms: int = 10_000
    force: bool = False
    revert: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """One worker's. `incarnation` is the process that it is about: the old one until that is gone, then the new one that is watched.

    `told_before` are settings that it ran by before; `p99_ms` is its REALTIME TTFT then, None where too little was measured. `requests` and
    `errors` are what its process had counted when it began to be watched.
    """

    node_id: str
    pool: str = ""
    step: Step = Step.PENDING
    incarnation: str = ""
    since_ms: int = 0
    asked_ms: int = 0
    told_before: Mapping[str, str] = field(default_factory=dict)
    p99_ms: float | None = None
    requests: int = 0
    errors: int = 0
    reverting: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    at_ms: int
    text: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """`waiting_ms` is since when nobody could go, 0 while somebody can. `verdict` says why it is where it is."""

    restart_id: str
    order: Order
    turns: tuple[Turn, ...]
    started_ms: int
    stage: Stage = Stage.ROLLING
    ended_ms: int = 0
    waiting_ms: int = 0
    verdict: str = ""
    lines: tuple[Line, ...] = ()

    @property
    def live(self) -> bool:
        return self.stage in (Stage.ROLLING, Stage.REVERTING)

    @property
    def under_way(self) -> frozenset[str]:
        """Workers that are away or watched now, by node id."""
        return frozenset(t.node_id for t in self.turns if t.step in UNDER_WAY) if self.live else frozenset()

    def turned(self, turn: Turn) -> Restart:
        """With this turn in the place of its worker's."""
        return dataclasses.replace(self, turns=tuple(turn if t.node_id == turn.node_id else t for t in self.turns))

    def said(self, now_ms: int, text: str, evidence: str = "") -> Restart:
        return dataclasses.replace(self, lines=(*self.lines, Line(now_ms, text, evidence))[-LINES:])

    def ended(self, stage: Stage, verdict: str, now_ms: int, evidence: str = "") -> Restart:
        over = dataclasses.replace(self, stage=stage, verdict=verdict, ended_ms=now_ms, waiting_ms=0)
        return over.said(now_ms, f"{stage.value}: {verdict}", evidence)


def encode(restart: Restart) -> bytes:
    return json.dumps({"kind": "restart", **dataclasses.asdict(restart)}, separators=(",", ":")).encode()


def decode(data: bytes) -> Restart | None:
    """None for what is no restart, or one of a newer build that says more than this one understands."""
    try:
        said: Any = json.loads(data)
        if not isinstance(said, dict) or said.pop("kind", None) != "restart":
            return None
        said["order"] = Order(**said["order"])
        said["turns"] = tuple(Turn(**{**t, "step": Step(t["step"])}) for t in said["turns"])
        said["lines"] = tuple(Line(**line) for line in said["lines"])
        return Restart(**{**said, "stage": Stage(said["stage"])})
    except (ValueError, TypeError, KeyError):
        return None
