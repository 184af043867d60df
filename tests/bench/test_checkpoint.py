"""Raw results on the disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.bench.checkpoint import RAW, Checkpoint
from services.bench.processes import BenchError
from trimtab.kit.cli import ExitCode

SETUP = {"bench": "overhead", "seed": 1, "requests": (1, 2)}


def test_what_was_added_is_found_again(tmp_path: Path) -> None:
    Checkpoint(tmp_path / "run", SETUP).add({"round": 0})
    again = Checkpoint(tmp_path / "run", SETUP)
    again.add({"round": 1})
    assert Checkpoint(tmp_path / "run", SETUP).parts == [{"round": 0}, {"round": 1}]


def test_a_torn_line_counts_as_absent(tmp_path: Path) -> None:
    Checkpoint(tmp_path, SETUP).add({"round": 0})
    with (tmp_path / RAW).open("a") as f:
        f.write('{"round": 1, "ce')
    again = Checkpoint(tmp_path, SETUP)
    assert again.parts == [{"round": 0}]
    again.add({"round": 1})
    assert Checkpoint(tmp_path, SETUP).parts == [{"round": 0}, {"round": 1}]


def test_another_setup_is_refused_and_says_what_differs(tmp_path: Path) -> None:
    Checkpoint(tmp_path, SETUP).add({"round": 0})
    with pytest.raises(BenchError, match="seed: 1 there, 2 here") as caught:
        Checkpoint(tmp_path, {**SETUP, "seed": 2})
    assert caught.value.code == ExitCode.USAGE


def test_a_place_that_cannot_be_written_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="can't keep results"):
        Checkpoint(tmp_path / "file" / "run", SETUP)
