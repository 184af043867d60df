"""What `trimtab top` shows, as values: the mesh now, its workers the worst first. Pure; takes the wire messages as they come.

What a node did not say, or said too long ago, is None and never 0.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from controlplane import quantiles
from trimtab import measures
from trimtab.codec import decode_state
from trimtab.messages import Workload
from trimtab.sketch import Quantiles

WINDOWS = 3
"""Of five seconds, that latencies are of."""
DECISIONS = 5
RECENT_S = 40.0
"""A window that ended longer ago says nothing of now."""
WORKER, GATEWAY = 1, 2
"""Role's numbers."""
TTFT = tuple(measures.ttft(Workload.REALTIME, path) for path in (measures.HOT, measures.COLD))
ITL = (measures.itl(Workload.REALTIME),)


@dataclass(frozen=True, slots=True)
class Row:
    """One node. Latencies are REALTIME's, in milliseconds."""

    node_id: str
    pool: str
    state: str
    age_s: float | None
    stale: bool
    ttft: Quantiles | None = None
    itl: Quantiles | None = None
    ttft_objective_ms: float = 0.0
    itl_objective_ms: float = 0.0
    realtime_waiting: float | None = None
    batch_waiting: float | None = None
    kv_used: float | None = None
    running: int | None = None
    active: int | None = None
    active_spec: int | None = None
    breaker: str = ""
    behind: bool = False
    applied: str = "-"
    refused: str = ""
    restarts: int = 0

    @property
    def ttft_over(self) -> bool:
        return _over(self.ttft, self.ttft_objective_ms)

    @property
    def itl_over(self) -> bool:
        return _over(self.itl, self.itl_objective_ms)

    @property
    def trouble(self) -> tuple[float, ...]:
        """Sorts: the greater, the worse."""
        ratios = (_ratio(self.ttft, self.ttft_objective_ms), _ratio(self.itl, self.itl_objective_ms))
        return (
            float(self.state in ("lost", "hung")),
            float(self.stale),
            float(bool(self.refused)),
            float(bool(self.breaker)),
            max(ratios) if max(ratios) > 1 else 0.0,
            float(self.state != "serving"),
            self.kv_used or 0.0,
            (self.realtime_waiting or 0.0) + (self.batch_waiting or 0.0),
        )


@dataclass(frozen=True, slots=True)
class View:
    """The whole of one refresh. `telemetry` and `policy` are the answers that it was made of; `ttft` is gateways' own."""

    telemetry: Any
    policy: Any
    workers: tuple[Row, ...]
    gateways: tuple[Row, ...]
    ttft: Quantiles | None
    mesh: str = ""

    def in_state(self, *states: str) -> int:
        return sum(row.state in states for row in self.workers)


def view(telemetry: Any, policy: Any, mesh: str = "") -> View:
    """`telemetry` and `policy` are GetTelemetry's and GetPolicy's answers."""
    desired = policy.snapshot.identity
    rows = [(n.role, _row(n, desired)) for n in telemetry.nodes]
    workers = sorted((row for role, row in rows if role == WORKER), key=_worst_first)
    gateways = tuple(row for role, row in rows if role == GATEWAY)
    seen = [row.ttft for row in gateways if row.ttft is not None]
    return View(telemetry, policy, tuple(workers), gateways, quantiles.mixed(seen) if seen else None, mesh)


def _worst_first(row: Row) -> tuple[tuple[float, ...], str]:
    return tuple(-t for t in row.trouble), row.node_id


def _row(n: Any, desired: Any) -> Row:
    heard = n.connected and n.HasField("age_s")
    fresh = heard and not n.stale
    windows = [w for w in n.windows[-WINDOWS:] if w.ended_ago_s <= RECENT_S] if n.connected else []
    held = (n.applied.epoch, n.applied.revision)
    return Row(
        n.node_id,
        n.pool,
        _state(n),
        n.age_s if n.HasField("age_s") else None,
        n.stale,
        ttft=_of(windows, TTFT),
        itl=_of(windows, ITL),
        ttft_objective_ms=n.ttft_objective_ms,
        itl_objective_ms=n.itl_objective_ms,
        realtime_waiting=_gauge(n, measures.REALTIME_WAITING, fresh),
        batch_waiting=_gauge(n, measures.BATCH_WAITING, fresh),
        kv_used=_gauge(n, measures.KV_USED, fresh),
        running=n.load.running if fresh and n.HasField("load") else None,
        active=n.batch_active or None,
        active_spec=n.batch_active_spec or None,
        breaker=n.breaker,
        behind=n.connected and n.role == WORKER and held < (desired.epoch, desired.revision),
        applied=f"{held[0]}.{held[1]}" if held[0] else "-",
        refused=n.refused_because if n.refused.epoch or n.refused_because else "",
        restarts=n.restarts,
    )


def _state(n: Any) -> str:
    state = decode_state(n.state).value
    if n.connected:
        return state
    return "drained" if state == "draining" else "lost"


def _gauge(n: Any, name: str, fresh: bool) -> float | None:
    return n.gauges[name] if fresh and name in n.gauges else None


def _of(windows: Iterable[Any], names: Iterable[str]) -> Quantiles | None:
    """None where nothing was measured."""
    found = [quantiles.of(w.quantiles[name]) for w in windows for name in names if name in w.quantiles]
    return quantiles.mixed(found) if any(q.count for q in found) else None


def _ratio(q: Quantiles | None, objective_ms: float) -> float:
    return q.p99 / objective_ms if q is not None and objective_ms else 0.0


def _over(q: Quantiles | None, objective_ms: float) -> bool:
    return _ratio(q, objective_ms) > 1
