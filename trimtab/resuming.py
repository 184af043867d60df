"""What becomes of a request whose attempt ended before its output did: another worker, or the end; pure.

An attempt is one worker's try. A stream goes on elsewhere from what was delivered, as often as it gets somewhere: attempts that give no token
are bounded in a row, all of them in number, and by the request's deadline (which its caller keeps). A request that two workers died of is a
poison: it goes to no third one. Who died of what is a matter of evidence: see `blamed`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

MAX_FRUITLESS = 3
"""Attempts in a row that gave no token, before a request that has begun nowhere is given up."""
STRIKES = 2
"""Workers that died of it, with no token between."""
SUSPECTS = 8
"""Among more than this nobody knows whose fault it was, and nobody is blamed."""
FEW = 2
"""Requests that had all given tokens are suspected only where there were so few."""


class Cause(enum.Enum):
    """Why an attempt ended early."""

    DIED = "died"
    """The worker or its engine is gone, or stopped answering."""
    BROKE = "broke"
    """It answered that something of its own failed."""
    LEFT = "left"
    """It drains."""
    MISPLACED = "misplaced"
    """The request belongs to another pool."""
    FULL = "full"
    """It has no room for the request now."""
    DIFFERS = "differs"
    """It can't take the stream on exactly, such as with another tokeniser."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known of a request between attempts. `accepted`: some worker has taken it. `resumable` is what that one said."""

    attempts: int = 0
    fruitless: int = 0
    victims: tuple[str, ...] = ()
    """Workers that died of it, as far as anybody can tell, with no token between."""
    accepted: bool = False
    delivered: int = 0
    resumable: bool = False


class Next(enum.Enum):
    ELSEWHERE = "elsewhere"
    """Another worker; the stream goes on at the next index."""
    CUT = "cut"
    """It had begun, and can't go on."""
    GIVE_UP = "give up"
    """Nothing was delivered: the last fault is the answer."""
    QUARANTINE = "quarantine"


@dataclass(frozen=True, slots=True)
class Verdict:
    next: Next
    why: str


def blamed(*, started: bool, gained: bool, begun_there: int, running_there: int) -> int:
    """How many requests share the blame for a worker's death, this one among them; 0 where it is not suspected.

    An engine that dies of a request mostly dies of its beginning: where some had started and given no token (`begun_there` of
    `running_there`), those are suspected; where all had given tokens, they are if they were few. What only waited is never.
    """
    if not started:
        return 0
    if not gained:
        return begun_there
    return running_there if not begun_there and running_there <= FEW else 0


def ended(
    standing: Standing, cause: Cause, *, gained: int, suspects: int, attempts: int, worker: str
) -> tuple[Standing, Verdict]:
    """After an attempt that delivered `gained` tokens. `suspects` is as `blamed` has it; `attempts` the policy's bound (`resume.attempts`),
    of which 1 moves nothing that has begun. `worker` is the process that it was at: one that was silent for a moment and then hangs has
    died once.
    """
    # A worker that is full or leaving, or speaks another dialect, says nothing about the request.
    fruitless = 0 if gained else standing.fruitless + (cause in (Cause.DIED, Cause.BROKE))
    struck = cause is Cause.DIED and 0 < suspects <= SUSPECTS
    victims = () if gained else standing.victims
    if struck and worker not in victims:
        victims = (*victims, worker)
    now = replace(standing, fruitless=fruitless, victims=victims, delivered=standing.delivered + gained)
    if len(victims) >= STRIKES:
        return now, Verdict(Next.QUARANTINE, f"{len(victims)} workers died of it")
    begun = now.delivered > 0
    if cause is Cause.MISPLACED and not begun:
        now = replace(now, accepted=False)  # nobody has taken it on
    give_up = Next.CUT if begun else Next.GIVE_UP
    if cause is Cause.FULL and not (now.accepted or begun):
        # Nothing was promised: back-pressure is the caller's to handle. If he comes again, it is not held against the request.
        return replace(standing, attempts=standing.attempts - 1), Verdict(Next.GIVE_UP, "no room")
    if begun and attempts <= 1:
        return now, Verdict(Next.CUT, "moving streams is off (resume.attempts = 1)")
    if begun and not now.resumable:
        return now, Verdict(Next.CUT, "it can't be continued exactly elsewhere")
    # Nothing is moved by trying anew what has not begun: that is bounded whatever the policy says of moving.
    if now.attempts >= (attempts if attempts > 1 else MAX_FRUITLESS):
        return now, Verdict(give_up, f"{now.attempts} attempts were made")
    if cause in (Cause.DIED, Cause.BROKE) and fruitless >= MAX_FRUITLESS:
        return now, Verdict(give_up, f"{fruitless} attempts in a row gave no token")
    return now, Verdict(Next.ELSEWHERE, cause.value)


def waits(standing: Standing) -> bool:
    """Whether it waits for a worker where there is none now: what was taken on is not dropped for want of a moment."""
    return standing.accepted
