"""The parts of the policy tree: every field, its default, its bounds and what it does.

Defaults come from the field guides, for a 128K window (DESIGN §4; docs/scheduling.md says what each does, measured).
"""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from trimtab.policy_field import choice, fraction, names, whole
from trimtab.policy_loops import (
    HOUR_MS,
    MANY,
    DegradedPart,
    GiantsPart,
    HealPart,
    LoopsPart,
    ObjectivesPart,
    OomPart,
    OverloadPart,
    ScalePart,
)
from trimtab.policy_rollouts import BlockPlanPart, RolloutPart


class Mode(enum.StrEnum):
    """Who orders: this scheduler, vLLM's fixed priority, or arrival alone. The latter two are for comparison and as a way out."""

    TRIMTAB = "trimtab"
    PRIORITY = "priority"
    FCFS = "fcfs"


class Protect(enum.StrEnum):
    """Who is never preempted by choice: REALTIME requests, or prompts below `hot_below` whoever sends them (the guide's literal rule)."""

    WORKLOAD = "workload"
    LENGTH = "length"


class Preemption(enum.StrEnum):
    NONE = "none"
    CONSERVATIVE = "conservative"
    AGGRESSIVE = "aggressive"


class Isolation(enum.StrEnum):
    """What becomes of a request that an isolation rule names."""

    ALONE = "alone"
    REFUSE = "refuse"
    POOL = "pool"


class Shed(enum.StrEnum):
    """What a gateway refuses at its door, to make room for the rest."""

    NONE = "none"
    COLD = "cold"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class BatchPart:
    """The engine's running set."""

    # 32 REALTIME+hot beside 16 of the rest: the bounds of guides A and B together (DESIGN §4 `batch`).
    active: int = whole(
        48, low=1, high=4096, schema=1, unit="requests", limit="max_num_seqs",
        doc="running requests at most, all workloads",
    )  # fmt: skip
    hard_cap: int = whole(
        16, low=1, high=4096, schema=23, unit="requests",
        doc="running requests at most that are not REALTIME and hot",
    )  # fmt: skip
    min_samples: int = whole(
        20, low=1, high=MANY, schema=50, unit="first tokens", doc="a window with fewer is joined with the next one"
    )
    max_window_s: int = whole(
        60,
        low=5,
        high=3600,
        schema=51,
        unit="seconds",
        doc="windows are joined up to this; then what is there decides nothing",
    )
    strikes: int = whole(
        3,
        low=1,
        high=100,
        schema=52,
        unit="windows",
        doc="over the objective in a row that make the running set smaller",
    )
    decrease: float = fraction(
        0.8, low=0.1, high=1.0, schema=53, unit="of the running set", doc="what is left of it then"
    )
    increase: int = whole(
        1, low=0, high=4096, schema=54, unit="requests", doc="by which it grows back with each good window"
    )
    safety_factor: float = fraction(
        1.2, low=1.0, high=10.0, schema=55, unit="times the need", doc="of a request, in the safe batch"
    )
    usable_memory: float = fraction(
        0.9, low=0.1, high=1.0, schema=56, unit="of the KV cache", doc="that the safe batch may fill"
    )


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """How much prompt an engine step may take, and how long a step may last."""

    step_tokens: int = whole(
        2048, low=1, high=MANY, schema=2, unit="tokens", limit="max_step_tokens", doc="tokens per engine step at most"
    )
    concurrent: int = whole(
        2, low=1, high=4096, schema=24, unit="requests",
        doc="cold prompts in prefill at once, each with its fair share of a step",
    )  # fmt: skip
    itl_budget_ms: int = whole(
        100, low=0, high=HOUR_MS, schema=25, unit="milliseconds",
        doc="a step beside protected decodes lasts so long at most, as predicted; 0 leaves steps unbounded",
    )  # fmt: skip
    max_step_ms: int = whole(
        0, low=0, high=HOUR_MS, schema=26, unit="milliseconds",
        doc="any other step lasts so long at most, as predicted; 0 means twice itl_budget_ms",
    )  # fmt: skip
    max_suspend_ms: int = whole(
        5000, low=0, high=HOUR_MS, schema=27, unit="milliseconds",
        doc="unprotected work is held back for the protected at most this long at a time",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdmissionPart:
    """Queue bounds, each per process."""

    realtime_queue: int = whole(
        256, low=0, high=MANY, schema=3, unit="requests", doc="REALTIME requests waiting in one process at most"
    )
    batch_queue: int = whole(
        4096, low=0, high=MANY, schema=4, unit="requests", doc="BATCH requests waiting in one process at most"
    )
    engine_queue: int = whole(
        8, low=0, high=4096, schema=5, unit="requests",
        doc="requests that the engine holds beyond its running set at most",
    )  # fmt: skip
    shed: str = choice(
        Shed, Shed.NONE, schema=43, restrictive=(Shed.NONE, Shed.COLD, Shed.BATCH),
        doc="what a gateway refuses at its door: nothing (none), cold BATCH requests (cold), all BATCH requests (batch)",
    )  # fmt: skip
    cold_share: float = fraction(
        0.75, low=0.0, high=1.0, schema=44, unit="of batch_queue", doc="what cold BATCH requests may take of a gateway's queue"
    )  # fmt: skip
    degrade_above: float = fraction(
        0.5, low=0.0, high=1.0, schema=45, unit="of the REALTIME queues",
        doc="above this use, in the least used worker, REALTIME output is capped to degraded_max_tokens",
    )  # fmt: skip
    degraded_max_tokens: int = whole(
        512, low=0, high=MANY, schema=46, unit="tokens", doc="output of a REALTIME request while queues are that full; 0 never caps"
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class PathsPart:
    """Hot and cold by prompt length; who is protected."""

    hot_below: int = whole(
        4096, low=1, high=MANY, schema=6, unit="tokens", inactive_from="max_model_len",
        doc="a prompt below this is hot, any other is cold",
    )  # fmt: skip
    protect: str = choice(
        Protect, Protect.WORKLOAD, schema=7,
        doc="who is never preempted by choice: REALTIME requests (workload), or hot ones whoever sends them (length)",
    )  # fmt: skip
    realtime_max_running: int = whole(
        32, low=1, high=4096, schema=8, unit="requests", doc="running requests at most that are REALTIME and hot"
    )
    realtime_reserve: int = whole(
        1, low=0, high=4096, schema=9, unit="slots",
        doc="slots of batch.active that only the protected may take, while anybody else runs",
    )  # fmt: skip
    cold_window_ms: int = whole(
        0, low=0, high=500, schema=10, unit="milliseconds",
        doc="a cold request waits so long for others like it before it is admitted beside running work",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SerialPart:
    """Giants go one after another."""

    above: int = whole(
        8192, low=1, high=MANY, schema=11, unit="tokens", inactive_from="max_model_len",
        doc="a prompt above this prefills under serial.prefills",
    )  # fmt: skip
    prefills: int = whole(1, low=1, high=4096, schema=12, unit="requests", doc="such prompts in prefill at once")


@dataclass(frozen=True, slots=True)
class IsolatePart:
    """Requests that must not mix with each other."""

    from_tokens: int = whole(
        65536, low=1, high=MANY, schema=13, unit="tokens", inactive_from="max_model_len",
        doc="a prompt of so many tokens or more is isolated",
    )  # fmt: skip
    action: str = choice(
        Isolation, Isolation.ALONE, schema=14, restrictive=(Isolation.ALONE, Isolation.POOL, Isolation.REFUSE),
        doc="what becomes of an isolated request: one runs at a time (alone), an error (refuse), another pool must take it (pool)",
    )  # fmt: skip
    tenants: tuple[str, ...] = names(schema=15, unit="tenants", doc="every request of these tenants is isolated")


@dataclass(frozen=True, slots=True)
class PreemptionPart:
    """When a running request makes room for a protected one."""

    mode: str = choice(
        Preemption, Preemption.CONSERVATIVE, schema=16,
        doc="when a running request makes room for a protected one: never (none), after its time slice and a bounded number of times "
        "(conservative), at once (aggressive)",
    )  # fmt: skip
    guaranteed_time_slice_ms: int = whole(
        50, low=0, high=HOUR_MS, schema=17, unit="milliseconds",
        doc="a request that runs is not preempted by choice before it has executed so long",
    )  # fmt: skip
    max_preemptions: int = whole(
        3, low=0, high=1000, schema=18, unit="times", doc="a request is preempted by choice so often at most"
    )


@dataclass(frozen=True, slots=True)
class PriorityPart:
    """The order of waiting requests."""

    max_overtake_ms: int = whole(
        30_000, low=1, high=HOUR_MS, schema=19, unit="milliseconds",
        doc="who arrived so much later than a BATCH request is not first scheduled before it, unless it can't run yet",
    )  # fmt: skip
    max_priority_diff: int = whole(
        2, low=0, high=2, schema=20, unit="levels", doc="a delta moves a workload or a request so far at most"
    )
    realtime_delta: int = whole(0, low=-2, high=2, schema=21, unit="levels", doc="REALTIME goes earlier by so much")
    batch_delta: int = whole(0, low=-2, high=2, schema=22, unit="levels", doc="BATCH goes earlier by so much")
    adjustment_interval_ms: int = whole(
        1000, low=100, high=HOUR_MS, schema=57, unit="milliseconds", doc="between two changes of the deltas at least"
    )
    raise_above: int = whole(
        5,
        low=1,
        high=MANY,
        schema=58,
        unit="requests",
        doc="REALTIME requests waiting at a worker that raise them a level",
    )
    raise_twice_above: int = whole(
        10, low=1, high=MANY, schema=59, unit="requests", doc="that raise them two levels, and lower BATCH by one"
    )


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """The engine's KV cache."""

    pressure_threshold: float = fraction(
        0.85, low=0.0, high=1.0, schema=28, unit="of the KV cache", doc="above this use no cold request is admitted"
    )
    reserve_high_priority: float = fraction(
        0.15, low=0.0, high=0.9, schema=29, unit="of the KV cache", doc="what admission keeps free for the protected"
    )
    forecast_s: int = whole(
        300, low=10, high=3600, schema=67, unit="seconds", doc="how far ahead the use of the KV cache is foretold"
    )
    forecast_above: float = fraction(
        0.9,
        low=0.0,
        high=1.0,
        schema=68,
        unit="of the KV cache",
        doc="foretold use that calls for another worker early",
    )


@dataclass(frozen=True, slots=True)
class ClustersPart:
    """Alike lengths run together."""

    spread_limit: float = fraction(
        0.3, low=0.0, high=1.0, schema=30, unit="of the longest",
        doc="cold prompts prefill together whose lengths differ by so much at most, where there is a choice; 1 is off",
    )  # fmt: skip
    short_to: int = whole(
        511, low=1, high=MANY, schema=75, unit="tokens", doc="the longest prompt of the class `short`"
    )
    standard_to: int = whole(1024, low=1, high=MANY, schema=76, unit="tokens", doc="of `standard`")
    medium_to: int = whole(4095, low=1, high=MANY, schema=77, unit="tokens", doc="of `medium`")
    long_to: int = whole(
        8192, low=1, high=MANY, schema=78, unit="tokens", doc="of `long`; a prompt above it is a `giant`"
    )


@dataclass(frozen=True, slots=True)
class SchedulerPart:
    """The scheduler as a whole."""

    mode: str = choice(
        Mode, Mode.TRIMTAB, schema=31,
        doc="who orders: this scheduler (trimtab), vLLM's fixed priority (priority), arrival alone (fcfs)",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResumePart:
    """How a stream goes on when its worker does not."""

    attempts: int = whole(
        16, low=1, high=100, schema=33, unit="attempts",
        doc="workers that one request may be given to, one after another; 1 never moves a stream that has begun",
    )  # fmt: skip
    wait_ms: int = whole(
        30_000, low=0, high=HOUR_MS, schema=34, unit="milliseconds",
        doc="a stream whose worker is gone waits so long for one that can take it on",
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class BreakerPart:
    """When a gateway sends a worker nothing for a while."""

    error_rate: float = fraction(
        0.5, low=0.01, high=1.0, schema=35, unit="of outcomes",
        doc="engine faults among the outcomes of the window at which a worker's breaker opens",
    )  # fmt: skip
    min_outcomes: int = whole(
        10, low=1, high=MANY, schema=36, unit="outcomes", doc="fewer in the window open no breaker"
    )
    window_ms: int = whole(
        10_000, low=100, high=HOUR_MS, schema=37, unit="milliseconds", doc="outcomes older than this are forgotten"
    )
    latency_factor: float = fraction(
        4.0, low=0.0, high=1000.0, schema=38, unit="times its peers' median",
        doc="a worker whose P95 of TTFT is above this, and its median above half of it, opens its breaker; 0 is off",
    )  # fmt: skip
    min_latencies: int = whole(
        20, low=1, high=MANY, schema=39, unit="first tokens", doc="fewer in the window open no breaker by latency"
    )
    open_ms: int = whole(
        2000, low=1, high=HOUR_MS, schema=40, unit="milliseconds",
        doc="an open breaker lets nothing through for so long; twice as long each time in a row"
    )  # fmt: skip
    max_open_ms: int = whole(
        30_000, low=1, high=HOUR_MS, schema=41, unit="milliseconds", doc="it never stays open longer than this"
    )
    probes: int = whole(
        3, low=1, high=100, schema=42, unit="requests", doc="let through half open, and successes that close it"
    )


@dataclass(frozen=True, slots=True)
class Policy:
    """The whole tree. `Policy()` is the default."""

    batch: BatchPart = dataclasses.field(default_factory=BatchPart)
    prefill: PrefillPart = dataclasses.field(default_factory=PrefillPart)
    admission: AdmissionPart = dataclasses.field(default_factory=AdmissionPart)
    paths: PathsPart = dataclasses.field(default_factory=PathsPart)
    serial: SerialPart = dataclasses.field(default_factory=SerialPart)
    isolate: IsolatePart = dataclasses.field(default_factory=IsolatePart)
    preemption: PreemptionPart = dataclasses.field(default_factory=PreemptionPart)
    priority: PriorityPart = dataclasses.field(default_factory=PriorityPart)
    memory: MemoryPart = dataclasses.field(default_factory=MemoryPart)
    clusters: ClustersPart = dataclasses.field(default_factory=ClustersPart)
    scheduler: SchedulerPart = dataclasses.field(default_factory=SchedulerPart)
    resume: ResumePart = dataclasses.field(default_factory=ResumePart)
    breaker: BreakerPart = dataclasses.field(default_factory=BreakerPart)
    objectives: ObjectivesPart = dataclasses.field(default_factory=ObjectivesPart)
    overload: OverloadPart = dataclasses.field(default_factory=OverloadPart)
    degraded: DegradedPart = dataclasses.field(default_factory=DegradedPart)
    oom: OomPart = dataclasses.field(default_factory=OomPart)
    giants: GiantsPart = dataclasses.field(default_factory=GiantsPart)
    scale: ScalePart = dataclasses.field(default_factory=ScalePart)
    heal: HealPart = dataclasses.field(default_factory=HealPart)
    loops: LoopsPart = dataclasses.field(default_factory=LoopsPart)
    block_plan: BlockPlanPart = dataclasses.field(default_factory=BlockPlanPart)
    rollout: RolloutPart = dataclasses.field(default_factory=RolloutPart)
