"""A gateway's Prometheus metrics. Labels are bounded: two workloads, five outcomes, reasons from the error tree, and so many tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab.errors import BY_REASON
from trimtab.messages import FinishReason, Workload

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
REASONS = frozenset(BY_REASON) | {r.value for r in FinishReason}
TENANTS = 200
"""That have a label of their own, as they come; the others share one."""
OTHERS = "other"


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
        self._resumed = counter("trimtab_gateway_resumes", "Streams that went on at another worker", ("cause",))
        self._gap = Histogram(
            "trimtab_gateway_resume_gap_seconds",
            "Last token before a move to the first one after it",
            registry=self.registry,
            buckets=SECONDS,
        )
        self._shed = counter("trimtab_gateway_shed", "Requests refused at the door, or capped", ("workload", "why"))
        self._trips = counter("trimtab_gateway_breaker_trips", "Breakers that opened here", ("dimension",))
        self._dropped = counter("trimtab_gateway_dropped_pieces", "Pieces of requests that had ended or moved on")
        self._denied = counter("trimtab_gateway_denied", "Calls of callers whom nobody knows", ("door",))
        self._of_tenants = counter(
            "trimtab_gateway_tenant_requests", "A tenant's requests ended", ("tenant", "outcome")
        )
        self._prompt_of = counter("trimtab_gateway_tenant_prompt_tokens", "Of a tenant's accepted prompts", ("tenant",))
        self._output_of = counter("trimtab_gateway_tenant_output_tokens", "Delivered to a tenant", ("tenant",))
        self._tenants: set[str] = set()
        self.counters = {"requests": 0, "errors": 0, "output_tokens": 0, "retries": 0, "resumes": 0, "shed": 0}
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

    def used(self, tenant: str, outcome: str, *, prompt_tokens: int, output_tokens: int) -> None:
        """By one request that ended."""
        if tenant not in self._tenants:
            if len(self._tenants) < TENANTS:
                self._tenants.add(tenant)
            else:
                tenant = OTHERS
        self._of_tenants.labels(tenant, outcome).inc()
        self._prompt_of.labels(tenant).inc(prompt_tokens)
        self._output_of.labels(tenant).inc(output_tokens)

    def denied(self, door: str) -> None:
        """`door` is grpc or http."""
        self._denied.labels(door).inc()

    def retried(self) -> None:
        self._retries.inc()
        self.counters["retries"] += 1

    def resumed(self, cause: str) -> None:
        self._resumed.labels(cause).inc()
        self.counters["resumes"] += 1

    def resume_gap(self, gap_s: float) -> None:
        self._gap.observe(gap_s)

    def shed(self, workload: str, why: str) -> None:
        """`why` is one of a few words of admission's."""
        self._shed.labels(workload, why).inc()
        self.counters["shed"] += 1

    def tripped(self, dimension: str) -> None:
        self._trips.labels(dimension).inc()

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
