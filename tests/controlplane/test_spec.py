"""A person's change: what it makes of the document, and what it must not touch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from controlplane.spec import Draft, Spec, adjust, apply, key_of, pin, set_fields, shown, spec_of
from trimtab.errors import PolicyRefused
from trimtab.policy import FIELDS, POLICY_SCHEMA, STATE_SCHEMA, Change, Value
from trimtab.snapshot import (
    Adjustment,
    Document,
    Limits,
    Node,
    Overlay,
    Owner,
    Pin,
    Scope,
    ScopeKind,
    parse_scope,
    resolve,
)

NOW = 1_000
SMALL = Node("w0", limits=Limits(max_num_seqs=16))


def change(document: Document, fields: Mapping[str, str], nodes: Iterable[Node], *, now_unix_ms: int) -> Draft:
    return set_fields(fields)(document, nodes, now_unix_ms)


def test_only_named_fields_change_and_the_rest_of_the_document_stays() -> None:
    before = Document(
        {"batch.active": 4, "admission.engine_queue": 2},
        overlays=(Overlay("pool/x", Scope(ScopeKind.POOL, ("x",)), {"batch.active": 3}),),
        pins=(Pin("batch.active", "ada", ""),),
    )
    draft = change(before, {"batch.active": "1_0"}, (), now_unix_ms=NOW)
    assert draft.document.base == {"batch.active": 10, "admission.engine_queue": 2}
    assert (draft.document.overlays, draft.document.pins) == (before.overlays, before.pins)
    assert draft.changes == (Change("batch.active", 4, 10),)
    assert draft.document.written_unix_ms == NOW
    assert draft.document.needs_schema == FIELDS["admission.engine_queue"].schema


def test_default_takes_a_field_out_of_the_spec() -> None:
    draft = change(Document({"batch.active": 4}), {"batch.active": "Default"}, (), now_unix_ms=NOW)
    assert draft.document.base == {}
    assert draft.changes == (Change("batch.active", 4, None),)
    assert draft.document.needs_schema == 0


@pytest.mark.parametrize(("base", "text"), [({"batch.active": 4}, "4"), ({}, "default")])
def test_what_is_so_already_changes_nothing(base: dict[str, int], text: str) -> None:
    document = Document(base, written_unix_ms=1)
    assert change(document, {"batch.active": text}, (SMALL,), now_unix_ms=NOW) == change(
        document, {}, (), now_unix_ms=NOW
    )
    assert change(document, {"batch.active": text}, (SMALL,), now_unix_ms=NOW).document is document


@pytest.mark.parametrize("text", ["0", "-1", "text", "", "1.5", "4097"])
def test_a_value_that_the_field_cannot_take_is_refused_by_name(text: str) -> None:
    with pytest.raises(PolicyRefused) as caught:
        change(Document(), {"batch.active": text}, (), now_unix_ms=NOW)
    assert caught.value.field == "batch.active"


@pytest.mark.parametrize(
    ("path", "typed", "value"),
    [
        ("memory.pressure_threshold", "0.90", 0.9),
        ("preemption.mode", "None", "none"),
        ("isolate.tenants", "b, a", ("b", "a")),
        ("isolate.tenants", "", ()),
        ("isolate.tenants", "default,", ("default",)),
        ("priority.realtime_delta", "-2", -2),
    ],
)
def test_every_kind_of_field_is_read_as_people_type_it(path: str, typed: str, value: Value) -> None:
    draft = change(Document({path: FIELDS[path].default, "batch.active": 4}), {path: typed}, (SMALL,), now_unix_ms=NOW)
    if value == FIELDS[path].default:
        assert draft.changes == ()
    else:
        assert draft.document.base == {"batch.active": 4, path: value}
        assert draft.changes == (Change(path, FIELDS[path].default, value),)
        assert draft.document.needs_schema == FIELDS[path].schema


def test_a_value_is_shown_as_it_would_be_typed() -> None:
    values: list[Value | None] = [None, 8, 0.9, "none", (), ("a", "b"), ("default",), ("Default",)]
    assert [shown(v) for v in values] == ["default", "8", "0.9", "none", "", "a,b", "default,", "Default,"]


def test_an_unknown_field_is_refused_also_when_it_is_reset() -> None:
    with pytest.raises(PolicyRefused, match=r"did you mean batch\.active"):
        change(Document(), {"batch.activ": "default"}, (), now_unix_ms=NOW)


def test_what_a_connected_node_cannot_do_is_refused_with_field_limit_and_node() -> None:
    with pytest.raises(PolicyRefused, match="max_num_seqs = 16") as caught:
        change(Document(), {"batch.active": "17"}, (Node("w1"), SMALL), now_unix_ms=NOW)
    assert (caught.value.field, caught.value.node, caught.value.cause) == ("batch.active", "w0", "ABOVE_ENGINE_LIMIT")
    assert change(Document(), {"batch.active": "16"}, (SMALL,), now_unix_ms=NOW).document.base == {"batch.active": 16}


def test_a_field_newer_than_a_connected_node_is_refused() -> None:
    with pytest.raises(PolicyRefused) as caught:
        change(Document(), {"admission.engine_queue": "2"}, (Node("old", policy_schema=1),), now_unix_ms=NOW)
    assert caught.value.cause == "SCHEMA_TOO_OLD"


def test_an_old_node_bars_new_fields_of_every_kind_and_takes_old_ones() -> None:
    old = Node("old", policy_schema=5)
    for typed in ({"preemption.mode": "none"}, {"memory.pressure_threshold": "0.9"}, {"isolate.tenants": "acme"}):
        with pytest.raises(PolicyRefused, match="upgrade the node") as caught:
            change(Document(), typed, (old,), now_unix_ms=NOW)
        assert (caught.value.cause, caught.value.node) == ("SCHEMA_TOO_OLD", "old")
    assert change(Document(), {"batch.active": "8"}, (old,), now_unix_ms=NOW).changes
    same = {"preemption.mode": "conservative", "isolate.tenants": ""}
    assert change(Document(), same, (old,), now_unix_ms=NOW).document.needs_schema == 0


def test_a_node_that_refuses_already_does_not_block_changes_that_are_not_to_blame() -> None:
    above = Document({"batch.active": 64})
    draft = change(above, {"admission.batch_queue": "10"}, (SMALL,), now_unix_ms=NOW)
    assert draft.document.base == {"batch.active": 64, "admission.batch_queue": 10}
    with pytest.raises(PolicyRefused):
        change(above, {"batch.active": "63"}, (SMALL,), now_unix_ms=NOW)
    assert change(above, {"batch.active": "8"}, (SMALL,), now_unix_ms=NOW).document.base == {"batch.active": 8}


def test_a_node_that_is_too_old_already_still_bars_further_new_fields() -> None:
    newer = Document({"admission.engine_queue": 2}, needs_schema=POLICY_SCHEMA)
    old = Node("old", policy_schema=1)
    assert change(newer, {"batch.active": "8"}, (old,), now_unix_ms=NOW).document.base["batch.active"] == 8
    with pytest.raises(PolicyRefused):
        change(newer, {"admission.batch_queue": "9"}, (old,), now_unix_ms=NOW)


SLOW = Scope(ScopeKind.POOL, ("slow",))
HERE = Scope(ScopeKind.NODE, ("w0",))


def a_move(field: str = "batch.active", scope: Scope = HERE, *, expires: int = NOW + 1000, **more: Any) -> Adjustment:
    what = {"factor": 0.5} if not {"delta", "state"} & set(more) else {}
    return Adjustment("batch", field, scope, "p99", expires, **{**what, **more})


def adjusted(document: Document, *moves: Adjustment, drop: Iterable[Any] = (), at: int = NOW) -> Draft:
    return adjust(moves, drop)(document, (), at)


def test_a_scope_has_fields_of_its_own_and_loses_its_overlay_with_the_last() -> None:
    draft = set_fields({"batch.active": "4"}, SLOW)(Document({"batch.active": 8}), (), NOW)
    assert draft.document.base == {"batch.active": 8}
    assert draft.document.overlays == (Overlay("pool/slow", SLOW, {"batch.active": 4}),)
    assert draft.changes == (Change("batch.active", None, 4, "pool/slow"),)
    back = set_fields({"batch.active": "default"}, SLOW)(draft.document, (), NOW)
    assert back.document.overlays == ()
    assert back.changes == (Change("batch.active", 4, None, "pool/slow"),)


def test_an_overlay_is_refused_for_what_a_node_of_its_scope_cannot_do_and_only_there() -> None:
    build = set_fields({"batch.active": "17"}, SLOW)
    assert build(Document(), (SMALL,), NOW).changes
    with pytest.raises(PolicyRefused) as caught:
        build(Document(), (dataclasses.replace(SMALL, pool="slow"),), NOW)
    assert caught.value.metadata["node"] == "w0"


def test_a_pin_drops_what_controllers_did_to_the_field_and_keeps_them_off_it() -> None:
    moved = adjusted(Document(), a_move(), a_move("batch.hard_cap")).document
    draft = pin(["batch.active"], True, author="ada", reason="mine")(moved, (), NOW)
    assert draft.document.pins == (Pin("batch.active", "ada", "mine"),)
    assert [a.field for a in draft.document.adjustments] == ["batch.hard_cap"]
    assert draft.changes == (
        Change("batch.active", "free", "pinned", "pin"),
        Change("batch.active", "×0.5", None, "adjustment/batch node/w0"),
    )
    assert not adjusted(draft.document, a_move()).changes
    assert not pin(["batch.active"], True, author="bob", reason="")(draft.document, (), NOW).changes
    free = pin(["batch.active"], False, author="bob", reason="")(draft.document, (), NOW).document
    assert adjusted(free, a_move()).changes


def test_an_adjustment_takes_the_place_of_the_same_controllers_for_the_same_field_and_scope() -> None:
    once = adjusted(Document(), a_move()).document
    twice = adjusted(once, a_move(factor=0.25), a_move(scope=SLOW, factor=None, delta=2)).document
    assert [(str(a.scope), str(a)) for a in twice.adjustments] == [("pool/slow", "+2"), ("node/w0", "×0.25")]
    gone = adjusted(twice, drop=[key_of(twice.adjustments[0])])
    assert [str(a) for a in gone.document.adjustments] == ["×0.25"]
    assert gone.changes == (Change("batch.active", "+2", None, "adjustment/batch pool/slow"),)


def test_a_longer_life_is_a_change_and_what_has_expired_goes_with_the_next() -> None:
    once = adjusted(Document(), a_move(), a_move("batch.hard_cap", expires=NOW + 1)).document
    assert not adjusted(once, a_move()).changes
    longer = adjusted(once, a_move(expires=NOW + 2000), at=NOW + 1)
    assert longer.changes
    assert [a.field for a in longer.document.adjustments] == ["batch.active"]


@pytest.mark.parametrize(
    ("move", "why"),
    [
        (a_move(factor=0.09), "between 0.1 and 1"),
        (a_move(factor=1.5), "between 0.1 and 1"),
        (a_move("preemption.mode"), "is no number"),
        (a_move("preemption.mode", state="none"), "takes no word"),
        (a_move("isolate.action", state="refus"), "no word of"),
        (a_move(expires=NOW), "expiry"),
        (a_move("batch.activ"), "did you mean batch.active"),
        (dataclasses.replace(a_move(), reason=""), "reason"),
    ],
)
def test_a_move_that_a_field_cannot_take_is_refused(move: Adjustment, why: str) -> None:
    with pytest.raises(PolicyRefused, match=why):
        adjusted(Document(), move)


def test_an_adjustment_that_would_starve_decodes_on_a_node_is_refused() -> None:
    spec = Document({"prefill.step_tokens": 64})
    with pytest.raises(PolicyRefused, match="starve"):
        adjust([a_move("prefill.step_tokens")])(spec, (Node("w0"),), NOW)


def test_words_need_nodes_that_see_them() -> None:
    draft = adjusted(Document(), a_move("isolate.action", state="refuse"))
    assert draft.document.needs_schema == STATE_SCHEMA
    resolved = resolve(draft.document, SMALL, now_unix_ms=NOW)
    assert resolved.policy.isolate.action == "refuse"
    assert "alone → refuse by batch (p99)" in resolved.sources["isolate.action"]


def test_an_adjustment_of_a_newer_field_needs_nodes_that_know_it() -> None:
    newest = max((f for f in FIELDS.values() if f.numeric), key=lambda f: f.schema)
    draft = adjusted(Document(), a_move(newest.path))
    assert draft.document.needs_schema == newest.schema


def test_a_whole_spec_leaves_what_others_own() -> None:
    canary = Overlay("canary", Scope(ScopeKind.ROLLOUT, ("w1",)), {"batch.active": 2}, Owner.ROLLOUT)
    before = adjusted(Document({"batch.active": 8}, (canary,)), a_move("batch.hard_cap")).document
    spec = Spec({"paths.hot_below": 100}, {SLOW: {"batch.active": 4}}, (Pin("batch.active", "ada", ""),))
    after = apply(spec)(before, (), NOW).document
    assert spec_of(after) == spec
    assert canary in after.overlays
    assert after.adjustments == before.adjustments
    assert not apply(spec)(after, (), NOW).changes


def test_a_rollouts_scope_is_not_peoples() -> None:
    rollout = Scope(ScopeKind.ROLLOUT, ("w0",))
    with pytest.raises(PolicyRefused):
        apply(Spec(overlays={rollout: {"batch.active": 4}}))(Document(), (), NOW)


@pytest.mark.parametrize("said", ["pool", "pool/", "label/x", "label/=x", "rollout/w0", "node/ w0", "pool/a\nb", "x/y"])
def test_what_is_no_scope_is_refused(said: str) -> None:
    with pytest.raises(PolicyRefused):
        parse_scope(said)


@pytest.mark.parametrize("said", ["pool/slow", "label/gpu=h200", "node/w0", ""])
def test_a_scope_reads_as_it_is_written(said: str) -> None:
    assert str(parse_scope(said)) == said
