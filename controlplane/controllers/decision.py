"""What a controller decides: pure values. `controlplane.loop` carries them out, by the same doors that people use."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from controlplane.seen import Seen
from trimtab.messages import RequestMatch
from trimtab.policy import Policy
from trimtab.snapshot import Adjustment, Node, Scope

PolicyOf = Callable[[Node | None], Policy]
"""The policy that people have set for a node, without controllers' adjustments; None asks for what a node without overlays has."""


@dataclass(frozen=True, slots=True)
class Move:
    """An adjustment that is to hold now: a factor in [0.1, 1] of what people have set, a word, or a delta where both are None.

    It expires `ttl_s` after it was last written; the loop renews it for as long as the controller wants it. `evidence` has the figures.
    """

    field: str
    scope: Scope
    reason: str
    evidence: str = ""
    factor: float | None = None
    delta: int = 0
    state: str | None = None
    ttl_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Restart:
    """A worker is drained within `drain_s` and started anew by whoever supervises it."""

    node_id: str
    incarnation: str
    drain_s: float
    reason: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """Requests on one worker end now; their clients may send them again."""

    node_id: str
    match: RequestMatch
    reason: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Reload:
    """A node is sent the newest policy anew, whatever it has answered."""

    node_id: str
    reason: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Want:
    """So many workers in a pool; `surplus` are to be drained first where there are more."""

    pool: str
    workers: int
    reason: str
    evidence: str = ""
    surplus: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Reblock:
    """A worker's engine changes its KV block size, as soon as few enough tokens are resident; `now` does not wait for that."""

    node_id: str
    incarnation: str
    block_size: int
    reason: str
    evidence: str = ""
    now: bool = False


@dataclass(frozen=True, slots=True)
class Propose:
    """A policy that is to be tried on canaries before it holds for `scope`: fields as people type them."""

    fields: Mapping[str, str]
    scope: Scope
    reason: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """What a pool's KV block size is to be, and why; `named` is the guide's word for the phase, `planned` what its engines accept.

    `gain` is, by size, the share of the work that it would save, below 0 where it would cost. `present` is the size that most of its engines
    have. `changed_at`, of the clock of `Seen`, is when another size was last planned or a worker came to it; None for never.
    """

    pool: str
    phase: str
    named: int
    planned: int
    reason: str
    evidence: str = ""
    gain: Mapping[int, float] = field(default_factory=dict)
    present: int = 0
    changed_at: float | None = None


Command = Restart | Release | Reload | Reblock | Propose


class Severity(enum.StrEnum):
    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"


@dataclass(frozen=True, slots=True)
class Alert:
    """For people. `key` is what it is about: one key is not told again while it lasts. It lasts for as long as decisions hold it."""

    key: str
    severity: Severity
    text: str
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Decision:
    """`moves` and `wants` are all that the controller wants to hold now: what it held before and does not name is taken back.

    `commands` are done once. `holds` says why it can't decide, one line for each input that is missing: then its moves are those before.
    """

    state: Any
    moves: tuple[Move, ...] = ()
    commands: tuple[Command, ...] = ()
    wants: tuple[Want, ...] = ()
    plans: tuple[BlockPlan, ...] = ()
    alerts: tuple[Alert, ...] = ()
    holds: tuple[str, ...] = ()


class Controller(Protocol):
    """A module with these names is one. `name` is that of its field under `loops`, and of its author in the history.

    `start` gives the first state of a new leader, from the adjustments of this controller that live. `step` is called once a tick, about
    once a second; `now` is `seen.now`.
    """

    name: str

    def start(self, live: Iterable[Adjustment]) -> Any: ...

    def step(self, state: Any, seen: Seen, policy: PolicyOf, now: float) -> Decision: ...
