"""What a node makes of a snapshot: order, scopes, folding and refusal."""

import pytest

from trimtab.errors import PolicyRefused
from trimtab.policy import Policy
from trimtab.snapshot import (
    Adjustment,
    Document,
    Identity,
    Limits,
    Node,
    Overlay,
    Pin,
    Scope,
    ScopeKind,
    Verdict,
    judge,
    resolve,
)

NODE = Node("w0", pool="chat", labels={"gpu": "h200"}, limits=Limits(max_num_seqs=64, max_step_tokens=2048))


def an_adjustment(**changes):
    facts = {
        "controller": "batch",
        "field": "batch.active",
        "scope": Scope(),
        "reason": "p99",
        "expires_unix_ms": 1000,
        "factor": 0.5,
    }
    return Adjustment(**{**facts, **changes})


@pytest.mark.parametrize(
    ("held", "pushed", "verdict"),
    [
        (Identity(), Identity(1, 1, b"a"), Verdict.TAKE),
        (Identity(1, 5, b"a"), Identity(1, 6, b"b"), Verdict.TAKE),
        (Identity(1, 5, b"a"), Identity(2, 1, b"b"), Verdict.TAKE),
        (Identity(2, 1, b"a"), Identity(1, 9, b"b"), Verdict.OLDER),
        (Identity(1, 5, b"a"), Identity(1, 5, b"a"), Verdict.SAME),
        (Identity(1, 5, b"a"), Identity(1, 5, b"b"), Verdict.CLASH),
    ],
)
def test_a_snapshot_is_taken_only_when_it_is_greater(held, pushed, verdict):
    assert judge(held, pushed) is verdict


def test_scopes_override_from_weak_to_strong_whatever_their_order():
    def overlay(name, kind, names, active):
        return Overlay(name, Scope(kind, names), {"batch.active": active})

    pool = overlay("p", ScopeKind.POOL, ("chat",), 10)
    label = overlay("l", ScopeKind.LABEL, ("gpu=h200",), 11)
    node = overlay("n", ScopeKind.NODE, ("w0",), 12)
    rollout = overlay("r", ScopeKind.ROLLOUT, ("w0", "w1"), 13)
    other = overlay("o", ScopeKind.NODE, ("w9",), 14)
    layers = [rollout, other, node, label, pool]
    for expected in (13, 12, 11, 10):
        document = Document(base={"batch.active": 9}, overlays=tuple(layers))
        assert resolve(document, NODE, now_unix_ms=0).policy.batch.active == expected
        layers = [x for x in layers if x.policy["batch.active"] != expected]
    assert resolve(Document(base={"batch.active": 9}), NODE, now_unix_ms=0).policy.batch.active == 9


def test_a_value_above_the_engines_limit_is_refused_with_field_limit_and_node():
    with pytest.raises(PolicyRefused) as e:
        resolve(Document(base={"batch.active": 65}), NODE, now_unix_ms=0)
    assert (e.value.cause, e.value.field, e.value.node) == ("ABOVE_ENGINE_LIMIT", "batch.active", "w0")
    assert "max_num_seqs = 64" in str(e.value)


def test_a_default_above_the_engines_limit_is_clamped_and_said():
    small = Node("w1", limits=Limits(max_num_seqs=8, max_step_tokens=512))
    resolved = resolve(Document(), small, now_unix_ms=0)
    assert (resolved.policy.batch.active, resolved.policy.prefill.step_tokens) == (8, 512)
    assert "clamped" in resolved.sources["batch.active"]


def test_a_newer_schema_is_refused_whole():
    with pytest.raises(PolicyRefused) as e:
        resolve(Document(base={"batch.active": 4}, needs_schema=99), NODE, now_unix_ms=0)
    assert e.value.cause == "SCHEMA_TOO_OLD"


def test_adjustments_fold_on_the_spec_until_they_expire():
    document = Document(
        base={"batch.active": 40},
        adjustments=(an_adjustment(), an_adjustment(controller="oom", factor=None, delta=-3)),
    )
    assert resolve(document, NODE, now_unix_ms=999).policy.batch.active == 17
    assert resolve(document, NODE, now_unix_ms=1000).policy.batch.active == 40


def test_adjustments_never_leave_the_fields_bounds():
    document = Document(adjustments=(an_adjustment(factor=None, delta=-500),))
    assert resolve(document, NODE, now_unix_ms=0).policy.batch.active == 1
    document = Document(adjustments=(an_adjustment(factor=None, delta=500),))
    assert resolve(document, NODE, now_unix_ms=0).policy.batch.active == 64


def test_a_pinned_field_ignores_adjustments():
    document = Document(
        base={"batch.active": 40}, adjustments=(an_adjustment(),), pins=(Pin("batch.active", "ann", "holiday"),)
    )
    assert resolve(document, NODE, now_unix_ms=0).policy.batch.active == 40


def test_an_empty_document_gives_the_defaults():
    assert resolve(Document(), Node("w2"), now_unix_ms=0).policy == Policy()


def test_a_step_smaller_than_the_running_set_is_refused_because_decodes_would_starve():
    with pytest.raises(PolicyRefused) as e:
        resolve(Document(base={"batch.active": 16, "prefill.step_tokens": 8}), NODE, now_unix_ms=0)
    assert e.value.cause == "STARVES_DECODES"
