"""`trimtab trace`: spans of several processes, put together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from services import cli as verbs
from services.cli import trace
from services.traces import Span, render, summarise

MS = 1_000_000


def a_row(span: str, parent: str | None, start_ms: int, end_ms: int, **changes: Any) -> dict[str, Any]:
    row = {
        "trace_id": "ab" * 16,
        "span_id": span,
        "parent_id": parent,
        "name": span,
        "service": "gateway",
        "start_ns": start_ms * MS,
        "end_ns": end_ms * MS,
        "status": "UNSET",
        "attributes": {},
        "events": [],
    }
    return {**row, **changes}


@pytest.fixture
def traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(verbs, "FLUSHED_AFTER_S", 0.0)
    directory = tmp_path / "default" / "traces"
    directory.mkdir(parents=True)
    worker = [
        a_row("queue", "work", 12, 15, service="worker-w0"),
        a_row(
            "work",
            "dispatch",
            11,
            40,
            service="worker-w0",
            attributes={"gen_ai.request.model": "tiny", "trimtab.worker": "w0", "gen_ai.usage.output_tokens": 2},
        ),
        a_row("decode", "work", 20, 40, service="worker-w0"),
    ]
    gateway = [a_row("dispatch", "request", 10, 41), a_row("request", "the client's", 10, 42)]
    other = a_row("put", None, 100, 101, trace_id="cd" * 16, service="control", status="ERROR")
    (directory / "worker-w0.jsonl").write_text("".join(json.dumps(r) + "\n" for r in worker) + '{"half": ')
    (directory / "gateway.jsonl").write_text("".join(json.dumps(r) + "\n" for r in gateway))
    (directory / "control.old.jsonl").write_text(json.dumps(other) + "\n")
    return directory


def run(*args: str) -> Result:
    return CliRunner().invoke(trace, args)


@pytest.mark.usefixtures("traces")
def test_the_tree_goes_across_processes() -> None:
    result = run("ab" * 16)
    assert result.exit_code == 0
    assert [line.split() for line in result.output.splitlines()[1:]] == [
        ["request", "+0.0", "ms", "32.0", "ms", "gateway"],
        ["dispatch", "+0.0", "ms", "31.0", "ms", "gateway"],
        ["work", "+1.0", "ms", "29.0", "ms", "worker-w0", "worker=w0", "output_tokens=2"],
        ["queue", "+2.0", "ms", "3.0", "ms", "worker-w0"],
        ["decode", "+10.0", "ms", "20.0", "ms", "worker-w0"],
    ]


@pytest.mark.usefixtures("traces")
def test_a_prefix_is_enough() -> None:
    spans = json.loads(run("abab", "--json").stdout)["spans"]
    assert [(s["name"], s["depth"]) for s in spans] == [
        ("request", 0),
        ("dispatch", 1),
        ("work", 2),
        ("queue", 3),
        ("decode", 3),
    ]


@pytest.mark.usefixtures("traces")
def test_an_unknown_id_lists_the_newest() -> None:
    result = run("ef")
    assert result.exit_code == 2
    assert "; the newest are:\n  cdcd" in result.stderr
    assert json.loads(run("ef", "--json").stdout)["error"]["newest"] == ["cd" * 16, "ab" * 16]


@pytest.mark.usefixtures("traces")
def test_without_an_id_the_newest_come_first() -> None:
    listed = json.loads(run("--json").stdout)
    assert [(t["trace_id"], t["name"], t["spans"], t["failed"]) for t in listed] == [
        ("cd" * 16, "put", 1, True),
        ("ab" * 16, "request", 5, False),
    ]
    assert "put FAILED" in run().output


def test_no_traces_yet_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIMTAB_STATE_DIR", str(tmp_path))
    result = run()
    assert (result.exit_code, "no traces yet" in result.output) == (0, True)


def test_a_push_to_a_node_that_joins_hours_later_is_none_of_a_writes_time() -> None:
    def span(name: str, parent: str | None, start_ms: int, end_ms: int) -> Span:
        return Span("t", name, parent, name, "control", start_ms * MS, end_ms * MS, "UNSET")

    hours = 4 * 3_600_000
    spans = [span("put", None, 0, 10), span("push", "put", 5, 30), span("late", "put", hours, hours + 5)]
    found = summarise(spans)
    assert (found.duration_ms, found.spans) == (30.0, 3)


def test_the_tree_fits_80_columns_and_cuts_nothing_in_two() -> None:
    facts = {f"trimtab.fact_{i}": "x" * 20 for i in range(9)} | {"trimtab.address": "y" * 90}
    lines = render([Span("t", "request", None, "request", "gateway", 0, 32 * MS, "UNSET", facts)])
    assert max(len(line) for line in lines if "y" * 90 not in line) <= 78
    assert "".join(lines).count("x" * 20) == 9 and any(line.strip() == "address=" + "y" * 90 for line in lines)
