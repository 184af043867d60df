"""A gateway's Prometheus metrics. Labels are bounded: two workloads, five outcomes, and reasons from the error tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab.errors import BY_REASON
from trimtab.messages import FinishReason, Workload

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
REASONS = frozenset(BY_REASON) | {r.value for r in FinishReason}


class GatewayMetrics:
    """Counters are written as requests end; gauges are read when they are scraped, so they are never stale."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, ["workload"], registry=self.registry, buckets=SECONDS)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._requests = counter("trimtab_gateway_requests", "Requests ended", ("workload", "outcome", "reason"))
        self._ttft = histogram("trimtab_gateway_ttft_seconds", "Arrival to first token delivered")
        self._e2e = histogram("trimtab_gateway_e2e_seconds", "Arrival to the end, of requests that ended well")
        self._tokens = counter("trimtab_gateway_output_tokens", "Tokens delivered")
        self._retries = counter("trimtab_gateway_retries", "Attempts beyond a request's first")
        self._dropped = counter("trimtab_gateway_dropped_pieces", "Pieces of requests that had ended or moved on")
        self.counters = {"requests": 0, "errors": 0, "output_tokens": 0, "retries": 0}
        """Since this incarnation began; they go up with the report."""

    def finished(
        self, workload: str, outcome: str, reason: str, *, tokens: int, ttft_s: float | None, total_s: float
    ) -> None:
        self._requests.labels(workload, outcome, reason if reason in REASONS else "OTHER").inc()
        self._tokens.inc(tokens)
        if ttft_s is not None:
            self._ttft.labels(workload).observe(ttft_s)
        if outcome == "ok":
            self._e2e.labels(workload).observe(total_s)
        self.counters["requests"] += 1
        self.counters["errors"] += outcome == "engine_fault"
        self.counters["output_tokens"] += tokens

    def retried(self) -> None:
        self._retries.inc()
        self.counters["retries"] += 1

    def dropped(self) -> None:
        self._dropped.inc()

    def watch(self, in_flight: Callable[[Workload], int], links_up: Callable[[], int]) -> None:
        self.registry.register(_Gauges(in_flight, links_up))

    def text(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)


class _Gauges(Collector):
    def __init__(self, in_flight: Callable[[Workload], int], links_up: Callable[[], int]) -> None:
        self._in_flight = in_flight
        self._links_up = links_up

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("trimtab_gateway_in_flight", "Requests not yet ended", labels=["workload"])
        for workload in Workload:
            family.add_metric([workload.value], self._in_flight(workload))
        yield family
        yield GaugeMetricFamily("trimtab_gateway_links_up", "Workers with a living link", value=self._links_up())
