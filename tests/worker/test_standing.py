"""How a worker stands: gauges of its queue and its engine together, and nothing where it can't tell."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

import pytest

from services.worker.resident import Resident, resident_bytes
from services.worker.standing import Busy, Standing, prefill_rate
from tests.worker.conftest import a_request
from tests.worker.test_steering import begin, leave
from trimtab import measures
from trimtab.blocks import LADDER
from trimtab.messages import Load
from trimtab.policy import Policy, with_fields
from trimtab.progress import Pulse
from trimtab.reuse import Reuse
from trimtab.scheduling.resident import NOBODY
from trimtab.v1 import inference_pb2 as pb

LONG = 3000


@pytest.fixture
def standing(rig):
    policy = with_fields(Policy(), {"paths.hot_below": 50, "batch.active": 4})
    return Standing(rig.engine, rig.gate, rig.health, lambda: policy, Resident(os.getpid()))


async def test_queue_and_engine_are_told_together(rig, standing):
    await rig.obey({"batch.active": 1, "admission.engine_queue": 1, "preemption.mode": "none", "paths.hot_below": 50})
    first = await begin(rig, "runs", [], tokens=LONG)
    calls = [rig.stub.Generate(a_request("word " * 30, max_tokens=8, workload=pb.WORKLOAD_BATCH)) for _ in range(4)]
    calls.append(rig.stub.Generate(a_request("hot", max_tokens=8, workload=pb.WORKLOAD_BATCH)))
    for call in calls:
        await call.read()
    async with asyncio.timeout(20):
        while rig.engine.load().running != 1 or rig.engine.load().waiting != 1:
            await asyncio.sleep(0.005)
    assert rig.gate.waiting == 4
    gauges = standing.gauges(0.0)
    names = (measures.REALTIME_RUNNING, measures.BATCH_RUNNING, measures.REALTIME_WAITING, measures.BATCH_WAITING)
    assert [gauges[name] for name in names] == [0, 1, 0, 5]
    assert gauges[measures.COLD_WAITING] == 4
    assert standing.pressure() == 5 / 4
    load, size = rig.engine.load(), rig.engine.limits.block_size
    held = load.total_blocks - load.free_blocks
    assert gauges[measures.KV_USED] == pytest.approx(held / load.total_blocks, abs=1e-3) and held > 0
    stored = rig.engine.stats()["stored_tokens"]
    assert standing.fragmentation() == pytest.approx(1 - stored / (held * size), abs=0.2)
    for call in calls:
        call.cancel()
    await leave(first)
    await rig.idle()
    assert [standing.gauges(0.0)[name] for name in (*names, measures.COLD_WAITING)] == [0] * 5
    assert standing.fragmentation() is None


def test_what_cannot_be_told_is_absent(rig, standing, monkeypatch):
    assert set(standing.gauges(0.0)) | {measures.BUSY} == set(measures.GAUGES) - {measures.RSS_BYTES}, "an idle one"
    monkeypatch.setattr(rig.engine, "stats", dict)
    monkeypatch.setattr(rig.engine, "load", Load)
    monkeypatch.setattr(rig.engine, "kv_bytes_per_token", 0.0)
    assert standing.report(0.0) == {measures.HUNG_S: 0.0}


def test_shared_blocks_are_no_negative_fragmentation(rig, standing, monkeypatch):
    monkeypatch.setattr(rig.engine, "load", lambda: Load(free_blocks=90, total_blocks=100))
    for stored, expected in ((120, 0.25), (160, 0.0), (500, 0.0)):
        monkeypatch.setattr(rig.engine, "stats", lambda stored=stored: {"stored_tokens": stored})
        assert standing.fragmentation() == pytest.approx(expected)


def test_what_the_engine_keeps_for_itself_is_held_by_no_request(rig, standing, monkeypatch):
    monkeypatch.setattr(rig.engine, "own_blocks", 1)
    monkeypatch.setattr(rig.engine, "load", lambda: Load(free_blocks=100, total_blocks=101))
    assert (standing.gauges(0.0)[measures.KV_USED], standing.fragmentation()) == (0.0, None)
    monkeypatch.setattr(rig.engine, "load", lambda: Load(free_blocks=75, total_blocks=101))
    assert standing.gauges(0.0)[measures.KV_USED] == 0.25


def test_the_busy_share_is_of_the_time_since_it_was_asked_before():
    busy = Busy()
    assert busy.share(500.0, 10.0) == 0.0
    assert busy.share(900.0, 10.8) == pytest.approx(0.5)
    assert busy.share(900.0, 11.6) == 0.0
    assert busy.share(9000.0, 12.4) == 1.0
    # The step in flight was counted a little early: it is not counted again.
    assert busy.share(8900.0, 13.4) == 0.0
    assert busy.share(9100.0, 14.4) == pytest.approx(0.1)


def test_a_step_in_flight_counts_as_far_as_it_has_come(rig, standing, monkeypatch):
    monkeypatch.setattr(rig.engine, "stats", lambda: {"busy_ms": 1000.0})
    monkeypatch.setattr(rig.engine, "pulse", lambda: Pulse(3, 50.0, 10.0, ended=False))
    assert standing.busy_ms(52.0) == 3000.0
    standing.report(50.0)
    assert standing.report(52.0)[measures.BUSY] == 1.0
    monkeypatch.setattr(rig.engine, "pulse", lambda: Pulse(3, 50.0, 10.0))
    assert standing.busy_ms(60.0) == 1000.0


async def test_memory_is_that_of_all_processes_below():
    alone = resident_bytes(os.getpid())
    script = "import sys; held = b'x' * (64 << 20); print('ready', flush=True); sys.stdin.read()"
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdin=pipe, stdout=pipe)
    try:
        assert child.stdout is not None
        assert await child.stdout.readline() == b"ready\n"
        assert resident_bytes(os.getpid()) - alone > 48 << 20
    finally:
        child.kill()
        await child.wait()
    resident = Resident(os.getpid())
    assert resident.bytes is None
    task = asyncio.create_task(resident.run())
    async with asyncio.timeout(20):
        while resident.bytes is None:
            await asyncio.sleep(0.005)
    assert resident.bytes > 10 << 20
    task.cancel()


async def test_waste_and_prefixes_are_told_of_the_sizes_that_the_engine_accepts(rig, standing, monkeypatch):
    names = {f"waste_{size}": 0.25 for size in LADDER}
    monkeypatch.setattr(rig.engine, "stats", lambda: names)
    monkeypatch.setattr(rig.engine, "limits", replace(rig.engine.limits, block_size=16, block_sizes=(32, 64)))
    gauges = standing.gauges(0.0)
    assert {n for n in gauges if n in measures.BY_BLOCK_SIZE} == {f"block_waste_{size}" for size in (16, 32, 64)}
    reuse = Reuse()
    reuse.prefixes.hit(48, 0.0)
    reuse.sessions.request("s", 0.0)
    reuse.sessions.request("s", 1.0)
    standing._reuse = reuse
    gauges = standing.gauges(2.0)
    assert [gauges[measures.prefix_kept(size)] for size in (16, 32, 64)] == [1.0, 32 / 48, 0.0]
    assert gauges[measures.SESSION_TURNS] == 2.0
    names.update(dict.fromkeys(names, NOBODY), decode_deviation=0.0)
    assert not {measures.block_waste(16), measures.DECODE_DEVIATION} & set(standing.gauges(2.0))
    names["decode_deviation"] = 0.4
    assert standing.gauges(2.0)[measures.DECODE_DEVIATION] == 0.4
    assert measures.PREFILL_MS_PER_1000_CONTEXT not in standing.gauges(2.0)
    names["step_ms_per_1000_context"] = 0.02
    assert standing.gauges(2.0)[measures.PREFILL_MS_PER_1000_CONTEXT] == 0.02


def test_the_prefill_rate_is_that_of_whole_steps_and_unknown_before_any():
    stats = {"step_constant_ms": 10.0, "step_ms_per_prefill_token": 0.01}
    assert prefill_rate(stats, 1000) == pytest.approx(1000 / 0.020)
    stats["step_ms_above_last_knee"] = 0.02
    assert prefill_rate(stats, 1256) == pytest.approx(1256 / (10.0 + 12.56 + 20.0) * 1000)
    assert prefill_rate({"step_constant_ms": 10.0}, 1000) is None
    assert prefill_rate({}, 1000) is None
