"""Where one length class ends and the next begins, by the lengths that come.

The edges that people have set (the field guide's 511, 1,024, 4,095 and 8,192) stay while each class between them has a twentieth of the
requests. Where one has not, the edges go to the mix's own quantiles, half of the requests below the first: the middle classes then hold
25, 15 and 8 of 100. A cut is made after three looks a minute apart, and only where it moves some edge by more than a quarter. A mix that its
own quantiles do not tell apart either, all of one length say, is left as it is.

What it misses, and what it costs: the scheduler uses classes only to choose which cold prompts prefill together, and `clusters.spread_limit`
alone keeps those from differing by more; edges below `paths.hot_below` are seen in measurements alone, and a cut makes what was measured by
class before and after it two different things. Edges are the mesh's: with several models it is the busiest one's mix that decides, and a pool
with edges of its own is moved by as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from controlplane.controllers.decision import Decision, Move, PolicyOf
from controlplane.seen import Seen
from trimtab.policy_tree import ClustersPart
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment, Scope

name = "clusters"

FIELDS = ("clusters.short_to", "clusters.standard_to", "clusters.medium_to", "clusters.long_to")
CUTS = (0.5, 0.75, 0.9, 0.98)
"""Quantiles of the mix at which its own classes end."""
STEP_TOKENS = 64
"""Edges of our own are multiples of this."""
LEAST_SHARE, ENOUGH_SHARE = 0.05, 0.1
"""Of the requests: with less in a class between them people's edges are left, with as much in each they are taken up again."""
LEAST_REQUESTS = 200
"""A smaller mix says nothing."""
CHANGE = 0.25
"""Of what holds: an edge that would move less stays."""
LOOKS, LOOK_S = 3, 60.0

Edges = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class State:
    """`edges` are our own, None while people's hold; `deltas` are those that a leader before left, until the first tick.

    `differs` counts the looks in a row that want other edges than those that hold.
    """

    edges: Edges | None = None
    deltas: Edges | None = None
    looked_at: float = -math.inf
    differs: int = 0
    few: str = ""
    reason: str = ""
    evidence: str = ""


def start(live: Iterable[Adjustment]) -> State:
    """Goes on with the edges that the leader before had cut."""
    found = {a.field: a for a in live if a.field in FIELDS and not a.scope.kind}
    if not found:
        return State()
    first = next(iter(found.values()))
    short, standard, medium, long = (found[f].delta if f in found else 0 for f in FIELDS)
    return State(deltas=(short, standard, medium, long), reason=first.reason, evidence=first.evidence)


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    spec = _edges(policy(None).clusters)
    if state.deltas is not None:
        short, standard, medium, long = (edge + delta for edge, delta in zip(spec, state.deltas, strict=True))
        state = replace(state, edges=(short, standard, medium, long), deltas=None)
    if now - state.looked_at >= LOOK_S:
        state = _looked(replace(state, looked_at=now), seen, spec)
    return Decision(state, _moves(state, spec), holds=(state.few,) if state.few else ())


def _edges(part: ClustersPart) -> Edges:
    return (part.short_to, part.standard_to, part.medium_to, part.long_to)


def _looked(state: State, seen: Seen, spec: Edges) -> State:
    mixes = {m: lengths for m, lengths in seen.lengths.items() if lengths.recent_prompts.count >= LEAST_REQUESTS}
    if not mixes:
        return replace(state, differs=0, few=f"no model has {LEAST_REQUESTS} requests yet")
    busiest = max(sorted(mixes), key=lambda m: mixes[m].day_prompts.count + mixes[m].recent_prompts.count)
    mix = mixes[busiest].recent_prompts
    target = _target(mix, spec, ours=state.edges is not None)
    held = state.edges or spec
    if all(abs(new - old) <= CHANGE * old for new, old in zip(target, held, strict=True)):
        return replace(state, differs=0, few="")
    if state.differs + 1 < LOOKS:
        return replace(state, differs=state.differs + 1, few="")
    reason = f"the mix of lengths has shifted: classes end at {', '.join(map(str, target))} tokens"
    shares = ", ".join(f"{share:.1%}" for share in _between(mix, spec))
    evidence = f"{mix.count} recent prompts of {busiest}: {shares} in the classes between {', '.join(map(str, spec))}"
    return State(None if target == spec else target, None, state.looked_at, reason=reason, evidence=evidence)


def _target(mix: Sketch, spec: Edges, *, ours: bool) -> Edges:
    """The edges that the mix calls for: people's, or its own quantiles where these tell its requests apart and people's do not."""
    if min(_between(mix, spec)) >= (ENOUGH_SHARE if ours else LEAST_SHARE):
        return spec
    cuts = _cuts(mix)
    return cuts if min(_between(mix, cuts)) >= LEAST_SHARE else spec


def _between(mix: Sketch, edges: Edges) -> tuple[float, float, float]:
    """What share of the requests is in each class but the first and the last."""
    short, standard, medium, long = (mix.share_above(edge) for edge in edges)
    return (short - standard, standard - medium, medium - long)


def _cuts(mix: Sketch) -> Edges:
    edges: list[int] = []
    for q in CUTS:
        edge = STEP_TOKENS * round(mix.quantile(q) / STEP_TOKENS)
        edges.append(max(edge, (edges[-1] if edges else 0) + STEP_TOKENS))
    short, standard, medium, long = edges
    return (short, standard, medium, long)


def _moves(state: State, spec: Edges) -> tuple[Move, ...]:
    if state.edges is None:
        return ()
    deltas = zip(FIELDS, state.edges, spec, strict=True)
    return tuple(
        Move(path, Scope(), state.reason, state.evidence, delta=edge - set_)
        for path, edge, set_ in deltas
        if edge != set_
    )
