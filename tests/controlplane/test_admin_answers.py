"""Answers about a large mesh: they fit into one message, and put together what several replicas know."""

from __future__ import annotations

import asyncio

from controlplane.admin.encode import decode_spec, encode_member, encode_spec, freshest, one_leader
from controlplane.answers import Answers
from controlplane.fleet import Fleet
from controlplane.spec import Spec
from controlplane.store import Answer, Entry
from controlplane.store.memory import MemoryStore
from tests.controlplane.mesh import a_mesh, an_identity
from tests.controlplane.test_fleet import a_hello
from trimtab.kit.rpc import MAX_MESSAGE_BYTES, cancel_and_wait
from trimtab.messages import NodeState, Report
from trimtab.v1 import admin_pb2


def test_a_spec_comes_back_to_the_last_digit() -> None:
    """Else what is shown, applied and rolled back is another policy than that which was written."""
    spec = Spec({"memory.pressure_threshold": 0.4225757203132733, "isolate.tenants": ("default",)})
    assert decode_spec(encode_spec(spec), author="", reason="") == spec


def test_of_several_replicas_that_know_a_node_the_one_that_it_is_connected_to_counts() -> None:
    fleet = Fleet()
    moved, _ = fleet.joined(a_hello(), 0.0)
    here = encode_member(fleet.local()[0], 9.0)
    fleet.lost(moved, 9.0)
    gone = encode_member(fleet.local()[0], 9.0)
    late = encode_member(fleet.local()[0], 20.0)
    assert freshest([gone, here]) == freshest([here, late]) == {"w0": here}
    assert freshest([late, gone]) == {"w0": gone}


def test_of_two_that_say_they_lead_the_one_of_the_newer_term_does() -> None:
    asleep = admin_pb2.ReplicaState(replica_id="a", leader=True, term=3)
    awake = admin_pb2.ReplicaState(replica_id="b", leader=True, term=4)
    follower = admin_pb2.ReplicaState(replica_id="c")
    assert [r.leader for r in one_leader([asleep, awake, follower])] == [False, True, False]


async def test_the_refusals_of_a_thousand_nodes_can_be_asked_for() -> None:
    async with a_mesh() as mesh:
        said = "x" * 2000
        rows = [Answer(f"w{i}", "i", an_identity(1, i), "refused", i, 0.0, "R", said) for i in range(9000)]
        await mesh.store.record_answers(rows)
        found = (await mesh.admin.answers(100_000)).answers
        assert found[0].node_id == "w8999"
        assert len(found) > 1000


async def test_a_history_of_long_reasons_can_be_asked_for() -> None:
    async with a_mesh() as mesh:
        for i in range(1000):
            await mesh.store.record_refused(
                Entry(an_identity(1, 1), 0, "ada", "x" * 2000, i, refused_because="y" * 20_000)
            )
        found = (await mesh.admin.history(1024)).entries
        assert found[0].written_unix_ms == 999
        assert len(found) > 100


def test_nodes_with_all_that_they_may_report_of_sketches_fit_into_a_message() -> None:
    fleet = Fleet()
    sketches = {f"s{k}": b"x" * (64 << 10) for k in range(6)}
    for i in range(50):
        session, _ = fleet.joined(a_hello(f"w{i}"), 0.0)
        fleet.reported(session, Report(1, NodeState.SERVING, sketches=sketches), 1.0)
    assert admin_pb2.GetFleetResponse(nodes=[encode_member(m, 2.0) for m in fleet]).ByteSize() < MAX_MESSAGE_BYTES


async def test_what_nodes_answered_just_before_a_replica_ends_is_kept() -> None:
    store = MemoryStore()
    log = Answers(store)
    running = asyncio.create_task(log.run())
    await asyncio.sleep(0)
    said = Answer("w0", "i", an_identity(1, 2), "applied", 7)
    log.add(said)
    await cancel_and_wait(running)
    assert await store.answers() == [said]
