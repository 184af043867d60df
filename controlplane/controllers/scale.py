"""How many workers a pool wants. Only where `scale.max_workers` is above 0; never more than it, never fewer than `scale.min_workers`.

One more when too many REALTIME requests wait for each worker, or the KV cache is foretold to be nearly full (`forecast`); workers that are
wanted and not there yet count as there, so a slow start does not call for another. One less, the newest, when little of the running set is
used and no queue stands anywhere, gateways included, for long enough. Never on a missing metric: then what was wanted stays. Workers that people
add are wanted from then on: only those that a decision here names are ever given back. Where every pool has all that it may and cold BATCH
requests still back up, gateways shed those (field guide B).

What the signals miss: how long a worker takes to start, so a burst shorter than that is met too late; requests that are refused instead of
waiting; and of which pool a request in a gateway's line will be, so any of them keeps every pool from shrinking.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from controlplane.controllers.backlog import Backlog
from controlplane.controllers.decision import Alert, Decision, PolicyOf, Severity, Want
from controlplane.controllers.forecast import Book, Course, serving
from controlplane.seen import NodeSeen, Seen
from trimtab.measures import BATCH_WAITING, REALTIME_WAITING
from trimtab.messages import NodeState, Role
from trimtab.policy import Policy
from trimtab.snapshot import Adjustment, Node

name = "scale"
PRESS_S = 5.0
"""A few requests that wait for a moment call for nobody."""
LOST_S = 60.0
"""A worker that is not heard is missed for so long; then it is gone."""
WARM_S = 30.0
"""Where no earlier want is known, a pool is listened to for so long before it is said how many there are."""
FOLLOW_S = 30.0
"""More workers than are wanted are so after this: one that is replaced may be seen beside the one that replaces it."""


@dataclass(frozen=True, slots=True)
class Sized:
    """What a pool wants, since when and why, and who is to leave for it.

    `pressed_at`, `calm_at` and `more_at` say since when, of that size, it is pressed or calm, and since when it has more than it wants.
    """

    want: int
    changed_at: float
    reason: str
    evidence: str = ""
    leaving: tuple[str, ...] = ()
    pressed_at: float | None = None
    calm_at: float | None = None
    more_at: float | None = None


@dataclass(frozen=True, slots=True)
class State:
    """`pools` holds None for one that was seen and is left as it is. `began` is this leader's first tick."""

    began: float | None = None
    book: Book = field(default_factory=Book)
    pools: Mapping[str, Sized | None] = field(default_factory=dict)
    backlog: Backlog = field(default_factory=Backlog)


@dataclass(frozen=True, slots=True)
class Pool:
    """One at a tick. `workers` are connected and stay; `course` is None while too little is known."""

    name: str
    workers: list[NodeSeen]
    policy: Policy
    course: Course | None
    lost: list[str]
    """Workers that went without a word: whether they are dead or only cut off is not known yet."""
    at_gateways: int | None
    """Requests that wait there; None where one does not say."""


def start(live: Iterable[Adjustment]) -> State:
    return State(backlog=Backlog.of(live))


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    began = now if state.began is None else state.began
    there = _there(state, seen)
    policies = {pool: policy(Node("", pool)) for pool in there}
    scaled = {pool for pool, p in policies.items() if p.scale.max_workers}
    if not scaled:
        return Decision(State(began, pools=dict.fromkeys(there)))
    book = state.book.noted(seen, policy, now)
    at_gateways = waiting_at_gateways(seen, now)
    pools: dict[str, Sized | None] = dict.fromkeys(there)
    wants, alerts, holds = [], [], []
    for pool in sorted(scaled):
        p = Pool(pool, there[pool], policies[pool], book.courses.get(pool), _lost(seen, pool, now), at_gateways)
        sized = state.pools.get(pool) or _first(p, state, seen, began, now)
        if sized is None:
            holds.append(f"pool {pool}: its workers may not all have been heard yet")
            continue
        sized = _followed(_bounded(sized, p, now), p, now)
        missing = _missing(p, now)
        if missing:
            holds.append(f"pool {pool}: {missing}")
            sized = replace(sized, pressed_at=None, calm_at=None)
        else:
            sized, unknown = _sized(sized, p, now)
            holds += [f"pool {pool}: {words}" for words in unknown]
        pools[pool] = sized
        surplus = tuple(n.node_id for n in p.workers if n.node_id in sized.leaving)
        wants.append(Want(pool, sized.want, sized.reason, sized.evidence, surplus))
        if _stuck(sized, p.policy, now):
            text = f"pool {pool} has all the workers that scale.max_workers allows, and needs more"
            alerts.append(Alert(f"scale/{pool}", Severity.WARNING, text, f"{sized.want} workers"))
    backlog = state.backlog
    if len(wants) == len(scaled):
        full = all(want.workers >= policies[want.pool].scale.max_workers for want in wants)
        workers = [n for pool in sorted(scaled) for n in serving(there[pool])]
        backlog, hold = backlog.next(seen, workers, [policies[pool].scale for pool in scaled], now, full=full)
        holds += [hold] if hold else []
    alerts += backlog.alerts
    state = State(began, book, pools, backlog)
    return Decision(state, backlog.moves, wants=tuple(wants), alerts=tuple(alerts), holds=tuple(holds))


def _there(state: State, seen: Seen) -> dict[str, list[NodeSeen]]:
    """Connected workers that stay, by pool; none of a pool that is only remembered."""
    remembered = {n.node.pool for n in seen.nodes.values() if n.role is Role.WORKER}
    there: dict[str, list[NodeSeen]] = {
        p: [] for p, sized in state.pools.items() if sized is not None and p in remembered
    }
    for n in seen.workers():
        workers = there.setdefault(n.node.pool, [])
        if n.state is not NodeState.DRAINING:
            workers.append(n)
    return there


def _lost(seen: Seen, pool: str, now: float) -> list[str]:
    return [
        n.node_id
        for n in seen.nodes.values()
        if n.role is Role.WORKER
        and n.node.pool == pool
        and not n.connected
        and n.state is not NodeState.DRAINING
        and n.reported_at is not None
        and now - n.reported_at <= LOST_S
    ]


def waiting_at_gateways(seen: Seen, now: float) -> int | None:
    """None where there is no gateway, or one does not say."""
    found = [n.gauge(name, now) for n in seen.of(Role.GATEWAY) for name in (REALTIME_WAITING, BATCH_WAITING)]
    known = [each for each in found if each is not None]
    return int(sum(known)) if found and len(known) == len(found) else None


def _first(p: Pool, state: State, seen: Seen, began: float, now: float) -> Sized | None:
    """Where it goes on from: what an earlier leader wanted, else what is there."""
    before = seen.wants.get(p.name)
    if before is not None and p.name not in state.pools and now - began < WARM_S:
        return Sized(before, now, "as it was wanted before")
    heard_at = min((n.joined_at for n in p.workers), default=now)
    if now - max(began, heard_at) < WARM_S:
        return None
    return Sized(len(p.workers), now, "as many as there are")


def _bounded(sized: Sized, p: Pool, now: float) -> Sized:
    """Within what people allow, at once."""
    low, high = _bounds(p)
    want = min(high, max(low, sized.want))
    if want == sized.want:
        return sized
    reason, figures = f"between {low} and {high} are allowed", f"{sized.want} were wanted"
    return Sized(want, now, reason, figures, _newest(p.workers, len(p.workers) - want) if want < sized.want else ())


def _followed(sized: Sized, p: Pool, now: float) -> Sized:
    """With those that came though nobody here wanted them."""
    staying = [n for n in p.workers if n.node_id not in sized.leaving]
    if len(staying) <= sized.want:
        return replace(sized, more_at=None) if sized.more_at is not None else sized
    since = now if sized.more_at is None else sized.more_at
    if now - since < FOLLOW_S:
        return replace(sized, more_at=since)
    want = min(_bounds(p)[1], len(staying))
    too_many = (*sized.leaving, *_newest(staying, len(staying) - want))
    if want == sized.want:
        return replace(sized, leaving=too_many, more_at=None)
    return Sized(want, now, f"people added workers to pool {p.name}", f"{sized.want} were wanted", too_many)


def _bounds(p: Pool) -> tuple[int, int]:
    high = p.policy.scale.max_workers
    return min(p.policy.scale.min_workers, high), high


def _newest(workers: Iterable[NodeSeen], count: int) -> tuple[str, ...]:
    newest = sorted(workers, key=lambda n: (n.joined_at, n.node_id), reverse=True)
    return tuple(n.node_id for n in newest[: max(0, count)])


def _missing(p: Pool, now: float) -> str:
    """What has to be known and is not."""
    if not p.workers:
        return "none of its workers is connected"
    if p.lost:
        return f"{p.lost[0]} was there a moment ago and is not heard now"
    silent = [n.node_id for n in serving(p.workers) if n.gauge(REALTIME_WAITING, now) is None]
    return f"{len(silent)} workers do not say what waits there, such as {silent[0]}" if silent else ""


def _sized(sized: Sized, p: Pool, now: float) -> tuple[Sized, list[str]]:
    """What it wants next, and what is not known of it."""
    rule, workers, unknown = p.policy.scale, serving(p.workers), []
    there = max(1, sized.want, len(p.workers))
    if p.course is None:
        unknown.append("too little is known of its KV use to foretell it")

    def foretold(among: int) -> float | None:
        return p.course.ahead(p.policy.memory.forecast_s, max(1, among)) if p.course is not None else None

    waiting = sum(n.gauge(REALTIME_WAITING, now) or 0.0 for n in workers) / there
    full = foretold(there)
    pressed = ""
    if waiting > rule.out_above:
        pressed = f"{waiting:.1f} REALTIME requests wait for each of {there} workers (limit {rule.out_above})"
    elif full is not None and full > p.policy.memory.forecast_above:
        pressed = (
            f"KV use is foretold to be {full:.0%} with {there} workers (limit {p.policy.memory.forecast_above:.0%})"
        )
    if pressed:
        since = now if sized.pressed_at is None else sized.pressed_at
        due = now - since >= PRESS_S and now - sized.changed_at >= rule.out_dwell_s
        if due and sized.want < rule.max_workers:
            return Sized(sized.want + 1, now, f"pool {p.name} needs one more worker", pressed), unknown
        return replace(sized, pressed_at=since, calm_at=None), unknown
    sized = replace(sized, pressed_at=None)
    if sized.want <= _bounds(p)[0]:
        return replace(sized, calm_at=None), unknown
    if p.at_gateways is None:
        unknown.append("no gateway, or not every one, says what waits there, so it does not shrink")
        return replace(sized, calm_at=None), unknown
    use = _use(workers, p.policy)
    fewer = foretold(there - 1)
    # A request that waits for the step in flight is no queue.
    nobody = p.at_gateways <= len(workers) and sum(n.load.waiting for n in workers) <= len(workers)
    if not (nobody and use < rule.in_below and fewer is not None and fewer <= p.policy.memory.forecast_above):
        return replace(sized, calm_at=None), unknown
    since = now if sized.calm_at is None else sized.calm_at
    if now - since < rule.in_dwell_s:
        return replace(sized, calm_at=since), unknown
    figures = (
        f"{use:.0%} of the running set of {len(workers)} workers is used (limit {rule.in_below:.0%}), "
        f"and no queue has stood for {now - since:.0f} s"
    )
    leaving = _newest(p.workers, len(p.workers) - (sized.want - 1))
    return Sized(sized.want - 1, now, f"pool {p.name} can do with one worker less", figures, leaving), unknown


def _use(workers: list[NodeSeen], policy: Policy) -> float:
    """Of their running sets."""
    room = sum(min(policy.batch.active, n.node.limits.max_num_seqs or policy.batch.active) for n in workers)
    return sum(n.load.running for n in workers) / room if room else 1.0


def _stuck(sized: Sized, policy: Policy, now: float) -> bool:
    pressed = sized.pressed_at is not None and now - sized.pressed_at >= policy.scale.out_dwell_s
    return pressed and sized.want >= policy.scale.max_workers
