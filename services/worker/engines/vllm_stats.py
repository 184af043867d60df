"""A stat logger that keeps nothing: its presence alone makes vLLM stamp each request's moments, which arrive with its outputs.

It stands where vLLM's Prometheus logger would: that one is added unless a logger of its class is there, and it observes several histograms
for every token, which nobody reads here (a worker has a registry of its own).
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import PrometheusStatLogger


class Quiet(PrometheusStatLogger):
    def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
        # The parent's own would register its metrics.
        self.engine_indexes = engine_indexes or [0]

    def record(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_sleep_state(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record_admission_rejection(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log(self) -> None:
        pass

    def log_engine_initialized(self) -> None:
        pass

    def log_metrics_info(self, *args: Any, **kwargs: Any) -> None:
        pass
