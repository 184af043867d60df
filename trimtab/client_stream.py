"""One stream as its caller has received it, and what is done when the connection that brought it is lost; pure.

Invariant: the caller sees Accepted once, and every index once, in order, whoever sends it. A server that goes on anywhere else than where the
stream stands is an error, never passed on.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from dataclasses import replace

from trimtab.errors import (
    Draining,
    InvalidRequest,
    ModelNotFound,
    NoWorker,
    QueueFull,
    ResumeRefused,
    StreamCut,
    TrimtabError,
)
from trimtab.messages import Accepted, Delta, Event, Notice, NoticeKind, Request, Resume

FIRST_PAUSE_MS = 500
MAX_PAUSE_MS = 10_000
JITTER = 0.5
"""A pause is longer by up to this part of it, so that those who lost the same gateway do not come back together."""
UNREACHABLE = "UNREACHABLE"
"""The reason of an error that says that nobody listens."""
_BROKEN_WIRE = re.compile("RST_STREAM|GOAWAY|stream removed|socket closed|connection reset", re.IGNORECASE)


class Received:
    """What has come of one request. `before` is what its caller had of it already, from somewhere else."""

    def __init__(self, before: Resume | None = None) -> None:
        self.accepted: Accepted | None = None
        """The newest."""
        self._token_ids = array("I", before.token_ids if before else ())
        self._text_bytes = before.text_bytes if before else 0
        self._digest = before.prompt_digest if before else b""

    @property
    def tokens(self) -> int:
        return len(self._token_ids)

    @property
    def begun(self) -> bool:
        """Something was delivered that must not come again."""
        return bool(self._token_ids) or self._text_bytes > 0

    @property
    def resumable(self) -> bool:
        return self.accepted is not None and self.accepted.resumable

    def take(self, event: Event, why_again: str = "") -> Event | None:
        """What the caller is to see of it. `why_again` is what ended the attempt before this one. StreamCut where it is not what is due."""
        match event:
            case Delta():
                if event.first_index != self.tokens:
                    raise self.cut(f"token {event.first_index} came where {self.tokens} was due")
                self._token_ids.extend(event.token_ids)
                self._text_bytes += len(event.text.encode())
                return event
            case Accepted():
                return self._take_accepted(event, why_again)
            case _:
                return event

    def _take_accepted(self, event: Accepted, why_again: str) -> Event | None:
        known, self.accepted = self.accepted, event
        if not self.begun:
            # The tokens to come are this worker's, and so is the prompt that they continue.
            self._digest = event.prompt_digest
        if known is None:
            return event
        if not self.begun:
            return None
        return Notice(NoticeKind.RESUMED, f"goes on at token {self.tokens} on {event.worker_id}: {why_again}")

    def request(self, first: Request, attempt: int) -> Request:
        """What the `attempt`-th call says, counted from 1: the request as it was made first, and from where it goes on."""
        if attempt == 1:
            return first
        request_id = first.request_id or (self.accepted.request_id if self.accepted else "")
        if not self.begun:
            return replace(first, request_id=request_id)
        resume = Resume(tuple(self._token_ids), self._text_bytes, attempt, self._digest)
        return replace(first, request_id=request_id, resume=resume)

    def cut(self, why: str, cause: TrimtabError | None = None) -> StreamCut:
        """The stream ends here, with its count. `cause` is what it was lost by."""
        said = {"tokens_delivered": str(self.tokens)} | ({"cause": cause.reason} if cause is not None else {})
        return StreamCut(f"the stream was cut after {self.tokens} tokens: {why}", metadata=said)


def is_lost(error: TrimtabError) -> bool:
    """The way to the server broke: no server said this, at least none of ours, whose errors carry a reason."""
    if error.reason == UNREACHABLE or (error.grpc_code, error.reason) == ("UNAVAILABLE", "UNAVAILABLE"):
        return True
    bare = error.reason == error.grpc_code and error.grpc_code in ("CANCELLED", "INTERNAL", "UNKNOWN")
    return bare and _BROKEN_WIRE.search(error.message) is not None


def may_go_on(error: TrimtabError, received: Received, *, attempt: int, attempts: int) -> bool:
    """Whether the request is asked for again after its `attempt`-th call, of `attempts` at most, ended so."""
    if attempt >= attempts or (received.begun and not received.resumable):
        return False
    if is_lost(error) or isinstance(error, Draining):
        return True
    if attempt == 1:
        return False
    # A gateway that has just started knows no worker yet, and one whose connection broke silently still has the earlier call.
    held = isinstance(error, InvalidRequest) and any(v.field == "request_id" for v in error.violations)
    return held or (received.accepted is not None and isinstance(error, NoWorker | QueueFull))


def last_word(error: TrimtabError, received: Received, lost_by: TrimtabError) -> TrimtabError:
    """What the caller hears when there is no further call. `error` ended the last one; `lost_by` ended the last one that had brought anything,
    and says more than that nobody took the stream on after it."""
    no_successor = isinstance(error, InvalidRequest | ModelNotFound | NoWorker | QueueFull | ResumeRefused)
    if is_lost(error):
        cut = received.accepted is not None
    elif isinstance(error, Draining) or (no_successor and error is not lost_by):
        cut = received.begun
    else:
        cut = False
    if not cut:
        return error
    return received.cut(lost_by.message if error is lost_by else f"{lost_by.message}; then {error.message}", lost_by)


def pause_ms(rounds: int, retry_after_ms: int | None, draw: Callable[[], float]) -> float:
    """Before every address is tried again for the `rounds`-th time, counted from 1. `draw` gives numbers from 0 to 1."""
    step = min(MAX_PAUSE_MS, FIRST_PAUSE_MS << min(rounds - 1, 10))
    longer: float = 1.0 + JITTER * draw()
    return max(step, retry_after_ms or 0) * longer
