"""What a control plane replica measures of itself, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from controlplane.breakers import DIMENSIONS

CONVERGENCE_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


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
        self.store_up = Gauge("trimtab_control_store_up", "1 while the policy store answers.", registry=registry)

    def tripped(self, dimension: str) -> None:
        self.trips.labels(dimension if dimension in DIMENSIONS else "other").inc()
