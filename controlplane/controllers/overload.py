"""Whether there is more than the mesh can do: then gateways take no cold BATCH requests.

The field guide's rule: overload is a mean of the last hundred utilisation samples above 0.9. A worker's utilisation is the fullest of
three: its KV cache, its places for REALTIME, its queue for REALTIME. It is not the share of time that the engine is busy: BATCH is there to
fill the machine, and a full machine that serves REALTIME in time is what is wanted. One sample a tick is the mean over the workers that
serve; gateways have no pool, so the answer is one for the whole mesh. It is taken back once the mean is a tenth lower.

What the signal misses: a mean over a hundred ticks comes after a burst of seconds, which queue bounds have to stand; a full pool beside
an empty one is no overload, though neither takes the other's requests; and full KV may be BATCH alone, which its own bounds ought to hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from controlplane.controllers.decision import Decision, Move, PolicyOf
from controlplane.seen import NodeSeen, Seen
from trimtab.measures import KV_USED, REALTIME_RUNNING, REALTIME_WAITING
from trimtab.messages import NodeState
from trimtab.policy import Policy, Shed
from trimtab.policy_loops import OverloadPart
from trimtab.snapshot import Adjustment, Node, Scope

name = "overload"

SHED = "admission.shed"
BACK = 0.1
"""So far below the mark the mean has to be before cold requests are taken again."""
GAP_S = 10.0
"""After so long without a sample the old ones are of another time."""


@dataclass(frozen=True, slots=True)
class State:
    """`samples` are the newest, oldest first; `move` is what holds."""

    samples: tuple[float, ...] = ()
    sampled_at: float = 0.0
    move: Move | None = None


def start(live: Iterable[Adjustment]) -> State:
    """Sheds on where the leader before did; its samples are gone, so that it takes as many new ones to decide otherwise."""
    held = [Move(SHED, Scope(), a.reason, a.evidence, state=a.state) for a in live if a.field == SHED and a.state]
    return State(move=held[0] if held else None)


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    rules = policy(None).overload
    used, silent = _utilisations(seen, policy, now)
    moves = () if state.move is None else (state.move,)
    if not used:
        words = f"no worker says how full it is ({len(silent)} serve)" if silent else "no worker serves"
        return Decision(state, moves, holds=(words,) if silent or state.move else ())
    kept = state.samples if now - state.sampled_at <= GAP_S else ()
    samples = (*kept, sum(used) / len(used))[-rules.samples :]
    if len(samples) < rules.samples:
        few = f"undecided: {len(samples)} of {rules.samples} samples"
        return Decision(State(samples, now, state.move), moves, holds=(few,))
    move = _decided(state.move, sum(samples) / len(samples), used, rules)
    return Decision(State(samples, now, move), () if move is None else (move,))


def _decided(move: Move | None, mean: float, used: list[float], rules: OverloadPart) -> Move | None:
    if move is not None:
        # A mark of a tenth or less would leave no way back.
        return None if mean < rules.above - min(BACK, rules.above / 2.0) else move
    if mean <= rules.above:
        return None
    reason = "the mesh is fuller than it can serve: cold BATCH requests are shed"
    full = sum(u > rules.above for u in used)
    evidence = (
        f"mean utilisation {mean:.3f} over {rules.above:g} in {rules.samples} samples; now {sum(used) / len(used):.3f}, "
        f"{full} of {len(used)} workers above"
    )
    return Move(SHED, Scope(), reason, evidence, state=Shed.COLD.value)


def _utilisations(seen: Seen, policy: PolicyOf, now: float) -> tuple[list[float], list[str]]:
    """Of the workers that serve, in no order; and those that do not say."""
    policies: dict[tuple[str, frozenset[tuple[str, str]]], Policy] = {}
    used: list[float] = []
    silent: list[str] = []
    for node in seen.workers():
        if node.state is not NodeState.SERVING:
            continue
        kind = (node.node.pool, frozenset(node.node.labels.items()))
        if kind not in policies:
            # Without its name: one look for all that are alike, and what one node has of its own hardly moves a mean.
            policies[kind] = policy(Node("", node.node.pool, node.node.labels))
        found = utilisation(node, policies[kind], now)
        if found is None:
            silent.append(node.node_id)
        else:
            used.append(found)
    return used, silent


def utilisation(node: NodeSeen, policy: Policy, now: float) -> float | None:
    """0 to 1, the fullest of KV cache, REALTIME's places and REALTIME's queue; None where one of them is not known."""
    kv, running, waiting = (node.gauge(x, now) for x in (KV_USED, REALTIME_RUNNING, REALTIME_WAITING))
    if kv is None or running is None or waiting is None:
        return None
    places = min(policy.paths.realtime_max_running, policy.batch.active)
    limit = node.node.limits.max_num_seqs
    if limit:
        places = min(places, limit)
    return min(1.0, max(kv, running / places, _of_queue(waiting, policy.admission.realtime_queue)))


def _of_queue(waiting: float, bound: int) -> float:
    """A queue that may hold nobody is full with the first."""
    return waiting / bound if bound else float(waiting > 0)
