"""Holds what is not REALTIME and hot to the safe batch: `batch.hard_cap` of a worker, by what requests have needed there.

The field guide's rule with live figures (`safe_batch`). Down at once, when what fits has changed by a tenth; up again only a minute later
and by a quarter, since the q95 of the newest thousand lengths swings by as much while nothing has changed.

What it misses, and what it costs: the scheduler admits by free blocks and preempts by cost, so a cache that is full loses no request without
this; what it does instead is to leave a good part of the cache unused, since most requests need far less than the q95
(docs/benchmarks.md has the figures). It is for engines that fail when their cache is full.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from controlplane.controllers.decision import Decision, Move, PolicyOf
from controlplane.controllers.held import move_of
from controlplane.controllers.safe_batch import Fits, fitting
from controlplane.seen import NodeSeen, Seen
from trimtab.snapshot import Adjustment, Scope, ScopeKind

name = "safe_batch"

FIELD = "batch.hard_cap"
LEAST_FACTOR = 0.1
"""A factor is never below (DESIGN §4)."""
DOWN, UP = 0.1, 0.25
"""Changes of what fits that move the cap."""
UP_S = 60.0
ENDED = 200
"""Requests of a model that must have ended: fewer say little of a q95."""
GONE_S = 60.0


@dataclass(frozen=True, slots=True)
class Worker:
    """`room` is what fitted when the cap was last moved, at `moved_at`; `judged` the newest window that was looked at."""

    judged: int = -1
    move: Move | None = None
    room: float | None = None
    moved_at: float = -math.inf
    gone_at: float | None = None
    unfit: str = ""


@dataclass(frozen=True, slots=True)
class State:
    workers: Mapping[str, Worker] = field(default_factory=dict)


def start(live: Iterable[Adjustment]) -> State:
    """Goes on with what the leader before had decided."""
    mine = [a for a in live if a.field == FIELD and a.scope.kind is ScopeKind.NODE]
    return State({a.scope.names[0]: Worker(move=move_of(a)) for a in mine})


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    workers = {}
    for node in seen.workers():
        worker = state.workers.get(node.node_id, Worker())
        newest = node.windows[-1].number if node.windows else 0
        if worker.judged != newest or worker.gone_at is not None:
            worker = _looked(replace(worker, judged=newest, gone_at=None), node, seen, policy, now)
        workers[node.node_id] = worker
    for node_id, worker in state.workers.items():
        if node_id not in workers and worker.move is not None:
            gone_at = now if worker.gone_at is None else worker.gone_at
            if now - gone_at < GONE_S:
                workers[node_id] = replace(worker, gone_at=gone_at)
    moves = tuple(w.move for w in workers.values() if w.move is not None)
    return Decision(State(workers), moves, holds=_holds(workers))


def _looked(worker: Worker, node: NodeSeen, seen: Seen, policy: PolicyOf, now: float) -> Worker:
    rules, lengths = policy(node.node).batch, seen.lengths.get(node.model)
    fits = fitting(node, lengths, rules, now)
    if isinstance(fits, str):
        return replace(worker, unfit=fits)
    ended = lengths.recent_totals.count if lengths is not None else 0
    if ended < ENDED:
        return replace(worker, unfit=f"fewer than {ENDED} requests have ended")
    return _capped(replace(worker, unfit=""), node, rules.hard_cap, fits, now)


def _capped(worker: Worker, node: NodeSeen, spec_cap: int, fits: Fits, now: float) -> Worker:
    held = _cap(worker.move, spec_cap)
    room = worker.room if worker.room is not None else (held + 0.5 if held is not None else float(spec_cap))
    lower = fits.requests <= (1 - DOWN) * room
    higher = fits.requests >= (1 + UP) * room and now - worker.moved_at >= UP_S
    if not (lower or higher):
        return replace(worker, room=room) if worker.move is not None else worker
    target = max(1, min(spec_cap, math.floor(fits.requests)))
    worker = replace(worker, room=fits.requests, moved_at=now)
    if target >= spec_cap:
        return replace(worker, move=None, room=None)
    if target == held:
        return worker
    reason = f"of what is not REALTIME and hot, {target} are safe at once, not {spec_cap}"
    return replace(worker, move=_move(node, reason, fits.evidence, spec_cap, target))


def _move(node: NodeSeen, reason: str, evidence: str, spec_cap: int, target: int) -> Move:
    scope = Scope(ScopeKind.NODE, (node.node_id,))
    if target / spec_cap >= LEAST_FACTOR:
        return Move(FIELD, scope, reason, evidence, factor=target / spec_cap)
    return Move(FIELD, scope, reason, evidence, delta=target - spec_cap)


def _cap(move: Move | None, spec_cap: int) -> int | None:
    if move is None:
        return None
    return max(1, round(spec_cap * move.factor) if move.factor is not None else spec_cap + move.delta)


def _holds(workers: Mapping[str, Worker]) -> tuple[str, ...]:
    """One line for each reason, however many workers share it."""
    at: dict[str, list[str]] = {}
    for node_id, worker in workers.items():
        if worker.unfit:
            at.setdefault(worker.unfit, []).append(node_id)
    return tuple(f"{ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {why}" for why, ids in at.items())
