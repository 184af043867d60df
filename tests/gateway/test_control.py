"""The gateway's policy: taken whole, refused with a reason, kept on disk, expiring by itself."""

from __future__ import annotations

import time

from services.gateway.control import PolicyHolder
from trimtab.codec import seal
from trimtab.policy import POLICY_SCHEMA, Policy
from trimtab.snapshot import Adjustment, Document, Identity, Node, Scope


def a_holder(tmp_path) -> PolicyHolder:
    return PolicyHolder(Node("g0"), tmp_path / "policy.json")


def a_snapshot(queue: int = 7, *, revision: int = 1, **more):
    return seal(Document(base={"admission.realtime_queue": queue}, **more), epoch=1, revision=revision)


async def test_a_push_is_applied_and_answered(tmp_path):
    holder = a_holder(tmp_path)
    assert holder.policy() == Policy()
    answer = await holder.on_push(a_snapshot(), 1000, "00-trace")
    assert answer.WhichOneof("result") == "applied"
    assert (answer.traceparent, answer.identity.revision) == ("00-trace", 1)
    assert holder.policy().admission.realtime_queue == 7


async def test_an_older_one_is_answered_with_what_is_held(tmp_path):
    holder = a_holder(tmp_path)
    await holder.on_push(a_snapshot(revision=2), 1000, "")
    answer = await holder.on_push(a_snapshot(3, revision=1), 1000, "")
    assert answer.ignored_holding.revision == 2
    assert holder.policy().admission.realtime_queue == 7


async def test_other_content_under_the_same_identity_is_an_error(tmp_path):
    holder = a_holder(tmp_path)
    await holder.on_push(a_snapshot(7), 1000, "")
    assert (await holder.on_push(a_snapshot(7), 1000, "")).WhichOneof("result") == "applied"
    assert (await holder.on_push(a_snapshot(8), 1000, "")).refused.reason == "DIGEST_CLASH"


async def test_a_newer_schema_is_refused_and_changes_nothing(tmp_path):
    holder = a_holder(tmp_path)
    await holder.on_push(a_snapshot(), 1000, "")
    answer = await holder.on_push(a_snapshot(9, revision=2, needs_schema=POLICY_SCHEMA + 1), 1000, "")
    assert answer.refused.reason == "SCHEMA_TOO_OLD"
    assert holder.policy().admission.realtime_queue == 7
    assert holder.held == Identity(1, 1)


async def test_the_last_good_one_survives_a_restart(tmp_path):
    await a_holder(tmp_path).on_push(a_snapshot(), 1000, "")
    again = a_holder(tmp_path)
    again.load()
    assert again.held == Identity(1, 1)
    assert again.policy().admission.realtime_queue == 7


async def test_a_file_that_cant_be_trusted_is_passed_over(tmp_path):
    (tmp_path / "policy.json").write_text('{"push": "00", "received_unix_ms": 1}')
    holder = a_holder(tmp_path)
    holder.load()
    assert holder.held == Identity()


async def test_an_adjustment_expires_by_the_monotonic_clock(tmp_path, monkeypatch):
    holder = a_holder(tmp_path)
    halved = Adjustment("overload", "admission.realtime_queue", Scope(), "busy", expires_unix_ms=6000, factor=0.5)
    await holder.on_push(a_snapshot(8, adjustments=(halved,), written_unix_ms=1000), 1000, "")
    assert holder.policy().admission.realtime_queue == 4
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 5.1)
    assert holder.policy().admission.realtime_queue == 8
