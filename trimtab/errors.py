"""The error tree: one sentence for each way in which a call fails, and its codes on gRPC and HTTP.

TrimtabError
├── ClientFault                  the caller must change something
│   ├── InvalidRequest           a field is missing, malformed or out of range
│   ├── ModelNotFound            the model is not served here
│   ├── WrongPool                the request belongs to another pool
│   ├── ResumeRefused            the delivered prefix does not belong to this prompt
│   └── Quarantined              workers died of it
├── BackPressure                 the same call may succeed later
│   ├── QueueFull                the process's queue for this workload is full
│   ├── SlowReader               the reader left too many tokens unread
│   ├── Released                 an operator ended it to make room
│   ├── Draining                 this process takes no new work
│   └── NoWorker                 no worker serves this model now
├── DeadlineExceeded             the caller's time ran out
├── Cancelled                    the caller left
├── EngineFault                  the engine, or the way to it, broke
│   ├── EngineDead               the engine process is gone
│   ├── StreamCut                a stream that had begun ended before its end
│   └── Internal                 a fault of ours that nobody foresaw
└── AdminError                   a policy or store call failed
    ├── PolicyRefused            the policy can't be met; nothing was changed
    ├── Conflict                 somebody else wrote since the version that the change was made from
    ├── PoolNotFound             no worker is, or is to be, in a pool of that name
    ├── WantUnknown              nobody has said how many workers a pool wants
    └── StoreUnavailable         the store can't be reached, or is read-only

Only EngineFault counts against a worker's breaker; only a success heals it (FIELD_FAULTS: breakers that opened on client errors).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar


class Outcome(enum.Enum):
    """What a finished call says about the worker that served it; low cardinality, for metrics and breakers."""

    OK = "ok"
    CLIENT_FAULT = "client_fault"
    BACK_PRESSURE = "back_pressure"
    ENGINE_FAULT = "engine_fault"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Violation:
    """One field of a request that can't be taken, and why."""

    field: str
    description: str


class TrimtabError(Exception):
    """Root of the tree. `reason` is UPPER_SNAKE and stable; the message is for people."""

    grpc_code: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    reason: ClassVar[str] = "INTERNAL"
    outcome: ClassVar[Outcome] = Outcome.UNKNOWN
    default_retry_after_ms: ClassVar[int | None] = None

    def __init__(
        self,
        message: str,
        *,
        violations: tuple[Violation, ...] = (),
        metadata: Mapping[str, str] | None = None,
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.violations = violations
        self.metadata = dict(metadata or {})
        self.retry_after_ms = self.default_retry_after_ms if retry_after_ms is None else retry_after_ms


class ClientFault(TrimtabError):
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "CLIENT_FAULT"
    outcome = Outcome.CLIENT_FAULT


class InvalidRequest(ClientFault):
    """A field is missing, malformed or out of range; `violations` names each."""

    reason = "INVALID_REQUEST"


class ModelNotFound(ClientFault):
    grpc_code = "NOT_FOUND"
    http_status = 404
    reason = "MODEL_NOT_FOUND"


class WrongPool(ClientFault):
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409
    reason = "WRONG_POOL"


class ResumeRefused(ClientFault):
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409
    reason = "RESUME_REFUSED"


class Quarantined(ClientFault):
    """Workers died of it; it is kept from the others."""

    grpc_code = "FAILED_PRECONDITION"
    http_status = 422
    reason = "QUARANTINED"


class BackPressure(TrimtabError):
    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429
    reason = "OVERLOADED"
    outcome = Outcome.BACK_PRESSURE
    default_retry_after_ms: ClassVar[int | None] = 1000


class QueueFull(BackPressure):
    reason = "QUEUE_FULL"


class Released(BackPressure):
    """An operator ended it to make room."""

    grpc_code = "ABORTED"
    http_status = 503
    reason = "RELEASED"


class SlowReader(BackPressure):
    reason = "SLOW_READER"
    default_retry_after_ms = None


class Draining(BackPressure):
    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "DRAINING"


class NoWorker(BackPressure):
    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "NO_WORKER"


class DeadlineExceeded(TrimtabError):
    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504
    reason = "DEADLINE_EXCEEDED"
    outcome = Outcome.CLIENT_FAULT


class Cancelled(TrimtabError):
    grpc_code = "CANCELLED"
    http_status = 499
    reason = "CANCELLED"
    outcome = Outcome.CLIENT_FAULT


class Unauthenticated(TrimtabError):
    """Nobody knows who calls: no certificate, and no token that is known."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401
    reason = "UNAUTHENTICATED"
    outcome = Outcome.CLIENT_FAULT


class PermissionDenied(TrimtabError):
    """It is known who calls, and he may not."""

    grpc_code = "PERMISSION_DENIED"
    http_status = 403
    reason = "PERMISSION_DENIED"
    outcome = Outcome.CLIENT_FAULT


class EngineFault(TrimtabError):
    grpc_code = "INTERNAL"
    http_status = 500
    reason = "ENGINE_FAULT"
    outcome = Outcome.ENGINE_FAULT


class EngineDead(EngineFault):
    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "ENGINE_DEAD"
    default_retry_after_ms = 1000


class StreamCut(EngineFault):
    """`metadata["tokens_delivered"]` says how far the stream had come."""

    grpc_code = "ABORTED"
    http_status = 502
    reason = "STREAM_CUT"


class Internal(EngineFault):
    reason = "INTERNAL"


class AdminError(TrimtabError):
    grpc_code = "FAILED_PRECONDITION"
    http_status = 409
    reason = "ADMIN_ERROR"


class PolicyRefused(AdminError):
    """`metadata` holds field, limit and node where one is to blame."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400
    reason = "POLICY_REFUSED"

    def __init__(self, message: str, *, reason: str = "POLICY_REFUSED", field: str = "", node: str = "") -> None:
        super().__init__(
            message, metadata={k: v for k, v in (("cause", reason), ("field", field), ("node", node)) if v}
        )
        self.cause = reason
        self.field = field
        self.node = node


class ReblockRefused(AdminError):
    """A KV block size that an engine does not change to; it serves as before. `accepted` are sizes that it would take, as far as known.

    `cause` is UPPER_SNAKE: SIZE (the attention back end, the model or vLLM can't), TOO_LONG (a request here would not fit), NOT_IDLE (more
    tokens are resident than may be recomputed), NOT_RECOMPUTABLE (a request here can't be computed anew), NOT_LIVE (this engine can't change
    while it runs), BUSY (another change is under way) or FAILED (it was tried, and rolled back).
    """

    reason = "REBLOCK_REFUSED"

    def __init__(self, message: str, *, cause: str = "SIZE", accepted: tuple[int, ...] = ()) -> None:
        super().__init__(message, metadata={"cause": cause, "accepted": ",".join(map(str, accepted))})
        self.cause = cause
        self.accepted = accepted


class PoolNotFound(AdminError):
    grpc_code = "NOT_FOUND"
    http_status = 404
    reason = "POOL_NOT_FOUND"


class WantUnknown(AdminError):
    """That is no number, and not 0."""

    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "WANT_UNKNOWN"


class Conflict(AdminError):
    grpc_code = "ABORTED"
    http_status = 409
    reason = "CONFLICT"


class StoreUnavailable(AdminError):
    grpc_code = "UNAVAILABLE"
    http_status = 503
    reason = "STORE_UNAVAILABLE"
    default_retry_after_ms = 1000


def _concrete(root: type[TrimtabError]) -> list[type[TrimtabError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _concrete(child))]


BY_REASON: dict[str, type[TrimtabError]] = {kind.reason: kind for kind in _concrete(TrimtabError)}
"""From the reason on the wire back to the class; where a class shares its parent's, the narrower one wins."""


def outcome_of(grpc_code: str, reason: str = "") -> Outcome:
    """Classify an ended call by its status. A known reason decides; else the code does, and an unknown code stays unknown."""
    if grpc_code == "OK":
        return Outcome.OK
    kind = BY_REASON.get(reason)
    if kind is not None and kind is not TrimtabError:
        return kind.outcome
    by_code = {
        "INVALID_ARGUMENT": Outcome.CLIENT_FAULT,
        "NOT_FOUND": Outcome.CLIENT_FAULT,
        "OUT_OF_RANGE": Outcome.CLIENT_FAULT,
        "PERMISSION_DENIED": Outcome.CLIENT_FAULT,
        "UNAUTHENTICATED": Outcome.CLIENT_FAULT,
        "FAILED_PRECONDITION": Outcome.CLIENT_FAULT,
        "CANCELLED": Outcome.CLIENT_FAULT,
        "DEADLINE_EXCEEDED": Outcome.CLIENT_FAULT,
        "RESOURCE_EXHAUSTED": Outcome.BACK_PRESSURE,
        "INTERNAL": Outcome.ENGINE_FAULT,
        "UNAVAILABLE": Outcome.ENGINE_FAULT,
        "DATA_LOSS": Outcome.ENGINE_FAULT,
        "ABORTED": Outcome.ENGINE_FAULT,
    }
    return by_code.get(grpc_code, Outcome.UNKNOWN)
