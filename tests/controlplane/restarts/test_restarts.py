"""Rolling restarts by a control plane on a real socket: workers that go and come back, other replicas, and leaders that die meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator

import pytest

from controlplane.admin.restarts import SENT_S
from controlplane.controllers.decision import Restart as Sent
from controlplane.restarts.state import Order, Restart, Stage, Turn, encode
from controlplane.restarts.steps import Ask
from controlplane.store import Mark
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import PATIENCE_S, Mesh, a_mesh
from tests.controlplane.restarts.phoenix import SETTINGS, Phoenix, an_order, once, three
from trimtab.errors import Conflict, InvalidRequest
from trimtab.messages import NodeState
from trimtab.v1 import admin_pb2, control_pb2


@pytest.mark.slow
async def test_all_workers_come_back_with_what_they_were_told_one_at_a_time() -> None:
    async with a_mesh() as mesh:
        workers = await three(mesh)
        begun = (await mesh.admin.start_restart(**an_order())).rollout
        assert (begun.live, begun.kind, list(begun.pending_node_ids)) == (True, "restart", ["w0", "w1", "w2"])
        over = await once(mesh, begun.rollout_id, lambda r: not r.live)
        assert (over.stage, over.verdict) == ("done", "3 of 3 workers were started anew")
        assert [(w.newest.life, w.newest.told) for w in workers] == [(2, SETTINGS)] * 3
        order = [x.text.split()[0] for x in over.lines if "to drain" in x.text or "does well" in x.text]
        assert order == ["w0", "w0", "w1", "w1", "w2", "w2"], "nobody goes before the one before him is back"
        assert {m.node_id: dict(m.hello.told) for m in mesh.plane.fleet} == dict.fromkeys(("w0", "w1", "w2"), SETTINGS)
        actions = (await mesh.admin.actions(node_id="w0")).actions
        assert [a.what for a in actions] == ["drain and restart within 1s, worker.max_num_seqs=32"]
        assert actions[0].reason == f"restart {begun.rollout_id}: more rows"


async def test_what_the_first_worker_refuses_stops_it_with_nothing_done() -> None:
    async with a_mesh() as mesh:
        workers = await three(mesh)
        workers[0].refuses = "unknown key worker.max_num_seq; did you mean max_num_seqs?"
        begun = (await mesh.admin.start_restart(**an_order())).rollout
        over = await once(mesh, begun.rollout_id, lambda r: not r.live)
        assert over.stage == "stopped"
        assert over.verdict.startswith("w0: BAD_SETTING: unknown key") and "nothing has happened" in over.verdict
        assert [w.newest.life for w in workers] == [1, 1, 1]


@pytest.mark.slow
async def test_one_that_does_not_come_back_stops_it() -> None:
    async with a_mesh() as mesh:
        workers = await three(mesh)
        workers[0].returns = False
        begun = (await mesh.admin.start_restart(**an_order(ready_ms=500))).rollout
        over = await once(mesh, begun.rollout_id, lambda r: not r.live)
        assert over.verdict.startswith("w0 does not serve again")
        assert [w.newest.life for w in workers[1:]] == [1, 1]


@pytest.mark.slow
async def test_an_abort_stops_it_where_it_is() -> None:
    async with a_mesh() as mesh:
        workers = await three(mesh)
        begun = (await mesh.admin.start_restart(**an_order(bake_ms=600_000))).rollout
        await once(mesh, begun.rollout_id, lambda r: "w0 is baking" in r.verdict)
        assert mesh.plane.restarts.restarting() == {"w0"}
        over = (await mesh.admin.end_rollout(begun.rollout_id, author="bob", reason="later")).rollout
        assert (over.stage, over.verdict, over.live) == ("aborted", "aborted by bob (later)", False)
        assert mesh.plane.restarts.restarting() == frozenset()
        with pytest.raises(InvalidRequest, match="over already"):
            await mesh.admin.end_rollout(begun.rollout_id, author="bob")
        with pytest.raises(InvalidRequest, match="no rollout is called"):
            await mesh.admin.end_rollout("rs-none", author="bob")
        assert [w.newest.life for w in workers] == [2, 1, 1]


async def test_one_lives_at_a_time() -> None:
    async with a_mesh() as mesh:
        await three(mesh)
        first = (await mesh.admin.start_restart(**an_order(bake_ms=600_000))).rollout
        with pytest.raises(Conflict, match=f"a restart is on its way: {first.rollout_id}, by ada"):
            await mesh.admin.start_restart(**an_order())
        await mesh.admin.end_rollout(first.rollout_id, author="ada")
        assert (await mesh.admin.start_restart(**an_order())).rollout.live


@pytest.mark.slow
async def test_none_begins_while_a_policy_is_tried_on_canaries() -> None:
    async with a_mesh() as mesh:
        workers = await three(mesh)
        tried = (await mesh.admin.start_rollout({"batch.active": "4"}, author="bob", bake_s=3600)).rollout
        with pytest.raises(Conflict, match=f"rollout {tried.rollout_id} of bob lives") as e:
            await mesh.admin.start_restart(**an_order())
        assert e.value.metadata["rollout"] == tried.rollout_id
        assert [r.rollout_id for r in (await mesh.admin.rollouts()).rollouts] == [tried.rollout_id]
        await mesh.admin.end_rollout(tried.rollout_id, author="bob")
        begun = (await mesh.admin.start_restart(**an_order())).rollout
        await once(mesh, begun.rollout_id, lambda r: not r.live)
        assert [w.newest.life for w in workers] == [2, 2, 2]


async def test_of_a_policy_and_a_restart_that_begin_at_once_the_restart_gives_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_mesh() as mesh:
        workers = await three(mesh)
        driver = mesh.plane.restarts._driver
        begin, tried = driver.begin, asyncio.Event()

        async def late(order: Order, turns: tuple[Turn, ...]) -> Restart:
            await mesh.admin.start_rollout({"batch.active": "4"}, author="bob", bake_s=3600)
            tried.set()
            return await begin(order, turns)

        monkeypatch.setattr(driver, "begin", late)
        with pytest.raises(Conflict, match="of bob lives"):
            await mesh.admin.start_restart(**an_order())
        assert tried.is_set()
        assert [r.live for r in (await mesh.admin.rollouts()).rollouts if r.kind == "restart"] == [False]
        assert mesh.plane.restarts.restarting() == frozenset()
        assert len(workers) == 3


async def heal(mesh: Mesh, worker: Phoenix) -> str:
    """What became of a restart that heal decided on a moment ago."""
    command = Sent(worker.node.node_id, worker.newest._incarnation, 1.0, "it leaks KV blocks")
    return await mesh.plane.loop._actuators.do("controller/heal", command)


@pytest.mark.slow
async def test_what_heal_decided_before_a_restart_went_on_is_not_done_any_more() -> None:
    async with a_mesh(controllers=()) as mesh:
        workers = await three(mesh, 2)
        begun = (await mesh.admin.start_restart(**an_order(bake_ms=600_000))).rollout
        await once(mesh, begun.rollout_id, lambda r: "w0 is baking" in r.verdict)
        assert await heal(mesh, workers[1]) == "a restart is on its way in its pool: w0 away or watched"
        assert await heal(mesh, workers[0]) == "w0 is started anew by a restart that is on its way"
        workers[1].state = NodeState.HUNG
        async with asyncio.timeout(PATIENCE_S):
            while not any(m.report and m.report.state is NodeState.HUNG for m in mesh.plane.fleet):
                await asyncio.sleep(0.05)
        assert await heal(mesh, workers[1]) == "", "one that hangs serves nobody anyway"


async def test_nobody_is_told_to_go_beside_one_that_heal_has_just_sent_away() -> None:
    async with a_mesh() as mesh:
        await three(mesh, 2)
        now = 100.0
        restarts = mesh.plane.restarts
        restarts._clock = lambda: now
        r = Restart("rs-1", Order("ada", drain_ms=1000), (Turn("w0", "default"), Turn("w1", "default")), 1)
        assert restarts.keeps("w1") == ""
        answer = await restarts._tell(r, Ask("w0", 1000, {}))
        assert (answer.done, answer.reason) == (False, "NOT_SENT")
        assert "has just sent w1 of its pool away" in answer.message
        now += SENT_S
        assert (await restarts._tell(r, Ask("w0", 1000, {}))).done, "the fleet knows by now"


async def test_what_can_not_be_begun_is_refused() -> None:
    async with a_mesh() as mesh:
        await three(mesh, 2)
        for wrong, words in (
            ({"node_ids": ["w7"]}, "did you mean w"),
            ({"pool": "none"}, "no worker of pool 'none'"),
            ({"pool": "default", "node_ids": ["w0"]}, "not both"),
            ({"settings": {"gateway.http": "x"}}, "begin with worker"),
            ({"settings": {"worker.listen": "0.0.0.0:1"}, "dry_run": True}, "who and where a worker is"),
            ({"settings": {"worker.foo": "1"}, "dry_run": True}, "no setting worker.foo; `trimtab config print`"),
            ({"settings": {"worker.max_num_seq": "1"}}, "did you mean worker.max_num_seqs?"),
            ({"author": ""}, "author"),
            ({"drain_ms": 86_400_001}, "at most a day"),
        ):
            with pytest.raises(InvalidRequest, match=words):
                await mesh.admin.start_restart(**an_order(**wrong))
        assert not (await mesh.admin.rollouts()).rollouts


@pytest.mark.slow
async def test_the_only_worker_of_a_model_is_refused_and_goes_by_force() -> None:
    async with a_mesh() as mesh:
        (worker,) = await three(mesh, 1)
        planned = (await mesh.admin.start_restart(**an_order(dry_run=True))).rollout
        assert any("only worker that serves its model" in line.text for line in planned.lines)
        assert not (await mesh.admin.rollouts()).rollouts, "a dry run leaves nothing"
        with pytest.raises(InvalidRequest, match="nobody else serves"):
            await mesh.admin.start_restart(**an_order())
        begun = (await mesh.admin.start_restart(**an_order(force=True))).rollout
        assert (await once(mesh, begun.rollout_id, lambda r: not r.live)).stage == "done"
        assert worker.newest.told == SETTINGS


@pytest.mark.slow
async def test_a_worker_whose_breaker_is_forced_open_is_none_that_serves() -> None:
    async with a_mesh() as mesh:
        await three(mesh, 2)
        await mesh.admin.force_breaker("w0", control_pb2.BREAKER_FORCE_OPEN, author="ada", reason="strange answers")
        planned = [x.text for x in (await mesh.admin.start_restart(**an_order(dry_run=True))).rollout.lines]
        assert any(x.startswith("w0 gets no requests: its breaker is forced open for") for x in planned)
        assert "w1 is the only worker that serves its model: it goes with --force alone" in planned
        with pytest.raises(InvalidRequest, match=r"nobody else serves the model of w1 .*w0 gets no requests"):
            await mesh.admin.start_restart(**an_order())
        begun = (await mesh.admin.start_restart(**an_order(node_ids=["w0"]))).rollout
        assert (await once(mesh, begun.rollout_id, lambda r: not r.live)).stage == "done", "w0 keeps nobody from work"


@pytest.mark.slow
async def test_a_new_leader_goes_on_where_the_last_one_was() -> None:
    store = MemoryStore()
    async with a_mesh(store) as mesh:
        workers = await three(mesh)
        begun = (await mesh.admin.start_restart(**an_order(bake_ms=600_000))).rollout
        await once(mesh, begun.rollout_id, lambda r: "w0 is baking" in r.verdict)
        await mesh.restart()
        await asyncio.wait_for(mesh.plane.loaded(), PATIENCE_S)
        found = await once(mesh, begun.rollout_id, lambda r: r.live)
        assert (list(found.node_ids), list(found.pending_node_ids)) == (["w0"], ["w1", "w2"])
        assert [w.newest.life for w in workers] == [2, 1, 1]


async def test_one_that_was_written_and_never_told_is_told_by_the_next_leader() -> None:
    """The leader died between the store and the worker."""
    store = MemoryStore()
    order = Order("ada", settings=SETTINGS, drain_ms=1000)
    turns = (Turn("w0", "default"), Turn("w1", "default"))
    await store.mark(Mark("restart/rs-old", 1, encode(Restart("rs-old", order, turns, 1))))
    async with a_mesh(store) as mesh:
        workers = await three(mesh, 2)
        await once(mesh, "rs-old", lambda r: any("w0 is told to drain" in line.text for line in r.lines))
        assert (await once(mesh, "rs-old", lambda r: bool(workers[0].next))).live


@pytest.fixture
async def pair(valkey_address: str) -> AsyncIterator[tuple[Mesh, Mesh]]:
    name = uuid.uuid4().hex
    stores = [RedisStore(valkey_address, name) for _ in range(2)]
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(a_mesh(store)) for store in stores]
        yield a, b
    for store in stores:
        await store.close()


@pytest.mark.slow
async def test_whichever_replica_is_asked_and_wherever_workers_are_connected(pair: tuple[Mesh, Mesh]) -> None:
    a, b = pair
    workers = [Phoenix(a, "w0"), Phoenix(b, "w1")]
    for mesh, worker in zip(pair, workers, strict=True):
        mesh.start_node(worker)
    for mesh in pair:
        await mesh.until(lambda f: sum(m.report is not None for m in f.values()) == 2)
    begun = (await b.admin.start_restart(**an_order())).rollout
    for mesh in pair:
        over = await _listed_over(mesh, begun.rollout_id)
        assert over.stage == "done", over.lines
    assert [(w.newest.life, w.newest.told) for w in workers] == [(2, SETTINGS)] * 2


async def _listed_over(mesh: Mesh, rollout_id: str) -> admin_pb2.Rollout:
    """Also where the store has not told this replica of it yet."""
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            for found in (await mesh.admin.rollouts(rollout_id=rollout_id)).rollouts:
                if not found.live:
                    return found
            await asyncio.sleep(0.05)


async def test_only_so_many_that_are_over_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("controlplane.restarts.driver.KEPT", 2)
    async with a_mesh() as mesh:
        await three(mesh, 2)
        ids = []
        for _ in range(4):
            begun = (await mesh.admin.start_restart(**an_order(bake_ms=600_000))).rollout
            ids.append(begun.rollout_id)
            await mesh.admin.end_rollout(begun.rollout_id, author="ada")
        assert {r.rollout_id for r in (await mesh.admin.rollouts()).rollouts} == set(ids[2:])
        assert {m.key for m in await mesh.store.marks() if m.key.startswith("restart/")} == {
            f"restart/{i}" for i in ids[2:]
        }


# ---- the verb


def test_stages_of_a_restart_are_those_that_the_wire_names() -> None:
    assert {s.value for s in Stage} == {"rolling", "reverting", "done", "stopped", "aborted"}
