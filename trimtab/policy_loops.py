"""The parts of the policy tree that controllers read: objectives, and when a loop does what.

Numbers are the field guides' where they give one (DESIGN §6), else measured; docs/loops.md says which. They act at the control plane's
next tick.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from trimtab.policy_field import choice, fraction, whole

MANY = 1 << 20
HOUR_MS = 3_600_000
DAY_S = 86_400


class Loop(enum.StrEnum):
    """What one controller may do."""

    ON = "on"
    ADVISE = "advise"
    OFF = "off"


class Degraded(enum.StrEnum):
    """How the mesh serves: as ever, or what it can while memory and engines are in trouble."""

    NORMAL = "normal"
    DEGRADED = "degraded"


@dataclass(frozen=True, slots=True)
class ObjectivesPart:
    """What service is promised. A request's own targets win over these."""

    ttft_p99_ms: int = whole(
        500,
        low=1,
        high=HOUR_MS,
        schema=47,
        unit="milliseconds",
        doc="P99 of a REALTIME request's time to its first token",
    )
    itl_p99_ms: int = whole(
        200,
        low=1,
        high=HOUR_MS,
        schema=48,
        unit="milliseconds",
        doc="P99 of the gaps between a REALTIME request's tokens",
    )
    max_queue_s: int = whole(
        600,
        low=1,
        high=DAY_S,
        schema=49,
        unit="seconds",
        doc="a BATCH request waits so long at most before its first step",
    )


@dataclass(frozen=True, slots=True)
class OverloadPart:
    """When there is more than the mesh can do."""

    above: float = fraction(
        0.9,
        low=0.0,
        high=1.0,
        schema=60,
        unit="of what there is",
        doc="mean utilisation at which cold BATCH requests are shed",
    )
    samples: int = whole(
        100, low=1, high=10_000, schema=61, unit="samples", doc="utilisation is the mean of so many, one a tick"
    )


@dataclass(frozen=True, slots=True)
class DegradedPart:
    """What is left out while memory and engines are in trouble."""

    state: str = choice(
        Degraded, Degraded.NORMAL, schema=62, restrictive=(Degraded.NORMAL, Degraded.DEGRADED),
        doc="as ever (normal), or no cold BATCH requests and capped outputs (degraded)",
    )  # fmt: skip
    enter_use: float = fraction(
        0.9,
        low=0.0,
        high=1.0,
        schema=63,
        unit="of the KV cache",
        doc="use above which, with errors, the mesh is degraded",
    )
    enter_errors: float = fraction(
        0.1,
        low=0.0,
        high=1.0,
        schema=64,
        unit="of requests",
        doc="engine faults above which, with that use, it is degraded",
    )
    leave_use: float = fraction(
        0.7, low=0.0, high=1.0, schema=65, unit="of the KV cache", doc="use below which it is normal again"
    )
    max_tokens: int = whole(
        512, low=1, high=MANY, schema=66, unit="tokens", doc="output of any request at most while degraded"
    )


@dataclass(frozen=True, slots=True)
class OomPart:
    """What is done about an engine that ran out of memory."""

    decrease: float = fraction(
        0.5, low=0.1, high=1.0, schema=69, unit="of batch.active", doc="what is left of the running set after one"
    )
    release_after_s: int = whole(
        60,
        low=0,
        high=DAY_S,
        schema=70,
        unit="seconds",
        doc="BATCH requests on that worker older than this are released",
    )
    hold_s: int = whole(
        300, low=1, high=DAY_S, schema=71, unit="seconds", doc="the smaller running set stays so long, then grows back"
    )


@dataclass(frozen=True, slots=True)
class GiantsPart:
    """When long prompts in the mix are kept apart for a while."""

    times_median: float = fraction(
        8.0,
        low=1.0,
        high=10_000.0,
        schema=72,
        unit="times the median",
        doc="a prompt so much longer than the median is a giant",
    )
    share: float = fraction(
        0.15,
        low=0.0,
        high=1.0,
        schema=73,
        unit="of prompt tokens",
        doc="giants' part of the mix from which on they are isolated",
    )
    for_s: int = whole(600, low=1, high=DAY_S, schema=74, unit="seconds", doc="a rule that isolates them lives so long")


@dataclass(frozen=True, slots=True)
class ScalePart:
    """How many workers a pool wants."""

    min_workers: int = whole(1, low=0, high=10_000, schema=79, unit="workers", doc="of a pool at least")
    max_workers: int = whole(
        0, low=0, high=10_000, schema=80, unit="workers", doc="of a pool at most; 0 leaves every pool as it is"
    )
    out_above: int = whole(
        5,
        low=1,
        high=MANY,
        schema=81,
        unit="requests",
        doc="REALTIME requests waiting, per worker, that call for one more",
    )
    cold_above: int = whole(
        64, low=1, high=MANY, schema=82, unit="requests",
        doc="cold BATCH requests waiting, per worker, at which gateways take no more of them where no worker can be added",
    )  # fmt: skip
    in_below: float = fraction(
        0.3, low=0.0, high=1.0, schema=83, unit="of the running set",
        doc="use below which, with nobody waiting, a pool gives a worker back",
    )  # fmt: skip
    out_dwell_s: int = whole(
        30,
        low=1,
        high=DAY_S,
        schema=84,
        unit="seconds",
        doc="between two changes of a pool's size, the second of them up",
    )
    in_dwell_s: int = whole(
        300,
        low=1,
        high=DAY_S,
        schema=85,
        unit="seconds",
        doc="between two changes of a pool's size, the second of them down",
    )


@dataclass(frozen=True, slots=True)
class HealPart:
    """When a worker is restarted, or its policy told again."""

    leak_s: int = whole(
        60, low=1, high=DAY_S, schema=86, unit="seconds", doc="KV blocks held so long by an idle worker are a leak"
    )
    growth_mb_per_min: int = whole(
        50,
        low=1,
        high=MANY,
        schema=87,
        unit="MB a minute",
        doc="memory that grows faster, beside no more work, is a leak",
    )
    growth_s: int = whole(600, low=10, high=DAY_S, schema=88, unit="seconds", doc="and for so long")
    no_progress_s: int = whole(
        15, low=1, high=DAY_S, schema=89, unit="seconds", doc="a worker hung for so long is restarted"
    )
    inversion_s: int = whole(
        15,
        low=1,
        high=DAY_S,
        schema=90,
        unit="seconds",
        doc="REALTIME waiting longer than BATCH for so long is an inversion",
    )
    grace_s: int = whole(
        30, low=0, high=DAY_S, schema=91, unit="seconds", doc="what a worker that is to be restarted gets to finish"
    )
    restarts_per_h: int = whole(
        3, low=0, high=1000, schema=92, unit="restarts", doc="of one worker within an hour at most; 0 restarts none"
    )
    return_s: int = whole(
        600,
        low=10,
        high=DAY_S,
        schema=126,
        unit="seconds",
        doc="a worker told to restart is back by then, beside what it gets to finish: what its engine takes to load, and more",
    )


def _loop(name: str, schema: int, default: Loop = Loop.ON) -> Any:
    return choice(
        Loop,
        default,
        schema=schema,
        doc=f"the {name} controller acts (on), only says what it would do (advise), or sleeps (off)",
    )


@dataclass(frozen=True, slots=True)
class LoopsPart:
    """Which controllers act."""

    batch: str = _loop("batch", 93)
    priority: str = _loop("priority", 94, Loop.ADVISE)
    overload: str = _loop("overload", 95, Loop.ADVISE)
    degraded: str = _loop("degraded", 96)
    memory: str = _loop("memory", 97, Loop.ADVISE)
    oom: str = _loop("oom", 98)
    isolation: str = _loop("isolation", 99, Loop.ADVISE)
    clusters: str = _loop("clusters", 100, Loop.OFF)
    scale: str = _loop("scale", 101)
    heal: str = _loop("heal", 102)
    safe_batch: str = _loop("safe_batch", 103, Loop.OFF)
    blocks: str = _loop("blocks", 104, Loop.ADVISE)
