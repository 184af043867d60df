"""A gateway's metrics: for Prometheus, and what goes up with its reports.

Labels are bounded: two workloads, two paths, five length classes, five outcomes, reasons from the error tree, and so many tenants.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab import measures
from trimtab.errors import BY_REASON
from trimtab.interval import Intervals
from trimtab.messages import FinishReason, Workload
from trimtab.scheduling import LengthClass

SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
REASONS = frozenset(BY_REASON) | {r.value for r in FinishReason}
TENANTS = 200
"""That have a label of their own, as they come; the others share one."""
OTHERS = "other"


@dataclass(frozen=True, slots=True)
class Kind:
    """What is told apart of a request. `whole` is False where its client goes on with what it got elsewhere."""

    workload: Workload
    cold: bool
    length: LengthClass
    whole: bool = True

    @property
    def path(self) -> str:
        return measures.COLD if self.cold else measures.HOT


class GatewayMetrics:
    """Counters are written as requests end; gauges are read when they are scraped, so they are never stale."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, label: str = "workload") -> Histogram:
            return Histogram(name, text, [label], registry=self.registry, buckets=SECONDS)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._requests = counter("trimtab_gateway_requests", "Requests ended", ("workload", "outcome", "reason"))
        self._ttft = histogram("trimtab_gateway_ttft_seconds", "Arrival to first token delivered")
        self._e2e = histogram("trimtab_gateway_e2e_seconds", "Arrival to the end, of requests that ended well")
        self._by_length = histogram(
            "trimtab_gateway_length_ttft_seconds", "Arrival to first token, by length of the prompt", "length_class"
        )
        self._paths = counter(
            "trimtab_gateway_path_requests", "Requests with a first token that ended", ("workload", "path")
        )
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
        self.intervals = Intervals(time.monotonic())
        """TTFT and E2E as clients see them."""
        self.scraped: Callable[[], Awaitable[bytes]] = self._alone
        """What a scraper gets: this process's text, or also that of others which share its ports."""

    def first_token(self, kind: Kind, ttft_s: float) -> None:
        """It came, so long after the request."""
        if kind.whole:
            self.intervals.add(measures.ttft(kind.workload, kind.path), ttft_s * 1000.0)
            self.intervals.add(measures.ttft_by_length(kind.length), ttft_s * 1000.0)

    def finished(
        self, kind: Kind, outcome: str, reason: str, *, tokens: int, ttft_s: float | None, total_s: float
    ) -> None:
        workload = kind.workload.value
        self._requests.labels(workload, outcome, reason if reason in REASONS else "OTHER").inc()
        self._tokens.inc(tokens)
        if ttft_s is not None:
            self._ttft.labels(workload).observe(ttft_s)
            self._by_length.labels(kind.length.value).observe(ttft_s)
            self._paths.labels(workload, kind.path).inc()
        if outcome == "ok":
            self._e2e.labels(workload).observe(total_s)
            if kind.whole:
                self.intervals.add(measures.e2e(kind.workload), total_s * 1000.0)
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

    def watch(
        self,
        in_flight: Callable[[Workload], int],
        links_up: Callable[[], int],
        standing: Callable[[], Mapping[str, float]],
    ) -> None:
        """`standing` gives gauges by the names of `trimtab.measures`."""
        self.registry.register(_Gauges(in_flight, links_up, standing))

    def text(self) -> bytes:
        """Of this process, in the Prometheus text format."""
        return generate_latest(self.registry)

    async def _alone(self) -> bytes:
        return self.text()


class _Gauges(Collector):
    def __init__(
        self,
        in_flight: Callable[[Workload], int],
        links_up: Callable[[], int],
        standing: Callable[[], Mapping[str, float]],
    ) -> None:
        self._in_flight = in_flight
        self._links_up = links_up
        self._standing = standing
        self._process = psutil.Process()

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("trimtab_gateway_in_flight", "Requests not yet ended", labels=["workload"])
        for workload in Workload:
            family.add_metric([workload.value], self._in_flight(workload))
        yield family
        gauges = self._standing()
        family = GaugeMetricFamily("trimtab_gateway_waiting", "Not yet accepted by a worker", labels=["workload"])
        for workload, name in (
            (Workload.REALTIME, measures.REALTIME_WAITING),
            (Workload.BATCH, measures.BATCH_WAITING),
        ):
            family.add_metric([workload.value], gauges[name])
        yield family
        text = "BATCH requests with cold prompts among them"
        yield GaugeMetricFamily("trimtab_gateway_cold_waiting", text, value=gauges[measures.COLD_WAITING])
        rss = self._process.memory_info().rss
        yield GaugeMetricFamily("trimtab_gateway_rss_bytes", "Resident memory of this process", value=rss)
        yield GaugeMetricFamily("trimtab_gateway_links_up", "Workers with a living link", value=self._links_up())
