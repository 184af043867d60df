"""What a client saw of one stream, and what is wrong with it. Pure.

A stream is right when it has one Accepted first and one Finish last, every index once and in order, and the tokens, text, reason and usage of
the same request where nothing failed. One that ended with an error is lost; what it gave before must be right all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from trimtab.errors import TrimtabError
from trimtab.messages import Accepted, Delta, Event, Finish, Notice, NoticeKind

_WHERE = re.compile(r" on (\S+): ")


@dataclass(frozen=True, slots=True)
class Move:
    """The stream went on elsewhere: `last` token before and `first` after it, seconds of one monotonic clock; `origin` is the worker it left."""

    origin: str
    told: float
    last: float
    first: float | None = None

    @property
    def gap_s(self) -> float | None:
        return None if self.first is None else self.first - self.last


@dataclass(slots=True)
class Seen:
    """One stream as it arrives. `lost` is the reason of the error that ended it."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)
    finishes: list[Finish] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    repeated: int = 0
    missing: int = 0
    disorder: list[str] = field(default_factory=list)
    lost: str = ""
    message: str = ""
    first: float | None = None
    """When its first token came."""
    gap_s: float = 0.0
    """The longest between two of its tokens."""
    _worker: str = ""
    _last: float = 0.0

    def take(self, event: Event, now: float) -> None:
        if self.finishes:
            self.disorder.append(f"{type(event).__name__} after Finish")
        elif not self.accepted and not isinstance(event, Accepted):
            self.disorder.append(f"{type(event).__name__} before Accepted")
        match event:
            case Accepted():
                self.accepted.append(event)
                self._worker = event.worker_id
            case Delta():
                self._delta(event, now)
            case Notice(kind=NoticeKind.RESUMED):
                self.moves.append(Move(self._worker, now, self._last))
                where = _WHERE.search(event.detail)
                self._worker = where[1] if where else ""
            case Finish():
                self.finishes.append(event)
            case _:
                pass

    def fail(self, error: TrimtabError) -> None:
        self.lost, self.message = error.reason, error.message

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def _delta(self, delta: Delta, now: float) -> None:
        if self.first is None and delta.token_ids:
            self.first = now
        due = len(self.token_ids)
        self.repeated += max(0, due - delta.first_index)
        self.missing += max(0, delta.first_index - due)
        self.token_ids += delta.token_ids
        self.texts.append(delta.text)
        if not delta.token_ids:
            return
        if self.moves and self.moves[-1].first is None:
            self.moves[-1] = replace(self.moves[-1], first=now)
        if self._last:
            self.gap_s = max(self.gap_s, now - self._last)
        self._last = now


def faults(seen: Seen, right: Seen | None) -> list[str]:
    """What is wrong with it, in words, beside its being lost. `right` is the undisturbed one; None judges a stream by itself."""
    found = list(seen.disorder)
    if len(seen.accepted) != 1 and not (seen.lost and not seen.accepted):
        found.append(f"{len(seen.accepted)} Accepted")
    if not seen.lost and len(seen.finishes) != 1:
        found.append(f"{len(seen.finishes)} Finish")
    if seen.repeated or seen.missing:
        found.append(f"{seen.repeated} indexes repeated, {seen.missing} missing")
    if right is not None:
        found += _differences(seen, right)
    for finish in seen.finishes:
        usage = finish.usage
        prompt = seen.accepted[0].prompt_tokens if seen.accepted else None
        if usage.completion_tokens != len(seen.token_ids) or usage.prompt_tokens != prompt:
            said = f"usage says {usage.prompt_tokens} + {usage.completion_tokens} tokens"
            found.append(f"{said}, where {prompt} + {len(seen.token_ids)} came")
    return found


def _differences(seen: Seen, right: Seen) -> list[str]:
    found = []
    tokens = right.token_ids[: len(seen.token_ids)] if seen.lost else right.token_ids
    text, wanted = seen.text.encode(), right.text.encode()
    if seen.token_ids != tokens:
        found.append(f"tokens differ from index {_common(seen.token_ids, tokens)} on")
    if text != (wanted[: len(text)] if seen.lost else wanted):
        found.append(f"text differs from byte {_common(list(text), list(wanted))} on")
    if seen.finishes and right.finishes:
        mine, theirs = seen.finishes[-1], right.finishes[-1]
        if (mine.reason, mine.stop) != (theirs.reason, theirs.stop):
            found.append(f"it ended by {mine.reason.value} {mine.stop!r}, not by {theirs.reason.value} {theirs.stop!r}")
    return found


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
