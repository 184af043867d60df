"""What was asked of a control plane under faults, what was acknowledged, and what must not have been. Pure but for the nodes that it asks."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from controlplane.store import Lease
from tests.controlplane.mesh import FakeNode


class Outcome(Enum):
    """What whoever asked was told."""

    OPEN = "open"
    COMMITTED = "committed"
    ACCEPTED = "accepted"
    REFUSED = "refused"
    UNKNOWN = "unknown"


@dataclass
class Asked:
    """One change, its value unlike any other's. Times by one monotonic clock; `ended` is infinite while nobody knows."""

    value: int
    began: float
    ended: float = float("inf")
    outcome: Outcome = Outcome.OPEN


@dataclass
class Written:
    """A controller's write that was taken: its lease, and when it was asked for."""

    lease: Lease
    began: float


@dataclass
class Seen:
    """A lease that held at some moment between these two."""

    lease: Lease
    asked: float
    told: float


@dataclass
class History:
    """All that was asked for and told."""

    asked: list[Asked] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    grants: list[Seen] = field(default_factory=list)
    fenced: int = 0
    log: list[str] = field(default_factory=list)

    def faults(self, final: int | None, nodes: list[FakeNode]) -> list[str]:
        """What must not have been. `final` is the value in force once all is quiet; None is the default."""
        found = []
        by_value = {a.value: a for a in self.asked}
        committed = [a for a in self.asked if a.outcome is Outcome.COMMITTED]
        mine = by_value.get(final) if final is not None else None
        if final is not None and mine is None:
            found.append(f"{final} is in force, and nobody asked for it")
        if mine is not None and mine.outcome is Outcome.REFUSED:
            found.append(f"{final} is in force, and was refused")
        ended = mine.ended if mine is not None and mine.outcome is not Outcome.UNKNOWN else float("inf")
        if mine is None:
            ended = float("-inf")
        found += [
            f"{a.value} was acknowledged as committed and is lost: {final} was over before it was asked for"
            for a in committed
            if a.began > ended
        ]
        for w in sorted(self.written, key=lambda w: w.began):
            before = [seen for seen in self.grants if seen.told < w.began]
            newest = max((seen.lease.term for seen in before), default=0)
            if w.lease.term < newest:
                found.append(f"a write of term {w.lease.term} landed after term {newest} was granted")
            other = _after(w.lease, before)
            if other is not None:
                found.append(f"a write of {w.lease.holder} landed after term {other.term} was {other.holder}'s")
        found += [f"{n.node.node_id} went back {n.backwards} times within an epoch" for n in nodes if n.backwards]
        return found


def _after(lease: Lease, seen: list[Seen]) -> Lease | None:
    """Who holds this lease's term now, where another does: a store that lost a grant before any other replica heard of it grants its term
    once more, and from then on nothing of the first holder's may land."""
    same = [s for s in seen if s.lease.term == lease.term]
    last = max(same, key=lambda s: s.asked, default=None)
    if last is None or last.lease == lease:
        return None
    return last.lease if any(s.lease == lease and s.told < last.asked for s in same) else None
