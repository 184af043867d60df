"""What a worker is held to, as Prometheus reads it."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from services.worker.promised import Promised
from trimtab import measures
from trimtab.messages import Workload
from trimtab.policy import Policy


def test_the_objectives_and_the_bound_are_those_that_hold_at_the_scrape():
    held = [Policy()]
    counters = dict.fromkeys(measures.OWN_COUNTERS, 0)
    registry = CollectorRegistry()
    registry.register(Promised(lambda: held[0], counters))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, labels)

    assert value("trimtab_worker_batch_active") == 48
    assert value("trimtab_worker_objective_seconds", objective="ttft_p99") == 0.5
    assert value("trimtab_worker_objective_seconds", objective="itl_p99") == 0.2
    assert value("trimtab_worker_objective_seconds", objective="max_queue") == 600
    assert value("trimtab_worker_over_total", workload="batch") == 0

    held[0] = replace(Policy(), batch=replace(Policy().batch, active=5))
    counters[measures.over(Workload.REALTIME)] += 3
    assert value("trimtab_worker_batch_active") == 5
    assert value("trimtab_worker_over_total", workload="realtime") == 3
    assert value("trimtab_worker_over_total", workload="batch") == 0
