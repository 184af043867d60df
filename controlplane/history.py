"""Revisions as people type them, and what differs between the policies of two of them: pure."""

from __future__ import annotations

from controlplane.spec import Spec, differences
from trimtab.errors import InvalidRequest, Violation
from trimtab.policy import Change
from trimtab.snapshot import Document, Overlay

MAX_DIGITS = 18
"""Of a number that the store and the wire take."""


def revision(said: str, epoch: int, newest: int) -> tuple[int, int]:
    """(epoch, revision) of `N` or `EPOCH.N`, as people type it; N alone is of the present epoch. InvalidRequest for what is none."""
    head, dot, tail = said.rpartition(".")
    if not _is_number(tail) or (dot and not _is_number(head)):
        raise _no_revision(
            f"{said[:80]!r} is no revision; `trimtab policy history` shows them, such as {epoch}.{newest}"
        )
    of, number = int(head) if dot else epoch, int(tail)
    if not 1 <= of <= epoch or number < 1 or (of == epoch and number > newest):
        raise _no_revision(f"there is no revision {of}.{number}; the newest is {epoch}.{newest}")
    return of, number


def _is_number(said: str) -> bool:
    return said.isascii() and said.isdigit() and len(said) <= MAX_DIGITS


def between(first: Spec, last: Spec) -> tuple[Change, ...]:
    """What differs, as a change from the one to the other would be shown."""
    return differences(_document(first), _document(last))


def _document(spec: Spec) -> Document:
    overlays = tuple(Overlay(str(scope), scope, partial) for scope, partial in spec.overlays.items())
    return Document(spec.base, overlays, pins=spec.pins)


def _no_revision(message: str) -> InvalidRequest:
    return InvalidRequest(message, violations=(Violation("revision", message),))
