"""Plans of KV block sizes and what comes of them, on a real control plane: kept, handed on, shown, advised, and carried out by workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from controlplane.controllers import blocks
from controlplane.controllers.decision import BlockPlan, Decision, PolicyOf, Reblock
from controlplane.plans import REFRESH_MS, Plans
from controlplane.seen import PlanSeen, Seen
from controlplane.store import Mark
from controlplane.store.memory import MemoryStore
from controlplane.tick import blocked
from tests.controlplane.mesh import PATIENCE_S, FakeNode, a_mesh
from tests.worker.test_reports import a_worker, composed
from trimtab.errors import StoreUnavailable
from trimtab.snapshot import Adjustment
from trimtab.v1 import control_pb2

PLAN = BlockPlan("default", "steady", 512, 64, "blocks of 64 pay", "waste 12 %", {64: 0.1, 128: 0.0}, 128, 1000.0)
T0 = 1_700_000_000_000


async def until(predicate: Callable[[], Any]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := predicate()):
            await asyncio.sleep(0.02)
        return found


class CountingStore(MemoryStore):
    """Counts marks; takes none while `away`."""

    away = False
    marked = 0

    async def mark(self, mark: Mark) -> bool:
        if self.away:
            raise StoreUnavailable("the store is away")
        self.marked += 1
        return await super().mark(mark)

    async def unmark(self, mark: Mark) -> None:
        if self.away:
            raise StoreUnavailable("the store is away")
        await super().unmark(mark)


async def kept(store: MemoryStore) -> Mapping[str, Any]:
    return {m.key: json.loads(m.data) for m in await store.marks()}


# ---- what is kept


async def test_a_plan_is_kept_once_for_as_long_as_nothing_changes() -> None:
    store = CountingStore()
    plans = Plans(store)
    assert await plans.keep([PLAN], 1200.0, T0) == [PLAN], "it names another size than there is"
    for second in range(1, 100):
        assert await plans.keep([PLAN], 1200.0 + second, T0 + 1000 * second) == []
    assert store.marked == 1
    said = (await kept(store))["plan/default"]
    assert said == {
        "kind": "plan", "pool": "default", "phase": "steady", "named": 512, "planned": 64, "present": 128,
        "reason": "blocks of 64 pay", "evidence": "waste 12 %", "gain": {"64": 0.1, "128": 0.0},
        "changed_unix_ms": T0 - 200_000,
    }  # fmt: skip


async def test_figures_are_refreshed_now_and_then_and_another_size_at_once() -> None:
    store = CountingStore()
    plans = Plans(store)
    await plans.keep([PLAN], 1200.0, T0)
    other = replace(PLAN, evidence="waste 13 %")
    await plans.keep([other], 1201.0, T0 + 1000)
    assert store.marked == 1
    await plans.keep([other], 1200.0 + REFRESH_MS / 1000.0, T0 + REFRESH_MS)
    assert (store.marked, (await kept(store))["plan/default"]["evidence"]) == (2, "waste 13 %")
    later = T0 + REFRESH_MS + 1000
    assert await plans.keep([replace(PLAN, planned=96)], 1261.0, later) == [replace(PLAN, planned=96)]
    assert (await kept(store))["plan/default"]["planned"] == 96


async def test_a_plan_to_leave_things_as_they_are_is_no_news() -> None:
    plans = Plans(MemoryStore())
    assert await plans.keep([replace(PLAN, planned=128, changed_at=None)], 1200.0, T0) == []
    assert plans.seen(1201.0, T0 + 1000)["default"].changed_at is None


async def test_the_next_leader_sees_what_was_planned_on_its_own_clock() -> None:
    store = MemoryStore()
    await Plans(store).keep([PLAN, replace(PLAN, pool="other")], 1200.0, T0)
    other = Plans(store)
    other.recall([*await store.marks(), Mark("plan/broken", 1, b"{}"), Mark("want/x", 1, b"{}")])
    assert other.seen(7.0, T0 + 5000) == {
        pool: PlanSeen("steady", 64, "blocks of 64 pay", "waste 12 %", 7.0 - 205.0) for pool in ("default", "other")
    }
    again = replace(PLAN, changed_at=7.0 - 205.0)
    assert await other.keep([again], 7.0, T0 + 5000) == []


async def test_a_store_that_is_away_loses_no_plan() -> None:
    store = CountingStore()
    plans = Plans(store)
    store.away = True
    assert await plans.keep([PLAN], 1200.0, T0) == [PLAN]
    assert plans.seen(1200.0, T0)["default"].planned == 64
    assert await plans.keep([PLAN], 1201.0, T0 + 1000) == []
    store.away = False
    assert await plans.keep([PLAN], 1202.0, T0 + 2000) == []
    assert (await kept(store)).keys() == {"plan/default"}
    store.away = True
    await plans.forget()
    assert plans.seen(1203.0, T0 + 3000).keys() == {"default"}
    store.away = False
    await plans.forget()
    assert (await kept(store), plans.seen(1204.0, T0 + 4000)) == ({}, {})


# ---- the loop


@dataclass
class Planning:
    """The blocks controller, but for that it decides what it is told."""

    name: str = "blocks"
    plans: tuple[BlockPlan, ...] = ()
    commands: tuple[Reblock, ...] = ()
    ticks: int = 0
    seen: Seen | None = None

    def start(self, live: Iterable[Adjustment]) -> Any:
        return None

    def step(self, state: Any, seen: Seen, policy: PolicyOf, now: float) -> Decision:
        self.ticks, self.seen = self.ticks + 1, seen
        commands, self.commands = self.commands, ()
        return Decision(None, commands=commands, plans=self.plans)


@pytest.mark.slow
async def test_a_command_goes_to_the_process_that_is_meant_and_is_told() -> None:
    told = Planning()
    async with a_mesh(controllers=(told,)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        node.obeys = lambda command: control_pb2.CommandResult(
            ok=True, reblock=control_pb2.ReblockResult(before_block_size=128, after_block_size=64, recompute_tokens=7)
        )
        await node.holds(1, 1)
        await mesh.admin.set_policy({"loops.blocks": "on"}, author="t", reason="try it")
        await until(lambda: told.ticks > 1)
        told.commands = (Reblock("w0", "i1", 64, "it wastes"), Reblock("w0", "another", 64, "too late"))
        await until(lambda: len(mesh.plane.loop.decisions) == 2)
        (command,) = node.commands.value
        assert (command.reblock.block_size, command.reblock.when) == (64, control_pb2.REBLOCK_WHEN_IDLE)
        done = sorted((r.failed, r.text, r.kind) for r in mesh.plane.loop.decisions)
        assert done == [
            ("", "reblock w0 to 64 tokens", "command"),
            ("that process is gone already", "reblock w0 to 64 tokens", "command"),
        ]
        actions = (await mesh.admin.actions(node_id="w0")).actions
        assert [(a.author, a.reason, a.what) for a in actions] == [
            ("controller/blocks", "it wastes", "KV block size 128 → 64, 7 tokens computed anew")
        ]


@pytest.mark.slow
async def test_a_worker_that_takes_its_time_keeps_no_tick_waiting() -> None:
    told = Planning()
    async with a_mesh(controllers=(told,)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        node.obeys = lambda command: control_pb2.CommandResult(reason="NOT_IDLE", message="4000 tokens are resident")
        await node.holds(1, 1)
        await mesh.admin.set_policy({"loops.blocks": "on"}, author="t", reason="try it")
        await node.holds(1, 2)
        node.ready.clear()
        told.commands = (Reblock("w0", "i1", 64, "it wastes"),)
        await until(lambda: node.commands.value)
        ticks = told.ticks
        await until(lambda: told.ticks > ticks + 2)
        assert not mesh.plane.loop.decisions
        node.ready.set()
        await until(lambda: mesh.plane.loop.decisions)
        assert mesh.plane.loop.decisions[0].failed == "NOT_IDLE: 4000 tokens are resident"


@pytest.mark.slow
async def test_a_plan_is_shown_handed_on_and_forgotten_where_nobody_plans() -> None:
    store, first = MemoryStore(), Planning(plans=(PLAN,))
    async with a_mesh(store, (first,)) as mesh:
        await mesh.admin.set_policy({"loops.blocks": "on"}, author="t", reason="try it")
        await until(lambda: mesh.plane.loop.decisions)
        said = mesh.plane.loop.decisions[0]
        assert (said.text, said.kind, said.reason) == (blocked(PLAN), "plan", PLAN.reason)
        await until(lambda: first.seen is not None and first.seen.plans)
        (pool,) = (await mesh.plane.blocks.show()).pools
        assert (pool.pool, pool.phase, pool.planned_block_size, pool.reason) == ("default", "steady", 64, PLAN.reason)
    second = Planning()
    async with a_mesh(store, (second,)) as mesh:
        await until(lambda: second.ticks)
        assert second.seen is not None and second.seen.plans["default"].planned == 64
        await mesh.admin.set_policy({"loops.blocks": "off"}, author="t", reason="enough")
        await until(lambda: not mesh.plane.loop._actuators.plans.seen(0.0, 0))
        assert await store.marks() == []


@pytest.mark.slow
async def test_advice_is_said_once_and_kept_and_nothing_is_done() -> None:
    told = Planning(plans=(PLAN, replace(PLAN, pool="settled", planned=128)))
    async with a_mesh(controllers=(told,)) as mesh:
        node = mesh.start_node(FakeNode(mesh.address))
        await node.holds(1, 1)
        await until(lambda: told.ticks > 1)
        for _ in range(3):
            told.commands = (Reblock("w0", "i1", 64, "it wastes"),)
            ticks = told.ticks
            await until(lambda ticks=ticks: told.ticks > ticks + 1)
        assert [(r.text, r.advised) for r in mesh.plane.loop.decisions] == [(blocked(PLAN), True)]
        assert node.commands.value == ()
        assert {p.pool for p in (await mesh.plane.blocks.show()).pools} == {"default", "settled"}


@pytest.mark.slow
async def test_by_the_guide_a_worker_of_the_mesh_gets_the_size_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker is the real thing but for its engine, and so is the controller."""
    store = MemoryStore()
    async with a_mesh(store, (blocks,)) as mesh:
        await mesh.admin.set_policy(
            {"loops.blocks": "on", "block_plan.choose_by": "guide", "block_plan.warm_up": "60"},
            author="t",
            reason="try it",
        )
        s = a_worker(tmp_path, monkeypatch, mesh.address)
        async with composed(s) as worker:
            assert worker.engine.limits.block_size == 16
            await until(lambda: worker.engine.limits.block_size == 64)
            await until(lambda: any(r.kind == "command" and not r.failed for r in mesh.plane.loop.decisions))
            (pool,) = (await mesh.plane.blocks.show()).pools
            assert (pool.phase, pool.named_block_size, pool.planned_block_size) == ("warm-up", 60, 64)
            member = mesh.plane.fleet.member(s.node_id)
            assert member is not None and member.hello.node.limits.block_size == 64
