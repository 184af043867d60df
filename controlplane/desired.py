"""What whoever starts and stops workers is to do about what their pool wants: pure.

The leader says how many workers a pool wants, and which are too many. A follower knows its own workers and looks at the fleet for the
others: those are counted, and never touched. What the control plane does not say changes nothing: no leader, no such pool, a pool that is to
be left as it is, or one that wants nobody (nothing in it could say then that it wants somebody again). One pool has one follower that
starts workers: two of them would both start what is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from trimtab.codec import decode_hello, decode_state
from trimtab.messages import NodeState
from trimtab.messages import Role as NodeRole


@dataclass(frozen=True, slots=True)
class Goal:
    """So many workers in the pool, where so many run; `surplus` are the ones that are too many, by node id."""

    wanted: int
    running: int
    surplus: tuple[str, ...] = ()
    why: str = ""


@dataclass(frozen=True, slots=True)
class Change:
    """So many workers to start, or these to end; neither where all is well. `short` are missing and may not be started."""

    more: int = 0
    fewer: tuple[str, ...] = ()
    short: int = 0

    def __bool__(self) -> bool:
        return bool(self.more or self.fewer)


def goal_of(answer: Any, pool: str) -> Goal | None:
    """Of GetScale's answer; None where it says nothing of this pool."""
    if not answer.leader_id:
        return None
    said = next((p for p in answer.pools if p.pool == pool), None)
    if said is None or not said.max_workers or not said.wanted:
        return None
    return Goal(min(said.wanted, said.max_workers), said.running, tuple(said.surplus), said.reason)


def settled(goal: Goal) -> bool:
    """Whether there is nothing to look at the fleet for."""
    return goal.wanted == goal.running and not goal.surplus


def named(fleet: Any) -> set[str]:
    """Of GetFleet's answer: who is connected, by node id."""
    return {n.hello.node_id for n in fleet.nodes if n.connected}


def there(fleet: Any, pool: str) -> set[str]:
    """Of GetFleet's answer: the pool's workers that are connected, by node id. One that drains is as good as gone."""
    found = ((decode_hello(n.hello), n) for n in fleet.nodes if n.connected)
    return {
        hello.node.node_id
        for hello, n in found
        if hello.role is NodeRole.WORKER
        and hello.node.pool == pool
        and decode_state(n.report.state) is not NodeState.DRAINING
    }


def change(goal: Goal, ours: Collection[str], others: Collection[str], *, most: int | None = None) -> Change:
    """`ours` are those that run, start or are being brought back, without those that were told to end; `others` are not ours. At most `most`
    are to be ours.

    Only those end that the leader names as too many. Where it names nobody, it may not know yet of one that has just started.
    """
    missing = goal.wanted - len(ours) - len(others)
    if missing >= 0:
        room = missing if most is None else max(0, most - len(ours))
        return Change(more=min(missing, room), short=max(0, missing - room))
    return Change(fewer=tuple(name for name in goal.surplus if name in ours)[:-missing])


def free_number(name: Callable[[int], str], taken: Collection[str]) -> int:
    """The lowest whose name nobody has."""
    return next(n for n in itertools.count() if name(n) not in taken)
