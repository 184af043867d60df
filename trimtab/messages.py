"""The values that cross process boundaries: a request, what comes back for it, and what a node reports of itself.

These are domain values: parsed and plain. `trimtab.codec` turns them to and from the wire.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.snapshot import Identity, Node


class Workload(enum.Enum):
    """Priority, preemption right and shedding order; not to be confused with the engine's running batch."""

    REALTIME = "realtime"
    BATCH = "batch"


@dataclass(frozen=True, slots=True)
class ChatMessage:
    role: str
    content: str
    name: str = ""


Prompt = str | tuple[ChatMessage, ...] | tuple[int, ...]
"""Text, a chat, or token ids. An empty tuple is an empty list of token ids."""


class StructureKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Structure:
    """What the output must conform to. `value` is the schema, regex or grammar; `choices` only for CHOICES."""

    kind: StructureKind
    value: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters; None means the engine's or the model's default."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    structure: Structure | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SloTargets:
    """A request's own objectives, in milliseconds; 0 means the policy's."""

    ttft_ms: int = 0
    itl_ms: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    """What a stream has already delivered: token ids, and bytes of UTF-8 text."""

    token_ids: tuple[int, ...]
    text_bytes: int
    attempt: int
    prompt_digest: bytes


@dataclass(frozen=True, slots=True)
class Request:
    request_id: str
    model: str
    prompt: Prompt
    sampling: Sampling = field(default_factory=Sampling)
    workload: Workload | None = None
    tenant: str = ""
    session_id: str = ""
    slo: SloTargets = field(default_factory=SloTargets)
    resume: Resume | None = None


@dataclass(frozen=True, slots=True)
class RequestMatch:
    """Which requests an operator means: those named, or all that have everything in common that is said here. Nothing said, none is meant."""

    request_ids: frozenset[str] = frozenset()
    workload: Workload | None = None
    tenant: str = ""
    min_prompt_tokens: int = 0
    min_age_ms: int = 0
    """Since it came to the mesh."""

    @property
    def empty(self) -> bool:
        """It says nothing."""
        return not (self.request_ids or self.workload or self.tenant or self.min_prompt_tokens or self.min_age_ms)

    def covers(self, request_id: str, workload: Workload, tenant: str, prompt_tokens: int, age_ms: float = 0.0) -> bool:
        return (
            not self.empty
            and (not self.request_ids or request_id in self.request_ids)
            and self.workload in (None, workload)
            and self.tenant in ("", tenant)
            and prompt_tokens >= self.min_prompt_tokens
            and age_ms >= self.min_age_ms
        )


@dataclass(frozen=True, slots=True)
class TopLogprob:
    token_id: int
    logprob: float
    token: bytes


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    logprob: float
    token: bytes
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """Sent before any engine work. `prompt_digest` is SHA-256 over the token ids, four little-endian bytes each."""

    request_id: str
    worker_id: str
    policy: Identity
    queue_position: int
    prompt_tokens: int
    prompt_digest: bytes
    resumable: bool
    model: str
    started: bool = False
    """The engine has it already; else a notice says when."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens from `first_index` (counted from 0) on, and the text that became complete with them."""

    first_index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


class NoticeKind(enum.Enum):
    PREEMPTED = "preempted"
    REQUEUED = "requeued"
    RESUMED = "resumed"
    DEGRADED = "degraded"
    STARTED = "started"


@dataclass(frozen=True, slots=True)
class Notice:
    kind: NoticeKind
    detail: str = ""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds from arrival at the worker; `prefill_ms` is from first scheduling to first token."""

    queued_ms: float = 0.0
    prefill_ms: float = 0.0
    first_token_ms: float = 0.0
    total_ms: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str = ""


Event = Accepted | Delta | Notice | Finish
"""What a stream is made of: Accepted first, Finish last."""


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a worker is now. `queued_prefill_tokens` are prompt tokens not yet computed."""

    running: int = 0
    waiting: int = 0
    queued_prefill_tokens: int = 0
    free_blocks: int = 0
    total_blocks: int = 0


class Role(enum.Enum):
    WORKER = "worker"
    GATEWAY = "gateway"


class NodeState(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    HUNG = "hung"


@dataclass(frozen=True, slots=True)
class Hello:
    """A node presents itself: the first message of its control stream. `held` is the snapshot that it runs by; `Identity()` is none.

    `told` are settings that the control plane told it, and that its process runs by.
    """

    node: Node
    incarnation: str
    role: Role
    model: str = ""
    build: str = ""
    held: Identity = field(default_factory=Identity)
    address: str = ""
    metrics_address: str = ""
    pid: int = 0
    told: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outlier:
    """A request that missed its objective, and what was around it. `itl_ms` is the longest gap between two of its tokens."""

    request_id: str
    workload: Workload
    prompt_tokens: int
    output_tokens: int = 0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    queued_ms: float = 0.0
    preemptions: int = 0
    neighbours: int = 0
    """Requests that ran beside it when it ended."""
    longest_neighbour_tokens: int = 0
    """The longest prompt among them."""


@dataclass(frozen=True, slots=True)
class Report:
    """Telemetry of one node: gauges now, counters since its incarnation began; sketches and outliers of the `interval_ms` before it.

    `sketches` are serialised `trimtab.sketch.Sketch`es. Which names there are says `trimtab.measures`.
    """

    sequence: int
    state: NodeState
    load: Load = field(default_factory=Load)
    steps: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    sketches: Mapping[str, bytes] = field(default_factory=dict)
    interval_ms: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)
    outliers: tuple[Outlier, ...] = ()
