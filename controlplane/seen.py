"""What controllers see: nodes' telemetry, folded. Values only; `controlplane.telemetry` makes them.

`now` and every moment are seconds of one monotonic clock, that of the process that folds. What is missing is absent or None, never 0.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from trimtab.messages import Load, NodeState, Outlier, Role
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment, Node

WINDOW_S = 5.0
"""Field guide A looks at P99 each 5 s."""
WINDOWS = 24
"""Closed windows that are kept of each node: two minutes."""
STALE_S = 2.5
"""A report older than this says nothing of now. Nodes report every 0.8 s."""


@dataclass(slots=True)
class Window:
    """`number` rises by one for each window of the node. `counters` are increases. A window in which no report came is not there."""

    number: int
    begun: float
    ended: float = 0.0
    counters: dict[str, int] = field(default_factory=dict)
    sketches: dict[str, Sketch] = field(default_factory=dict)
    outliers: list[Outlier] = field(default_factory=list)
    peaks: dict[str, float] = field(default_factory=dict)
    """The highest of each gauge within it."""


@dataclass(slots=True)
class NodeSeen:
    """One node. `reported_at` is None before its first report; `restarts` counts incarnations after the first."""

    node: Node
    incarnation: str
    role: Role
    model: str
    state: NodeState
    connected: bool
    joined_at: float
    reported_at: float | None = None
    load: Load = field(default_factory=Load)
    steps: int = 0
    gauges: Mapping[str, float] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)
    """Counters since the node was first heard of, across its restarts."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """As its process said them last: the same wherever they are folded."""
    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=WINDOWS))
    """Closed ones, oldest first."""
    open: dict[str, list[Sketch]] = field(default_factory=dict)
    """What the window that is open has so far, a sketch from each report."""
    restarts: int = 0
    deaths: int = 0
    """Of those restarts, how many came without a drain before: nobody had asked for them, or nobody saw that."""
    died_at: float | None = None
    """When the newest process that ended so was last heard of."""
    out_of_memory_at: float | None = None
    """When an engine of it last ran out of memory."""
    refused: str = ""
    """Why it does not take the newest policy; empty while it does."""
    idle_since: float | None = None
    """Since when nothing runs or waits there; None while something does."""

    @property
    def node_id(self) -> str:
        return self.node.node_id

    def fresh(self, now: float) -> bool:
        """Whether its last report says anything of now."""
        return self.connected and self.reported_at is not None and now - self.reported_at <= STALE_S

    def gauge(self, name: str, now: float) -> float | None:
        """None where the node can't measure it, or said nothing for too long."""
        return self.gauges.get(name) if self.fresh(now) else None


@dataclass(slots=True)
class Lengths:
    """Of one model's requests, in tokens."""

    recent_prompts: Sketch
    """The newest thousand, roughly."""
    day_prompts: Sketch
    """The day before those."""
    recent_totals: Sketch
    """Prompt and output, of the newest thousand that ended."""
    day_span_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PlanSeen:
    """What was last planned for the KV blocks of a pool; `changed_at` as `BlockPlan` has it, before `now`."""

    phase: str
    planned: int
    reason: str = ""
    evidence: str = ""
    changed_at: float | None = None


@dataclass(slots=True)
class Seen:
    """The mesh at `now`. `adjustments` are those that live; `started_at` is when this process began to fold: before that it saw nothing."""

    now: float
    started_at: float
    nodes: Mapping[str, NodeSeen]
    lengths: Mapping[str, Lengths] = field(default_factory=dict)
    adjustments: tuple[Adjustment, ...] = ()
    wants: Mapping[str, int] = field(default_factory=dict)
    """Workers that each pool was last said to want; of an earlier leader too."""
    restarting: frozenset[str] = frozenset()
    """Workers of a rolling restart that are away or watched."""
    plans: Mapping[str, PlanSeen] = field(default_factory=dict)
    """By pool; of an earlier leader too."""
    restarted: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """When earlier leaders' heal controllers had workers started anew, by node, as far as the store tells."""

    def workers(self, pool: str | None = None) -> Iterator[NodeSeen]:
        """Connected ones, by node id."""
        return (n for n in self.of(Role.WORKER) if pool is None or n.node.pool == pool)

    def of(self, role: Role) -> Iterator[NodeSeen]:
        return (n for n in self.nodes.values() if n.role is role and n.connected)

    def pools(self) -> list[str]:
        return sorted({n.node.pool for n in self.workers()})


def merged(windows: Iterable[Window], names: Iterable[str]) -> Sketch:
    """All that these windows have under these names, to be read: where that is one sketch, it is that one."""
    wanted = tuple(names)
    found = [w.sketches[name] for w in windows for name in wanted if name in w.sketches]
    return found[0] if len(found) == 1 else Sketch.merged(found)


def counted(windows: Iterable[Window], name: str) -> int:
    """How much a counter rose in them."""
    return sum(w.counters.get(name, 0) for w in windows)
