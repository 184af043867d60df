"""What the log of changes says about an earlier policy: pure, over the entries that `policy history` shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trimtab.errors import InvalidRequest, Violation


@dataclass(frozen=True, slots=True)
class Net:
    """A field's value before and after a stretch of the log, as people type them; a field that is not set is `default`."""

    field: str
    before: str
    after: str


def net(entries: Iterable[Any], epoch: int, first: int, last: int) -> list[Net]:
    """What differs between revisions `first` and `last` of this epoch, in the order of fields' first change.

    `entries` are PolicyHistoryEntry messages, newest first. InvalidRequest where they don't hold every revision in between.
    """
    writes = {e.identity.revision: e for e in entries if e.identity.epoch == epoch and not e.refused_because}
    missing = [r for r in range(first + 1, last + 1) if r not in writes]
    if missing:
        # Each write tells what was there before it.
        raise _no_revision(
            f"the history no longer reaches back to revision {epoch}.{first}; the oldest that it can tell is {epoch}.{missing[-1]}"
        )
    found: dict[str, Net] = {}
    for revision in range(first + 1, last + 1):
        for change in writes[revision].changes:
            before = found[change.field].before if change.field in found else change.before
            found[change.field] = Net(change.field, before, change.after)
    return [n for n in found.values() if n.before != n.after]


def as_of(now: Mapping[str, str], since: Sequence[Net]) -> dict[str, str]:
    """The fields that were set before `since` happened, from those that are set now."""
    fields = dict(now)
    for n in since:
        fields[n.field] = n.before
    return {path: said for path, said in fields.items() if said != "default"}


def revision(said: str, epoch: int, newest: int) -> int:
    """`N` or `EPOCH.N`, as people type it. InvalidRequest where there is no such revision in this epoch."""
    head, dot, tail = said.rpartition(".")
    number = tail if dot else said
    if not number.isdigit() or (dot and not head.isdigit()):
        raise _no_revision(f"{said!r} is no revision; `trimtab policy history` shows them, such as {epoch}.{newest}")
    if dot and int(head) != epoch:
        raise _no_revision(f"revision {said} is of epoch {head}; only those of the present epoch, {epoch}, can be told")
    if not 1 <= int(number) <= newest:
        raise _no_revision(f"there is no revision {epoch}.{int(number)}; the newest is {epoch}.{newest}")
    return int(number)


def _no_revision(message: str) -> InvalidRequest:
    return InvalidRequest(message, violations=(Violation("revision", message),))
