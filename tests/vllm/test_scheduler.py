"""Our scheduler in a real vLLM changes when tokens come, never which: float32, greedy, against plain vLLM, under everything it does."""

import asyncio
import json
import os
import random
import subprocess
import sys
import time

import pytest

from services.worker.engines import Job
from services.worker.engines.vllm import VllmEngine
from tests.vllm.conftest import ROOT
from trimtab.messages import Sampling, Workload
from trimtab.policy import Policy, with_fields

REQUESTS = 200
BLOCKERS = 12
"""The first of `jobs`: as many batch requests as there are slots, still at work when the next ones come, which are short."""
BASE = {"batch.active": 12, "paths.hot_below": 64, "prefill.step_tokens": 256, "preemption.guaranteed_time_slice_ms": 0}
POLICIES = (
    {},
    {"preemption.mode": "aggressive", "batch.active": 3, "paths.realtime_reserve": 0},
    {"prefill.itl_budget_ms": 30, "prefill.max_suspend_ms": 300},
    {"prefill.step_tokens": 32, "prefill.concurrent": 4, "clusters.spread_limit": 1.0},
    {"scheduler.mode": "fcfs"},
    {"scheduler.mode": "priority", "batch.active": 4},
    {"batch.hard_cap": 2, "serial.above": 100, "isolate.from_tokens": 150},
)
"""What the run switches between, on top of BASE."""


def jobs(seed: int) -> list[dict]:
    """Mixed lengths, some with a prefix that others share, as plain data."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(100, 40_000) for _ in range(140)] for _ in range(3)]
    found = [{"prompt": [rng.randrange(100, 40_000) for _ in range(100)], "max_tokens": 100} for _ in range(BLOCKERS)]
    found += [{"prompt": [rng.randrange(100, 40_000) for _ in range(20)], "max_tokens": 8} for _ in range(BLOCKERS)]
    while len(found) < REQUESTS:
        shared = rng.choice(prefixes) if rng.random() < 0.3 else []
        tail = rng.randint(4, 60) if rng.random() < 0.5 else rng.randint(80, 260)
        prompt = shared + [rng.randrange(100, 40_000) for _ in range(tail)]
        found.append({"prompt": prompt, "max_tokens": rng.randint(2, 20)})
    return found


@pytest.fixture(scope="module")
def expected(model_path, tmp_path_factory):
    """Plain vLLM's tokens for `jobs(1)`."""
    file = tmp_path_factory.mktemp("stock") / "jobs.json"
    file.write_text(json.dumps(jobs(1)))
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.stock", model_path, "float32", str(file)],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    rows = [x for x in done.stdout.splitlines() if x.startswith("TOKENS ")]
    assert rows, done.stderr[-4000:]
    return json.loads(rows[0][len("TOKENS ") :])


async def start(model_path: str) -> VllmEngine:
    engine = VllmEngine(
        model_path=model_path, model="m", max_num_seqs=12, max_step_tokens=256, max_model_len=2048, dtype="float32", kv_cache_gib=1
    )  # fmt: skip
    await engine.start()
    return engine


async def ask(engine: VllmEngine, name: str, job: dict, workload: Workload, cut: int | None = None) -> list[int]:
    """The job's tokens; closed after `cut` of them."""
    tokens: list[int] = []
    stream = engine.generate(
        Job(
            name, tuple(job["prompt"]), job["max_tokens"], Sampling(temperature=0.0, ignore_eos=True), workload,
            arrival_ms=time.monotonic() * 1000,
        )
    )  # fmt: skip
    try:
        async for out in stream:
            tokens += out.token_ids
            if cut is not None and len(tokens) >= cut:
                break
    finally:
        await stream.aclose()
    return tokens


async def test_tokens_are_plain_vllms_whatever_the_scheduler_does(model_path, expected):
    engine = await start(model_path)
    try:
        rng = random.Random(2)
        got: dict[int, list[int]] = {}
        cuts: dict[int, int] = {}
        places = asyncio.Semaphore(40)
        tasks = []

        async def one(i: int, job: dict) -> None:
            try:
                workload = Workload.REALTIME if len(job["prompt"]) < 64 else Workload.BATCH
                got[i] = await ask(engine, f"r{i}", job, workload, cuts.get(i))
            finally:
                places.release()

        await engine.apply(
            with_fields(Policy(), {**BASE, "preemption.mode": "aggressive", "paths.realtime_reserve": 0})
        )
        for i, job in enumerate(jobs(1)):
            while i == BLOCKERS and engine.row().running < BLOCKERS:
                await asyncio.sleep(0.02)
            # Those that make room for each other at the start are left alone, so that somebody is preempted on any machine.
            if i < 2 * BLOCKERS:
                await places.acquire()
                tasks.append(asyncio.create_task(one(i, job)))
                continue
            if rng.random() < 0.15:
                cuts[i] = rng.randint(1, job["max_tokens"])
            if i % 9 == 0:
                await engine.apply(with_fields(Policy(), {**BASE, **rng.choice(POLICIES)}))
            await places.acquire()
            tasks.append(asyncio.create_task(one(i, job)))
        await asyncio.gather(*tasks)
        # A reader that lags gets two steps' tokens at once, and so may leave with more than it meant to.
        wrong = [i for i in got if len(got[i]) < min(len(expected[i]), cuts.get(i, 1 << 30))]
        differing = [i for i in got if got[i] != expected[i][: len(got[i])]]
        assert not differing and not wrong, (differing, wrong)
        assert len(got) == REQUESTS
        while engine.row().running or engine.row().waiting:
            await asyncio.sleep(0.05)
        stats = engine.stats()
        assert stats["preemptions"] >= 1, "realtime requests met nothing but batch in all slots"
        assert stats["recomputed_tokens"] > 0
        row = engine.row()
        assert row.queued_prefill_tokens == 0
        assert row.free_blocks == row.total_blocks - 1, "vLLM keeps one block for itself; all others are free again"
    finally:
        await engine.stop()
