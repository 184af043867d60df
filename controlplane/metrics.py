"""What a control plane replica measures of itself, for Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.breakers import DIMENSIONS

TICK_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
CONVERGENCE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

MAX_POOLS = 200


class PoolSize(Protocol):
    """How many workers a pool wants and has, and whether anybody has decided that it wants them."""

    @property
    def pool(self) -> str: ...
    @property
    def wanted(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def decided(self) -> bool: ...


class ControlMetrics:
    """Labels are bounded: roles, outcomes and results, never nodes or authors."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.nodes = Gauge("trimtab_control_nodes", "Connected nodes.", ["role"], registry=registry)
        self.epoch = Gauge("trimtab_control_policy_epoch", "Epoch of the newest policy.", registry=registry)
        self.revision = Gauge("trimtab_control_policy_revision", "Revision of the newest policy.", registry=registry)
        self.puts = Counter(
            "trimtab_control_policy_puts",
            "Policy changes asked for, by outcome: written, unchanged, dry_run, refused, conflict, unavailable, invalid.",
            ["outcome"],
            registry=registry,
        )
        self.results = Counter(
            "trimtab_control_policy_results",
            "Nodes' answers to pushes: applied, refused, ignored_holding.",
            ["result"],
            registry=registry,
        )
        # There from the start: a counter that is new with its first refusal has not risen.
        self.results.labels("refused")
        self.convergence = Histogram(
            "trimtab_control_push_convergence_seconds",
            "From a policy change, as this replica learnt of it, to a connected worker's answer that it is applied.",
            buckets=CONVERGENCE_BUCKETS_S,
            registry=registry,
        )
        self.denied = Counter(
            "trimtab_control_denied",
            "Calls that were turned away for want of a role or an identity, by method.",
            ["method"],
            registry=registry,
        )
        self.trips = Counter(
            "trimtab_control_breaker_trips",
            "Breakers that gateways of this replica opened on workers, by what they opened on: errors, latency, hung.",
            ["dimension"],
            registry=registry,
        )
        self.alerts = Gauge(
            "trimtab_control_alerts", "Alerts that last now, where this replica leads.", ["severity"], registry=registry
        )
        self.alert_webhook_failures = Counter(
            "trimtab_control_alert_webhook_failures",
            "Alerts that the webhook did not take, after all tries.",
            registry=registry,
        )
        self.ticks = Histogram(
            "trimtab_control_tick_seconds",
            "What the leader's controllers took to look at the mesh and decide.",
            buckets=TICK_BUCKETS_S,
            registry=registry,
        )
        self.decisions = Counter(
            "trimtab_control_decisions",
            "What controllers decided anew, by controller and by what came of it: done, failed, advised.",
            ["controller", "outcome"],
            registry=registry,
        )
        self.moves = Gauge(
            "trimtab_control_adjustments", "Adjustments that live, by controller.", ["controller"], registry=registry
        )
        self.holds = Gauge(
            "trimtab_control_holds",
            "Inputs that a controller misses, so that it can't decide.",
            ["controller"],
            registry=registry,
        )
        self.leads = Gauge("trimtab_control_leader", "1 while this replica runs the controllers.", registry=registry)
        self.desired_workers = Gauge(
            "trimtab_control_desired_workers",
            "Workers that a pool wants, where this replica leads.",
            ["pool"],
            registry=registry,
        )
        self.running_workers = Gauge(
            "trimtab_control_running_workers", "Workers of it that are connected.", ["pool"], registry=registry
        )
        self._pools: set[str] = set()
        self._decided: set[str] = set()
        self.store_up = Gauge("trimtab_control_store_up", "1 while the policy store answers.", registry=registry)

    def ticked(self, took_s: float) -> None:
        self.ticks.observe(took_s)

    def decided(self, controller: str, outcome: str) -> None:
        self.decisions.labels(controller, outcome).inc()

    def rested(self) -> None:
        """This replica does not lead: what its controllers held and missed is nobody's now."""
        self.leads.set(0)
        self.moves.clear()
        self.holds.clear()
        self.scaled(())

    def looped(self, *, moves: Mapping[str, int], holds: Mapping[str, int]) -> None:
        """After each tick of the leader."""
        for name, count in moves.items():
            self.moves.labels(name).set(count)
        for name, count in holds.items():
            self.holds.labels(name).set(count)

    def tripped(self, dimension: str) -> None:
        self.trips.labels(dimension if dimension in DIMENSIONS else "other").inc()

    def scaled(self, pools: Iterable[PoolSize]) -> None:
        """The pools that there are; what was said of others is taken back. None: this replica does not lead. Of a pool for which nobody has
        decided there is no wanted number: an autoscaler would take it for one."""
        said = {p.pool: p for p in itertools.islice(pools, MAX_POOLS)}
        for gone in self._pools - said.keys():
            self.running_workers.remove(gone)
        decided = {name for name, pool in said.items() if pool.decided}
        for gone in self._decided - decided:
            self.desired_workers.remove(gone)
        for name, pool in said.items():
            if name in decided:
                self.desired_workers.labels(name).set(pool.wanted)
            self.running_workers.labels(name).set(pool.running)
        self._pools, self._decided = set(said), decided
