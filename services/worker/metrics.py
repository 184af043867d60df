"""A worker's Prometheus metrics: its own, and the `vllm:*` names that stock pickers and autoscalers read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from trimtab.messages import Load, Timings
from trimtab.scheduling import BY_LENGTH, LengthClass
from trimtab.snapshot import Limits

_LENGTHS = {f"{length}_{what}" for length in LengthClass for what in BY_LENGTH}
"""Statistics of one length class: they go out as one metric for all classes."""
SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class WorkerMetrics:
    """Labels are bounded: two workloads, six outcomes, five length classes."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, ["workload"], registry=self.registry, buckets=SECONDS)

        self._requests = Counter(
            "trimtab_worker_requests", "Requests ended", ["workload", "outcome"], registry=self.registry
        )
        self._prompt = Counter(
            "trimtab_worker_prompt_tokens", "Prompt tokens of ended requests", registry=self.registry
        )
        self._output = Counter("trimtab_worker_output_tokens", "Tokens delivered", registry=self.registry)
        self._ttft = histogram("trimtab_worker_ttft_seconds", "Arrival to first token, by the engine's clock")
        self._queued = histogram("trimtab_worker_queue_seconds", "Arrival to first scheduling, by the engine's clock")
        self.counters: dict[str, int] = {"requests": 0, "errors": 0, "prompt_tokens": 0, "output_tokens": 0}
        """Since this incarnation began; they go up with the report."""

    def finished(self, workload: str, outcome: str, prompt_tokens: int, output_tokens: int, t: Timings) -> None:
        self._requests.labels(workload, outcome).inc()
        self._prompt.inc(prompt_tokens)
        self._output.inc(output_tokens)
        if t.first_token_ms:
            self._ttft.labels(workload).observe(t.first_token_ms / 1000.0)
            self._queued.labels(workload).observe(t.queued_ms / 1000.0)
        self.counters["requests"] += 1
        self.counters["errors"] += outcome == "engine_fault"
        self.counters["prompt_tokens"] += prompt_tokens
        self.counters["output_tokens"] += output_tokens

    def watch(
        self,
        load: Callable[[], Load],
        limits: Limits,
        steps: Callable[[], int],
        serving: Callable[[], bool],
        scheduler: Callable[[], Mapping[str, float]],
    ) -> None:
        """Gauges are read when they are scraped, so they are never stale."""
        self.registry.register(_Gauges(self._model, load, limits, steps, serving))
        self.registry.register(_Scheduler(scheduler))


class _Scheduler(Collector):
    """The scheduler's statistics as they are now (`scheduling.STATS`): each under its own name, those of length classes by a label."""

    def __init__(self, stats: Callable[[], Mapping[str, float]]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for name, value in stats.items():
            if name not in _LENGTHS:
                family = _family(name)
                family.add_metric([], value)
                yield family
        for what in BY_LENGTH:
            family = _family(what, "length_class")
            for length in LengthClass:
                if (name := f"{length}_{what}") in stats:
                    family.add_metric([length.value], stats[name])
            yield family


def _family(name: str, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    """Of one statistic; some are no running totals."""
    now = name.startswith("step_") or "max_" in name or name == "waiting"
    text = f"The scheduler's {name.replace('_', ' ')}"
    return (GaugeMetricFamily if now else CounterMetricFamily)(f"trimtab_scheduler_{name}", text, labels=labels)


class _Gauges(Collector):
    def __init__(
        self,
        model: str,
        load: Callable[[], Load],
        limits: Limits,
        steps: Callable[[], int],
        serving: Callable[[], bool],
    ) -> None:
        self._model = model
        self._load = load
        self._limits = limits
        self._steps = steps
        self._serving = serving

    def collect(self) -> Iterator[Metric]:
        load = self._load()
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
        info.add_metric([str(self._limits.block_size), str(self._limits.total_blocks)], 1)
        yield info
        yield GaugeMetricFamily(
            "trimtab_worker_queued_prefill_tokens", "Prompt tokens not yet computed", value=load.queued_prefill_tokens
        )
        yield GaugeMetricFamily("trimtab_worker_engine_steps", "Engine steps begun", value=self._steps())
        yield GaugeMetricFamily(
            "trimtab_worker_serving", "1 while the engine makes progress", value=int(self._serving())
        )
