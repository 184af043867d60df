"""What a node makes of a snapshot: order, scopes, folding and refusal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trimtab.test_codec import documents
from trimtab.errors import PolicyRefused
from trimtab.policy import FIELDS, POLICY_SCHEMA, Policy, flatten
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
    fold,
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
        resolve(Document(base={"batch.active": 4}, needs_schema=POLICY_SCHEMA + 1), NODE, now_unix_ms=0)
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


@pytest.mark.parametrize(
    ("spec", "factor", "delta", "folded"),
    [
        (0.85, 0.5, 0, 0.425),
        (0.85, None, -1, 0.0),
        (0.15, None, 1, 0.9),
        (1.0, 0.1, 0, 0.1),
        (48, 0.5, 0, 24),
        (49, 0.5, 0, 24),
        (-2, 0.5, 0, -1),
    ],
)
def test_fractions_stay_fractions_and_whole_numbers_whole(spec, factor, delta, folded):
    low, high = (0.0, 0.9 if spec == 0.15 else 1.0) if isinstance(spec, float) else (-2, 4096)
    result = fold(spec, [an_adjustment(factor=factor, delta=delta)], low, high)
    assert result == pytest.approx(folded)
    assert type(result) is type(spec)


def test_a_fraction_is_adjusted_on_the_spec_and_says_so():
    adjustment = an_adjustment(field="memory.pressure_threshold", controller="memory", reason="forecast 0.95")
    resolved = resolve(Document({"memory.pressure_threshold": 0.9}, adjustments=(adjustment,)), NODE, now_unix_ms=0)
    assert resolved.policy.memory.pressure_threshold == pytest.approx(0.45)
    assert resolved.sources["memory.pressure_threshold"] == "spec, 0.9 → 0.45 by memory (forecast 0.95)"


@pytest.mark.parametrize("path", ["preemption.mode", "isolate.tenants"])
def test_words_and_lists_ignore_adjustments(path):
    moves = (an_adjustment(field=path), an_adjustment(field=path, factor=None, delta=1))
    resolved = resolve(Document(adjustments=moves), NODE, now_unix_ms=0)
    assert flatten(resolved.policy)[path] == FIELDS[path].default
    assert resolved.sources[path] == "default"


def test_every_kind_of_field_is_overridden_by_the_narrower_scope():
    base = {"preemption.mode": "none", "isolate.tenants": ("a", "b"), "memory.pressure_threshold": 0.5}
    mine = {"preemption.mode": "aggressive", "isolate.tenants": (), "memory.pressure_threshold": 0.0}
    document = Document(base, overlays=(Overlay("o", Scope(ScopeKind.NODE, ("w0",)), mine),))
    for node, expected in ((NODE, mine), (Node("w9"), base)):
        found = flatten(resolve(document, node, now_unix_ms=0).policy)
        assert {path: found[path] for path in base} == expected


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("preemption.mode", "sometimes", "OUT_OF_RANGE"),
        ("isolate.tenants", ("a,b",), "OUT_OF_RANGE"),
        ("memory.pressure_threshold", 1.5, "OUT_OF_RANGE"),
        ("memory.pressure_threshold", float("nan"), "WRONG_TYPE"),
        ("priority.batch_delta", -3, "OUT_OF_RANGE"),
    ],
)
def test_a_document_that_holds_what_no_field_takes_is_refused_by_the_node(path, value, reason):
    with pytest.raises(PolicyRefused) as e:
        resolve(Document({path: value}), NODE, now_unix_ms=0)
    assert (e.value.cause, e.value.field) == (reason, path)


@pytest.mark.parametrize(
    ("window", "inactive"),
    [
        (0, ()),
        (131072, ()),
        (65536, ("isolate.from_tokens",)),
        (16384, ("isolate.from_tokens", "block_plan.mixed_from")),
        (8193, ("isolate.from_tokens", "block_plan.mixed_from")),
        (8192, ("serial.above", "isolate.from_tokens", "block_plan.mixed_from")),
        (4096, ("paths.hot_below", "serial.above", "isolate.from_tokens", "block_plan.mixed_from")),
    ],
)
def test_a_threshold_that_no_prompt_in_the_window_reaches_is_inactive(window, inactive):
    node = Node("w0", limits=Limits(max_model_len=window))
    assert resolve(Document(), node, now_unix_ms=0).inactive == inactive


@pytest.mark.slow
@given(documents, st.builds(Limits, *[st.integers(0, 8192)] * 3))
def test_resolving_gives_a_policy_within_the_engines_limits_or_a_refusal_with_a_reason(document, limits):
    resolved, cause = None, ""
    try:
        resolved = resolve(document, Node("w0", limits=limits), now_unix_ms=0)
    except PolicyRefused as refusal:
        cause = refusal.cause
    if resolved is None:
        assert cause in {"SCHEMA_TOO_OLD", "ABOVE_ENGINE_LIMIT", "STARVES_DECODES"}
        return
    for path, value in flatten(resolved.policy).items():
        assert FIELDS[path].check(value) == value
        assert isinstance(value, str | tuple) or value <= (limits.of(FIELDS[path].limit) or value)
    assert set(resolved.sources) == set(FIELDS)


def test_an_empty_document_gives_the_defaults():
    assert resolve(Document(), Node("w2"), now_unix_ms=0).policy == Policy()


def test_a_step_smaller_than_the_running_set_is_refused_because_decodes_would_starve():
    with pytest.raises(PolicyRefused) as e:
        resolve(Document(base={"batch.active": 16, "prefill.step_tokens": 8}), NODE, now_unix_ms=0)
    assert e.value.cause == "STARVES_DECODES"


def test_a_factor_takes_its_share_of_what_the_engine_can_do():
    """A default beyond the engine's limit is clamped first: half of 48, clamped to 16 afterwards, would change nothing."""
    small = Node("w0", limits=Limits(max_num_seqs=16, max_step_tokens=8192))
    half = Adjustment("oom", "batch.active", Scope(), "out of memory", 10_000, factor=0.5)
    resolved = resolve(Document(adjustments=(half,)), small, now_unix_ms=0)
    assert resolved.policy.batch.active == 8
