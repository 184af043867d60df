"""One bake of one rollout, as whoever leads watches it: what it looks at, and what a look comes to. Pure.

A bake that is lengthened is a new one, whose P99s are its own: what was doubtful for a moment, such as a queue from before, need not stay so.
The tests go on, and so do the samples.
"""

from __future__ import annotations

from dataclasses import replace

from controlplane import spec
from controlplane.policies import Policies
from controlplane.rollouts import builds
from controlplane.rollouts.choose import Group, Worker
from controlplane.rollouts.judge import Bench
from controlplane.rollouts.state import Rollout, Stage
from controlplane.rollouts.steps import Facts, advance
from controlplane.seen import Seen
from trimtab.messages import NodeState
from trimtab.policy import Policy
from trimtab.snapshot import Document

NEW_MS = 10_000
"""A rollout that is so young may not be in the policy yet."""


class Watching:
    """`look` once a tick, for as long as it is `of` the rollout."""

    def __init__(self, r: Rollout, seen: Seen, policies: Policies) -> None:
        self._bake = (r.rollout_id, r.canaries, r.extended)
        self._began = seen.now
        self._here_at = seen.now
        sides: dict[Group, tuple[list[str], list[str]]] = {}
        for w in workers_of(seen, policies.document, r, all_of_them=True):
            sides.setdefault(w.group, ([], []))[w.node_id not in r.canaries].append(w.node_id)
        rest = {n.node.pool: n.node for n in seen.workers() if n.node_id not in r.canaries}
        self._bench = Bench(
            sides,
            # By what the rest has: a rollout that changes objectives is not judged by its own.
            lambda group: _objectives(policies.spec(rest.get(group[0]))),
            r.wealth,
            r.samples,
        )
        # From here on is counted.
        self._bench.look(seen, policies.spec(None).rollout)

    def of(self, r: Rollout) -> bool:
        return self._bake == (r.rollout_id, r.canaries, r.extended)

    def look(self, r: Rollout, seen: Seen, policies: Policies, now_unix_ms: int) -> Rollout:
        canaries = [n for name in r.canaries if (n := seen.nodes.get(name)) is not None]
        if any(n.connected and n.state is NodeState.SERVING for n in canaries):
            self._here_at = seen.now
        judgement = self._bench.look(seen, policies.spec(None).rollout)
        document = policies.document
        present = builds.overlay_of(document, r.rollout_id) is not None
        facts = Facts(
            present=present or now_unix_ms - r.started_unix_ms < NEW_MS,
            done=not present and _all_have_it(r, document),
            theirs=_changed(r, document),
            absent_s=seen.now - self._here_at,
            restarts=self._bench.restarts,
            out_of_memory=tuple(n.node_id for n in canaries if (n.out_of_memory_at or 0.0) > self._began),
            others=workers_of(seen, document, r),
        )
        return advance(replace(r, wealth=self._bench.wealth), judgement, facts, now_unix_ms)


def build_of(r: Rollout) -> spec.Build:
    """The policy as the rollout's stage has it."""
    match r.stage:
        case Stage.PROMOTED:
            return spec.promote(r.rollout_id, r.fields, r.scope)
        case Stage.BAKING | Stage.WIDENING:
            return builds.widen(r.rollout_id, r.canaries)
        case Stage.ROLLED_BACK | Stage.ABORTED:
            return builds.drop(r.rollout_id)


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
    """It was promoted by a leader that died before it could say so."""
    draft = spec.promote(r.rollout_id, r.fields, r.scope)(document, (), r.started_unix_ms)
    return not draft.changes
