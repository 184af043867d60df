"""What people may ask of the control plane, over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from controlplane.admin.client import AdminClient
from tests.controlplane.mesh import PATIENCE_S, FakeNode, Mesh, a_mesh
from trimtab.client import Unreachable
from trimtab.errors import TrimtabError
from trimtab.kit.process import free_port
from trimtab.policy import FIELDS, text
from trimtab.snapshot import Limits
from trimtab.v1 import admin_pb2, admin_pb2_grpc


@pytest.fixture
async def mesh() -> AsyncIterator[Mesh]:
    async with a_mesh() as running:
        yield running


async def refused(mesh: Mesh, reason: str, **fields: str) -> TrimtabError:
    with pytest.raises(TrimtabError) as caught:
        await mesh.admin.set_policy({k.replace("__", "."): v for k, v in fields.items()}, author="bob")
    assert caught.value.reason == reason
    return caught.value


async def test_a_new_mesh_runs_by_the_defaults(mesh: Mesh) -> None:
    answer = await mesh.admin.get_policy()
    assert (answer.snapshot.identity.epoch, answer.snapshot.identity.revision, answer.spec_version) == (1, 1, 0)
    assert (answer.author, answer.reason) == ("trimtab", "first start")
    assert answer.effective.batch.active == FIELDS["batch.active"].default
    assert dict(answer.sources) == dict.fromkeys(FIELDS, "default")
    assert answer.store.connected


async def test_a_change_has_version_changes_and_the_workers_answers(mesh: Mesh) -> None:
    mesh.start_node(FakeNode(mesh.address))
    mesh.start_node(FakeNode(mesh.address, "w1"))
    await mesh.until(lambda fleet: len(fleet) == 2)
    answer = await mesh.admin.set_policy({"batch.active": "8"}, author="ada", reason="less", wait_ms=5000)
    assert (answer.identity.revision, answer.spec_version) == (2, 1)
    assert [(c.field, c.before, c.after) for c in answer.changes] == [("batch.active", "default", "8")]
    assert [(n.node_id, n.applied.revision) for n in answer.nodes] == [("w0", 2), ("w1", 2)]
    shown = await mesh.admin.get_policy("w1")
    assert (shown.effective.batch.active, shown.sources["batch.active"], shown.author) == (8, "spec", "ada")


async def test_waiting_ends_with_its_time_and_says_who_has_not_answered(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await node.holds(1, 1)
    node.ready.clear()
    answer = await mesh.admin.set_policy({"batch.active": "8"}, author="ada", wait_ms=50)
    assert [(n.node_id, n.applied.revision) for n in answer.nodes] == [("w0", 1)]


async def test_a_worker_that_is_lost_while_waited_for_is_not_waited_for(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await node.holds(1, 1)
    node.ready.clear()
    setting = asyncio.create_task(mesh.admin.set_policy({"batch.active": "8"}, author="ada", wait_ms=60_000))
    await asyncio.wait_for(node.begun.until(1), PATIENCE_S)
    await node.stop()
    assert list((await asyncio.wait_for(setting, PATIENCE_S)).nodes) == []


async def test_what_a_connected_worker_cannot_do_is_refused_recorded_and_changes_nothing(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address, limits=Limits(max_num_seqs=16)))
    await node.holds(1, 1)
    error = await refused(mesh, "POLICY_REFUSED", batch__active="17")
    assert error.metadata == {"cause": "ABOVE_ENGINE_LIMIT", "field": "batch.active", "node": "w0"}
    assert "max_num_seqs = 16" in error.message
    newest = (await mesh.admin.history()).entries[0]
    assert (newest.author, newest.identity.revision, newest.refused_because[:15]) == ("bob", 1, "batch.active=17")
    assert (await mesh.admin.get_policy()).spec_version == 0
    assert node.active == [16]


@pytest.mark.parametrize("text", ["0", "-1", "many", ""])
async def test_a_value_that_no_node_could_take_is_refused(mesh: Mesh, text: str) -> None:
    await refused(mesh, "POLICY_REFUSED", batch__active=text)
    assert (await mesh.admin.get_policy()).snapshot.identity.revision == 1


async def test_a_stale_version_is_a_conflict_and_the_right_one_is_taken(mesh: Mesh) -> None:
    await mesh.admin.set_policy({"batch.active": "8"}, author="ada", expect_version=0)
    with pytest.raises(TrimtabError) as caught:
        await mesh.admin.set_policy({"batch.active": "9"}, author="bob", expect_version=0)
    assert (caught.value.reason, caught.value.metadata["found"]) == ("CONFLICT", "1")
    assert (await mesh.admin.get_policy()).effective.batch.active == 8


async def test_concurrent_changes_without_a_version_all_hold(mesh: Mesh) -> None:
    fields = ["batch.active", "admission.batch_queue", "admission.realtime_queue", "admission.engine_queue"]
    await asyncio.gather(*(mesh.admin.set_policy({path: "7"}, author="ada") for path in fields))
    answer = await mesh.admin.get_policy()
    assert (answer.spec_version, answer.snapshot.identity.revision) == (4, 5)
    assert [answer.sources[path] for path in fields] == ["spec"] * 4


async def test_what_is_so_already_spends_no_revision(mesh: Mesh) -> None:
    first = await mesh.admin.set_policy({"batch.active": "8"}, author="ada")
    again = await mesh.admin.set_policy({"batch.active": "8"}, author="ada", wait_ms=60_000)
    assert (again.identity, again.spec_version, list(again.changes)) == (first.identity, 1, [])
    assert len((await mesh.admin.history()).entries) == 2


async def test_a_dry_run_answers_as_a_write_would_and_writes_nothing(mesh: Mesh) -> None:
    answer = await mesh.admin.set_policy({"batch.active": "8"}, author="ada", dry_run=True, wait_ms=60_000)
    assert [c.after for c in answer.changes] == ["8"]
    with pytest.raises(TrimtabError, match="between"):
        await mesh.admin.set_policy({"batch.active": "0"}, author="ada", dry_run=True)
    assert len((await mesh.admin.history()).entries) == 1


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (admin_pb2.SetPolicyRequest(author="ada"), "fields"),
        (admin_pb2.SetPolicyRequest(fields={"batch.active": "8"}, author=" "), "author"),
        (admin_pb2.SetPolicyRequest(fields={"batch.active": "8"}, author="a", reason="x" * 2001), "reason"),
        (admin_pb2.SetPolicyRequest(fields={"batch.active": "8"}, author="a", reason="two\nlines"), "reason"),
        (admin_pb2.SetPolicyRequest(fields={"batch.active": "8" * 101}, author="a"), "fields"),
        (admin_pb2.SetPolicyRequest(fields={"isolate.tenants": "a" * 10_001}, author="a"), "fields"),
        (admin_pb2.SetPolicyRequest(fields={"isolate.tenants": "a\n"}, author="a"), "fields"),
    ],
)
async def test_a_change_without_fields_or_author_is_the_callers_fault(
    mesh: Mesh, request_: admin_pb2.SetPolicyRequest, field: str
) -> None:
    call = admin_pb2_grpc.AdminServiceStub(mesh.admin._channel).SetPolicy(request_)
    with pytest.raises(TrimtabError) as caught:
        await mesh.admin._ask(call)
    assert caught.value.reason == "INVALID_REQUEST"
    assert [v.field for v in caught.value.violations] == [field]


async def test_a_list_may_be_longer_than_other_values(mesh: Mesh) -> None:
    names = [f"customer-{i}" for i in range(500)]
    await mesh.admin.set_policy({"isolate.tenants": ",".join(names)}, author="ada")
    assert list((await mesh.admin.get_policy()).effective.isolate.tenants.names) == names


async def test_all_fields_may_be_set_at_once(mesh: Mesh) -> None:
    everything = {path: text(f.default) for path, f in FIELDS.items()}
    assert len((await mesh.admin.set_policy(everything, author="ada")).changes) == len(FIELDS)


async def test_a_node_nobody_knows_is_named_with_those_known(mesh: Mesh) -> None:
    await mesh.start_node(FakeNode(mesh.address)).holds(1, 1)
    with pytest.raises(TrimtabError, match="known nodes: w0") as caught:
        await mesh.admin.get_policy("w7")
    assert caught.value.reason == "INVALID_REQUEST"


async def test_one_trace_covers_put_push_and_apply(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr("trimtab.kit.telemetry._TRACER", provider.get_tracer("test"))
    node = mesh.start_node(FakeNode(mesh.address))
    await node.holds(1, 1)
    answer = await mesh.admin.set_policy({"batch.active": "8"}, author="ada", reason="less", wait_ms=5000)
    mine = {s.name: s for s in spans.get_finished_spans() if f"{s.context.trace_id:032x}" == answer.trace_id}
    assert set(mine) == {"policy.put", "policy.push", "policy.apply"}
    for child, parent in (("policy.push", "policy.put"), ("policy.apply", "policy.push")):
        above = mine[child].parent
        assert above is not None
        assert above.span_id == mine[parent].context.span_id
    attributes = mine["policy.apply"].attributes or {}
    assert (attributes["trimtab.node"], attributes["trimtab.apply_ms"]) == ("w0", 0.5)
    assert (mine["policy.put"].attributes or {})["trimtab.author"] == "ada"


async def test_metrics_count_puts_and_answers(mesh: Mesh) -> None:
    node = mesh.start_node(FakeNode(mesh.address))
    await node.holds(1, 1)
    await mesh.admin.set_policy({"batch.active": "8"}, author="ada", wait_ms=5000)
    await refused(mesh, "POLICY_REFUSED", batch__active="0")
    read = mesh.metrics.registry.get_sample_value
    assert read("trimtab_control_policy_puts_total", {"outcome": "written"}) == 1
    assert read("trimtab_control_policy_puts_total", {"outcome": "refused"}) == 1
    assert read("trimtab_control_policy_results_total", {"result": "applied"}) == 2
    assert read("trimtab_control_policy_revision") == 2
    assert read("trimtab_control_push_convergence_seconds_count") == 2


async def test_a_control_plane_that_is_not_there_is_unreachable() -> None:
    async with AdminClient(f"127.0.0.1:{free_port()}") as client:
        with pytest.raises(Unreachable, match="--control"):
            await client.fleet()
