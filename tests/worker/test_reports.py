"""A worker's reports, as they come over a real control stream: all that was measured, once, however often the control plane is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.worker import __main__ as main
from services.worker.settings import WorkerSettings
from tests.test_services_control import Served
from tests.worker.conftest import a_request
from trimtab import codec, measures
from trimtab.kit import process, rpc
from trimtab.kit.process import free_port
from trimtab.messages import Report
from trimtab.scheduling import NOW, STATS
from trimtab.sketch import Sketch
from trimtab.v1 import inference_pb2 as pb
from trimtab.v1 import inference_pb2_grpc

pytestmark = pytest.mark.slow

PATIENCE_S = 30


@contextlib.asynccontextmanager
async def a_control_plane() -> AsyncIterator[Served]:
    served = Served()
    await served.start()
    yield served
    await served.stop()


class Heard:
    """All reports so far, folded as a control plane does."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self.reports: list[Report] = []

    @property
    def counts(self) -> dict[str, int]:
        """Of each sketch, the values in all reports."""
        found: Counter[str] = Counter()
        for report in self.reports:
            for name, data in report.sketches.items():
                found[name] += Sketch.from_bytes(data).count
        return dict(found)

    async def until(self, name: str, count: int) -> Report:
        """Once the sketches of this name hold so many; the newest report."""
        async with asyncio.timeout(PATIENCE_S):
            while not self.reports or self.counts.get(name, 0) < count:
                self.reports.append(codec.decode_report(await self._served.script.next("report")))
        return self.reports[-1]


def a_worker(path: Path, monkeypatch: pytest.MonkeyPatch, control: str) -> WorkerSettings:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(path))
    return WorkerSettings(
        listen=f"127.0.0.1:{free_port()}", metrics=f"127.0.0.1:{free_port()}", control=(control,), engine="simulated",
        served_model_name="sim", max_num_seqs=8, max_step_tokens=256, max_model_len=4096, step_ms=2.0, token_us=0.0, vllm_door="off",
    )  # fmt: skip


async def run(s: WorkerSettings, requests: int, **fields: object) -> None:
    async with rpc.channel(s.listen, "worker") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one() -> None:
            async for _ in stub.Generate(a_request(max_tokens=5, **fields)):
                pass

        await asyncio.gather(*(one() for _ in range(requests)))


@contextlib.asynccontextmanager
async def composed(s: WorkerSettings) -> AsyncIterator[main.Worker]:
    worker = await main.compose(s)
    await worker.server.start()
    tasks = [asyncio.create_task(part.run()) for part in (worker.membership, worker.health, worker.resident)]
    yield worker
    for task in tasks:
        await rpc.cancel_and_wait(task)
    await worker.server.stop(0)
    await worker.engine.stop()


async def test_a_report_has_all_that_was_measured_since_the_one_before(tmp_path, monkeypatch):
    async with a_control_plane() as served:
        s, heard = a_worker(tmp_path, monkeypatch, served.address), Heard(served)
        async with composed(s):
            await heard.until(measures.PROMPT, 0)
            await run(s, 6, workload=pb.WORKLOAD_REALTIME)
            await run(s, 3, workload=pb.WORKLOAD_BATCH)
            newest = await heard.until(measures.TOTAL, 9)
    assert heard.counts == {
        "ttft.realtime.hot": 6, "ttft.batch.hot": 3, "ttft.short": 9, "itl.realtime": 24, "itl.batch": 12, "e2e.realtime": 6,
        "e2e.batch": 3, "prompt": 9, "total": 9,
    }  # fmt: skip
    sums = [Sketch.from_bytes(r.sketches["total"]).sum for r in heard.reports if "total" in r.sketches]
    assert sum(sums) == pytest.approx(9 * (5 + 5))
    c = newest.counters
    assert (c["requests"], c["realtime_requests"], c["batch_requests"], c["short_requests"]) == (9, 6, 3, 9)
    assert (c["output_tokens"], c["prompt_tokens"], c["errors"], c["out_of_memory"]) == (45, 45, 0, 0)
    assert c["scheduler_computed_tokens"] >= 81
    assert set(c) == set(measures.OWN_COUNTERS) | {f"scheduler_{name}" for name in STATS if name not in NOW}
    assert set(measures.GAUGES) <= set(newest.gauges) <= {*measures.GAUGES, *measures.AT_TIMES}
    assert newest.gauges[measures.RSS_BYTES] > 0 and newest.gauges[measures.KV_BYTES_PER_TOKEN] > 0
    assert all(0 <= r.gauges[measures.BUSY] <= 1 for r in heard.reports)
    assert any(r.gauges[measures.BUSY] > 0 for r in heard.reports)
    assert all(r.interval_ms > 0 for r in heard.reports[1:])
    for before, after in zip(heard.reports, heard.reports[1:], strict=False):
        assert all(after.counters[name] >= before.counters[name] for name in before.counters)


async def test_while_the_control_plane_is_away_the_interval_grows_and_nothing_is_lost(tmp_path, monkeypatch):
    async with a_control_plane() as served:
        s, heard = a_worker(tmp_path, monkeypatch, served.address), Heard(served)
        async with composed(s) as worker:
            await run(s, 2)
            await heard.until(measures.TOTAL, 2)
            await served.stop()
            async with asyncio.timeout(PATIENCE_S):
                while worker.membership._link.connected:
                    await asyncio.sleep(0.005)
            while not served.script.heard["report"].empty():
                heard.reports.append(codec.decode_report(await served.script.next("report")))
            for _ in range(3):
                await run(s, 2)
            await served.start()
            newest = await heard.until(measures.TOTAL, 8)
    assert (heard.counts["total"], heard.counts["itl.realtime"], newest.counters["requests"]) == (8, 32, 8)


async def test_a_request_that_missed_its_objective_is_reported_with_what_was_around_it(tmp_path, monkeypatch):
    async with a_control_plane() as served:
        s, heard = a_worker(tmp_path, monkeypatch, served.address), Heard(served)
        async with composed(s):
            request = {"slo": pb.SloTargets(ttft_ms=1), "request_id": "late", "workload": pb.WORKLOAD_REALTIME}
            await run(s, 1, **request)
            newest = await heard.until(measures.TOTAL, 1)
    outliers = [o for r in heard.reports for o in r.outliers]
    assert [(o.request_id, o.prompt_tokens, o.output_tokens, o.neighbours) for o in outliers] == [("late", 5, 5, 0)]
    assert outliers[0].ttft_ms > 1.0
    assert newest.counters["realtime_over"] == 1


async def test_an_engine_that_runs_out_of_memory_is_told_as_such_and_ends_its_worker(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "end_within", lambda *_: lambda: None)
    build = main.build_engine
    engines = []

    def built(s):
        engines.append(build(s))
        return engines[0]

    monkeypatch.setattr(main, "build_engine", built)

    def out_of_memory(*_):
        raise MemoryError("no pages left")

    async with a_control_plane() as served:
        s = a_worker(tmp_path, monkeypatch, served.address)
        serving = asyncio.create_task(main.serve(s))
        await served.script.next("report")
        engines[0]._value.planner.victims = out_of_memory
        with contextlib.suppress(Exception):
            await run(s, 1)
        event = await served.script.next("node_event")
        assert await asyncio.wait_for(serving, PATIENCE_S) == main.EXIT_ENGINE_DEAD
    assert event.engine_died.out_of_memory
    assert event.engine_died.message == "the engine process is gone: MemoryError: no pages left"
