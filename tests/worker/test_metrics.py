"""A worker's Prometheus metrics: the scheduler's statistics under their names, requests by labels that are few."""

from __future__ import annotations

import urllib.request

import pytest
from prometheus_client import generate_latest, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from services.worker.engines import Stamps
from services.worker.measuring import End, Measuring
from services.worker.metrics import Watched, WorkerMetrics
from trimtab.kit.process import free_port
from trimtab.messages import Load, Request, Timings, Workload
from trimtab.policy import Policy
from trimtab.scheduling import STATS, LengthClass
from trimtab.snapshot import Limits


class AStanding:
    """How a worker stands, as a test wants it."""

    def gauges(self, now):
        return {
            "realtime_running": 3.0, "batch_running": 4.0, "realtime_waiting": 5.0, "batch_waiting": 6.0, "cold_waiting": 2.0,
            "kv_used": 0.5, "rss_bytes": 1e9, "hung_s": 0.0, "fragmentation": 0.25, "block_waste_64": 0.125, "prefix_kept_256": 0.75,
            "session_turns": 3.5, "decode_deviation": 0.1, "prefill_tokens_per_s": 4000.0,
        }  # fmt: skip

    def pressure(self):
        return 1.5


def metrics_of(stats=dict):
    """Metrics, and the measuring beside them."""
    metrics, measuring = WorkerMetrics("m"), Measuring(Policy, lambda: (0, 0), 0.0)
    metrics.watch(
        Watched(Load, Limits, lambda: 0, lambda: True, stats, AStanding(), measuring.gaps, lambda: 0.0)  # type: ignore[arg-type]
    )
    return metrics, measuring


def scraped(stats):
    """Kind by metric, and value by (sample, length class)."""
    metrics, _ = metrics_of(lambda: stats)
    found = [m for m in metrics.registry.collect() if m.name.startswith("trimtab_scheduler_")]
    assert len({m.name for m in found}) == len(found)
    samples = {(s.name, s.labels.get("length_class")): s.value for m in found for s in m.samples}
    return {m.name: m.type for m in found}, samples


def series(metrics):
    """What a scrape says: value by (sample, labels)."""
    families = text_string_to_metric_families(generate_latest(metrics.registry).decode())
    return {
        (s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples if "_created" not in s.name
    }


def end_of(metrics, measuring, i=0, *, workload=Workload.REALTIME, prompt=100, outcome="ok", tenant="", model="m"):
    """A whole request; its first token after 30 ms, its second 20 ms later."""
    one = measuring.accepted(Request(f"r{i}", model, "", workload=workload, tenant=tenant), prompt, 10.0, 0.0)
    measuring.output(one, Stamps(10.0, 10.03, 10.03), 0.0)
    measuring.output(one, Stamps(10.0, 10.03, 10.05), 0.0)
    end = End(workload, outcome, prompt, 2, 40, Timings(5.0, 25.0, 30.0, 50.0), 10.05)
    measuring.ended(end, one)
    metrics.finished(end, one)


def test_every_statistic_is_a_metric():
    stats = {name: float(n) for n, name in enumerate(STATS)}
    kinds, samples = scraped(stats)
    gauges = {"decode_deviation", *(name for name in stats if name.startswith("waste_"))}
    assert sorted(samples.values()) == sorted(value for name, value in stats.items() if name not in gauges)
    assert samples["trimtab_scheduler_forced_total", None] == stats["forced"]
    assert samples["trimtab_scheduler_step_error_ms", None] == stats["step_error_ms"]
    assert (kinds["trimtab_scheduler_forced"], kinds["trimtab_scheduler_step_error_ms"]) == ("counter", "gauge")
    assert kinds["trimtab_scheduler_batch_max_wait_ms"] == kinds["trimtab_scheduler_stored_tokens"] == "gauge"
    assert kinds["trimtab_scheduler_busy_ms"] == "counter"


@pytest.mark.parametrize(
    ("what", "sample", "kind"),
    [
        ("waits", "trimtab_scheduler_waits_total", "counter"),
        ("wait_ms", "trimtab_scheduler_wait_ms_total", "counter"),
        ("max_wait_ms", "trimtab_scheduler_max_wait_ms", "gauge"),
        ("waiting", "trimtab_scheduler_waiting", "gauge"),
    ],
)
def test_length_classes_are_a_label(what, sample, kind):
    stats = {name: float(n) for n, name in enumerate(STATS)}
    kinds, samples = scraped(stats)
    assert kinds[sample.removesuffix("_total")] == kind
    assert {c: v for (name, c), v in samples.items() if name == sample} == {
        c.value: stats[f"{c}_{what}"] for c in LengthClass
    }


def test_what_an_engine_cannot_say_is_absent():
    assert scraped({"forced": 3.0})[1] == {("trimtab_scheduler_forced_total", None): 3.0}


def test_resources_requests_and_what_is_delivered_are_there():
    metrics, measuring = metrics_of()
    end_of(metrics, measuring)
    end_of(metrics, measuring, workload=Workload.BATCH, prompt=5000, outcome="engine_fault")
    found = series(metrics)
    realtime, batch = ("workload", "realtime"), ("workload", "batch")
    expected = {
        ("trimtab_worker_kv_used",): 0.5,
        ("trimtab_worker_kv_fragmentation",): 0.25,
        ("trimtab_worker_kv_waste", ("block_size", "64")): 0.125,
        ("trimtab_worker_prefix_kept", ("block_size", "256")): 0.75,
        ("trimtab_worker_session_turns",): 3.5,
        ("trimtab_worker_decode_deviation",): 0.1,
        ("trimtab_worker_prefill_tokens_per_s",): 4000.0,
        ("trimtab_worker_rss_bytes",): 1e9,
        ("trimtab_worker_scheduler_pressure",): 1.5,
        ("trimtab_worker_waiting", realtime): 5.0,
        ("trimtab_worker_running", batch): 4.0,
        ("trimtab_worker_cold_waiting",): 2.0,
        ("trimtab_worker_path_requests_total", ("path", "hot"), realtime): 1.0,
        ("trimtab_worker_path_requests_total", ("path", "cold"), batch): 1.0,
        ("trimtab_worker_length_ttft_seconds_count", ("length_class", "long")): 1.0,
        ("trimtab_worker_length_ttft_seconds_sum", ("length_class", "short")): pytest.approx(0.03),
        ("trimtab_worker_queue_seconds_sum", realtime): pytest.approx(0.005),
        ("trimtab_worker_ttft_seconds_count", batch): 1.0,
        ("trimtab_worker_e2e_seconds_sum", realtime): pytest.approx(0.05),
        ("trimtab_worker_itl_seconds_bucket", ("le", "0.01"), realtime): 0.0,
        ("trimtab_worker_itl_seconds_bucket", ("le", "0.035"), realtime): 1.0,
        ("trimtab_worker_itl_seconds_count", batch): 1.0,
        ("trimtab_worker_itl_seconds_sum", batch): pytest.approx(0.02),
        ("trimtab_worker_requests_total", ("outcome", "engine_fault"), batch): 1.0,
        ("trimtab_worker_output_tokens_total",): 4.0,
        ("trimtab_worker_first_computed_tokens_total",): 60.0 + 4960.0,
        ("vllm:num_requests_running", ("model_name", "m")): 0.0,
    }
    assert {key: found.get(key) for key in expected} == expected


def test_whoever_sends_whatever_the_series_stay_few():
    metrics, measuring = metrics_of(lambda: dict.fromkeys(STATS, 0.0))
    outcomes = ("ok", "client_fault", "back_pressure", "engine_fault", "cancelled", "unknown")

    def all_kinds(start, lengths):
        for i in range(start, start + 1000):
            kind = {"workload": tuple(Workload)[i % 2], "outcome": outcomes[i % 6], "prompt": lengths(i)}
            end_of(metrics, measuring, i, tenant=f"tenant {i}", model=f"model {i}", **kind)
        return set(series(metrics))

    before = all_kinds(0, lambda i: (100, 700, 3000, 6000, 20_000)[i % 5])
    assert all_kinds(1000, lambda i: 1 + 97 * i) == before
    assert len(before) < 400


def test_a_scrape_over_http_says_the_same():
    metrics, measuring = metrics_of()
    end_of(metrics, measuring)
    port = free_port()
    server, thread = start_http_server(port, "127.0.0.1", registry=metrics.registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        thread.join(20)
    assert 'trimtab_worker_itl_seconds_bucket{le="+Inf",workload="realtime"} 1.0' in text
    # Numbers all of them: what reads them as such must not stumble.
    assert "nan" not in text.lower()
