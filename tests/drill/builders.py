"""What a client sees of a stream, with sane defaults."""

from __future__ import annotations

from services.drill.witness import Seen
from trimtab.messages import Accepted, Delta, Event, Finish, FinishReason, Notice, NoticeKind, Timings, Usage
from trimtab.snapshot import Identity

TEXT = "abcdef"


def accepted(worker: str = "w0", prompt_tokens: int = 3) -> Accepted:
    return Accepted("r", worker, Identity(), 0, prompt_tokens, b"", True, "bench")


def delta(first: int, text: str) -> Delta:
    """A token for each character; its id is the character's number."""
    return Delta(first, tuple(ord(c) for c in text), text)


def resumed(worker: str = "w1", index: int = 3) -> Notice:
    return Notice(NoticeKind.RESUMED, f"goes on at token {index} on {worker}: the link to worker w0 died: gone")


def finish(tokens: int = len(TEXT), prompt_tokens: int = 3, stop: str = "") -> Finish:
    reason = FinishReason.STOP if stop else FinishReason.LENGTH
    return Finish(reason, Usage(prompt_tokens, tokens), Timings(), stop)


def seen(*events: Event, start: float = 10.0) -> Seen:
    """As they came, a second apart."""
    stream = Seen()
    for i, event in enumerate(events):
        stream.take(event, start + i)
    return stream


def a_right_one() -> Seen:
    return seen(accepted(), delta(0, TEXT), finish())
