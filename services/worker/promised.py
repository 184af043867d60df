"""What a worker is held to, for Prometheus: the objectives and the bound that hold here now, and how many requests missed their objective.

Boards draw what is beside what should be; rules compare the two without knowing the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab import measures
from trimtab.messages import Workload
from trimtab.policy import Policy


class Promised(Collector):
    """Read when it is scraped. `policy` is this node's own, with controllers' adjustments; `counters` are by the names of `trimtab.measures`."""

    def __init__(self, policy: Callable[[], Policy], counters: Mapping[str, int]) -> None:
        self._policy = policy
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        policy = self._policy()
        text = "Running requests at most, all workloads (batch.active)"
        yield GaugeMetricFamily("trimtab_worker_batch_active", text, value=policy.batch.active)
        objectives = GaugeMetricFamily(
            "trimtab_worker_objective_seconds",
            "What requests without objectives of their own are promised",
            labels=["objective"],
        )
        objectives.add_metric(["ttft_p99"], policy.objectives.ttft_p99_ms / 1000.0)
        objectives.add_metric(["itl_p99"], policy.objectives.itl_p99_ms / 1000.0)
        objectives.add_metric(["max_queue"], policy.objectives.max_queue_s)
        yield objectives
        over = CounterMetricFamily(
            "trimtab_worker_over", "Requests that ended and had missed their objective", labels=["workload"]
        )
        for workload in Workload:
            over.add_metric([workload.value], self._counters[measures.over(workload)])
        yield over
