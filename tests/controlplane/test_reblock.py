"""KV block sizes changed through the mesh: a real worker before a simulated engine, and everybody who keeps what it can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from controlplane.admin import blocks as admin_blocks
from controlplane.store import Action, Mark
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from services.worker import __main__ as main
from services.worker.settings import WorkerSettings
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from tests.controlplane.sized import PLAN, SIZED, Worker, a_pool, a_report, joined, reported, sizes, until
from tests.worker.conftest import a_request
from tests.worker.test_reports import a_worker, composed
from trimtab import codec, measures
from trimtab.blocks import LADDER
from trimtab.errors import InvalidRequest, StoreUnavailable
from trimtab.kit import rpc
from trimtab.messages import NodeState
from trimtab.messages import Role as NodeRole
from trimtab.snapshot import Limits
from trimtab.v1 import admin_pb2, control_pb2, inference_pb2_grpc

NOW, IDLE = control_pb2.REBLOCK_WHEN_NOW, control_pb2.REBLOCK_WHEN_IDLE
TOKENS = 1200


class Rig:
    """A mesh with a worker `w0` that is the real thing but for its engine, and a gateway that looks on."""

    def __init__(self, mesh: Mesh, worker: main.Worker, gateway: FakeNode, stub: Any) -> None:
        self.mesh, self.worker, self.gateway, self.stub = mesh, worker, gateway, stub
        self.heard: list[int] = []

    async def stream(self, prompt: str) -> list[int]:
        """Indices of the tokens that came, in order."""
        found = []
        async for event in self.stub.Generate(a_request(prompt, max_tokens=TOKENS, ignore_eos=True)):
            for i, _ in enumerate(event.delta.token_ids):
                found.append(event.delta.first_index + i)
                self.heard.append(1)
        return found

    @property
    def known(self) -> Limits:
        """By the control plane."""
        member = self.mesh.plane.fleet.member("w0")
        assert member is not None
        return member.hello.node.limits

    async def viewed(self, block_size: int) -> control_pb2.FleetView:
        return await self.gateway.viewed(lambda v: [w.limits.block_size for w in v.workers] == [block_size])

    def scraped(self) -> str:
        return generate_latest(self.worker.metrics.registry).decode()


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    async with a_mesh() as mesh:
        settings: WorkerSettings = a_worker(tmp_path, monkeypatch, mesh.address)
        async with composed(settings) as worker, rpc.channel(settings.listen, "worker") as channel:
            gateway = mesh.start_node(FakeNode(mesh.address, "g0", role=NodeRole.GATEWAY))
            made = Rig(mesh, worker, gateway, inference_pb2_grpc.InferenceServiceStub(channel))
            await made.viewed(16)
            yield made


@pytest.mark.slow
async def test_a_change_reaches_the_engine_under_streams_and_everybody_who_keeps_its_size(rig: Rig) -> None:
    streams = [asyncio.create_task(rig.stream("word " * n)) for n in (4, 40, 100)]
    await until(lambda: len(rig.heard) > 30)
    before = rig.known
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="4096"} 1.0' in rig.scraped()
    [node] = (await rig.mesh.admin.reblock(("w0",), 64, when=NOW, author="ada", reason="long prompts")).nodes
    r = node.result
    assert (node.done, r.before_block_size, r.before_total_blocks) == (True, 16, 4096)
    assert (r.after_block_size, r.after_total_blocks, r.requests, r.dry_run) == (64, 1024, 3, False)
    assert r.recompute_tokens > 144
    # The news was on the stream before the answer.
    assert rig.known == rig.worker.engine.limits == replace(before, block_size=64, total_blocks=1024)
    keeper = rig.worker.membership._keeper
    assert keeper.node.limits == rig.known
    assert codec.decode_limits(rig.worker.membership._hello().limits) == rig.known
    assert 'vllm:cache_config_info{block_size="64",num_gpu_blocks="1024"} 1.0' in rig.scraped()
    seen = rig.mesh.plane.telemetry.seen(rig.mesh.plane.fleet, (), time.monotonic())
    assert seen.nodes["w0"].node.limits == rig.known
    member = rig.mesh.plane.fleet.member
    await until(lambda: (m := member("w0")) is not None and m.report is not None and m.report.load.total_blocks == 1024)
    view = await rig.viewed(64)
    assert view.workers[0].limits.total_blocks == 1024
    [pb] = (await rig.mesh.admin.blocks()).nodes
    assert codec.decode_limits(pb.limits) == rig.known
    for found in await asyncio.gather(*streams):
        assert found == list(range(TOKENS)), "no token is missing or twice"
    [action] = (await rig.mesh.admin.actions(node_id="w0")).actions
    assert action.what == f"KV block size 16 → 64, {r.recompute_tokens} tokens computed anew"
    assert (action.author, action.reason) == ("ada", "long prompts")


async def test_a_stream_that_begins_anew_says_the_present_size(rig: Rig) -> None:
    assert (await rig.mesh.admin.reblock(("w0",), 32, author="ada")).nodes[0].done
    await rig.mesh.restart()
    await until(lambda: reported(rig.mesh, "w0"))
    assert rig.known.block_size == 32


@pytest.mark.parametrize(("size", "words"), [(17, "multiples of 8"), (4096, "1 to 2048")])
async def test_a_refused_size_leaves_all_as_before_and_names_those_that_would_do(
    rig: Rig, size: int, words: str
) -> None:
    before, version = rig.known, rig.mesh.plane.fleet.version
    [node] = (await rig.mesh.admin.reblock(("w0",), size, when=NOW, author="ada")).nodes
    assert (node.done, node.reason, node.HasField("result")) == (False, "SIZE", False)
    assert words in node.message
    assert tuple(node.accepted_block_sizes) == rig.worker.engine.limits.block_sizes == LADDER
    assert (rig.known, rig.worker.engine.limits, rig.mesh.plane.fleet.version) == (before, before, version)
    assert 'block_size="16"' in rig.scraped()
    [action] = (await rig.mesh.admin.actions()).actions
    assert action.what == f"KV block size to {size}; not done: SIZE"


@pytest.mark.slow
async def test_a_dry_run_says_what_it_would_cost_and_changes_and_records_nothing(rig: Rig) -> None:
    stream = asyncio.create_task(rig.stream("word " * 100))
    await until(lambda: len(rig.heard) > 10)
    rate = measures.PREFILL_TOKENS_PER_S
    plane = rig.mesh.plane
    await until(lambda: plane.telemetry.seen(plane.fleet, (), time.monotonic()).nodes["w0"].gauges.get(rate))
    [node] = (await rig.mesh.admin.reblock(("w0",), 64, when=NOW, dry_run=True, author="ada")).nodes
    assert node.done and node.result.dry_run and node.result.recompute_tokens >= 500
    assert node.recompute_s > 0
    assert rig.worker.engine.limits.block_size == rig.known.block_size == 16
    assert not (await rig.mesh.admin.actions()).actions
    assert await stream == list(range(TOKENS))


@pytest.mark.slow
async def test_idle_waits_for_few_tokens_by_the_policy_or_by_what_is_said(rig: Rig) -> None:
    asked: list[int] = []
    reblock = rig.worker.engine.reblock

    async def watched(block_size: int, **how: Any) -> Any:
        asked.append(how["max_recompute_tokens"])
        return await reblock(block_size, **how)

    rig.worker.engine.reblock = watched  # type: ignore[method-assign]
    await rig.mesh.admin.set_policy({"block_plan.max_recompute_tokens": "300"}, author="ada", wait_ms=10_000)
    stream = asyncio.create_task(rig.stream("word " * 100))
    await until(lambda: len(rig.heard) > 10)
    [node] = (await rig.mesh.admin.reblock(("w0",), 64, author="ada")).nodes
    assert (node.done, node.reason) == (False, "NOT_IDLE")
    [node] = (await rig.mesh.admin.reblock(("w0",), 64, author="ada", when=IDLE, max_recompute_tokens=5000)).nodes
    assert node.done
    assert asked == [300, 5000]
    assert await stream == list(range(TOKENS))


async def test_one_change_at_a_time(rig: Rig) -> None:
    begun, may_go = asyncio.Event(), asyncio.Event()
    reblock = rig.worker.engine.reblock

    async def slow(block_size: int, **how: Any) -> Any:
        begun.set()
        await may_go.wait()
        return await reblock(block_size, **how)

    rig.worker.engine.reblock = slow  # type: ignore[method-assign]
    first = asyncio.create_task(rig.mesh.admin.reblock(("w0",), 64, author="ada"))
    await begun.wait()
    [second] = (await rig.mesh.admin.reblock(("w0",), 128, author="bob")).nodes
    assert (second.done, second.reason) == (False, "BUSY")
    may_go.set()
    assert (await first).nodes[0].done
    assert (await rig.mesh.admin.reblock(("w0",), 128, author="bob")).nodes[0].done, "it is free again"


@pytest.mark.slow
async def test_an_engine_that_changes_by_itself_is_told_of_all_the_same(rig: Rig) -> None:
    await rig.worker.engine.reblock(256)
    await rig.viewed(256)
    assert rig.known == rig.worker.engine.limits


# ---- several workers


async def test_a_pool_is_changed_one_worker_after_another() -> None:
    async with a_pool() as (mesh, workers):
        order: list[str] = []
        for worker in workers:
            name, obeys = worker.node.node_id, worker.obeys

            def watched(command: control_pb2.Command, name: str = name, obeys: Any = obeys) -> Any:
                order.append(name)
                return obeys(command)

            worker.obeys = watched
        answer = await mesh.admin.reblock((), 64, pool="a", author="ada")
        assert [n.node_id for n in answer.nodes if n.done] == order == ["w0", "w1", "w2"]
        assert sizes(mesh) == {"w0": 64, "w1": 64, "w2": 64, "x0": 16}


async def test_one_that_leaves_its_pool_keeps_its_blocks() -> None:
    async with a_pool() as (mesh, workers):
        workers[1].state = NodeState.DRAINING
        workers[1].link.send_event(control_pb2.NodeEvent(drain_begun=control_pb2.DrainBegun()))
        member = mesh.plane.fleet.member
        await until(lambda: (m := member("w1")) and m.report and m.report.state is NodeState.DRAINING)
        answer = await mesh.admin.reblock((), 64, pool="a", author="ada")
        assert [(n.node_id, n.done) for n in answer.nodes] == [("w0", True), ("w2", True)]
        assert (await mesh.admin.reblock(("w1",), 64, author="ada")).nodes[0].done, "unless it is named"


async def test_after_one_that_refuses_the_others_are_left_and_a_dry_run_asks_all() -> None:
    async with a_pool() as (mesh, workers):
        workers[1].refusal = "NOT_IDLE"
        dry = await mesh.admin.reblock((), 64, pool="a", dry_run=True, author="ada")
        assert [(n.node_id, n.done) for n in dry.nodes] == [("w0", True), ("w1", False), ("w2", True)]
        answer = await mesh.admin.reblock((), 64, pool="a", author="ada")
        assert [(n.node_id, n.reason) for n in answer.nodes] == [("w0", ""), ("w1", "NOT_IDLE")]
        assert list(answer.nodes[1].accepted_block_sizes) == [8, 16]
        assert sizes(mesh) == {"w0": 64, "w1": 16, "w2": 16, "x0": 16}
        assert [a.node_id for a in (await mesh.admin.actions()).actions] == ["w1", "w0"]


async def test_what_can_not_be_meant_is_refused_before_anybody_is_asked() -> None:
    async with a_pool() as (mesh, workers):
        mesh.start_node(FakeNode(mesh.address, "g0", role=NodeRole.GATEWAY))
        await mesh.until(lambda fleet: "g0" in fleet)
        for ids, pool, size, says in (
            (("w9",), "", 64, "did you mean w"),
            (("g0",), "", 64, "no worker is called 'g0'"),
            ((), "", 64, "name workers, or a pool"),
            (("w0",), "a", 64, "leave it empty"),
            ((), "c", 64, "pools with workers: a, b"),
            (("w0",), "", 0, "block_size: between 1 and"),
            (("w0",), "", 2**31, "block_size: between 1 and"),
        ):
            with pytest.raises(InvalidRequest, match=says):
                await mesh.admin.reblock(ids, size, pool=pool, author="ada")
        with pytest.raises(InvalidRequest, match="needs an author"):
            await mesh.admin.reblock(("w0",), 64, author=" ")
        assert not [c for worker in workers for c in worker.commands.value]


async def test_one_that_is_gone_hangs_or_does_not_know_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_blocks, "ANSWER_S", 0.2)
    async with a_pool() as (mesh, workers):
        await workers[0].stop()
        await mesh.until(lambda fleet: not fleet["w0"].connected)
        workers[1].ready.clear()
        workers[2].obeys = lambda command: None
        found = [(await mesh.admin.reblock((f"w{i}",), 64, author="ada")).nodes[0].reason for i in range(3)]
        assert found == ["NOT_CONNECTED", "NO_ANSWER", "UNSUPPORTED"]


class Forgetful(MemoryStore):
    async def record_action(self, action: Action) -> None:
        raise StoreUnavailable("the store is away")


async def test_a_store_that_is_away_keeps_no_size_from_changing() -> None:
    async with a_pool(Forgetful()) as (mesh, _):
        assert (await mesh.admin.reblock(("w0",), 64, author="ada")).nodes[0].done


async def test_a_worker_of_another_replica_is_changed_too_and_all_replicas_hear_of_its_size(
    valkey_address: str,
) -> None:
    name = uuid.uuid4().hex
    stores = [RedisStore(valkey_address, name) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(a_mesh(store, controllers=())) for store in stores]
        here, there = Worker(a.address, "w0"), Worker(b.address, "w1")
        await joined(a, here)
        await joined(b, there)
        gateway = a.start_node(FakeNode(a.address, "g0", role=NodeRole.GATEWAY))
        await gateway.viewed(lambda v: [w.node_id for w in v.workers] == ["w0", "w1"])
        answer = await a.admin.reblock((), 64, pool="default", author="ada")
        assert [(n.node_id, n.done, n.result.after_total_blocks) for n in answer.nodes] == [
            ("w0", True, 250),
            ("w1", True, 250),
        ]
        await gateway.viewed(lambda v: [w.limits.block_size for w in v.workers] == [64, 64])
        await b.until(lambda f: "w0" in f and f["w0"].hello.node.limits.block_size == 64)
        assert sorted(x.node_id for x in (await b.admin.actions()).actions) == ["w0", "w1"], "once each"
        shown = {n.node_id: n.limits.block_size for n in (await b.admin.blocks()).nodes}
        assert shown == {"w0": 64, "w1": 64}
    for store in stores:
        await store.close()


async def test_only_a_workers_own_live_stream_changes_what_it_can_do() -> None:
    async with a_mesh(controllers=()) as mesh:
        await joined(mesh, Worker(mesh.address))
        fleet = mesh.plane.fleet
        member = fleet.member("w0")
        assert member is not None
        wanted = replace(SIZED, block_size=64, engine="a name that no Hello said")
        assert fleet.limits_changed(member.session + 100, wanted) is None
        gateway = mesh.start_node(FakeNode(mesh.address, "g0", role=NodeRole.GATEWAY))
        await gateway.viewed(lambda v: bool(v.workers))
        version = fleet.version
        event = control_pb2.LimitsChanged(limits=codec.encode_limits(wanted))
        gateway.link.send_event(control_pb2.NodeEvent(limits_changed=event))
        await gateway.link.said(PATIENCE_S)
        other = fleet.member("g0")
        assert other is not None
        assert fleet.limits_changed(other.session, wanted) is None
        assert sizes(mesh) == {"w0": 16}
        assert fleet.version == version
        hello = fleet.limits_changed(member.session, wanted)
        assert hello is not None and hello.node.limits == replace(SIZED, block_size=64)
        assert fleet.version == version + 1
        fleet.limits_changed(member.session, wanted)
        assert fleet.version == version + 1, "what changes nothing is no news"


# ---- what is shown


async def test_blocks_are_shown_with_what_they_waste_and_what_is_planned() -> None:
    store = MemoryStore()
    async with a_pool(store) as (mesh, workers):
        workers[0].says = a_report(
            fragmentation=0.5, stored_tokens=4000.0, block_waste_16=0.004, block_waste_64=0.021, prefix_kept_64=0.75
        )
        for mark in (Mark("plan/a", 7, json.dumps(PLAN).encode()), Mark("plan/b", 7, b"{}"), Mark("want/a", 7, b"[]")):
            await store.mark(mark)
        async with asyncio.timeout(PATIENCE_S):
            while not (answer := await mesh.admin.blocks()).nodes[0].waste or not answer.leader_id:
                await asyncio.sleep(0.02)
        first, second, *_ = answer.nodes
        assert (first.node_id, first.pool, first.limits.block_size, first.resident_tokens) == ("w0", "a", 16, 4000)
        assert (dict(first.waste), dict(first.prefix_kept)) == ({16: 0.004, 64: 0.021}, {64: 0.75})
        assert (first.fragmentation, second.HasField("fragmentation"), dict(second.waste)) == (0.5, False, {})
        assert list(answer.pools) == [
            admin_pb2.PoolBlocks(
                pool="a", phase="mixed", named_block_size=24, planned_block_size=32, reason="the guide names 24",
                evidence="multiples of 32", at_unix_ms=7, gain={32: 0.01, 64: -0.02},
            )
        ]  # fmt: skip
        assert answer.leader_id == mesh.plane.peers.replica_id

        async def away() -> list[Mark]:
            raise StoreUnavailable("the store is away")

        store.marks = away  # type: ignore[method-assign]
        assert list((await mesh.admin.blocks()).pools) == list(answer.pools), "as they were last read"
