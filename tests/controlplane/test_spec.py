"""A person's change: what it makes of the document, and what it must not touch."""

from __future__ import annotations

import pytest

from controlplane.spec import change, shown
from trimtab.errors import PolicyRefused
from trimtab.policy import FIELDS, POLICY_SCHEMA, Change, Value
from trimtab.snapshot import Document, Limits, Node, Overlay, Pin, Scope

NOW = 1_000
SMALL = Node("w0", limits=Limits(max_num_seqs=16))


def test_only_named_fields_change_and_the_rest_of_the_document_stays() -> None:
    before = Document(
        {"batch.active": 4, "admission.engine_queue": 2},
        overlays=(Overlay("o", Scope(), {"batch.active": 3}),),
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
