"""The documents name every policy field as it is: default, bounds, words. A field that changed or is new fails here until it is described."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trimtab.policy import FIELDS, Field, Kind, text

ROOT = Path(__file__).parents[2]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PARTS = "|".join(sorted({path.split(".")[0] for path in FIELDS}))


def facts(f: Field) -> str:
    """How a row of the table begins; what follows is for people."""
    match f.kind:
        case Kind.CHOICE:
            takes = ", ".join(f.choices)
        case Kind.NAMES:
            takes = "names"
        case _:
            takes = f"{f.minimum:.12g} to {f.maximum:.12g} {f.unit}"
    return f"| `{f.path}` | {text(f.default) or 'none'} | {takes} |"


@pytest.mark.parametrize("f", FIELDS.values(), ids=lambda f: f.path)
def test_every_field_is_in_the_table_with_its_default_and_what_it_takes(f):
    rows = [line for line in OPERATIONS.splitlines() if line.startswith(f"| `{f.path}` |")]
    assert len(rows) == 1
    assert rows[0].startswith(facts(f)), f"\n{facts(f)}\n{rows[0]}"
    assert len(rows[0].removeprefix(facts(f)).strip(" |")) > 10


@pytest.mark.parametrize("f", [f for f in FIELDS.values() if f.choices], ids=lambda f: f.path)
def test_the_table_says_what_each_word_does(f):
    (row,) = [line for line in OPERATIONS.splitlines() if line.startswith(f"| `{f.path}` |")]
    assert [word for word in f.choices if word not in row.removeprefix(facts(f))] == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_no_document_names_a_field_that_is_not_there(document):
    named = re.findall(rf"(?<![\w./*])((?:{PARTS})\.[a-z_]+)(?![\w(/]|\.[a-z])", document.read_text())
    assert [path for path in named if path not in FIELDS and not path.endswith((".py", ".md", ".env"))] == []
