"""Giants in the mix: a few prompts much longer than the median, with a good part of all prompt tokens, while REALTIME objectives are
missed.

Both have to be there: giants that hurt nobody are work like any other. Then a rule isolates them for `giants.for_s`, and for as long again
with each look that still finds them coming. The rule is put to each pool that serves the model, so that a pool for isolated requests stays
what it is; requests go there if there is one (called `isolation`, or labelled isolation=true) and else run one at a time where they are.
It is a delta and no factor: a giant of a chat mix is far below a tenth of the default line. Where people have isolated requests refused,
or sent to a pool that is not there, lowering the line would lose requests: then people are told, and nothing is moved.

What the signals miss: that the giants are why objectives are missed (they may be innocent), giants of output, and any mix of fewer than
a hundred prompts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.controllers.decision import Alert, Decision, Move, PolicyOf, Severity
from controlplane.controllers.held import move_of
from controlplane.controllers.recent import since
from controlplane.seen import WINDOW_S, NodeSeen, Seen
from trimtab.measures import PROMPT, over, requests_of
from trimtab.messages import NodeState, Role, Workload
from trimtab.policy import Isolation
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment, Node, Scope, ScopeKind

name = "isolation"
LINE, ACTION = "isolate.from_tokens", "isolate.action"
POOL_NAME, POOL_LABEL = "isolation", ("isolation", "true")
MIN_PROMPTS = 100
MISSED = 0.01
"""Of REALTIME requests: an objective is a P99."""
RARE = 0.08
"""Of the prompts: where more are so long they are what the mix is made of, and keeping them apart is no help."""
GRACE_S = 30.0
"""What an earlier leader held is kept so long for a pool of which nothing is seen yet."""
PARTS = 64


@dataclass(frozen=True, slots=True)
class Apart:
    """Prompts of one model that are longer than `above` tokens are isolated until then."""

    above: int
    until: float
    reason: str
    evidence: str


@dataclass(frozen=True, slots=True)
class State:
    """`restored` are an earlier leader's moves, until the pools that they are for are seen."""

    models: Mapping[str, Apart] = field(default_factory=dict)
    looked_at: float = -math.inf
    restored: tuple[Move, ...] = ()


def start(live: Iterable[Adjustment]) -> State:
    return State(restored=tuple(move_of(a) for a in live))


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    pools = _pools(seen)
    models = dict(state.models)
    restored = _take_up(state.restored, models, pools, policy, now)
    looked_at, holds = state.looked_at, []
    if now - looked_at >= WINDOW_S:
        looked_at = now
        for model in sorted({n.model for nodes in pools.values() for n in nodes}):
            found = _look(model, models.get(model), pools, seen, policy, now)
            if isinstance(found, str):
                holds.append(found)
            elif found is not None:
                models[model] = found
    models = {model: apart for model, apart in models.items() if apart.until > now}
    moves, alerts = _moves(models, pools, seen, policy, now)
    if now - seen.started_at < GRACE_S:
        moves += restored
    else:
        restored = []
    return Decision(State(models, looked_at, tuple(restored)), tuple(moves), alerts=tuple(alerts), holds=tuple(holds))


def _pools(seen: Seen) -> dict[str, list[NodeSeen]]:
    pools: dict[str, list[NodeSeen]] = {}
    for n in seen.workers():
        pools.setdefault(n.node.pool, []).append(n)
    return pools


def _take_up(
    restored: Iterable[Move],
    models: dict[str, Apart],
    pools: Mapping[str, list[NodeSeen]],
    policy: PolicyOf,
    now: float,
) -> list[Move]:
    """Puts into `models` what an earlier leader held for the pools that are here, and gives what is of others."""
    others = []
    for move in restored:
        pool = move.scope.names[0] if move.scope.names else ""
        nodes = pools.get(pool)
        if nodes is None:
            others.append(move)
        elif move.field == LINE:
            people = policy(Node("", pool))
            above = max(1, people.isolate.from_tokens + move.delta - 1)
            for model in {n.model for n in nodes}:
                models.setdefault(model, Apart(above, now + people.giants.for_s, move.reason, move.evidence))
    return others


def _look(
    model: str, held: Apart | None, pools: Mapping[str, list[NodeSeen]], seen: Seen, policy: PolicyOf, now: float
) -> Apart | str | None:
    """What is to hold from now on; None for what holds, a text where too little is known."""
    serving = {pool: [n for n in nodes if n.model == model] for pool, nodes in pools.items()}
    nodes = [n for each in serving.values() for n in each]
    people = policy(Node("", next(pool for pool, each in serving.items() if each)))
    lengths = seen.lengths.get(model)
    if held is not None:
        share = tokens_above(lengths.recent_prompts, held.above) if lengths is not None else 0.0
        if share >= people.giants.share and _still_come(nodes, held.above, now):
            return Apart(held.above, now + people.giants.for_s, held.reason, held.evidence)
        return None
    missed, ended = _missed(nodes, now)
    if not missed:
        return None
    prompts = lengths.recent_prompts if lengths is not None else Sketch()
    if prompts.count < MIN_PROMPTS:
        return (
            f"model {model}: objectives are missed, and {prompts.count} prompts are too few to tell whether by giants"
        )
    median = prompts.quantile(0.5)
    above = math.ceil(max(people.giants.times_median * median, people.paths.hot_below))
    if prompts.share_above(above) > RARE:
        return None
    share = tokens_above(prompts, above)
    if share < people.giants.share:
        return None
    figures = (
        f"prompts above {above} tokens have {share:.0%} of prompt tokens (limit {people.giants.share:.0%}, median {median:.0f}, "
        f"n={prompts.count}); {missed} of {ended} REALTIME requests missed an objective in 2 windows"
    )
    return Apart(above, now + people.giants.for_s, "long prompts are in the way of REALTIME requests", figures)


def tokens_above(prompts: Sketch, above: float) -> float:
    """The share of all tokens that prompts longer than `above` have."""
    below = 1.0 - prompts.share_above(above)
    if below >= 1.0 or prompts.sum <= 0.0:
        return 0.0
    # From those below: few parts of them say their mean well, while the longest of all may outweigh many others.
    mean = sum(min(above, prompts.quantile(below * (i + 0.5) / PARTS)) for i in range(PARTS)) / PARTS
    return max(0.0, 1.0 - mean * below * prompts.count / prompts.sum)


def _missed(nodes: Iterable[NodeSeen], now: float) -> tuple[int, int]:
    """(missed, ended) REALTIME requests of each node's last two windows; none missed unless in both, and by more than a P99 allows."""
    missed = [0, 0]
    ended = 0
    for n in nodes:
        for i, window in enumerate(since(n, now - 3 * WINDOW_S)[:2]):
            missed[i] += window.counters.get(over(Workload.REALTIME), 0)
            ended += window.counters.get(requests_of(Workload.REALTIME), 0)
    total = sum(missed)
    return (total if all(missed) and total > MISSED * ended else 0), ended


def _still_come(nodes: Iterable[NodeSeen], above: int, now: float) -> bool:
    windows = (w for n in nodes for w in since(n, now - 2 * WINDOW_S))
    return any(PROMPT in w.sketches and w.sketches[PROMPT].quantile(1.0) > above for w in windows)


def _moves(
    models: Mapping[str, Apart], pools: Mapping[str, list[NodeSeen]], seen: Seen, policy: PolicyOf, now: float
) -> tuple[list[Move], list[Alert]]:
    moves: list[Move] = []
    alerts: list[Alert] = []
    if not models:
        return moves, alerts
    apart_in = {pool: [models[m] for m in {n.model for n in nodes} if m in models] for pool, nodes in pools.items()}
    rooms = {model: _room(model, pools, policy, now) for model in models}
    room_there = all(rooms.values())
    if room_there:
        # Gateways send requests there by their own pool's policy.
        for n in seen.of(Role.GATEWAY):
            apart_in.setdefault(n.node.pool, list(models.values()))
    for pool, aparts in sorted(apart_in.items()):
        if not aparts or pool in rooms.values():
            continue
        apart = min(aparts, key=lambda a: a.above)
        people = policy(Node("", pool)).isolate
        if apart.above + 1 >= people.from_tokens:
            continue
        if people.action == Isolation.REFUSE or (people.action == Isolation.POOL and not room_there):
            text = f"long prompts hurt pool {pool}, and isolate.action = {people.action} would lose them: nothing is isolated"
            alerts.append(Alert(f"giants/{pool}", Severity.WARNING, text, apart.evidence))
            continue
        scope = Scope(ScopeKind.POOL, (pool,))
        delta = apart.above + 1 - people.from_tokens
        moves.append(Move(LINE, scope, apart.reason, apart.evidence, delta=delta))
        if room_there and people.action == Isolation.ALONE:
            moves.append(Move(ACTION, scope, apart.reason, apart.evidence, state=Isolation.POOL.value))
    return moves, alerts


def _room(model: str, pools: Mapping[str, list[NodeSeen]], policy: PolicyOf, now: float) -> str | None:
    """A pool for isolated requests of this model that serves."""
    key, value = POOL_LABEL
    for pool, nodes in pools.items():
        meant = pool == POOL_NAME or any(n.node.labels.get(key) == value for n in nodes)
        there = any(n.model == model and n.state is NodeState.SERVING and n.fresh(now) for n in nodes)
        if meant and there and policy(Node("", pool)).isolate.action == Isolation.ALONE:
            return pool
    return None
