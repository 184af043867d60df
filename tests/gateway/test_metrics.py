"""What a gateway measures as its clients see it: for Prometheus, and for its reports."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.metrics import TENANTS, GatewayMetrics, Kind
from tests.gateway.builders import a_request, until
from tests.gateway.fake_worker import Running
from tests.test_services_control import Served
from trimtab import codec, measures
from trimtab import messages as m
from trimtab.scheduling import LengthClass
from trimtab.sketch import Sketch

REALTIME, BATCH = m.Workload.REALTIME, m.Workload.BATCH


def series(metrics):
    """What a scrape says: value by (sample, labels)."""
    families = text_string_to_metric_families(metrics.text().decode())
    return {
        (s.name, *sorted(s.labels.items())): s.value for f in families for s in f.samples if "_created" not in s.name
    }


def sketches_of(metrics):
    return {name: Sketch.from_bytes(data) for name, data in metrics.intervals.take(1e9).sketches.items()}


async def test_first_tokens_and_ends_are_measured_by_workload_and_path(start_worker, start_gateway, client_of, policy):
    async def counted(r: Running) -> None:
        tokens = 700 if r.request.workload is BATCH else 50
        r.accept(prompt_tokens=tokens)
        r.token("Hel")
        r.token("lo")
        r.event(m.Finish(m.FinishReason.STOP, m.Usage(tokens, 2), m.Timings()))

    gateway = await start_gateway(await start_worker(script=counted))
    policy(gateway, {"paths.hot_below": 600})
    client = client_of(gateway)
    for workload in (REALTIME, REALTIME, BATCH):
        await client.complete(a_request(workload=workload))
    await until(lambda: not gateway.admission.live)
    sketches = sketches_of(gateway.metrics)
    assert {name: s.count for name, s in sketches.items()} == {
        "ttft.realtime.hot": 2, "ttft.batch.cold": 1, "ttft.short": 2, "ttft.standard": 1, "e2e.realtime": 2, "e2e.batch": 1,
    }  # fmt: skip
    assert all(s.quantile(0.0) > 0 for s in sketches.values())
    found = series(gateway.metrics)
    assert found["trimtab_gateway_path_requests_total", ("path", "hot"), ("workload", "realtime")] == 2
    assert found["trimtab_gateway_path_requests_total", ("path", "cold"), ("workload", "batch")] == 1
    assert found["trimtab_gateway_length_ttft_seconds_count", ("length_class", "standard")] == 1
    assert found["trimtab_gateway_rss_bytes",] > 10 << 20


async def test_what_a_client_goes_on_with_has_no_first_token_of_its_own(start_worker, start_gateway, client_of):
    async def goes_on(r: Running) -> None:
        r.index = len(r.request.resume.token_ids)
        r.accept()
        r.token("lo")
        r.finish()

    gateway = await start_gateway(await start_worker(script=goes_on))
    await client_of(gateway).complete(a_request(request_id="x", resume=m.Resume((100,), 3, 2, b"")))
    await until(lambda: gateway.metrics.counters["requests"] == 1)
    assert sketches_of(gateway.metrics) == {}


async def test_who_waits_and_who_runs_is_told_by_workload(start_worker, start_gateway, client_of, policy):
    go = asyncio.Event()

    async def hold(r: Running) -> None:
        await go.wait()
        r.accept()
        r.token("done")
        r.finish()

    worker = await start_worker(script=hold)
    gateway = await start_gateway(worker)
    policy(gateway, {"paths.hot_below": 1})
    client = client_of(gateway)
    tasks = [asyncio.create_task(client.complete(a_request(workload=w))) for w in (REALTIME, BATCH, BATCH)]
    await until(lambda: len(gateway.admission.live) == 3)
    assert gateway.admission.gauges() == {
        "realtime_waiting": 1, "batch_waiting": 2, "cold_waiting": 2, "realtime_running": 0, "batch_running": 0,
    }  # fmt: skip
    assert series(gateway.metrics)["trimtab_gateway_waiting", ("workload", "batch")] == 2
    go.set()
    await asyncio.gather(*tasks)
    await until(lambda: not gateway.admission.live)
    assert set(gateway.admission.gauges().values()) == {0}


@pytest.mark.slow
async def test_a_gateways_report_has_it_all_over_a_real_control_stream(start_worker, start_gateway, client_of):
    served = Served()
    await served.start()
    gateway = await start_gateway(await start_worker(), control=(served.address,))
    for _ in range(3):
        await client_of(gateway).complete(a_request(workload=REALTIME))
    reports: list[m.Report] = []
    async with asyncio.timeout(30):
        while sum(Sketch.from_bytes(r.sketches["e2e.realtime"]).count for r in reports if r.sketches) < 3:
            reports.append(codec.decode_report(await served.script.next("report")))
    await served.stop()
    assert (reports[-1].counters["requests"], reports[-1].counters["errors"]) == (3, 0)
    assert set(reports[-1].gauges) == {
        measures.REALTIME_WAITING, measures.BATCH_WAITING, measures.COLD_WAITING, measures.REALTIME_RUNNING,
        measures.BATCH_RUNNING,
    }  # fmt: skip
    assert {name for r in reports for name in r.sketches} <= set(measures.SKETCHES)


def test_whoever_sends_whatever_the_series_stay_few():
    metrics = GatewayMetrics()
    metrics.watch(lambda _: 0, lambda: 0, lambda: dict.fromkeys(measures.GAUGES, 0.0))

    def thousand(start):
        for i in range(start, start + 1000):
            kind = Kind(tuple(m.Workload)[i % 2], cold=i % 4 > 1, length=tuple(LengthClass)[i % 5])
            metrics.first_token(kind, i / 1000.0)
            metrics.finished(kind, "ok", f"REASON {i}", tokens=i, ttft_s=i / 1000.0, total_s=float(i))
            metrics.used(f"tenant {i}", "ok", prompt_tokens=i, output_tokens=i)
        return set(series(metrics))

    before = thousand(0)
    assert thousand(1000) == before
    assert len(before) < 400 + 3 * (TENANTS + 1)
    assert set(sketches_of(metrics)) <= set(measures.SKETCHES)


@pytest.mark.parametrize("cold", [True, False])
def test_a_path_has_one_of_two_names(cold):
    assert Kind(REALTIME, cold, LengthClass.SHORT).path == ("cold" if cold else "hot")
