"""Controllers' own moves, tried on canaries first: those of the controllers that `rollout.through` names. Pure.

A move for the mesh or a pool that does not hold yet goes to one worker of each pool and model alone, is judged like a rollout, and holds
where it was meant to once its bake is over and its canaries serve. Worse or undecided, it is taken back, and is not tried again for a while.
Moves of single nodes pass, and so do those that come nearer to what people have set, or are taken back: for that nobody waits. A new leader
tries anew what did not hold yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from controlplane.controllers.decision import Alert, Controller, Move, Severity
from controlplane.policies import Policies
from controlplane.rollouts.attendance import serves
from controlplane.rollouts.choose import Group, Wanted, Worker, choose
from controlplane.rollouts.judge import Bench
from controlplane.rollouts.state import Wealth
from controlplane.rollouts.steps import LOOKS, LOST_S
from controlplane.seen import Seen
from controlplane.spec import FACTOR, Key
from trimtab.errors import TrimtabError
from trimtab.messages import NodeState
from trimtab.snapshot import Adjustment, Scope, ScopeKind

REFUSED_S = 600.0
"""What was taken back is not tried again before."""
Value = tuple[float | None, int, str | None]


@dataclass(slots=True)
class _Trial:
    value: Value
    canaries: tuple[str, ...]
    began: float
    bench: Bench
    looks: int = 0


class Through:
    """Belongs to one leader. `moves` once a tick for each controller, with what it wants to hold."""

    def __init__(self) -> None:
        self._trials: dict[Key, _Trial] = {}
        self._refused: dict[tuple[Key, Value], float] = {}
        self.told: list[tuple[str, str, str]] = []
        """What trials came to since it was last emptied: (controller, what, evidence)."""

    def moves(
        self, name: str, wanted: Sequence[Move], live: Mapping[Key, Adjustment], seen: Seen, policies: Policies
    ) -> tuple[Move, ...]:
        """What of it is to hold now."""
        rules = policies.spec(None).rollout
        wide = {(name, m.field, m.scope): m for m in wanted if m.scope.kind in (ScopeKind.MESH, ScopeKind.POOL)}
        for key in [k for k in self._trials if k[0] == name and (k not in wide or name not in rules.through)]:
            del self._trials[key]
        if name not in rules.through:
            return tuple(wanted)
        found = [m for m in wanted if (name, m.field, m.scope) not in wide]
        for key, m in wide.items():
            held = live.get(key)
            if held is not None and (_value(held) == _value(m) or _looser(m, held)):
                self._trials.pop(key, None)
                found.append(m)
            else:
                found += self._tried(key, m, held, seen, policies)
        return tuple(found)

    def _tried(self, key: Key, m: Move, held: Adjustment | None, seen: Seen, policies: Policies) -> Iterable[Move]:
        rules, value = policies.spec(None).rollout, _value(m)
        before = [_as_move(held, m)] if held is not None else []
        if seen.now < self._refused.get((key, value), 0.0):
            return before
        trial = self._trials.get(key)
        if trial is None or trial.value != value:
            trial = _begin(m, value, seen, policies)
            if trial is None:
                # Where nobody is left to compare with, there is nothing to try it on.
                return [m]
            self._trials[key] = trial
            self.told.append((key[0], f"tries {m.field} on {', '.join(trial.canaries)}", m.evidence))
        judgement = trial.bench.look(seen, rules)
        trial.looks = trial.looks + 1 if judgement.worse else 0
        over = seen.now - trial.began >= rules.bake_s
        away = [name for name in trial.canaries if (n := seen.nodes.get(name)) is None or not serves(n)]
        lost = f"{', '.join(away)} not serving" if away and seen.now - trial.began >= rules.bake_s + LOST_S else ""
        if trial.looks >= LOOKS or (over and not away and judgement.undecided) or lost:
            del self._trials[key]
            self._refused[key, value] = seen.now + REFUSED_S
            why = "; ".join(judgement.worse) or lost or judgement.undecided
            self.told.append((key[0], f"takes {m.field} back from {', '.join(trial.canaries)}", why))
            return before
        if over and not away:
            return [m]
        return [*before, *(_at(m, held, name) for name in trial.canaries)]


def unknown(through: Iterable[str], controllers: Iterable[Controller]) -> list[Alert]:
    """Names in `rollout.through` that are no controller's."""
    known = sorted(c.name for c in controllers)
    return [
        Alert(
            f"through/{name}", Severity.WARNING,
            f"rollout.through names {name!r}, which is no controller; known: {', '.join(known)}",
        )
        for name in through
        if name not in known
    ]  # fmt: skip


def _begin(m: Move, value: Value, seen: Seen, policies: Policies) -> _Trial | None:
    workers = [
        Worker(n.node, n.model) for n in seen.workers() if n.state is NodeState.SERVING and m.scope.covers(n.node)
    ]
    try:
        canaries = choose(workers, Wanted())
    except TrimtabError:
        return None
    sides: dict[Group, tuple[list[str], list[str]]] = {}
    for w in workers:
        sides.setdefault(w.group, ([], []))[w.node_id not in canaries].append(w.node_id)
    objectives = {w.group: policies.spec(w.node).objectives for w in workers}
    bench = Bench(sides, lambda g: (float(objectives[g].ttft_p99_ms), float(objectives[g].itl_p99_ms)), Wealth())
    bench.look(seen, policies.spec(None).rollout)
    return _Trial(value, canaries, seen.now, bench)


def _value(x: Move | Adjustment) -> Value:
    return (None if x.factor is None else round(x.factor, 4), x.delta, x.state)


def _looser(m: Move, held: Adjustment) -> bool:
    """Nearer to what people have set than what holds."""
    if m.factor is not None and held.factor is not None:
        return m.factor >= held.factor
    deltas = m.factor is held.factor is None and m.state is held.state is None
    return deltas and m.delta * held.delta >= 0 and abs(m.delta) <= abs(held.delta)


def _as_move(held: Adjustment, m: Move) -> Move:
    """What holds goes on for as long as its change is tried."""
    return replace(
        m, factor=held.factor, delta=held.delta, state=held.state, reason=held.reason, evidence=held.evidence
    )


def _at(m: Move, held: Adjustment | None, node_id: str) -> Move:
    """The move for one node: on top of what holds for all, so that together they come to what is tried."""
    scope = Scope(ScopeKind.NODE, (node_id,))
    if held is None:
        return replace(m, scope=scope)
    if m.factor is not None and held.factor is not None:
        return replace(m, scope=scope, factor=min(FACTOR[1], max(FACTOR[0], m.factor / held.factor)))
    return replace(m, scope=scope, delta=m.delta - held.delta if m.factor is None and m.state is None else 0)
