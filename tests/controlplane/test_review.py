"""What a review found, and must not come back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from controlplane import gatekeeper, spec
from controlplane.access import Grant, Role
from controlplane.admin.client import AdminClient
from controlplane.admin.writing import Writer, apply_work
from controlplane.gatekeeper import AccessFile
from controlplane.metrics import ControlMetrics
from controlplane.server import ControlPlane
from controlplane.store import ANSWERS_BATCH, Answer, Entry, Stored, Write, WriteKind
from controlplane.store import redis as redis_store
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from services.control.keeper import PolicyKeeper
from tests.controlplane.mesh import PATIENCE_S, ROOMY, FakeNode, Mesh, a_mesh, a_snapshot, an_identity
from trimtab import codec
from trimtab.kit.tls import Caller
from trimtab.policy import Policy
from trimtab.snapshot import Adjustment, Document, Identity, Node, Pin, Scope, ScopeKind
from trimtab.v1 import admin_pb2, policy_pb2

LATER = 1 << 50
TOKEN = "a token of 20 chars."


@pytest.fixture
async def store(valkey_address: str) -> AsyncIterator[RedisStore]:
    opened = RedisStore(valkey_address, uuid.uuid4().hex)
    yield opened
    await opened.close()


async def put(store: RedisStore) -> Stored:
    stored = Stored(a_snapshot(1, 1, batch__active=8), 1, "ada", "why", 1)
    await store.put(Write(stored, Identity(), uuid.uuid4().hex))
    return stored


async def test_a_store_that_the_build_before_wrote_is_read(store: RedisStore) -> None:
    stored = await put(store)
    new = ("epoch", "revision", "spec_version", "refused_because", "kind", "term", "evidence")
    await store._at.redis.execute_command("HDEL", store._policy, *new)
    found = await store.load()
    assert found is not None
    assert (found.snapshot, found.author) == (stored.snapshot, "ada")


@pytest.mark.parametrize("fields", [("kind", "rollout"), ("changes", "no json"), ("term", "x")])
async def test_what_this_build_cannot_read_in_the_store_ends_no_follower(store: RedisStore, fields: Any) -> None:
    """A newer build may have written it."""
    await put(store)
    await store._at.redis.execute_command("HSET", store._policy, *fields)
    async with contextlib.aclosing(store.watch()) as states:
        await anext(states)


async def test_refused_attempts_push_no_write_out_of_the_past(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controlplane.store.redis.PAST_LENGTH", 3)
    stored = await put(store)
    for i in range(5):
        entry = Entry(stored.identity, 1, "robot", "", i, refused_because="no", kind=WriteKind.REFUSED)
        await store.record_refused(entry)
    assert await store.revision(1, 1) == stored.snapshot


@pytest.mark.slow
async def test_reading_what_nodes_answered_lets_others_run_in_between(
    store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [Answer(f"w{i}", "i", an_identity(1, 1), "applied", i) for i in range(100 * ANSWERS_BATCH)]
    await store.record_answers(rows)
    ticks = 0
    decoded_at: list[int] = []
    real = redis_store.decode_answers

    def decode(data: bytes) -> list[Answer]:
        decoded_at.append(ticks)
        return real(data)

    monkeypatch.setattr(redis_store, "decode_answers", decode)

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    await store.answers()
    ticking.cancel()
    assert max(decoded_at.count(at) for at in set(decoded_at)) <= 25


def test_a_move_of_one_node_looks_at_each_scope_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def on(i: int) -> Scope:
        return Scope(ScopeKind.NODE, (f"w{i}",))

    many = 100
    document = Document(
        adjustments=tuple(Adjustment("batch", "batch.active", on(i), "p99", LATER, factor=0.5) for i in range(many))
    )
    looks = 0
    real = Scope.covers

    def covers(self: Scope, node: Node) -> bool:
        nonlocal looks
        looks += 1
        return real(self, node)

    monkeypatch.setattr(Scope, "covers", covers)
    move = Adjustment("batch", "batch.active", on(5), "p99", LATER + 1, factor=0.5)
    spec.adjust([move])(document, [Node(f"w{i}") for i in range(many)], 1)
    assert looks <= 10 * many


def test_a_pins_reason_is_written() -> None:
    before = Document(pins=(Pin("batch.active", "ada", "old"),))
    after = spec.apply(spec.Spec(pins=(Pin("batch.active", "ada", "new"),)))(before, (), 1)
    assert after.document.pins[0].reason == "new"


async def test_adjustments_expire_also_after_an_expiry_that_the_node_could_not_obey(tmp_path: Path) -> None:
    async def obey(policy: Policy) -> int:
        return 1

    keeper = PolicyKeeper(Node("w0", limits=ROOMY), obey, tmp_path / "policy")
    await keeper.start()
    sent = 1000
    document = Document(
        {"batch.active": 40, "prefill.step_tokens": 40},
        adjustments=(
            Adjustment("batch", "batch.active", Scope(), "p99", sent + 1, factor=0.25),
            Adjustment("memory", "prefill.step_tokens", Scope(), "full", sent + 2, factor=0.5),
        ),
        written_unix_ms=sent,
    )
    answer = await keeper.on_push(codec.seal(document, epoch=1, revision=1), sent, "")
    assert answer.HasField("applied")
    async with asyncio.timeout(2):
        # At sent + 1 ms: 40 requests and 20 tokens, which no node takes. At sent + 2 ms both are as the spec says.
        while keeper.resolved.policy.batch.active != 40:
            await asyncio.sleep(0.001)


async def test_an_operator_pins_nothing_in_the_name_of_another() -> None:
    async with a_mesh() as mesh:
        oncall = Grant(Caller("operator", "oncall", "certificate"), Role.OPERATOR)
        token = gatekeeper._granted.set(oncall)
        try:
            await writer_of(mesh).write(a_request(), apply_work, "")
        finally:
            gatekeeper._granted.reset(token)
        stored = await mesh.store.load()
        assert stored is not None
        assert [p.author for p in codec.decode_document(stored.snapshot.document).pins] == ["oncall"]


def writer_of(mesh: Mesh) -> Writer:
    plane = mesh.plane
    return Writer(plane.replica, plane.fleet, plane.control.answers, mesh.metrics, plane.peers)


def a_request() -> admin_pb2.ApplyPolicyRequest:
    pins = [policy_pb2.Pin(field="batch.active", author="ada", reason="mine")]
    return admin_pb2.ApplyPolicyRequest(spec=admin_pb2.PolicySpec(pins=pins), author="x", reason="")


async def test_with_tokens_and_without_tls_a_replica_is_still_answered_by_the_others(tmp_path: Path) -> None:
    access = tmp_path / "access.toml"
    access.write_text(
        f'[[token]]\nname = "ada"\nrole = "admin"\nsha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"\n'
    )
    store = MemoryStore()
    planes = [
        ControlPlane(store, "127.0.0.1:0", ControlMetrics(CollectorRegistry()), access=AccessFile(access))
        for _ in range(2)
    ]
    try:
        for plane in planes:
            await plane.start()
            await plane.loaded()
        node = FakeNode(planes[1].address)
        node.start()
        await node.holds(1, 1)
        async with AdminClient(planes[0].address, token=TOKEN) as admin, asyncio.timeout(PATIENCE_S):
            while not (nodes := (await admin.fleet()).nodes):
                await asyncio.sleep(0.01)
        await node.stop()
        assert [n.policy.applied.revision for n in nodes] == [1]
    finally:
        for plane in planes:
            await plane.stop()
