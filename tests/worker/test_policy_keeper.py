"""The worker's policy: whole or not at all, newest only, and kept over a restart."""

import asyncio
import hashlib
import json

import pytest

from services.control import PolicyKeeper
from tests.worker.conftest import running_worker
from trimtab import codec
from trimtab.policy import POLICY_SCHEMA
from trimtab.snapshot import Adjustment, Document, Identity, Node, Scope, Snapshot
from trimtab.v1 import control_pb2, policy_pb2


def a_snapshot(epoch=1, revision=1, *, needs_schema=0, adjustments=(), **fields):
    base = {k.replace("__", "."): v for k, v in fields.items()}
    return codec.seal(
        Document(base=base, needs_schema=needs_schema, adjustments=adjustments), epoch=epoch, revision=revision
    )


async def push(rig, snapshot, sent_unix_ms=0):
    return await rig.keeper.on_push(snapshot, sent_unix_ms, "tp")


async def test_a_greater_snapshot_is_applied_and_answered(rig):
    result = await push(rig, a_snapshot(batch__active=3))
    assert result.WhichOneof("result") == "applied"
    assert result.applied.step_no == rig.engine.pulse().step_no + 1
    assert result.traceparent == "tp"
    assert rig.engine._value.rules.active == 3
    assert rig.keeper.held == Identity(1, 1)


async def test_every_kind_of_field_reaches_engine_and_queue(rig):
    kinds = {
        "memory__pressure_threshold": 0.5,
        "preemption__mode": "none",
        "isolate__tenants": ("acme",),
        "priority__batch_delta": -1,
        "scheduler__mode": "fcfs",
    }
    assert (await push(rig, a_snapshot(**kinds))).HasField("applied")
    for rules in (rig.engine._value.rules, rig.gate._rules):
        found = (rules.pressure_threshold, rules.preemption, rules.isolate_tenants, rules.batch_delta, rules.mode)
        assert found == (0.5, "none", {"acme"}, -1, "fcfs")


def a_word_of_a_newer_build():
    pb = policy_pb2.PolicyDocument()
    pb.base.scheduler.mode = 77
    document = pb.SerializeToString()
    return Snapshot(Identity(1, 6, hashlib.sha256(document).digest()), document)


@pytest.mark.parametrize(
    ("snapshot", "reason", "field"),
    [
        (a_snapshot(1, 6, batch__active=9999), "OUT_OF_RANGE", "batch.active"),
        (a_snapshot(1, 6, batch__active=9), "ABOVE_ENGINE_LIMIT", "batch.active"),
        (a_snapshot(1, 6, needs_schema=POLICY_SCHEMA + 1), "SCHEMA_TOO_OLD", ""),
        (a_snapshot(1, 6, batch__active=4, prefill__step_tokens=2), "STARVES_DECODES", "prefill.step_tokens"),
        (a_snapshot(1, 6, preemption__max_preemptions=1001), "OUT_OF_RANGE", "preemption.max_preemptions"),
        (a_word_of_a_newer_build(), "UNKNOWN_WORD", "scheduler.mode"),
        (Snapshot(Identity(1, 6, b""), b"\xff\xff"), "MALFORMED", ""),
    ],
)
async def test_a_refused_snapshot_changes_nothing(rig, snapshot, reason, field):
    await push(rig, a_snapshot(1, 5, batch__active=3))
    result = await push(rig, snapshot)
    assert (result.refused.reason, result.refused.field) == (reason, field)
    assert rig.keeper.held == Identity(1, 5)
    assert (rig.engine._value.rules.active, rig.keeper.resolved.policy.batch.active) == (3, 3)


async def test_an_older_snapshot_is_answered_with_what_is_held(rig):
    await push(rig, a_snapshot(2, 1, batch__active=3))
    result = await push(rig, a_snapshot(1, 9, batch__active=5))
    assert codec.decode_identity(result.ignored_holding) == Identity(2, 1)
    assert rig.engine._value.rules.active == 3


async def test_the_same_snapshot_again_is_applied_and_other_content_is_a_clash(rig):
    await push(rig, a_snapshot(1, 1, batch__active=3))
    assert (await push(rig, a_snapshot(1, 1, batch__active=3))).HasField("applied")
    assert (await push(rig, a_snapshot(1, 1, batch__active=4))).refused.reason == "DIGEST_CLASH"
    assert rig.engine._value.rules.active == 3


async def test_the_last_good_policy_is_there_after_a_restart(tmp_path):
    path = tmp_path / "policy.json"
    async with running_worker(path) as rig:
        await push(rig, a_snapshot(3, 7, batch__active=2))
        await push(rig, a_snapshot(3, 8, batch__active=9999))
    async with running_worker(path) as rig:
        assert rig.keeper.held == Identity(3, 7)
        assert rig.engine._value.rules.active == 2


@pytest.mark.parametrize("damage", ["truncated", "document", "not json"])
async def test_a_damaged_file_is_passed_over(tmp_path, damage):
    path = tmp_path / "policy.json"
    async with running_worker(path) as rig:
        await push(rig, a_snapshot(3, 7, batch__active=2))
    row = json.loads(path.read_text())
    if damage == "document":
        push_ = control_pb2.PolicyPush.FromString(bytes.fromhex(row["push"]))
        push_.snapshot.document = a_snapshot(batch__active=5).document
        row["push"] = push_.SerializeToString().hex()
    text = {"truncated": path.read_text()[:40], "document": json.dumps(row), "not json": "{"}[damage]
    path.write_text(text)
    async with running_worker(path) as rig:
        assert rig.keeper.held == Identity()
        assert rig.engine._value.rules.active == 8


async def test_an_adjustment_expires_by_itself(rig):
    applied, apply = [], rig.engine.apply

    async def watched(policy):
        applied.append(policy.batch.active)
        return await apply(policy)

    # Watched, since the push's answer may come when the 50 ms are over already.
    rig.engine.apply = watched
    adjustment = Adjustment("batch", "batch.active", Scope(), "p99", expires_unix_ms=1_000_050, factor=0.5)
    await push(rig, a_snapshot(batch__active=6, adjustments=(adjustment,)), sent_unix_ms=1_000_000)
    async with asyncio.timeout(20):
        while rig.engine._value.rules.active != 6:
            await asyncio.sleep(0.01)
    assert applied == [3, 6]


async def test_an_unwritable_directory_does_not_stop_the_policy(rig, tmp_path):
    async def obey(policy):
        return 1

    keeper = PolicyKeeper(Node("w0", limits=rig.engine.limits), obey, tmp_path / "no" / "dir" / "p.json")
    await keeper.start()
    result = await keeper.on_push(a_snapshot(batch__active=2), 0, "")
    assert result.HasField("applied")


async def test_an_expiry_that_waits_behind_a_newer_policy_does_not_bring_the_old_one_back(rig):
    adjustment = Adjustment("batch", "batch.active", Scope(), "p99", expires_unix_ms=1_000_020, factor=0.5)
    await push(rig, a_snapshot(1, 1, batch__active=6, adjustments=(adjustment,)), sent_unix_ms=1_000_000)
    async with rig.keeper._applying:
        await asyncio.sleep(0.05)
        newer = asyncio.create_task(push(rig, a_snapshot(1, 2, batch__active=7)))
        await asyncio.sleep(0)
    await newer
    await asyncio.sleep(0.05)
    assert (rig.keeper.held, rig.engine._value.rules.active) == (Identity(1, 2), 7)
