"""The spec as a file: read, written, and what its schema says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from controlplane.spec import Spec
from controlplane.spec_file import read, schema, write
from trimtab.errors import InvalidRequest
from trimtab.policy import FIELDS
from trimtab.snapshot import Document, Overlay, Pin, Scope, ScopeKind

PUBLISHED = Path(__file__).parents[2] / "docs" / "policy.schema.json"
SLOW = Scope(ScopeKind.POOL, ("slow",))
WHOLE = """
expect_version: 12
fields:
  batch: {active: 8, hard_cap: default}
  prefill.itl_budget_ms: 50
  isolate: {tenants: [acme, "ünï"], action: refuse}
  memory: {pressure_threshold: 0.9}
overlays:
  - pool: slow
    fields: {batch: {active: 4}}
  - label: gpu=h200
    fields: {batch.active: 16}
pins:
  - batch.active
  - {field: paths.hot_below, reason: mine, author: ada}
"""


def faults(text: str) -> dict[str, str]:
    with pytest.raises(InvalidRequest) as caught:
        read(text)
    return {v.field: v.description for v in caught.value.violations}


def test_a_file_is_read_whole() -> None:
    found = read(WHOLE)
    assert found.expect_version == 12
    assert found.spec == Spec(
        {
            "batch.active": 8,
            "prefill.itl_budget_ms": 50,
            "isolate.tenants": ("acme", "ünï"),
            "isolate.action": "refuse",
            "memory.pressure_threshold": 0.9,
        },
        {SLOW: {"batch.active": 4}, Scope(ScopeKind.LABEL, ("gpu=h200",)): {"batch.active": 16}},
        (Pin("batch.active", "", ""), Pin("paths.hot_below", "ada", "mine")),
    )


@pytest.mark.parametrize("text", ["", "fields:", "{}", "# nothing\n"])
def test_an_empty_file_sets_nothing(text: str) -> None:
    assert read(text).spec == Spec()


def test_what_is_written_reads_back() -> None:
    values = {f.path: f.default for f in FIELDS.values()} | {"isolate.tenants": ("default", "1", "a b", "ünï")}
    document = Document(values, (Overlay("o", SLOW, {"batch.active": 4}),), pins=(Pin("batch.active", "ada", "why"),))
    text = write(document, 3)
    found = read(text)
    assert found.expect_version == 3
    assert found.spec == Spec(values, {SLOW: {"batch.active": 4}}, document.pins)
    assert read(write(Document(), None)).spec == Spec()


def test_every_fault_is_named_at_its_place() -> None:
    found = faults("""
expect_version: soon
field: {}
fields:
  batch: {activ: 8, active: "8"}
  prefil: {itl_budget_ms: 50}
  prefill.itl_budget_ms: -1
overlays:
  - {pool: slow, node: w0, fields: {}}
  - {label: h200, fields: {batch: {active: 0}}}
pins: [batch.activ]
""")
    assert found.keys() == {
        "expect_version",
        "field",
        "fields.batch.activ",
        "fields.batch.active",
        "fields.prefil",
        "fields.prefill.itl_budget_ms",
        "overlays[0]",
        "overlays[1]",
        "overlays[1].fields.batch.active",
        "pins[0]",
    }
    assert "did you mean fields?" in found["field"]
    assert "did you mean batch.active?" in found["fields.batch.activ"]
    assert "did you mean prefill?" in found["fields.prefil"]


@pytest.mark.parametrize(
    "text",
    [
        "fields: {batch: {active: 8}, batch.active: 9}",
        "fields:\n  batch: {active: 8}\n  batch: {hard_cap: 8}",
        "overlays: [{pool: a, fields: {batch.active: 4}}, {pool: a, fields: {batch.active: 5}}]",
        "fields: [",
        "- a",
        "fields: 8",
        "!!python/object/apply:os.system [true]",
        "pins: [batch.active, {field: batch.active, reason: mine}]",
        "pins: [{field: batch.active, reason: [a, b]}]",
        'pins: [{field: batch.active, reason: "\\ud800"}]',
        "expect_version: 99999999999999999999",
    ],
)
def test_what_would_lose_or_run_something_is_refused(text: str) -> None:
    assert faults(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "fields: {batch.active: 2024-13-45}",
        "fields: {batch.active: 0b_}",
        "expect_version: " + "9" * 5000,
        "fields: " + "[" * 100_000,
    ],
)
def test_what_python_itself_cannot_read_is_a_fault_of_the_file(text: str) -> None:
    assert faults(text).keys() == {"file"}


def test_a_file_that_names_itself_again_and_again_is_refused_before_it_fills_the_memory() -> None:
    lines = ["a: &a0 [x, x, x, x, x, x, x, x]"]
    lines += [f"b{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 8)}]" for i in range(1, 20)]
    found = faults("\n".join([*lines, "fields: {batch.active: *a19, isolate.tenants: *a19}", "expect_version: *a19"]))
    assert {"expect_version", "fields.batch.active", "fields.isolate.tenants"} <= found.keys()


@pytest.mark.parametrize(
    ("text", "good"),
    [
        (WHOLE, True),
        ("fields:", True),
        ("fields: {batch: {active: 0}}", False),
        ("fields: {batch: {active: '8'}}", False),
        ("fields: {batch: {activ: 8}}", False),
        ("fields: {preemption: {mode: never}}", False),
        ("overlays: [{fields: {}}]", False),
        ("pins: [batch.activ]", False),
        ("more: 1", False),
    ],
)
def test_the_schema_says_what_the_reader_says(text: str, good: bool) -> None:
    said: Any = yaml.safe_load(text)
    assert jsonschema.Draft202012Validator(schema()).is_valid(said) is good
    if good:
        read(text)
    else:
        assert faults(text)


def test_the_published_schema_is_this_one() -> None:
    """`trimtab policy schema > docs/policy.schema.json` writes it anew."""
    assert json.loads(PUBLISHED.read_text()) == schema()
