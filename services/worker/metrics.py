"""A worker's Prometheus metrics: its own, and the `vllm:*` names that stock pickers and autoscalers read.

In three layers: resources (KV blocks, memory), requests (hot and cold, waits, latency by length), and what is delivered (TTFT, gaps between
tokens, tokens, faults). Labels are bounded: two workloads, two paths, six outcomes, five length classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.worker.measuring import GAP_EDGES_MS, Buckets, End, Ongoing
from services.worker.standing import Standing
from trimtab import measures
from trimtab.blocks import LADDER
from trimtab.messages import Load, Workload
from trimtab.scheduling import BY_LENGTH, NOW, LengthClass
from trimtab.snapshot import Limits

_LENGTHS = {f"{length}_{what}" for length in LengthClass for what in BY_LENGTH}
"""Statistics of one length class: they go out as one metric for all classes."""
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class Watched:
    """What gauges are read from when they are scraped, so that they are never stale. Callables answer at once."""

    load: Callable[[], Load]
    limits: Callable[[], Limits]
    steps: Callable[[], int]
    serving: Callable[[], bool]
    scheduler: Callable[[], Mapping[str, float]]
    standing: Standing
    gaps: Mapping[Workload, Buckets]
    now: Callable[[], float]


class WorkerMetrics:
    def __init__(self, model: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str, label: str = "workload") -> Histogram:
            return Histogram(name, text, [label], registry=self.registry, buckets=SECONDS)

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        self._requests = counter("trimtab_worker_requests", "Requests ended", ("workload", "outcome"))
        self._paths = counter("trimtab_worker_path_requests", "Accepted requests that ended", ("workload", "path"))
        self._prompt = counter("trimtab_worker_prompt_tokens", "Prompt tokens of ended requests")
        self._first_computed = counter(
            "trimtab_worker_first_computed_tokens", "Prompt tokens that were computed here for the first time"
        )
        self._output = counter("trimtab_worker_output_tokens", "Tokens delivered")
        self._memory = counter("trimtab_worker_out_of_memory", "Requests that the engine ended for want of memory")
        self._ttft = histogram("trimtab_worker_ttft_seconds", "Arrival to first token, by the engine's clock")
        self._by_length = histogram(
            "trimtab_worker_length_ttft_seconds", "Arrival to first token, by length of the prompt", "length_class"
        )
        self._queued = histogram("trimtab_worker_queue_seconds", "Arrival to first scheduling, by the engine's clock")
        self._e2e = histogram("trimtab_worker_e2e_seconds", "Arrival to the last token, of requests that ended well")

        self._denied = counter(
            "trimtab_worker_denied", "Calls of callers whose certificate is not for them", ("method",)
        )

    def denied(self, method: str) -> None:
        """A call was turned away."""
        self._denied.labels(method).inc()

    def finished(self, end: End, one: Ongoing | None) -> None:
        """A request ended. `one` is None where it was never accepted."""
        workload, t = end.workload.value, end.timings
        self._requests.labels(workload, end.outcome).inc()
        self._prompt.inc(end.prompt_tokens)
        self._output.inc(end.output_tokens)
        self._memory.inc(end.out_of_memory)
        if t.first_token_ms:
            self._ttft.labels(workload).observe(t.first_token_ms / 1000.0)
            self._queued.labels(workload).observe(t.queued_ms / 1000.0)
        if one is None:
            return
        self._paths.labels(workload, measures.COLD if one.cold else measures.HOT).inc()
        if one.before is None and t.first_token_ms:
            self._by_length.labels(one.length.value).observe(t.first_token_ms / 1000.0)
            self._first_computed.inc(max(0, end.prompt_tokens - end.cached_tokens))
        if end.outcome == "ok" and one.before is None:
            self._e2e.labels(workload).observe(t.total_ms / 1000.0)

    def watch(self, watched: Watched) -> None:
        self.registry.register(_Engine(self._model, watched))
        self.registry.register(_Scheduler(watched.scheduler))
        self.registry.register(_Standing(watched))


class _Scheduler(Collector):
    """The scheduler's statistics as they are now (`scheduling.STATS`): each under its own name, those of length classes by a label."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, value in stats.items():
            if name not in _LENGTHS and name not in _ELSEWHERE:
                family = _family(name, now=name in NOW or "max_" in name)
                family.add_metric([], value)
                yield family
        for what in BY_LENGTH:
            family = _family(what, "length_class", now=what in ("waiting", "max_wait_ms"))
            for length in LengthClass:
                if (name := f"{length}_{what}") in stats:
                    family.add_metric([length.value], stats[name])
            yield family


def _family(name: str, *labels: str, now: bool) -> CounterMetricFamily | GaugeMetricFamily:
    """Of one statistic; `now`: it is no running total."""
    text = f"The scheduler's {name.replace('_', ' ')}"
    return (GaugeMetricFamily if now else CounterMetricFamily)(f"trimtab_scheduler_{name}", text, labels=labels)


class _Engine(Collector):
    def __init__(self, model: str, watched: Watched) -> None:
        self._model = model
        self._w = watched

    def collect(self) -> Iterator[Metric]:
        w, load = self._w, self._w.load()
        used = 1 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Requests running in the engine", load.running),
            ("vllm:num_requests_waiting", "Requests waiting, in the worker's queue and the engine's", load.waiting),
            ("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", used),
        ):
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model], value)
            yield family
        info = GaugeMetricFamily("vllm:cache_config_info", "Cache sizes", labels=["block_size", "num_gpu_blocks"])
        limits = w.limits()
        info.add_metric([str(limits.block_size), str(limits.total_blocks)], 1)
        yield info
        yield GaugeMetricFamily(
            "trimtab_worker_queued_prefill_tokens", "Prompt tokens not yet computed", value=load.queued_prefill_tokens
        )
        yield GaugeMetricFamily("trimtab_worker_engine_steps", "Engine steps begun", value=w.steps())
        yield GaugeMetricFamily("trimtab_worker_serving", "1 while the engine makes progress", value=int(w.serving()))


_TEXTS = {
    measures.KV_USED: "Share of KV blocks that requests hold, 0 to 1",
    measures.STORED_TOKENS: "Tokens whose KV requests hold",
    measures.KV_BYTES_PER_TOKEN: "Bytes that the KV of one token takes",
    measures.RSS_BYTES: "Resident memory of all the worker's processes",
    measures.COLD_WAITING: "BATCH requests with cold prompts that wait",
    measures.HUNG_S: "For how long the engine has been found hung",
    measures.SESSION_TURNS: "Requests of a session on average, of those with two or more in the last ten minutes",
    measures.DECODE_DEVIATION: "Deviation of the time of decode steps, in shares of its mean",
    measures.PREFILL_TOKENS_PER_S: "Prompt tokens that full steps compute in a second, by what steps took",
}
_BY_SIZE: tuple[tuple[str, str, Callable[[int], str]], ...] = (
    ("kv_waste", "Of the slots in requests' KV blocks, the share that would hold no token", measures.block_waste),
    ("prefix_kept", "Of the prompt tokens from the prefix cache, the share in whole blocks", measures.prefix_kept),
)
"""By block size, of those that the engine accepts."""
_ELSEWHERE = {"decode_deviation", *(f"waste_{size}" for size in LADDER)}
"""Statistics that gauges above tell."""


class _Standing(Collector):
    """What reports say too, and what only people look at."""

    def __init__(self, watched: Watched) -> None:
        self._w = watched

    def collect(self) -> Iterator[Metric]:
        w = self._w
        gauges = w.standing.gauges(w.now())
        for name, text in _TEXTS.items():
            unit = "hung_seconds" if name == measures.HUNG_S else name
            # Declared also while nothing is known, without a sample: a name that comes and goes looks like one that is misspelt.
            yield GaugeMetricFamily(f"trimtab_worker_{unit}", text, value=gauges.get(name))
        for what in ("running", "waiting"):
            family = GaugeMetricFamily(f"trimtab_worker_{what}", f"Requests that are {what}", labels=["workload"])
            for workload in Workload:
                if (name := f"{workload.value}_{what}") in gauges:
                    family.add_metric([workload.value], gauges[name])
            yield family
        text = "Of the slots in held KV blocks, the share without a token"
        yield GaugeMetricFamily("trimtab_worker_kv_fragmentation", text, value=gauges.get(measures.FRAGMENTATION))
        for what, text, name_of in _BY_SIZE:
            family = GaugeMetricFamily(f"trimtab_worker_{what}", text, labels=["block_size"])
            for size in LADDER:
                if (name := name_of(size)) in gauges:
                    family.add_metric([str(size)], gauges[name])
            yield family
        text = "Requests that wait for each that may run (batch.active)"
        yield GaugeMetricFamily("trimtab_worker_scheduler_pressure", text, value=w.standing.pressure())
        yield self._gaps()

    def _gaps(self) -> Metric:
        text = "Gaps between the outputs of one request, by the engine's clock"
        family = HistogramMetricFamily("trimtab_worker_itl_seconds", text, labels=["workload"])
        for workload, buckets in self._w.gaps.items():
            counts = buckets.up_to()
            edges = [*(f"{ms / 1000.0:g}" for ms in GAP_EDGES_MS), "+Inf"]
            family.add_metric([workload.value], list(zip(edges, counts, strict=True)), buckets.sum / 1000.0)
        return family
