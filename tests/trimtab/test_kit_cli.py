"""What verbs share: exit codes by error, and tables that fit 80 columns."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from trimtab.client import Unreachable
from trimtab.errors import (
    Conflict,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    PolicyRefused,
    QueueFull,
    StoreUnavailable,
    TrimtabError,
    Violation,
)
from trimtab.kit.cli import ExitCode, exit_code, fail, table
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
        (PolicyRefused("x", reason="UNKNOWN_FIELD", field="batch.activ"), ExitCode.USAGE),
        (DeadlineExceeded("x"), ExitCode.GOAL_FAILED),
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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            InvalidRequest("for_ms: at most 1d", violations=(Violation("for_ms", "at most 1d"),)),
            "error: --for: at most 1d\n",
        ),
        (
            InvalidRequest(
                "why: is empty; for_ms: at most 1d",
                violations=(Violation("why", "is empty"), Violation("for_ms", "at most 1d")),
            ),
            "error: why: is empty; --for: at most 1d\n",
        ),
        (InvalidRequest("no worker", violations=(Violation("node_id", "no worker"),)), "error: no worker\n"),
        (
            InvalidRequest("2 faults", violations=(Violation("for_ms", "at most 1d"), Violation("x", "is missing"))),
            "error: 2 faults\n  --for: at most 1d\n  x: is missing\n",
        ),
    ],
)
def test_a_fault_is_told_once_and_by_the_option_that_was_typed(error: TrimtabError, told: str) -> None:
    @click.command()
    @click.option("--for", "for_ms")
    def verb(for_ms: str) -> None:
        fail(error, False)

    result = CliRunner().invoke(verb, ["--for", "9d"])
    assert (result.exit_code, result.stderr) == (2, told)
