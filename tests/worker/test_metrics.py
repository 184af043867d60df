"""A worker's Prometheus metrics: the scheduler's statistics under their names, those of length classes by a label."""

import pytest

from services.worker.metrics import WorkerMetrics
from trimtab.messages import Load
from trimtab.scheduling import STATS, LengthClass
from trimtab.snapshot import Limits


def scraped(stats):
    """Kind by metric, and value by (sample, length class)."""
    metrics = WorkerMetrics("m")
    metrics.watch(Load, Limits(), lambda: 0, lambda: True, lambda: stats)
    found = [m for m in metrics.registry.collect() if m.name.startswith("trimtab_scheduler_")]
    assert len({m.name for m in found}) == len(found)
    samples = {(s.name, s.labels.get("length_class")): s.value for m in found for s in m.samples}
    return {m.name: m.type for m in found}, samples


def test_every_statistic_is_a_metric():
    stats = {name: float(n) for n, name in enumerate(STATS)}
    kinds, samples = scraped(stats)
    assert sorted(samples.values()) == sorted(stats.values())
    assert samples["trimtab_scheduler_forced_total", None] == stats["forced"]
    assert samples["trimtab_scheduler_step_error_ms", None] == stats["step_error_ms"]
    assert (kinds["trimtab_scheduler_forced"], kinds["trimtab_scheduler_step_error_ms"]) == ("counter", "gauge")
    assert kinds["trimtab_scheduler_batch_max_wait_ms"] == "gauge"


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
