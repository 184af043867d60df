"""The policy tree: every field is described, checked and typed by one rule."""

import pytest

from trimtab import policy as p
from trimtab.errors import PolicyRefused


def test_every_field_is_hot_or_cold_and_its_default_is_inside_its_bounds():
    for path, f in p.FIELDS.items():
        assert f.hot in (True, False), path
        assert f.minimum <= f.default <= f.maximum, path
        assert f.unit and f.doc, path


def test_schema_numbers_are_unique_and_without_gap():
    assert sorted(f.schema for f in p.FIELDS.values()) == list(range(1, p.POLICY_SCHEMA + 1))


def test_every_field_exists_on_the_wire_under_the_same_path():
    from trimtab.v1 import policy_pb2

    wire = {
        f"{part.name}.{field.name}"
        for part in policy_pb2.Policy.DESCRIPTOR.fields
        for field in part.message_type.fields
    }
    assert wire == set(p.FIELDS)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("0", "OUT_OF_RANGE"), ("-1", "OUT_OF_RANGE"), ("many", "WRONG_TYPE"), ("1.5", "WRONG_TYPE"), ("", "WRONG_TYPE")],
)
def test_a_bad_value_is_refused_with_its_reason(text, reason):
    with pytest.raises(PolicyRefused) as e:
        p.parse("batch.active", text)
    assert e.value.cause == reason
    assert e.value.field == "batch.active"


def test_a_mistyped_field_names_the_nearest():
    with pytest.raises(PolicyRefused, match=r"did you mean batch\.active\?"):
        p.parse("batch.activ", "4")


def test_with_fields_changes_only_what_is_named():
    changed = p.with_fields(p.Policy(), {"batch.active": 3})
    assert changed.batch.active == 3
    assert changed.prefill == p.Policy().prefill


def test_min_schema_counts_only_fields_away_from_their_default():
    assert p.min_schema({"batch.active": p.FIELDS["batch.active"].default}) == 0
    assert p.min_schema({"batch.active": 3}, {"admission.engine_queue": 1}) == 5


def test_diff_lists_set_changed_and_unset_fields():
    changes = p.diff({"batch.active": 1, "prefill.step_tokens": 64}, {"batch.active": 2, "admission.engine_queue": 4})
    assert [(c.field, c.before, c.after) for c in changes] == [
        ("batch.active", 1, 2),
        ("prefill.step_tokens", 64, None),
        ("admission.engine_queue", None, 4),
    ]
