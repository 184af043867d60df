"""Cold BATCH requests that back up where no worker can be added: gateways refuse more of them until half of the backlog is gone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from controlplane.controllers.decision import Alert, Move, Severity
from controlplane.controllers.held import move_of
from controlplane.seen import NodeSeen, Seen
from trimtab.measures import COLD_WAITING
from trimtab.messages import Role
from trimtab.policy import Shed
from trimtab.policy_loops import ScalePart
from trimtab.snapshot import Adjustment, Scope

FIELD = "admission.shed"


@dataclass(frozen=True, slots=True)
class Backlog:
    """Since when it is too long, and the move while it is. For the whole mesh: gateways have no pool of workers."""

    since: float | None = None
    move: Move | None = None

    @staticmethod
    def of(live: Iterable[Adjustment]) -> Backlog:
        return Backlog(move=next((move_of(a) for a in live if a.field == FIELD), None))

    @property
    def moves(self) -> tuple[Move, ...]:
        return (self.move,) if self.move is not None else ()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        text = "cold BATCH requests back up and no worker can be added: more of them are refused"
        return tuple(Alert("scale/cold", Severity.WARNING, text, m.evidence) for m in self.moves)

    def next(
        self, seen: Seen, workers: Sequence[NodeSeen], rules: Sequence[ScalePart], now: float, *, full: bool
    ) -> tuple[Backlog, str]:
        """`full` is whether every pool has all that it may; `rules` are theirs, the strictest holds. Also what is missing, if anything."""
        if not full:
            # A pool that has a worker to come says nothing about those that wait until it is there.
            return Backlog(), ""
        found = [n.gauge(COLD_WAITING, now) for n in (*workers, *seen.of(Role.GATEWAY))]
        known = [each for each in found if each is not None]
        if not workers or len(known) < len(found):
            return self, "not every node says how many cold requests wait there"
        limit = min(rule.cold_above for rule in rules)
        each = sum(known) / len(workers)
        if self.move is not None:
            return (self if each > limit / 2 else Backlog()), ""
        if each <= limit:
            return Backlog(), ""
        since = now if self.since is None else self.since
        if now - since < max(rule.out_dwell_s for rule in rules):
            return replace(self, since=since), ""
        figures = f"{each:.0f} wait for each of {len(workers)} workers (limit {limit})"
        return Backlog(since, Move(FIELD, Scope(), "cold backlog", figures, state=Shed.COLD.value)), ""
