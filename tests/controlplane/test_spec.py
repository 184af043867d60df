"""A person's change: what it makes of the document, and what it must not touch."""

from __future__ import annotations

import pytest

from controlplane.spec import change
from trimtab.errors import PolicyRefused
from trimtab.policy import FIELDS, POLICY_SCHEMA, Change
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
