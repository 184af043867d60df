"""Rollouts on a simulated mesh: what the leader's driver does, in virtual time and without a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from controlplane.controllers.decision import Controller
from controlplane.policies import Policies
from controlplane.rehearsal import Rehearsal
from controlplane.rollouts import builds
from controlplane.rollouts.choose import Wanted, Worker, choose
from controlplane.rollouts.state import Rollout
from controlplane.rollouts.watching import Watching, build_of
from trimtab.messages import Hello, Role
from trimtab.simulation import Orders
from trimtab.snapshot import Document, Scope


class RolloutRehearsal(Rehearsal):
    """A rollout of `fields` that begins at `at_s`; afterwards `rollout` has what came of it."""

    def __init__(
        self,
        fields: Mapping[str, str],
        *,
        at_s: float,
        document: Document,
        wanted: Wanted | None = None,
        controllers: Sequence[Controller] = (),
    ) -> None:
        super().__init__(controllers, document)
        self.rollout: Rollout | None = None
        self._fields = fields
        self._at_s = at_s
        self._wanted = wanted or Wanted()
        self._workers: dict[str, Hello] = {}
        self._watching: Watching | None = None

    def joined(self, hello: Hello, now: float) -> None:
        super().joined(hello, now)
        if hello.role is Role.WORKER:
            self._workers[hello.node.node_id] = hello

    def tick(self, now: float) -> Orders:
        orders = super().tick(now)
        if self.rollout is None:
            if now >= self._at_s:
                self._begin(int(1000.0 * now))
        elif self.rollout.live:
            self._carry_on(self.rollout, now)
        r = self.rollout
        weights = {name: r.share_of_work() for name in r.canaries} if r is not None and r.live else {}
        return replace(orders, document=self.document, weights=weights)

    def _begin(self, now_ms: int) -> None:
        workers = [Worker(h.node, h.model) for h in self._workers.values()]
        canaries = choose(workers, self._wanted)
        rules = Policies(self.document).spec(None).rollout
        pending = tuple(w.node_id for w in workers if w.node_id not in canaries)
        before = builds.set_now(self.document, self._fields, Scope())
        self.rollout = Rollout(
            "r-rehearsed", "a test", "", self._fields, before, Scope(), canaries, pending, rules.weight, rules.bake_s,
            now_ms, now_ms,
        )  # fmt: skip
        begin = builds.begin("r-rehearsed", self._fields, Scope(), canaries)
        self.document = begin(self.document, [h.node for h in self._workers.values()], now_ms).document

    def _carry_on(self, r: Rollout, now: float) -> None:
        seen, policies = self._telemetry.seen(self._fleet, (), now), Policies(self.document)
        now_ms = int(1000.0 * now)
        if self._watching is None or not self._watching.of(r):
            self._watching = Watching(r, seen, policies, now_ms, self._watching)
        after = self._watching.look(r, seen, policies, now_ms)
        if after.live and after.extended > r.extended:
            self._watching = Watching(after, seen, policies, now_ms, self._watching)
        if after.stage is not r.stage or after.canaries != r.canaries:
            nodes = [h.node for h in self._workers.values()]
            self.document = build_of(after)(self.document, nodes, now_ms).document
        self.rollout = after
