"""Rollouts on a real control plane: begun, carried on by whoever leads, ended by people, and told to gateways and to the history."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from controlplane.controllers.decision import Propose
from controlplane.restarts.state import Order, Restart, Turn
from controlplane.restarts.state import encode as encode_restart
from controlplane.rollouts import builds
from controlplane.rollouts.driver import document_of
from controlplane.store import Mark, PolicyStore
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab import measures
from trimtab.errors import Conflict, InvalidRequest, TrimtabError
from trimtab.messages import Load, NodeState, Report, Role, Workload
from trimtab.sketch import Sketch
from trimtab.snapshot import Scope, ScopeKind
from trimtab.v1 import admin_pb2, control_pb2

FIELDS = {"batch.active": "8"}
TTFT = measures.ttft(Workload.REALTIME, measures.HOT)


class Speaker:
    """Reports first tokens of so many milliseconds, ten each time."""

    def __init__(self, ttft_ms: float = 50.0) -> None:
        self.ttft_ms = ttft_ms
        self.sequence = 0

    def __call__(self) -> Report:
        self.sequence += 1
        sketch = Sketch()
        for _ in range(10):
            sketch.add(self.ttft_ms)
        counters = {"requests": 10 * self.sequence, "realtime_requests": 10 * self.sequence}
        return Report(self.sequence, NodeState.SERVING, Load(), self.sequence, counters, {TTFT: sketch.to_bytes()}, 100)


async def workers(mesh: Mesh, count: int = 3) -> list[FakeNode]:
    nodes = []
    for i in range(count):
        node = FakeNode(mesh.address, f"w{i}")
        node.says = Speaker()
        nodes.append(mesh.start_node(node))
    await mesh.until(lambda fleet: len(fleet) == count and all(m.report is not None for m in fleet.values()))
    return nodes


async def until(look: Callable[[], Awaitable[Any]]) -> Any:
    async with asyncio.timeout(PATIENCE_S):
        while not (found := await look()):
            await asyncio.sleep(0.05)
        return found


async def shown(mesh: Mesh, rollout_id: str) -> admin_pb2.Rollout:
    (found,) = (await mesh.admin.rollouts(rollout_id=rollout_id)).rollouts
    return found


async def ended(mesh: Mesh, rollout_id: str) -> admin_pb2.Rollout:
    async def look() -> admin_pb2.Rollout | None:
        found = await shown(mesh, rollout_id)
        return None if found.live else found

    over: admin_pb2.Rollout = await until(look)
    return over


async def begun(mesh: Mesh, **asked: Any) -> admin_pb2.Rollout:
    return (await mesh.admin.start_rollout(FIELDS, author="ada", reason="a try", **asked)).rollout


async def active(node: FakeNode, value: int) -> None:
    async def look() -> bool:
        return bool(node.active) and node.active[-1] == value

    await until(look)


async def test_canaries_have_it_and_less_of_new_work_until_a_person_takes_it_back() -> None:
    async with a_mesh() as mesh:
        w = await workers(mesh)
        gateway = mesh.start_node(FakeNode(mesh.address, "g0", role=Role.GATEWAY))
        r = await begun(mesh, bake_s=600)
        assert (list(r.node_ids), list(r.pending_node_ids), r.stage) == (["w0"], ["w1", "w2"], "baking")
        await active(w[0], 8)

        def weights(view: control_pb2.FleetView) -> dict[str, float]:
            return {x.node_id: x.weight for x in view.workers if x.HasField("weight")}

        await gateway.viewed(lambda view: weights(view) == {"w0": 0.5})
        (newest,) = (await mesh.admin.history(1)).entries
        assert newest.author == "ada" and newest.reason == f"rollout {r.rollout_id} to w0: a try"
        over = (await mesh.admin.end_rollout(r.rollout_id, author="bob", reason="no")).rollout
        assert (over.stage, over.verdict) == ("aborted", "aborted by bob: no")
        await active(w[0], 48)
        assert {8} & set(w[1].active) == set()
        await gateway.viewed(lambda view: not weights(view))
        with pytest.raises(Conflict, match="has ended"):
            await mesh.admin.end_rollout(r.rollout_id, author="bob", promote=True)


async def test_one_lives_at_a_time_and_what_is_refused_leaves_nothing() -> None:
    async with a_mesh() as mesh:
        await workers(mesh)
        dry = await begun(mesh, dry_run=True, canary_count=2)
        assert list(dry.node_ids) == ["w0", "w1"]
        with pytest.raises(TrimtabError, match="max_num_seqs"):
            await mesh.admin.start_rollout({"batch.active": "65"}, author="ada")
        with pytest.raises(TrimtabError, match="too many"):
            await begun(mesh, canary_count=3)
        with pytest.raises(InvalidRequest, match="weight"):
            await begun(mesh, weight=0.0)
        with pytest.raises(InvalidRequest, match="one of them"):
            await begun(mesh, canary_count=1, canary_label="a=b")
        with pytest.raises(Conflict):
            await begun(mesh, expect_version=7)
        await mesh.admin.pin_policy(["batch.active"], True, author="bob", reason="mine")
        with pytest.raises(TrimtabError, match="pinned by bob"):
            await begun(mesh)
        await mesh.admin.pin_policy(["batch.active"], False, author="bob")
        assert (await mesh.admin.rollouts()).rollouts == []
        assert [m for m in await mesh.store.marks() if m.key.startswith("rollout/")] == []
        r = await begun(mesh, bake_s=600)
        with pytest.raises(Conflict, match=f"{r.rollout_id} of ada lives"):
            await begun(mesh)
        with pytest.raises(InvalidRequest, match="no rollout is called 'r-x'"):
            await mesh.admin.end_rollout("r-x", author="bob")


@pytest.mark.slow
async def test_what_is_refused_as_it_is_written_is_gone_though_the_leader_has_carried_it_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_mesh() as mesh:
        await workers(mesh)
        replica, write = mesh.plane.replica, mesh.plane.replica.write

        async def refuses(build: Any, nodes: Any, **asked: Any) -> Any:
            if asked["author"] != "ada" or asked.get("dry_run"):
                return await write(build, nodes, **asked)
            (r,) = (await mesh.admin.rollouts()).rollouts
            await until(lambda: _carried_on(mesh.store, r.rollout_id))
            raise Conflict("others kept changing the policy in between; try again")

        monkeypatch.setattr(replica, "write", refuses)
        with pytest.raises(Conflict, match="kept changing"):
            await begun(mesh, bake_s=1)
        assert (await mesh.admin.rollouts()).rollouts == []
        assert await _rollout_marks(mesh.store) == {}
        monkeypatch.undo()
        assert (await begun(mesh, bake_s=600)).live


async def test_what_would_be_refused_is_heard_of_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with a_mesh() as mesh:
        await workers(mesh)
        marked: list[str] = []
        mark = mesh.store.mark

        async def noted(m: Mark) -> bool:
            marked.append(m.key)
            return await mark(m)

        monkeypatch.setattr(mesh.store, "mark", noted)
        with pytest.raises(Conflict):
            await begun(mesh, expect_version=7)
        assert [key for key in marked if key.startswith("rollout/")] == []


async def test_none_begins_while_workers_are_restarted_one_after_another() -> None:
    async with a_mesh() as mesh:
        await workers(mesh)
        restart = Restart("rs-1", Order("bob"), (Turn("w2"),), 1)
        assert await mesh.store.mark(Mark("restart/rs-1", 1, encode_restart(restart)))

        async def known() -> bool:
            return any(r.rollout_id == "rs-1" for r in (await mesh.admin.rollouts()).rollouts)

        await until(known)
        with pytest.raises(Conflict, match="restart rs-1 of bob is on its way"):
            await begun(mesh)
        with pytest.raises(Conflict, match="rs-1"):
            await begun(mesh, dry_run=True)
        await mesh.admin.end_rollout("rs-1", author="bob")
        assert (await begun(mesh, bake_s=600)).live


async def test_a_person_does_not_promote_what_was_taken_back_and_is_not_marked_so_yet() -> None:
    async with a_mesh() as mesh:
        w = await workers(mesh)
        r = await begun(mesh, bake_s=600)
        nodes = [m.hello.node for m in mesh.plane.fleet.connected(Role.WORKER)]
        await mesh.plane.replica.write(builds.drop(r.rollout_id), lambda: nodes, author="controller/rollout", reason="")
        with pytest.raises(Conflict, match=f"rollout {r.rollout_id} has ended"):
            await mesh.admin.end_rollout(r.rollout_id, author="bob", promote=True)
        await active(w[0], 48)
        assert (await mesh.admin.get_policy()).effective.batch.active == 48


async def _rollout_marks(store: PolicyStore) -> dict[str, Mark]:
    return {m.key: m for m in await store.marks() if m.key.startswith("rollout/")}


async def _carried_on(store: PolicyStore, rollout_id: str) -> bool:
    """The leader has kept it once more than whoever began it."""
    mark = (await _rollout_marks(store)).get(f"rollout/{rollout_id}")
    return mark is not None and mark.stamp > 2


@pytest.mark.slow
async def test_the_leader_promotes_what_does_no_worse_in_the_name_of_who_began_it() -> None:
    async with a_mesh() as mesh:
        w = await workers(mesh)
        version = (await mesh.admin.get_policy()).spec_version
        r = await begun(mesh, bake_s=2)
        over = await ended(mesh, r.rollout_id)
        assert over.stage == "promoted", over.verdict
        assert over.lines[0].text == "canaries: w0"
        assert {m.name for m in over.measures} >= {"realtime P99 TTFT, ms", "requests failed"}
        for node in w:
            await active(node, 8)
        after = await mesh.admin.get_policy()
        assert (after.spec_version, after.author, after.effective.batch.active) == (version + 2, "ada", 8)
        assert after.reason.startswith(f"rollout {r.rollout_id}: promoted")
        kinds = [e.kind for e in (await mesh.admin.history(3, controllers=True)).entries]
        assert kinds[:2] == [admin_pb2.HISTORY_KIND_PERSON, admin_pb2.HISTORY_KIND_CONTROLLER]


@pytest.mark.slow
async def test_worse_canaries_are_taken_back_with_the_figures_and_the_next_leader_goes_on() -> None:
    store = MemoryStore()
    async with a_mesh(store) as mesh:
        w = await workers(mesh)
        r = await begun(mesh, bake_s=600)
        await active(w[0], 8)
        await mesh.restart()
        assert (await until(lambda: _found(mesh, r.rollout_id))).live
        w[0].says.ttft_ms = 900.0  # type: ignore[attr-defined]
        over = await ended(mesh, r.rollout_id)
        assert (over.stage, over.verdict) == ("rolled back", "canaries are worse")
        assert "realtime P99 TTFT, ms 900" in over.lines[-1].evidence
        await active(w[0], 48)
        newest = (await mesh.admin.history(1, controllers=True)).entries[0]
        assert newest.author == "controller/rollout" and "900" in newest.evidence


async def _found(mesh: Mesh, rollout_id: str) -> admin_pb2.Rollout | None:
    found = (await mesh.admin.rollouts(rollout_id="")).rollouts
    return next((r for r in found if r.rollout_id == rollout_id), None)


@pytest.mark.slow
async def test_a_person_who_sets_the_same_field_ends_it() -> None:
    async with a_mesh() as mesh:
        w = await workers(mesh)
        r = await begun(mesh, bake_s=600)
        await mesh.admin.set_policy({"batch.active": "9"}, author="bob")
        over = await ended(mesh, r.rollout_id)
        assert (over.stage, over.verdict) == ("aborted", "aborted: batch.active was set to 9 meanwhile")
        await active(w[0], 9)


async def test_a_person_promotes_it_at_once() -> None:
    async with a_mesh() as mesh:
        w = await workers(mesh, 2)
        scope = Scope(ScopeKind.POOL, ("default",))
        r = await begun(mesh, bake_s=600, scope=scope)
        over = (await mesh.admin.end_rollout(r.rollout_id, author="bob", promote=True)).rollout
        assert over.stage == "promoted"
        await active(w[1], 8)
        policy = await mesh.admin.get_policy("w1")
        assert policy.author == "bob" and "pool/default" in policy.sources["batch.active"]


@pytest.mark.slow
async def test_what_a_rollout_that_nobody_knows_has_left_in_the_policy_is_taken_out() -> None:
    async with a_mesh() as mesh:
        await workers(mesh)
        nodes = [m.hello.node for m in mesh.plane.fleet.connected(Role.WORKER)]
        begin = builds.begin("r-lost", FIELDS, Scope(), ("w0",))
        await mesh.plane.replica.write(begin, lambda: nodes, author="ada", reason="its mark was lost")

        async def look() -> bool:
            return builds.overlay_of(document_of(mesh.plane.replica)) is None

        await until(look)


async def test_a_controller_proposes_and_is_told_why_not() -> None:
    async with a_mesh() as mesh:
        proposed = Propose(FIELDS, Scope(), "denser", "use 0.5")
        propose = mesh.plane.loop._actuators.do  # what the loop calls
        assert "can't be tried" in await propose("controller/blocks", proposed)
        await workers(mesh)
        assert await propose("controller/blocks", proposed) == ""
        (r,) = (await mesh.admin.rollouts()).rollouts
        assert (r.author, r.reason) == ("controller/blocks", "denser; use 0.5")
        assert "lives" in await propose("controller/blocks", replace(proposed, fields={"batch.active": "7"}))
