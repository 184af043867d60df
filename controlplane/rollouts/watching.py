"""One bake of one rollout, as whoever leads watches it: what it looks at, and what a look comes to. Pure.

A bake that is lengthened is a new one, whose P99s are its own: what was doubtful for a moment, such as a queue from before, need not stay so.
The tests go on, and so do the samples, unless a canary is away or comes back: those were of others, and min_samples begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from controlplane import spec
from controlplane.policies import Policies
from controlplane.rollouts import builds
from controlplane.rollouts.attendance import Attendance, serves
from controlplane.rollouts.choose import Group, Worker
from controlplane.rollouts.judge import Bench
from controlplane.rollouts.state import Rollout, Stage
from controlplane.rollouts.steps import Facts, advance
from controlplane.seen import Seen
from trimtab.errors import Conflict
from trimtab.messages import NodeState
from trimtab.policy import Policy
from trimtab.snapshot import Document, Node

NEW_MS = 10_000
"""A rollout that is so young may not be in the policy yet."""


class Watching:
    """`look` once a tick, for as long as it is `of` the rollout. `before` is the one that there was: of the same rollout, it is gone on from."""

    def __init__(
        self, r: Rollout, seen: Seen, policies: Policies, now_unix_ms: int, before: Watching | None = None
    ) -> None:
        self._bake = (r.rollout_id, r.canaries, r.extended)
        mine = before if before is not None and before._bake[0] == r.rollout_id else None
        self._attendance: Attendance = mine._attendance if mine is not None else Attendance()
        self._waits_at: float | None = mine._waits_at if mine is not None else None
        self._rest_waits_at: float | None = mine._rest_waits_at if mine is not None else None
        self._since = seen.now - (now_unix_ms - r.began_unix_ms) / 1000.0
        sides = _sides(r, seen, policies.document)
        self._paired = _paired(sides)
        self._attendance.look(r.canaries, (), seen, self._since)
        missing = self._attendance.missing(seen, self._paired)
        self._bench = _bench(r, sides, seen, policies, (0, 0) if missing else r.samples)

    def of(self, r: Rollout) -> bool:
        return self._bake == (r.rollout_id, r.canaries, r.extended)

    def look(self, r: Rollout, seen: Seen, policies: Policies, now_unix_ms: int) -> Rollout:
        document = policies.document
        r = r.looked(now_unix_ms)
        self._pair_anew(r, seen, policies)
        judgement = self._bench.look(seen, policies.spec(None).rollout)
        here, there = self._bench.compared
        others = workers_of(seen, document, r)
        rest = {*there, *r.pending, *(w.node_id for w in others)}.difference(r.canaries)
        self._attendance.look(r.canaries, rest, seen, self._since)
        watched = [*here, *(name for name in r.canaries if name not in self._paired)]
        waits = self._attendance.missing(seen, self._paired)
        rest_waits = self._attendance.missing_rest(rest, seen)
        self._waits_at = _waits_at(self._waits_at, waits, r.canaries, seen)
        self._rest_waits_at = _waits_at(self._rest_waits_at, rest_waits, rest, seen)
        present = builds.overlay_of(document, r.rollout_id) is not None
        facts = Facts(
            present=present or now_unix_ms - r.started_unix_ms < NEW_MS,
            done=not present and _all_have_it(r, document),
            theirs=_changed(r, document),
            absent_s=self._attendance.absent_s(seen.now),
            restarts=self._attendance.ended(watched, there),
            out_of_memory=self._attendance.out_of_memory(seen),
            waits=waits,
            waits_s=0.0 if self._waits_at is None else seen.now - self._waits_at,
            rest_waits=rest_waits,
            rest_waits_s=0.0 if self._rest_waits_at is None else seen.now - self._rest_waits_at,
            others=others,
        )
        return advance(replace(r, wealth=self._bench.wealth), judgement, facts, now_unix_ms)

    def _pair_anew(self, r: Rollout, seen: Seen, policies: Policies) -> None:
        """A canary that was away when sides were made is compared from its return on, and all are counted anew."""
        serving = {name for name in r.canaries if (n := seen.nodes.get(name)) is not None and serves(n)}
        if serving <= self._paired:
            return
        sides = _sides(r, seen, policies.document)
        paired = _paired(sides)
        if not serving & paired <= self._paired:
            self._paired = paired
            self._bench = _bench(replace(r, wealth=self._bench.wealth), sides, seen, policies, (0, 0))


def _waits_at(before: float | None, waits: str, names: Iterable[str], seen: Seen) -> float | None:
    """Since when they are waited for. For a rolling restart to bring them back nobody's patience runs out."""
    if not waits or not seen.restarting.isdisjoint(names):
        return None
    return seen.now if before is None else before


Sides = dict[Group, tuple[list[str], list[str]]]
"""Canaries, and the rest."""


def _sides(r: Rollout, seen: Seen, document: Document) -> Sides:
    sides: Sides = {}
    for w in workers_of(seen, document, r, all_of_them=True):
        sides.setdefault(w.group, ([], []))[w.node_id not in r.canaries].append(w.node_id)
    return sides


def _paired(sides: Sides) -> frozenset[str]:
    """Canaries that somebody is left beside to compare with."""
    return frozenset(name for here, there in sides.values() if there for name in here)


def _bench(r: Rollout, sides: Sides, seen: Seen, policies: Policies, samples: tuple[int, int]) -> Bench:
    rest = {n.node.pool: n.node for n in seen.workers() if n.node_id not in r.canaries}
    bench = Bench(
        sides,
        # By what the rest has: a rollout that changes objectives is not judged by its own.
        lambda group: _objectives(policies.spec(rest.get(group[0]))),
        r.wealth,
        samples,
    )
    # From here on is counted.
    bench.look(seen, policies.spec(None).rollout)
    return bench


def build_of(r: Rollout) -> spec.Build:
    """The policy as the rollout's stage has it."""
    match r.stage:
        case Stage.PROMOTED:
            return _promote(r)
        case Stage.BAKING | Stage.WIDENING:
            return builds.widen(r.rollout_id, r.canaries)
        case Stage.ROLLED_BACK | Stage.ABORTED:
            return _take_back(r)


def _promote(r: Rollout) -> spec.Build:
    """Refused where it is not the rollout's to decide any more: another has ended it, or people have changed what it is about."""

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> spec.Draft:
        if builds.overlay_of(document, r.rollout_id) is None and _all_have_it(r, document):
            # By a leader that could not say so any more.
            return spec.Draft(document, ())
        if theirs := _changed(r, document):
            raise Conflict(f"rollout {r.rollout_id} is not promoted: {theirs}", metadata={"rollout": r.rollout_id})
        return spec.promote(r.rollout_id, r.fields, r.scope)(document, nodes, now_unix_ms)

    return build


def _take_back(r: Rollout) -> spec.Build:
    """Refused where everybody has it, and only its mark does not say so yet: nothing would be taken back."""

    def build(document: Document, nodes: Iterable[Node], now_unix_ms: int) -> spec.Draft:
        if builds.overlay_of(document, r.rollout_id) is None and _all_have_it(r, document):
            words = "everybody has it; set its fields back, or roll the policy back (trimtab policy rollback)"
            raise Conflict(f"rollout {r.rollout_id} is promoted: {words}", metadata={"rollout": r.rollout_id})
        return builds.drop(r.rollout_id)(document, nodes, now_unix_ms)

    return build


def workers_of(seen: Seen, document: Document, r: Rollout, *, all_of_them: bool = False) -> list[Worker]:
    """Those that serve and that the change would reach, without canaries unless `all_of_them`."""
    return [
        Worker(n.node, n.model)
        for n in seen.workers()
        if n.state is NodeState.SERVING
        and r.scope.covers(n.node)
        and (all_of_them or n.node_id not in r.canaries)
        and not builds.shadowed(document, r.fields, r.scope, n.node)
    ]


def _changed(r: Rollout, document: Document) -> str:
    """What people have done to its fields meanwhile, in words."""
    now = builds.set_now(document, r.before, r.scope)
    theirs = {f: v for f, v in now.items() if v != r.before[f]}
    pinned = [p for p in document.pins if p.field in r.fields]
    if pinned:
        return f"{pinned[0].field} was pinned by {pinned[0].author} meanwhile"
    return ", ".join(f"{f} was set to {v} meanwhile" for f, v in theirs.items())


def _objectives(policy: Policy) -> tuple[float, float]:
    return float(policy.objectives.ttft_p99_ms), float(policy.objectives.itl_p99_ms)


def _all_have_it(r: Rollout, document: Document) -> bool:
    """It was promoted, and only its mark does not say so yet. Of a document without the rollout's overlay."""
    return not spec.promote("", r.fields, r.scope)(document, (), r.started_unix_ms).changes
