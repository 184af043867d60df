"""What verbs share: exit codes by error, and tables that fit 80 columns."""

from __future__ import annotations

import pytest

from trimtab.client import Unreachable
from trimtab.errors import (
    Conflict,
    EngineDead,
    InvalidRequest,
    PolicyRefused,
    QueueFull,
    StoreUnavailable,
    TrimtabError,
)
from trimtab.kit.cli import ExitCode, exit_code, table
from trimtab.kit.rpc import decode_status, encode_status


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PolicyRefused("x", field="batch.active"), ExitCode.REFUSED),
        (Conflict("x"), ExitCode.REFUSED),
        (QueueFull("x"), ExitCode.REFUSED),
        (InvalidRequest("x"), ExitCode.USAGE),
        (StoreUnavailable("x"), ExitCode.UNREACHABLE),
        (Unreachable("x"), ExitCode.UNREACHABLE),
        (EngineDead("x"), ExitCode.UNREACHABLE),
        (TrimtabError("x"), ExitCode.GOAL_FAILED),
    ],
)
def test_an_errors_exit_code_is_the_same_on_both_ends_of_the_wire(error: TrimtabError, code: ExitCode) -> None:
    assert exit_code(error) == code
    assert exit_code(decode_status(encode_status(error))) == code


def test_a_table_aligns_and_wraps_its_last_column() -> None:
    text = table(("NAME", "N", "WHAT"), [("a", "1", "word " * 20), ("long name", "20", "")], right=(1,))
    lines = text.splitlines()
    assert lines[0] == "NAME        N  WHAT"
    assert lines[1].startswith("a           1  word")
    assert lines[2].startswith(" " * 15 + "word")
    assert lines[-1] == "long name  20"
    assert max(map(len, lines)) <= 80
