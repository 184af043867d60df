"""Where a request goes; pure.

By what it needs (isolation, room), by the share of new work that a worker is to get, by what it has been near (its session, its prompt's
beginning), and then by the work that waits: the least of all in a small fleet, the lesser of two drawn in a large one, so that a choice costs
the same among a thousand workers as among sixteen (power of two choices). Nearness never outweighs load: a worker with much more than the
others is passed over (consistent hashing with bounded loads).
"""

from __future__ import annotations

import bisect
import enum
import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from trimtab.breaking import Gate
from trimtab.errors import NoWorker, QueueFull
from trimtab.messages import Load, Workload

SEQUENCE_TOKENS = 64
"""What a request that runs or waits weighs, in tokens of prefill: its steps are shared with others, a prompt's tokens are not."""
SCANNED = 16
"""Fleets up to this size are looked at whole."""
DRAWN, TRIES = 2, 12
"""Beyond it so many that can take the request are compared, found in so many draws; where they are not, the whole fleet is looked at."""
NEAR_FACTOR, NEAR_SLACK_TOKENS = 1.25, 2048
"""Nearness counts up to this many times the work of the one that would be chosen without it, and so much more."""
RING_POINTS = 16
RING_OWNERS = 2
"""A key's first so many owners are asked; then nearness is given up."""
LEAST_WEIGHT = 0.01
"""Nothing weighs more than a hundred times what it is."""
SESSION = b"s"
"""Begins the keys of sessions."""


class Need(enum.Enum):
    """Which pools may take it."""

    ANY = "any"
    ISOLATION = "isolation"
    """Only those that take isolated requests, where the mesh has pools for them."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as a gateway sees it. `life` tells a restarted one from what it was before. `in_flight` counts this gateway's own requests
    there, and `sent_tokens` their prompts' tokens, which its load may not show yet. `room` is how many more requests of the workload asked
    for it can take. `isolates`: its pool is for isolated requests.
    """

    node_id: str
    life: int
    serving: bool
    load: Load
    in_flight: int
    sent_tokens: int = 0
    gate: Gate = Gate.PASS
    room: int = 1
    isolates: bool = False
    open_ms: float = 0.0
    """Until its breaker may let something through."""
    doubtful: bool = False
    """Its breaker is shut for being slow, or by hearsay: better than nobody."""
    weight: float = 1.0
    """What it gets of new work, next to what it would get by itself: less while it tries a policy."""

    @property
    def work_tokens(self) -> int:
        """What stands before a newcomer; of a worker that gets less, so much more as it would be by itself, or being the least would make up
        for it.
        """
        requests = max(self.load.running + self.load.waiting, self.in_flight)
        work = requests * SEQUENCE_TOKENS + max(self.load.queued_prefill_tokens, self.sent_tokens)
        return work if self.weight >= 1.0 else int(work / max(self.weight, LEAST_WEIGHT))


@dataclass(frozen=True, slots=True)
class Want:
    """`key` is what it is near to, empty for nothing; `avoid` are (node id, life) that it has tried."""

    workload: Workload = Workload.REALTIME
    need: Need = Need.ANY
    key: bytes = b""
    avoid: Collection[tuple[str, int]] = ()


@dataclass(frozen=True, slots=True)
class Pick:
    """`compared`: others could have taken it, and none of them had less to do. Of a worker that was the only one, or had more before it, a late
    first token says how much it had, not how fast it is.
    """

    node_id: str
    why: str
    probe: bool = False
    compared: bool = False


@dataclass(slots=True)
class Ring:
    """Whom a key belongs to, and who is next, unmoved by the comings and goings of others. `nodes` are ids, in a fleet's order."""

    nodes: Sequence[str]
    _points: list[int] = field(init=False)
    _owners: list[int] = field(init=False)

    def __post_init__(self) -> None:
        points = sorted(
            (_hash(f"{node}/{i}".encode()), index) for index, node in enumerate(self.nodes) for i in range(RING_POINTS)
        )
        self._points = [p for p, _ in points]
        self._owners = [o for _, o in points]

    def owners(self, key: bytes) -> Iterator[int]:
        """Indexes into `nodes`, nearest first, each once."""
        start, seen = bisect.bisect(self._points, _hash(key)), set()
        for i in range(len(self._owners)):
            owner = self._owners[(start + i) % len(self._owners)]
            if owner not in seen:
                seen.add(owner)
                yield owner


def key_of(session: str, prompt_head: bytes) -> bytes:
    """A request's own: its session where it has one, else a digest of its prompt's beginning."""
    if session:
        return SESSION + session.encode("utf-8", "surrogatepass")
    return b"p" + hashlib.blake2b(prompt_head, digest_size=8).digest() if prompt_head else b""


def draws(workers: int) -> int:
    """How many random numbers `pick` needs for so many workers: for whom it looks at, for the choice among equals, and for canaries' shares."""
    return 2 if workers <= SCANNED else TRIES + 2


def pick(fleet: Sequence[Candidate], want: Want, draw: Sequence[float], ring: Ring | None = None) -> Pick:
    """One of `fleet`, which are all the workers of the model. NoWorker where none can take it now, QueueFull where all are full.

    `draw`: as many random numbers in [0, 1) as `draws` says, each for one purpose: one that served for two would tie a canary's share to its
    place in the fleet. `ring` has the fleet's nodes in the fleet's order; without it nothing is near.
    """
    *places, choice, share = draw
    if len(fleet) <= SCANNED:
        able = [c for c in fleet if _able(c, want)]
        pool = "of"
    else:
        able = _drawn(fleet, want, places)
        pool = "of a draw of"
        if len(able) < DRAWN:
            able = [c for c in fleet if _able(c, want)]
    if not able:
        able = [c for c in fleet if c.doubtful and _able(c, want, doubtful=True)]
    if not able:
        raise _nobody(fleet, want)
    able = _preferred(_weighed(able, want, share), want)
    least = min(c.work_tokens for c in able)
    alike = [c for c in able if c.work_tokens == least]
    chosen = alike[int(choice * len(alike)) % len(alike)]
    why = f"least work: {least} tokens, {len(alike)} {pool} {len(able)} alike"
    if want.key and ring is not None and len(fleet) > 1:
        bound = NEAR_FACTOR * least + NEAR_SLACK_TOKENS
        for index, _ in zip(ring.owners(want.key), range(RING_OWNERS), strict=False):
            near = fleet[index]
            if _able(near, want) and _fits(near, want) and near.work_tokens <= bound and _takes(near, want, share):
                chosen, why = near, f"near: {near.work_tokens} tokens of work, where the least is {least}"
                break
    compared = len(able) > 1 and chosen.work_tokens <= least
    return Pick(chosen.node_id, why, chosen.gate is Gate.PROBE, compared)


def _able(c: Candidate, want: Want, *, doubtful: bool = False) -> bool:
    shut = c.gate is Gate.SHUT and not doubtful
    if not c.serving or shut or c.room < 1 or (c.node_id, c.life) in want.avoid:
        return False
    return want.need is Need.ANY or c.isolates


def _fits(c: Candidate, want: Want) -> bool:
    """An isolation pool is for those who need it, and for others where there is nobody else."""
    return c.isolates == (want.need is Need.ISOLATION)


def _preferred(able: list[Candidate], want: Want) -> list[Candidate]:
    able = [c for c in able if _fits(c, want)] or able
    # A probe is a risk for whoever makes it: one of many requests takes it, and a half open worker that nobody tries never closes.
    return [c for c in able if c.gate is Gate.PROBE] or able


def _weighed(able: list[Candidate], want: Want, share: float) -> list[Candidate]:
    """Without those whose share this request is not of, where there are others."""
    return [c for c in able if _takes(c, want, share)] or able


def _takes(c: Candidate, want: Want, share: float) -> bool:
    """Whether the request is of the share that it gets. A session stays in it or out of it; prompts that begin alike may be all there are."""
    if c.weight >= 1.0:
        return True
    drawn = _hash(b"w" + want.key) / 2.0**64 if want.key.startswith(SESSION) else share
    return drawn < c.weight


def _drawn(fleet: Sequence[Candidate], want: Want, places: Sequence[float]) -> list[Candidate]:
    found: dict[int, Candidate] = {}
    for r in places[:TRIES]:
        index = int(r * len(fleet)) % len(fleet)
        if index not in found and _able(c := fleet[index], want):
            found[index] = c
            if len(found) == DRAWN:
                break
    return list(found.values())


def _nobody(fleet: Sequence[Candidate], want: Want) -> NoWorker | QueueFull:
    """Why: full is another answer than gone."""
    if not fleet:
        return NoWorker("there is no worker now")
    states = [_state(c, want) for c in fleet]
    shown = ", ".join(f"{c.node_id} {s}" for c, s in zip(fleet, states, strict=True) if s)
    shown = shown if len(shown) <= 400 else f"{shown[:400]}…"
    if "full" in states:
        return QueueFull(f"every worker that could take the request is full: {shown}")
    opens = [c.open_ms for c in fleet if c.gate is Gate.SHUT and c.open_ms]
    retry = int(min(opens)) + 1 if opens else None
    return NoWorker(f"no worker can take the request now: {shown}", retry_after_ms=retry)


def _state(c: Candidate, want: Want) -> str:
    if (c.node_id, c.life) in want.avoid:
        return "already tried"
    if not c.serving:
        return "not serving"
    if c.gate is Gate.SHUT:
        return "breaker open"
    if want.need is Need.ISOLATION and not c.isolates:
        return "not for isolated requests"
    return "full"


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
