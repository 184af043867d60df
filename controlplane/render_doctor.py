"""What the doctor found, for people (80 columns) and for programs (JSON)."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from controlplane.doctor import Check, Finding, Fix, Verdict
from trimtab.kit.cli import WIDTH, ExitCode

COLOURS = {Verdict.FOUND: "red", Verdict.SUSPECT: "yellow", Verdict.UNKNOWN: "yellow", Verdict.OK: "green"}
NAME, WORD = 12, 9


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a fix. `undo` is the command or the words that take it back."""

    fix: Fix
    done: bool
    said: str
    undo: str = ""


def exit_code(findings: Iterable[Finding]) -> ExitCode:
    verdicts = {f.verdict for f in findings}
    if verdicts & {Verdict.FOUND, Verdict.SUSPECT}:
        return ExitCode.GOAL_FAILED
    return ExitCode.PARTIAL if Verdict.UNKNOWN in verdicts else ExitCode.OK


def finding_text(f: Finding, first_fix: int) -> list[tuple[str, Verdict | None]]:
    """Lines, and whose colour they have; of a symptom that is not there, one. `first_fix` numbers its fixes."""
    head = f"{f.symptom:{NAME}} {f.verdict.upper() if f.verdict is not Verdict.OK else 'ok':{WORD}}"
    lines: list[tuple[str, Verdict | None]] = [(line, f.verdict) for line in _wrap(head + f.said, NAME + WORD + 1)]
    if f.verdict is Verdict.OK:
        return lines
    for c in f.checks:
        lines += [(line, None) for line in _wrap(f"    {c.verdict:{WORD}}{c.name}: {c.said}", 4 + WORD)]
    for nth, fix in enumerate(f.fixes, first_fix):
        lines += [(line, None) for line in _wrap(f"    fix {nth:<5}{fix.does}:", 4 + WORD)]
        # A command is one line, whatever its length: it is there to be copied.
        lines.append((f"    {'':{WORD}}{fix.command}", None))
    return lines


def _wrap(text: str, indent: int) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    ) or [""]


def summary_text(findings: list[Finding]) -> str:
    bad = [f.symptom for f in findings if f.verdict in (Verdict.FOUND, Verdict.SUSPECT)]
    dark = [f.symptom for f in findings if f.verdict is Verdict.UNKNOWN]
    if bad:
        return f"{len(bad)} of {len(findings)} symptoms show: {', '.join(bad)}"
    return f"nothing found, but it can't be told of {', '.join(dark)}" if dark else "all is well"


def done_text(done: Done) -> list[str]:
    if not done.done:
        return _wrap(f"not done: {done.fix.does}: {done.said}", 2)
    lines = _wrap(f"done: {done.fix.does}: {done.said}", 2)
    return [*lines, f"  undo: {done.undo}"] if done.undo else lines


def doctor_json(findings: list[Finding], done: list[Done] | None) -> dict[str, Any]:
    """`done` is None where nothing was to be set right."""
    found: dict[str, Any] = {
        "verdict": exit_code(findings).name.lower(),
        "symptoms": [
            {
                "symptom": f.symptom,
                "verdict": f.verdict.value,
                "said": f.said,
                "checks": [_check_json(c) for c in f.checks],
                "fixes": [_fix_json(x) for x in f.fixes],
            }
            for f in findings
        ],
    }
    if done is not None:
        found["done"] = [{**_fix_json(d.fix), "done": d.done, "said": d.said, "undo": d.undo or None} for d in done]
    return found


def _check_json(c: Check) -> dict[str, Any]:
    return {"name": c.name, "verdict": c.verdict.value, "said": c.said}


def _fix_json(fix: Fix) -> dict[str, Any]:
    return {"does": fix.does, "command": fix.command, "by_itself": fix.action is not None}
