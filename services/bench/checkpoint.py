"""Where a run keeps its raw results, so that it can be taken up again: `setup.json`, and `raw.jsonl` with one line for each finished part.

Invariant: a line is written whole or counts as absent, and a directory is only ever continued with the setup that it was begun with.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.bench.processes import BenchError
from trimtab.kit.cli import ExitCode
from trimtab.kit.process import state_dir, write_atomically

SETUP = "setup.json"
RAW = "raw.jsonl"


class Checkpoint:
    """The directory of one run. `parts` are the lines that were found or added, oldest first."""

    def __init__(self, directory: Path, setup: Mapping[str, Any]) -> None:
        """BenchError when the directory holds a run of another setup, or can't be written."""
        self.directory = directory
        self.parts: list[dict[str, Any]] = []
        wanted = json.loads(json.dumps(setup))  # tuples are lists there too
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if (directory / SETUP).exists():
                _compare(directory, json.loads((directory / SETUP).read_text()), wanted)
                self.parts = _read(directory / RAW)
            else:
                write_atomically(directory / SETUP, json.dumps(wanted, indent=2).encode(), mode=0o644)
        except (OSError, ValueError) as e:
            raise BenchError(f"can't keep results in {directory}: {e}", ExitCode.USAGE) from e
        self.resumed = bool(self.parts)

    def add(self, part: Mapping[str, Any]) -> None:
        """Keep a finished part: on the disk when this returns."""
        self.parts.append(dict(part))
        with (self.directory / RAW).open("a") as f:
            f.write(json.dumps(part) + "\n")
            f.flush()
            os.fsync(f.fileno())


def new_directory(bench: str) -> Path:
    """Where a run keeps its results that was not told where."""
    return state_dir("bench") / f"{bench}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def now() -> dict[str, Any]:
    """What each part says of the moment of its end."""
    return {"at_unix_s": time.time(), "load_average": os.getloadavg()[0]}


def _compare(directory: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    differing = [
        f"{k}: {found.get(k)!r} there, {wanted.get(k)!r} here" for k in wanted if found.get(k) != wanted.get(k)
    ]
    if differing:
        text = "\n".join(f"  {line}" for line in differing)
        raise BenchError(
            f"{directory} holds a run of another setup; give the same options, or another directory:\n{text}",
            ExitCode.USAGE,
        )


def _read(path: Path) -> list[dict[str, Any]]:
    """Every whole line; the last one may have been cut by a crash, and is then dropped from the file too."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    return [json.loads(line) for line in whole.splitlines()]
