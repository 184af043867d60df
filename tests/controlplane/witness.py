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
class History:
    """All that was asked for and told. `grants` are leases with the moment at which they were known to hold."""

    asked: list[Asked] = field(default_factory=list)
    written: list[Written] = field(default_factory=list)
    grants: list[tuple[Lease, float]] = field(default_factory=list)
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
        newest = 0
        for w in sorted(self.written, key=lambda w: w.began):
            newest = max((lease.term for lease, at in self.grants if at < w.began), default=0)
            if w.lease.term < newest:
                found.append(f"a write of term {w.lease.term} landed after term {newest} was granted")
        holders: dict[int, set[str]] = {}
        for lease, _ in self.grants:
            holders.setdefault(lease.term, set()).add(lease.holder)
        found += [f"term {term} was granted to {sorted(who)}" for term, who in holders.items() if len(who) > 1]
        found += [f"{n.node.node_id} went back {n.backwards} times within an epoch" for n in nodes if n.backwards]
        return found
