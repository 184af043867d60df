"""What every write must say, and in what measure: all of it ends in the log or the history, so all of it is bounded."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab.errors import InvalidRequest, Violation

MAX_AUTHOR_CHARS = 200
MAX_REASON_CHARS = 2000


def unfit(words: Iterable[tuple[str, str, int]]) -> list[Violation]:
    """Of (field, text, most characters): each that is too long or is not one line."""
    faults = []
    for name, text, limit in words:
        if len(text) > limit:
            faults.append(Violation(name, f"at most {limit} characters"))
        elif not text.isprintable():
            faults.append(Violation(name, "one line of printable characters"))
    return faults


def who_and_why(author: str, reason: str) -> list[Violation]:
    faults = [] if author.strip() else [Violation("author", "every change needs an author")]
    return faults + unfit([("author", author, MAX_AUTHOR_CHARS), ("reason", reason, MAX_REASON_CHARS)])


def refuse_if(faults: list[Violation]) -> None:
    """InvalidRequest that names them all."""
    if faults:
        raise InvalidRequest("; ".join(f"{v.field}: {v.description}" for v in faults), violations=tuple(faults))
