"""The policy tree: every field is described, checked and typed by one rule."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trimtab.test_codec import partials, value_of
from trimtab import policy as p
from trimtab.errors import PolicyRefused

KINDS = {
    p.Kind.WHOLE: "batch.active",
    p.Kind.FRACTION: "memory.pressure_threshold",
    p.Kind.CHOICE: "preemption.mode",
    p.Kind.NAMES: "isolate.tenants",
}


def refused(path, value, *, typed):
    with pytest.raises(PolicyRefused) as e:
        p.parse(path, value) if typed else p.check(path, value)
    assert e.value.field == path
    return e.value


@pytest.mark.parametrize("f", p.FIELDS.values(), ids=lambda f: f.path)
def test_every_field_is_hot_or_cold_described_and_takes_its_default(f):
    assert f.hot in (True, False)
    assert f.doc
    assert p.check(f.path, f.default) == f.default
    assert bool(f.choices) == (f.kind is p.Kind.CHOICE)
    assert bool(f.unit) == (f.kind is not p.Kind.CHOICE)
    assert (f.minimum < f.maximum) == f.numeric


@pytest.mark.parametrize("f", [f for f in p.FIELDS.values() if f.choices], ids=lambda f: f.path)
def test_a_choices_description_says_what_each_word_does(f):
    assert [word for word in f.choices if f"({word})" not in f.doc] == []


def test_every_field_of_the_tree_is_listed_once():
    tree = p.Policy()
    paths = [
        f"{part.name}.{f.name}"
        for part in dataclasses.fields(tree)
        for f in dataclasses.fields(getattr(tree, part.name))
    ]
    assert sorted(paths) == sorted(p.FIELDS)
    assert p.flatten(tree) == {path: f.default for path, f in p.FIELDS.items()}


def test_schema_numbers_are_unique_and_without_gap():
    numbers = [*(f.schema for f in p.FIELDS.values()), p.STATE_SCHEMA]
    assert sorted(numbers) == list(range(1, p.POLICY_SCHEMA + 1))


def test_a_rank_of_words_holds_all_of_them():
    for f in p.FIELDS.values():
        assert not f.restrictive or sorted(f.restrictive) == sorted(f.choices), f.path


def test_schema_numbers_of_released_fields_stay():
    """A node of schema 5 knows these five; a number that moved would let it take what it can't obey."""
    assert [path for path, f in p.FIELDS.items() if f.schema <= 5] == [
        "batch.active",
        "prefill.step_tokens",
        "admission.realtime_queue",
        "admission.batch_queue",
        "admission.engine_queue",
    ]


def test_every_field_exists_on_the_wire_under_the_same_path():
    from trimtab.v1 import policy_pb2

    wire = {
        f"{part.name}.{field.name}"
        for part in policy_pb2.Policy.DESCRIPTOR.fields
        for field in part.message_type.fields
    }
    assert wire == set(p.FIELDS)


@given(st.data(), st.sampled_from(sorted(p.FIELDS)))
def test_what_is_shown_is_what_may_be_typed(data, path):
    value = data.draw(value_of(p.FIELDS[path]))
    read = p.parse(path, f" {p.text(value)} ")
    assert type(read) is type(value)
    assert read == pytest.approx(value, rel=1e-11) if isinstance(value, float) else read == value


@pytest.mark.slow
@given(partials)
def test_with_fields_changes_only_what_is_named(partial):
    changed = p.flatten(p.with_fields(p.Policy(), partial))
    assert changed == {**p.flatten(p.Policy()), **partial}


@pytest.mark.parametrize(
    ("path", "typed", "reason", "says"),
    [
        ("batch.active", "0", "OUT_OF_RANGE", "must be between 1 and 4096 requests, not 0"),
        ("batch.active", "-1", "OUT_OF_RANGE", "not -1"),
        ("batch.active", "9" * 4000, "OUT_OF_RANGE", r"not 9{57}\.\.\.$"),
        ("batch.active", "9" * 9000, "WRONG_TYPE", r"not '9{56}\.\.\.$"),
        ("batch.active", "many", "WRONG_TYPE", "must be a whole number of requests, not 'many'"),
        ("batch.active", "1.5", "WRONG_TYPE", "whole number"),
        ("batch.active", "", "WRONG_TYPE", "not ''"),
        ("priority.batch_delta", "-3", "OUT_OF_RANGE", "must be between -2 and 2 levels, not -3"),
        ("prefill.itl_budget_ms", "3600001", "OUT_OF_RANGE", "between 0 and 3600000 milliseconds, not 3600001"),
        ("memory.pressure_threshold", "1.01", "OUT_OF_RANGE", "must be between 0 and 1 of the KV cache, not 1.01"),
        ("memory.pressure_threshold", "85%", "WRONG_TYPE", "must be a number from 0 to 1 of the KV cache, not '85%'"),
        ("memory.pressure_threshold", "nan", "WRONG_TYPE", "not nan"),
        ("memory.pressure_threshold", "-inf", "WRONG_TYPE", "not -inf"),
        ("preemption.mode", "agressive", "OUT_OF_RANGE", "one of none, .*, not 'agressive'; did you mean aggressive?"),
        ("preemption.mode", "xyz", "OUT_OF_RANGE", "must be one of none, conservative, aggressive, not 'xyz'$"),
        ("preemption.mode", "", "OUT_OF_RANGE", "not ''$"),
        ("isolate.tenants", "a" * 201, "OUT_OF_RANGE", "names of 1 to 200 printable characters"),
        ("isolate.tenants", "a\tb", "OUT_OF_RANGE", r"printable.*not 'a\\tb'"),
        ("isolate.tenants", ",".join(map(str, range(1001))), "OUT_OF_RANGE", "must be at most 1000 names, not 1001"),
    ],
    ids=lambda x: str(x)[:24],
)
def test_a_bad_value_is_refused_with_field_bound_and_unit(path, typed, reason, says):
    error = refused(path, typed, typed=True)
    assert error.cause == reason
    assert error.message.startswith(f"{path} must be")
    with pytest.raises(PolicyRefused, match=says):
        raise error


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (p.Kind.WHOLE, True),
        (p.Kind.WHOLE, 4.0),
        (p.Kind.WHOLE, "4"),
        (p.Kind.FRACTION, True),
        (p.Kind.FRACTION, "0.5"),
        (p.Kind.CHOICE, 1),
        (p.Kind.CHOICE, ("none",)),
        (p.Kind.NAMES, "acme"),
        (p.Kind.NAMES, (1,)),
    ],
)
def test_a_value_of_another_kind_is_refused(kind, value):
    assert refused(KINDS[kind], value, typed=False).cause == "WRONG_TYPE"


@pytest.mark.parametrize("name", ["", " a", "a ", "a,b", "a\n"])
def test_a_name_that_could_not_be_typed_is_refused(name):
    assert refused("isolate.tenants", ("acme", name), typed=False).cause == "OUT_OF_RANGE"


def test_numbers_too_large_for_floats_are_refused_like_others():
    for kind in (p.Kind.WHOLE, p.Kind.FRACTION):
        assert refused(KINDS[kind], 10**400, typed=False).cause == "OUT_OF_RANGE"


@pytest.mark.parametrize(
    ("path", "typed", "value"),
    [
        ("batch.active", " 1_024 ", 1024),
        ("priority.realtime_delta", "-2", -2),
        ("memory.pressure_threshold", "1", 1.0),
        ("memory.pressure_threshold", ".5", 0.5),
        ("preemption.mode", " None", "none"),
        ("scheduler.mode", "FCFS", "fcfs"),
        ("isolate.tenants", "b, a,,b", ("b", "a")),
        ("isolate.tenants", " ", ()),
        ("isolate.tenants", "default,", ("default",)),
    ],
)
def test_what_people_type_is_read(path, typed, value):
    assert p.parse(path, typed) == value
    assert type(p.parse(path, typed)) is type(value)


def test_a_mistyped_field_names_the_nearest():
    with pytest.raises(PolicyRefused, match=r"did you mean batch\.active\?"):
        p.parse("batch.activ", "4")


def test_min_schema_counts_only_fields_away_from_their_default():
    assert p.min_schema({path: f.default for path, f in p.FIELDS.items()}) == 0
    assert p.min_schema({"batch.active": 3}, {"admission.engine_queue": 1}) == 5
    assert p.min_schema({"isolate.tenants": ("acme",)}) == p.FIELDS["isolate.tenants"].schema


def test_diff_lists_set_changed_and_unset_fields():
    before = {"batch.active": 1, "prefill.step_tokens": 64, "isolate.tenants": ("a",), "preemption.mode": "none"}
    after = {"batch.active": 2, "admission.engine_queue": 4, "isolate.tenants": (), "preemption.mode": "none"}
    assert [(c.field, c.before, c.after) for c in p.diff(before, after)] == [
        ("batch.active", 1, 2),
        ("prefill.step_tokens", 64, None),
        ("admission.engine_queue", None, 4),
        ("isolate.tenants", ("a",), ()),
    ]


def test_a_field_that_is_like_none_is_answered_with_the_parts_and_not_with_every_name() -> None:
    with pytest.raises(PolicyRefused) as refused:
        p.field("zzzz")
    assert "fields are PART.NAME, of admission, batch," in refused.value.message
    assert "batch.active" not in refused.value.message and len(refused.value.message) < 500
