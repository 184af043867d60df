"""Nodes' reports, folded into what controllers see. Pure: `now` is an argument, seconds of one monotonic clock.

A report is folded once, when it arrives: counters become increases, sketches go into the node's open window, and a window that has run
its 5 s is closed. All smoothing is here; a tick only reads. Invariants: a counter that starts anew with its process adds up, and never goes
down; a report that comes twice, or late, counts once or not at all; what a node did not say is absent.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.fleet import Member
from controlplane.seen import STALE_S, WINDOW_S, Lengths, NodeSeen, Seen, Window
from trimtab import measures
from trimtab.messages import Hello, NodeState, Report, Role
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment

RECENT = 1000
"""Field guide A looks at the lengths of the last 1,000 requests."""
HOURS = 24
HOUR_S = 3600.0
MAX_MODELS = 32
"""Whose lengths are kept; a mesh has a few."""
FORGET_S = 900.0
"""A node that has said nothing for so long leaves; its totals with it."""
MAX_OUTLIERS = 16
"""Of one window."""
RUNNING, WAITING = "running", "waiting"
"""Peaks of the load, beside those of gauges."""


def _rises(name: str) -> bool:
    """Whether it is a running total: some of what a scheduler says are high-water marks, or numbers of now."""
    return "max_" not in name and not name.endswith("_waiting")


@dataclass(slots=True)
class _Folding:
    """What is between reports of one node."""

    seen: NodeSeen
    sequence: int = 0
    last: Mapping[str, int] = field(default_factory=dict)
    open: Window | None = None
    windows: int = 0
    heard_at: float = 0.0
    gone: deque[str] = field(default_factory=lambda: deque(maxlen=8))
    """Incarnations before this one: what they said may come late, over another replica."""


@dataclass(slots=True)
class _History:
    """Lengths of one model's requests. `recent` holds (prompts, totals) of single windows, oldest first."""

    recent: deque[tuple[Sketch, Sketch]] = field(default_factory=deque)
    count: int = 0
    hours: dict[int, Sketch] = field(default_factory=dict)
    first_at: float | None = None
    made: Lengths | None = None

    def add(self, prompts: Sketch, totals: Sketch, now: float) -> None:
        self.first_at = now if self.first_at is None else self.first_at
        self.recent.append((prompts, totals))
        self.count += prompts.count
        while self.recent and self.count - self.recent[0][0].count >= RECENT:
            old, _ = self.recent.popleft()
            self.count -= old.count
            hour = int(now // HOUR_S)
            self.hours[hour] = Sketch.merged((self.hours[hour], old)) if hour in self.hours else old
            for past in [h for h in self.hours if h <= hour - HOURS]:
                del self.hours[past]
        self.made = None

    def lengths(self, now: float) -> Lengths:
        if self.made is None:
            self.made = Lengths(
                Sketch.merged(p for p, _ in self.recent),
                Sketch.merged(self.hours.values()),
                Sketch.merged(t for _, t in self.recent),
            )
        self.made.day_span_s = min(now - (self.first_at or now), HOURS * HOUR_S)
        return self.made


class Telemetry:
    """Changed by its methods alone. `started_at` is when it began to listen."""

    def __init__(self, started_at: float) -> None:
        self._started_at = started_at
        self._nodes: dict[str, _Folding] = {}
        self._models: dict[str, _History] = {}

    def reported(self, hello: Hello, report: Report, now: float) -> bool:
        """A node has said how it fares. False, and nothing is counted, for what was counted already or is of a process that is gone."""
        node = self._node(hello, now)
        if hello.incarnation != node.seen.incarnation:
            if hello.incarnation in node.gone:
                return False
            self._restarted(node, hello, now)
        elif report.sequence <= node.sequence:
            return False
        if node.open is not None and now - node.heard_at > STALE_S:
            # What came before the silence is of then.
            self._close(node, node.heard_at)
        window = node.open
        if window is None:
            node.windows += 1
            covered_s = min(report.interval_ms / 1000.0, now - node.heard_at if node.heard_at else WINDOW_S)
            window = node.open = Window(node.windows, now - max(0.0, covered_s))
        # Of a process that runs already when it is first heard, what it counted until then is of no window.
        self._count(node, window if report.sequence <= 1 or node.sequence else None, report)
        node.sequence = report.sequence
        for name, data in report.sketches.items():
            with contextlib.suppress(ValueError):
                sketch = Sketch.from_bytes(data)
                node.seen.open.setdefault(name, []).append(sketch)
        room = MAX_OUTLIERS - len(window.outliers)
        window.outliers += report.outliers[: max(0, room)]
        self._gauge(node.seen, window, report, now)
        node.heard_at = now
        if now - window.begun >= WINDOW_S:
            self._close(node, now)
        return True

    def ran_out_of_memory(self, hello: Hello, now: float) -> None:
        """An engine of the node said so, or was killed for it."""
        self._node(hello, now).seen.out_of_memory_at = now

    def seen(self, members: Iterable[Member], adjustments: tuple[Adjustment, ...], now: float) -> Seen:
        """The mesh now: of nodes that are known to the fleet, whether they are connected; of the others, what they said last."""
        self.look(members, now)
        nodes = {node_id: self._nodes[node_id].seen for node_id in sorted(self._nodes)}
        lengths = {model: history.lengths(now) for model, history in self._models.items()}
        return Seen(now, self._started_at, nodes, lengths, adjustments)

    def look(self, members: Iterable[Member], now: float) -> None:
        """Takes what the fleet knows of nodes beside their reports, and forgets who is gone for long. To be done each second, also where nobody
        asks: a process that drains at once is soon another one.
        """
        here: set[str] = set()
        for m in members:
            node = self._nodes.get(m.node_id)
            if node is None:
                if not m.connected:
                    continue
                node = self._node(m.hello, now)
            here.add(m.node_id)
            if m.hello.incarnation != node.seen.incarnation and m.connected and m.hello.incarnation not in node.gone:
                self._restarted(node, m.hello, now)
            node.seen.connected = m.connected
            if m.connected:
                node.seen.node = m.hello.node
            if m.report is not None and m.hello.incarnation == node.seen.incarnation:
                # Elsewhere a state is told at once, a report each second.
                node.seen.state = m.report.state
            node.seen.refused = f"{m.refusal.reason}: {m.refusal.message}" if m.refusal is not None else ""
        for node_id, node in list(self._nodes.items()):
            if node_id not in here:
                node.seen.connected = False
                if now - max(node.heard_at, node.seen.joined_at) > FORGET_S:
                    del self._nodes[node_id]

    def _node(self, hello: Hello, now: float) -> _Folding:
        node = self._nodes.get(hello.node.node_id)
        if node is None:
            seen = NodeSeen(
                hello.node,
                hello.incarnation,
                hello.role,
                hello.model,
                NodeState.STARTING,
                connected=True,
                joined_at=now,
            )
            node = self._nodes[hello.node.node_id] = _Folding(seen)
        return node

    def _restarted(self, node: _Folding, hello: Hello, now: float) -> None:
        """Another process goes on under its name. What the last one did stays counted; nothing else of it says anything of this one."""
        if node.open is not None:
            self._close(node, node.heard_at)
        old = node.seen
        node.gone.append(old.incarnation)
        # Whoever is told to go, or gets a SIGTERM, drains first and says so.
        died = old.state is not NodeState.DRAINING
        node.seen = NodeSeen(
            hello.node, hello.incarnation, hello.role, hello.model, NodeState.STARTING, connected=True, joined_at=now,
            totals=old.totals, restarts=old.restarts + 1, out_of_memory_at=old.out_of_memory_at,
            deaths=old.deaths + died, died_at=(node.heard_at or old.joined_at) if died else old.died_at,
        )  # fmt: skip
        node.sequence, node.last, node.heard_at = 0, {}, 0.0

    def _count(self, node: _Folding, window: Window | None, report: Report) -> None:
        totals, last, counters = node.seen.totals, node.last, window.counters if window is not None else {}
        for name, value in report.counters.items():
            if not _rises(name):
                continue
            before = last.get(name, 0)
            rose = value - before if value >= before else value
            if rose:
                totals[name] = totals.get(name, 0) + rose
                counters[name] = counters.get(name, 0) + rose
        node.last = node.seen.counters = report.counters

    def _gauge(self, seen: NodeSeen, window: Window, report: Report, now: float) -> None:
        seen.state, seen.load, seen.steps, seen.gauges, seen.reported_at = (
            report.state,
            report.load,
            report.steps,
            report.gauges,
            now,
        )
        peaks = window.peaks
        for name, value in (
            *((name, value) for name, value in report.gauges.items() if name not in measures.BY_BLOCK_SIZE),
            (RUNNING, float(report.load.running)),
            (WAITING, float(report.load.waiting)),
        ):
            if value > peaks.get(name, -1.0):
                peaks[name] = value
        if seen.load.running or seen.load.waiting:
            seen.idle_since = None
        elif seen.idle_since is None:
            seen.idle_since = now

    def _close(self, node: _Folding, now: float) -> None:
        window = node.open
        assert window is not None
        node.open = None
        window.ended = now
        window.sketches = {
            name: found[0] if len(found) == 1 else Sketch.merged(found) for name, found in node.seen.open.items()
        }
        # Let go of here, one node at a time: of all nodes together that is a third of a tick.
        node.seen.open = {}
        node.seen.windows.append(window)
        if node.seen.role is Role.WORKER and measures.PROMPT in window.sketches:
            self._lengthen(node.seen.model, window, now)

    def _lengthen(self, model: str, window: Window, now: float) -> None:
        if model not in self._models and len(self._models) >= MAX_MODELS:
            return
        totals = window.sketches.get(measures.TOTAL) or Sketch()
        self._models.setdefault(model, _History()).add(window.sketches[measures.PROMPT], totals, now)
