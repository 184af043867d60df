"""How many requests an engine runs: fewer while REALTIME misses its objectives, more again while it keeps them.

The field guide's rule: three looks in a row with a P99 over the objective take a fifth of the running set away; each good look gives one
request back, up to what people have set. The first decrease starts from what really runs, so that it binds at once. Beside it, what is not
REALTIME and hot may be held to the safe batch (`safe_batch_cap`), which needs nobody to be late first. It is never less than what REALTIME ran,
and it acts under the mesh's own scheduler alone: in order of arrival fewer places make REALTIME wait longer.

What the signal misses: P99 says that a request was late, not that the running set made it so; a prompt of 100K tokens is late by itself.
A look therefore counts against the running set only where something else ran beside, and the lateness of a few long REALTIME prompts among
many short ones still looks like that of all. A worker with fewer than `batch.min_samples` first tokens a minute is never judged, and what
was decided for it stays. Lowering evicts nobody: what runs has to end first, so a look may still be over for what was there before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from controlplane.controllers.decision import Decision, Move, PolicyOf
from controlplane.controllers.held import move_of
from controlplane.seen import NodeSeen, Seen, Window, merged
from controlplane.telemetry import RUNNING
from trimtab.measures import BATCH_RUNNING, COLD, HOT, REALTIME_RUNNING, itl, ttft
from trimtab.messages import Outlier, Workload
from trimtab.policy import Mode, Policy
from trimtab.snapshot import Adjustment, Scope, ScopeKind

name = "batch"

ACTIVE = "batch.active"
TTFTS = (ttft(Workload.REALTIME, HOT), ttft(Workload.REALTIME, COLD))
ITLS = (itl(Workload.REALTIME),)
TAIL = 0.99
LEAST_FACTOR = 0.1
"""A factor is never below (DESIGN §4)."""
GONE_S = 60.0
"""What was decided for a worker that is away so long is forgotten."""
UNKNOWN = -1
"""The number of no window."""


@dataclass(frozen=True, slots=True)
class Look:
    """A window, or some that were joined, with enough first tokens to be judged. P99 in milliseconds; `itl_ms` is None with too few gaps."""

    span_s: float
    samples: int
    ttft_ms: float
    itl_ms: float | None
    ran: int
    """Requests that ran at once at most."""
    beside: bool
    """BATCH ran, which a smaller running set keeps out."""
    realtime: int = 0
    """Of them REALTIME, at most."""
    outliers: tuple[Outlier, ...] = ()


@dataclass(frozen=True, slots=True)
class Worker:
    """What is known of one. `judged` is its newest window that was looked at; `struck` are the looks over the objective in a row."""

    judged: int = UNKNOWN
    ended: float = 0.0
    thin: tuple[Window, ...] = ()
    struck: tuple[Look, ...] = ()
    active: Move | None = None
    few: str = ""
    """Why its running set was not judged lately."""


@dataclass(frozen=True, slots=True)
class State:
    """`absent` says since when workers with a decision are away. `moves` and `holds` are those of `workers`, kept while nothing is new."""

    workers: Mapping[str, Worker] = field(default_factory=dict)
    absent: Mapping[str, float] = field(default_factory=dict)
    moves: tuple[Move, ...] = ()
    holds: tuple[str, ...] = ()


def start(live: Iterable[Adjustment]) -> State:
    """Goes on with what the leader before had decided."""
    workers: dict[str, Worker] = {}
    for a in live:
        if a.scope.kind is ScopeKind.NODE and a.field == ACTIVE:
            workers[a.scope.names[0]] = Worker(active=move_of(a))
    return State(workers, moves=_moves(workers))


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    changed: dict[str, Worker] = {}
    others = [a for a in seen.adjustments if a.field == ACTIVE and a.controller != name]
    for node in seen.workers():
        worker = state.workers.get(node.node_id)
        newest = node.windows[-1].number if node.windows else 0
        if worker is not None and worker.judged == newest:
            continue
        if worker is None or worker.judged == UNKNOWN or worker.judged > newest:
            # Windows from before the first look were another leader's to judge.
            ended = node.windows[-1].ended if node.windows else now
            changed[node.node_id] = replace(worker or Worker(), judged=newest, ended=ended, thin=(), struck=())
            continue
        spec = policy(node.node)
        changed[node.node_id] = _looked(worker, node, spec, _Room.of(node, spec, others))
    absent = _absent(state, seen, now)
    gone = {node_id for node_id, since in absent.items() if now - since >= GONE_S}
    if not changed and not gone and absent == state.absent:
        return Decision(state, state.moves, holds=state.holds)
    workers = {node_id: w for node_id, w in {**state.workers, **changed}.items() if node_id not in gone}
    kept = {node_id: since for node_id, since in absent.items() if node_id not in gone}
    state = State(workers, kept, _moves(workers), _holds(workers))
    return Decision(state, state.moves, holds=state.holds)


def _absent(state: State, seen: Seen, now: float) -> dict[str, float]:
    found = {}
    for node_id in state.workers:
        node = seen.nodes.get(node_id)
        if node is None or not node.connected:
            found[node_id] = state.absent.get(node_id, now)
    return found


def _moves(workers: Mapping[str, Worker]) -> tuple[Move, ...]:
    return tuple(w.active for w in workers.values() if w.active is not None)


def _holds(workers: Mapping[str, Worker]) -> tuple[str, ...]:
    """One line for each reason, however many workers share it."""
    at: dict[str, list[str]] = {}
    for node_id, worker in workers.items():
        if worker.few:
            at.setdefault(worker.few, []).append(node_id)
    return tuple(f"{ids[0]}{f' and {len(ids) - 1} more' if len(ids) > 1 else ''}: {why}" for why, ids in at.items())


@dataclass(frozen=True, slots=True)
class _Room:
    """What the running set of a worker may be. `whole` is what factors start from, `ceiling` what it is without this controller."""

    whole: float
    ceiling: int
    bottom: int

    @staticmethod
    def of(node: NodeSeen, spec: Policy, others: Iterable[Adjustment]) -> _Room:
        mine = [a for a in others if a.factor is not None and a.scope.covers(node.node)]
        whole = spec.batch.active * math.prod(a.factor or 1.0 for a in mine)
        bottom = max(1 + spec.paths.realtime_reserve, math.ceil(LEAST_FACTOR * whole))
        return _Room(whole, round(whole), bottom)

    def now(self, move: Move | None) -> int:
        return self.ceiling if move is None else round(self.whole * (move.factor or 1.0))


def _looked(worker: Worker, node: NodeSeen, spec: Policy, room: _Room) -> Worker:
    if spec.scheduler.mode != Mode.TRIMTAB:
        newest = node.windows[-1]
        few = f"scheduler.mode is {spec.scheduler.mode}: fewer places would make REALTIME wait longer"
        return replace(worker, judged=newest.number, ended=newest.ended, thin=(), struck=(), active=None, few=few)
    for window in node.windows:
        if window.number > worker.judged:
            worker = _judged(worker, window, node, spec, room)
    return worker


# The running set.


def _judged(worker: Worker, window: Window, node: NodeSeen, spec: Policy, room: _Room) -> Worker:
    """After one more window. Those with too few first tokens wait for the next ones, `batch.max_window_s` at most."""
    rules = spec.batch
    if window.begun - worker.ended > rules.max_window_s:
        # What was before so long a silence says nothing beside what is now.
        worker = replace(worker, thin=(), struck=())
    thin = (*worker.thin, window)
    worker = replace(worker, judged=window.number, ended=window.ended, thin=thin)
    if sum(_count(w) for w in thin) >= rules.min_samples:
        return _decided(replace(worker, thin=(), few=""), _look(thin, node, rules.min_samples), node, spec, room)
    if window.ended - thin[0].begun >= rules.max_window_s:
        few = f"undecided: fewer than {rules.min_samples} REALTIME first tokens in {rules.max_window_s} s"
        return replace(worker, thin=(), struck=(), few=few)
    return worker


def _count(window: Window) -> int:
    return sum(window.sketches[key].count for key in TTFTS if key in window.sketches)


def _look(windows: tuple[Window, ...], node: NodeSeen, min_samples: int) -> Look:
    ttfts, itls = merged(windows, TTFTS), merged(windows, ITLS)
    batch = max(w.peaks.get(BATCH_RUNNING, 0.0) for w in windows)
    ran = int(max(w.peaks.get(RUNNING, 0.0) for w in windows)) or node.load.running
    return Look(
        sum(w.ended - w.begun for w in windows),
        ttfts.count,
        ttfts.quantile(TAIL),
        itls.quantile(TAIL) if itls.count >= min_samples else None,
        ran,
        beside=batch > 0,
        realtime=int(max(w.peaks.get(REALTIME_RUNNING, 0.0) for w in windows)),
        outliers=tuple(o for w in windows for o in w.outliers if o.workload is Workload.REALTIME),
    )


def _late(look: Look, spec: Policy) -> tuple[bool, bool]:
    """Whether its TTFT is over the objective, and whether its ITL is."""
    goal = spec.objectives
    return look.ttft_ms > goal.ttft_p99_ms, look.itl_ms is not None and look.itl_ms > goal.itl_p99_ms


def _decided(worker: Worker, look: Look, node: NodeSeen, spec: Policy, room: _Room) -> Worker:
    if not any(_late(look, spec)):
        return _grown(replace(worker, struck=()), look, node, spec, room)
    if not look.beside:
        # It was late alone: nobody could be kept out.
        return replace(worker, struck=())
    struck = (*worker.struck, look)
    if len(struck) < spec.batch.strikes:
        return replace(worker, struck=struck)
    return _lowered(replace(worker, struck=()), struck, node, spec, room)


def _lowered(worker: Worker, struck: tuple[Look, ...], node: NodeSeen, spec: Policy, room: _Room) -> Worker:
    held = room.now(worker.active)
    runs = min(held, max(look.ran for look in struck))
    # REALTIME's own places are not what makes it late.
    realtime = spec.paths.realtime_reserve + max(look.realtime for look in struck)
    target = max(room.bottom, realtime, math.floor(runs * spec.batch.decrease + 1e-9))
    if target >= held or spec.batch.decrease >= 1.0:
        return worker
    reason = f"REALTIME P99 over its objective {len(struck)} times in a row: running set {held} → {target}"
    evidence = "; ".join(x for x in (_figures(struck, spec), f"{runs} ran", _features(struck)) if x)
    return replace(worker, active=_move(ACTIVE, node, reason, evidence, room.whole, target))


def _grown(worker: Worker, look: Look, node: NodeSeen, spec: Policy, room: _Room) -> Worker:
    if worker.active is None:
        return worker
    held = room.now(worker.active)
    target = held + spec.batch.increase
    if target >= room.ceiling:
        return replace(worker, active=None)
    if target == held:
        return worker
    reason = f"REALTIME P99 within its objective again: running set {held} → {target}"
    return replace(worker, active=_move(ACTIVE, node, reason, _figures((look,), spec), room.whole, target))


def _move(path: str, node: NodeSeen, reason: str, evidence: str, whole: float, target: int) -> Move:
    """A factor, which goes along with what people set; a delta where a factor can't be so small."""
    scope = Scope(ScopeKind.NODE, (node.node_id,))
    factor = target / whole
    if factor >= LEAST_FACTOR:
        return Move(path, scope, reason, evidence, factor=factor)
    return Move(path, scope, reason, evidence, delta=target - round(whole))


def _figures(looks: tuple[Look, ...], spec: Policy) -> str:
    """The worst P99 of each kind against its objective, in how many looks of which length, and over how many first tokens."""
    goal, late = spec.objectives, [_late(look, spec) for look in looks]
    gaps = [look.itl_ms for look in looks if look.itl_ms is not None]
    over = (sum(by_ttft for by_ttft, _ in late), sum(by_itl for _, by_itl in late))
    spans = sorted({round(look.span_s) for look in looks})
    of = f"of {spans[0]} s" if len(spans) == 1 else f"of {spans[0]} to {spans[-1]} s"
    said = []
    for what, worst, limit, times in (
        ("TTFT", max(look.ttft_ms for look in looks), goal.ttft_p99_ms, over[0]),
        ("ITL", max(gaps, default=None), goal.itl_p99_ms, over[1]),
    ):
        if times:
            said.append(f"P99 {what} {worst:.0f} ms over {limit} in {times} window{'s' if times > 1 else ''} {of}")
        elif worst is not None and not any(over):
            said.append(f"P99 {what} {worst:.0f} ms within {limit}")
    return f"{', '.join(said)}, n={sum(look.samples for look in looks)}"


def _features(looks: tuple[Look, ...]) -> str:
    """What those that missed have in common; empty where none was told of."""
    late = [o for look in looks for o in look.outliers]
    if not late:
        return ""
    prompts, waits = [o.prompt_tokens for o in late], [o.queued_ms for o in late]
    preempted = sum(o.preemptions for o in late)
    beside = max(o.neighbours for o in late)
    longest = max(o.longest_neighbour_tokens for o in late)
    return (
        f"{len(late)} outliers: prompts {min(prompts)} to {max(prompts)} tokens (median {median(prompts):.0f}), "
        f"waited {median(waits):.0f} ms (at most {max(waits):.0f}), preempted {preempted} times, "
        f"at most {beside} beside, the longest of {longest} tokens"
    )
