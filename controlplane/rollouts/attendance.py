"""Which canaries of a rollout are there, and whose processes ended, from its first look to its last. Pure.

It goes on from one bake to the next, so that what happens to a canary between two is not forgotten. Whoever leads next measures from when the
stage began, as far as it has seen the workers itself. Workers of a rolling restart are away because people want it: they count as there, and
their ends for nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from controlplane.rollouts.choose import Group
from controlplane.rollouts.steps import LOST_S
from controlplane.seen import NodeSeen, Seen
from trimtab.messages import NodeState

NAMED = 5
"""Workers that words name, at most."""


@dataclass(slots=True)
class _One:
    """One worker, watched since `since`; moments are `Seen`'s. `here_at` is when it last served, `connected_at` when it last was connected."""

    since: float
    here_at: float
    connected_at: float
    group: Group | None = None
    ended: int = 0
    """Of its processes, since then."""
    restarts: int | None = None
    """As they were counted at the last look."""
    leaves: bool = False
    """A rolling restart had it at the last look."""


class Attendance:
    """`look` once a tick; the rest is of the newest look."""

    def __init__(self) -> None:
        self._canaries: dict[str, _One] = {}
        self._rest: dict[str, _One] = {}

    def look(self, canaries: Iterable[str], rest: Iterable[str], seen: Seen, since: float) -> None:
        """Who is new here is watched from `since` on."""
        for known, names in ((self._canaries, canaries), (self._rest, rest)):
            for name in names:
                one = known.get(name)
                if one is None:
                    one = known[name] = _One(min(since, seen.now), seen.now, seen.now)
                if (n := seen.nodes.get(name)) is not None:
                    _note(one, n, name in seen.restarting, seen.now)

    def absent_s(self, now: float) -> float:
        """For how long no canary has served."""
        return now - max((one.here_at for one in self._canaries.values()), default=now)

    def ended(self, canaries: Iterable[str], rest: Iterable[str]) -> tuple[int, int]:
        """Processes, of these."""
        return sum(self._canaries[n].ended for n in canaries), sum(self._rest[n].ended for n in rest)

    def out_of_memory(self, seen: Seen) -> tuple[str, ...]:
        found = ((name, one, seen.nodes.get(name)) for name, one in self._canaries.items())
        return tuple(name for name, one, n in found if n is not None and (n.out_of_memory_at or 0.0) > one.since)

    def missing_rest(self, rest: Iterable[str], seen: Seen) -> str:
        """Those of the rest who are to be there before all get the policy, in words: who served a moment ago, and who is the last of a pool and
        model beside its canaries.
        """
        known = {name: one for name in rest if (one := self._rest.get(name)) is not None}
        serving = _serving(known, seen)
        lacking = {one.group for one in self._canaries.values()} - {None, *(known[name].group for name in serving)}
        away = [
            name
            for name, one in known.items()
            if name not in serving and (one.group in lacking or seen.now - one.here_at < LOST_S)
        ]
        return f"{_names(away)} of the rest not serving" if away else ""

    def missing(self, seen: Seen, paired: Collection[str]) -> str:
        """Canaries without whom nothing can be said of the policy, in words. `paired` are those that are compared with somebody.

        One that is gone for good is not waited for, where another of its pool and model serves.
        """
        serving = _serving(self._canaries, seen)
        groups = {self._canaries[name].group for name in serving}
        away = [
            name
            for name, one in self._canaries.items()
            if name not in serving and (one.group not in groups or seen.now - one.connected_at < LOST_S)
        ]
        alone = [name for name in serving if name not in paired]
        words = [f"{_names(away)} not serving"] if away else []
        return "; ".join(words + ([f"{_names(alone)} without anybody to compare with"] if alone else []))


def _serving(names: Iterable[str], seen: Seen) -> set[str]:
    return {name for name in names if (n := seen.nodes.get(name)) is not None and serves(n)}


def serves(n: NodeSeen) -> bool:
    return n.connected and n.state is NodeState.SERVING


def _note(one: _One, n: NodeSeen, restarting: bool, now: float) -> None:
    one.group = (n.node.pool, n.model)
    # Before the first look one process may have been followed by another.
    first = int(n.restarts > 0 and n.joined_at > one.since)
    new = first if one.restarts is None else n.restarts - one.restarts
    if not restarting and not one.leaves:
        one.ended += max(0, new)
    one.restarts, one.leaves = n.restarts, restarting
    if restarting or serves(n):
        one.here_at = now
    if restarting or n.connected:
        one.connected_at = now


def _names(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:NAMED]) + (f" and {len(found) - NAMED} more" if len(found) > NAMED else "")
