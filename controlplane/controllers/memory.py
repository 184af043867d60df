"""Memory that will run short: a pool whose KV cache is foretold to be nearly full has its pressure line lowered before it is.

Cold requests then stop coming in a little earlier, and `scale` reads the same forecast for itself. What the signal misses is what
`forecast` says; above all it sees no burst coming. A pool of which too little is known yet is left as it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.controllers.decision import Alert, Decision, Move, PolicyOf, Severity
from controlplane.controllers.forecast import Book, described, serving
from controlplane.controllers.held import move_of
from controlplane.seen import Seen
from trimtab.snapshot import Adjustment, Node, Scope, ScopeKind

name = "memory"
FIELD = "memory.pressure_threshold"
FACTOR = 0.9
BACK = 0.05
"""The forecast must be so far below the line before it is over."""
SURE_S = 15.0
"""It must be above for so long: three samples."""
GRACE_S = 30.0
"""What an earlier leader held is kept so long for a pool of which nothing is seen yet."""


@dataclass(frozen=True, slots=True)
class State:
    """`above` says since when a pool's forecast is over the line; `moves` are of pools that are pressed, `holds` of those not known."""

    book: Book = field(default_factory=Book)
    above: Mapping[str, float] = field(default_factory=dict)
    moves: Mapping[str, Move] = field(default_factory=dict)
    holds: tuple[str, ...] = ()


def start(live: Iterable[Adjustment]) -> State:
    mine = (a for a in live if a.field == FIELD and a.scope.kind is ScopeKind.POOL)
    return State(moves={a.scope.names[0]: move_of(a) for a in mine})


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    book = state.book.noted(seen, policy, now)
    if book is state.book:
        return _decided(state)
    pools = Counter(n.node.pool for n in serving(seen.workers()))
    above: dict[str, float] = {}
    moves: dict[str, Move] = {}
    holds = []
    for pool, workers in sorted(pools.items()):
        held = state.moves.get(pool)
        found = book.courses.get(pool)
        if found is None:
            holds.append(f"pool {pool}: too little is known of its KV use yet to foretell it")
            if held is not None:
                moves[pool] = held
            continue
        rule = policy(Node("", pool)).memory
        foretold = found.ahead(rule.forecast_s, workers)
        line = rule.forecast_above - (BACK if held is not None else 0.0)
        if foretold <= line:
            continue
        above[pool] = state.above.get(pool, now)
        if held is not None:
            moves[pool] = held
        elif now - above[pool] >= SURE_S:
            reason = f"the KV cache of pool {pool} will be nearly full"
            figures = f"{described(found, foretold, rule.forecast_s)} (limit {rule.forecast_above:.0%})"
            moves[pool] = Move(FIELD, Scope(ScopeKind.POOL, (pool,)), reason, figures, factor=FACTOR)
    if now - seen.started_at < GRACE_S:
        moves.update((pool, m) for pool, m in state.moves.items() if pool not in pools)
    return _decided(State(book, above, moves, tuple(holds)))


def _decided(state: State) -> Decision:
    moves = tuple(move for _, move in sorted(state.moves.items()))
    alerts = (Alert(f"memory/{m.scope.names[0]}", Severity.WARNING, m.reason, m.evidence) for m in moves)
    return Decision(state, moves, alerts=tuple(alerts), holds=state.holds)
