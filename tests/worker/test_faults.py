"""Faults that a drill switches on in a simulated engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.worker.engines import Job
from services.worker.engines.faults import (
    FAULTS_ENV,
    Faults,
    FaultyEngine,
    Switches,
    from_environment,
    parsed,
    simulated,
)
from services.worker.engines.simulated import SimulatedEngine
from services.worker.settings import WorkerSettings
from trimtab.kit.process import write_atomically
from trimtab.messages import Sampling, Workload
from trimtab.policy import Policy

HOW = {
    "model": "sim",
    "max_num_seqs": 4,
    "max_step_tokens": 2048,
    "max_model_len": 4096,
    "step_ms": 1.0,
    "token_us": 0.0,
}
PATIENCE_S = 30.0


def put(path: Path, **faults: int | bool) -> None:
    write_atomically(path, json.dumps({"w0": faults, "w1": {"stuck": True}}).encode())


@contextlib.asynccontextmanager
async def an_engine(path: Path) -> AsyncIterator[FaultyEngine]:
    engine = FaultyEngine(Switches(path, "w0"), **HOW)
    await engine.start()
    yield engine
    await engine.stop()


async def until(what: object) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not what():  # type: ignore[operator]
            await asyncio.sleep(0.01)


async def asked(engine: FaultyEngine, name: str, workload: Workload = Workload.REALTIME, tokens: int = 4) -> list[int]:
    sampling = Sampling(ignore_eos=True)
    found: list[int] = []
    async for output in engine.generate(Job(name, tuple(range(20)), tokens, sampling, workload)):
        found += output.token_ids
    return found


@pytest.mark.parametrize(
    "data",
    ["[]", '{"w0": []}', '{"w0": {"stock": true}}', '{"w0": {"stuck": 1}}', '{"w0": {"leak_blocks": true}}', "{"],
)
def test_a_file_that_says_something_else_is_refused(data: str) -> None:
    with pytest.raises(ValueError):
        parsed(data.encode(), "w0")


def test_a_node_has_its_own_faults_alone() -> None:
    data = b'{"w0": {"leak_blocks": 50}, "w1": {"stuck": true}}'
    assert parsed(data, "w0") == Faults(leak_blocks=50)
    assert parsed(data, "w2") == Faults()


def test_a_file_that_goes_switches_all_off_and_one_that_is_broken_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    switches = Switches(path, "w0")
    assert switches.look() == Faults()
    put(path, stuck=True)
    assert switches.look() == Faults(stuck=True)
    write_atomically(path, b"{")
    assert switches.look() == Faults(stuck=True)
    path.unlink()
    assert switches.look() == Faults()


def test_an_engine_without_the_variable_is_the_plain_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FAULTS_ENV, raising=False)
    assert type(simulated("w0", **HOW)) is SimulatedEngine
    assert from_environment({}, "w0") is None
    monkeypatch.setenv(FAULTS_ENV, str(tmp_path / "faults.json"))
    assert type(simulated("w0", **HOW)) is FaultyEngine


def test_blocks_that_do_not_hold_one_request_are_refused() -> None:
    with pytest.raises(ValueError, match="kv_blocks"):
        WorkerSettings(engine="simulated", kv_blocks=127, max_model_len=2048)
    settings = WorkerSettings(engine="simulated", kv_blocks=128, max_model_len=2048)
    assert SimulatedEngine(**HOW | {"max_model_len": 2048, "kv_blocks": settings.kv_blocks}).load().total_blocks == 128


async def test_blocks_that_leak_are_lost_for_the_life_of_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    async with an_engine(path) as engine:
        whole = engine.load().free_blocks
        put(path, leak_blocks=50)
        await until(lambda: engine.load().free_blocks == whole - 50)
        put(path)
        await until(lambda: engine._switches.faults == Faults())
        assert len(await asked(engine, "one")) == 4
        await until(lambda: engine.load().running == 0)
        assert engine.load().free_blocks == whole - 50
        put(path, leak_blocks=1 << 30)
        await until(lambda: engine.load().free_blocks == 0)


async def test_a_stuck_engine_ends_no_step_answers_nobody_and_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    async with an_engine(path) as engine:
        put(path, stuck=True)
        await until(lambda: engine._switches.faults.stuck)
        task, ping = asyncio.create_task(asked(engine, "one")), asyncio.create_task(engine.ping())
        await until(lambda: engine.pulse().step_no == 1)
        done, _ = await asyncio.wait([task, ping], timeout=0.3)
        assert not done
        assert not engine.pulse().ended
        put(path)
        async with asyncio.timeout(PATIENCE_S):
            assert len(await task) == 4
            await ping


async def order(engine: FaultyEngine) -> list[str]:
    """In which one of each workload ends that came while the only slot was taken: batch came first by a little."""
    ends: list[str] = []

    async def one(name: str, workload: Workload, tokens: int) -> None:
        await asked(engine, name, workload, tokens)
        ends.append(name)

    names = (("first", Workload.BATCH, 60), ("batch", Workload.BATCH, 2), ("realtime", Workload.REALTIME, 2))
    tasks = []
    for name, workload, tokens in names:
        tasks.append(asyncio.create_task(one(name, workload, tokens)))
        await until(lambda: len(engine._live) + len(ends) == len(tasks))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*tasks)
    return [name for name in ends if name != "first"]


async def test_an_engine_without_its_policy_serves_batch_first_until_it_is_told_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    policy = Policy()
    policy = replace(
        policy, batch=replace(policy.batch, active=1, hard_cap=1), preemption=replace(policy.preemption, mode="none")
    )
    other = replace(policy, preemption=replace(policy.preemption, max_preemptions=9))
    async with an_engine(path) as engine:
        await engine.apply(policy)
        assert await order(engine) == ["realtime", "batch"]
        put(path, ignores_policy=True)
        await until(lambda: engine._lost)
        assert await order(engine) == ["batch", "realtime"]
        await engine.apply(other)
        assert await order(engine) == ["batch", "realtime"], "it does not hear what is new"
        await engine.apply(other)
        assert await order(engine) == ["realtime", "batch"], "it hears what it is told again"
        assert engine._switches.faults.ignores_policy, "though nothing was switched off"
        put(path)
        await until(lambda: not engine._ignores)
        put(path, ignores_policy=True)
        await until(lambda: engine._lost)
        put(path)
        await until(lambda: not engine._lost)
        assert await order(engine) == ["realtime", "batch"]
