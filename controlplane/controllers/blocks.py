"""Which KV block size each pool is to have, and workers brought to it one by one while they serve.

Under `block_plan.choose_by` guide a pool has the field guides' size for the phase that it is in; under measured it keeps what it has unless
its KV cache is badly used and what is measured says that another size saves `block_plan.min_gain` of the work. A size that the engines do
not take becomes the nearest that all of them take. Never twice within `block_plan.dwell_s`, one pool at a time and of it one worker: the one
with the fewest resident tokens, once these are few or cheaply carried over; it refuses by itself while they are not. Engines that can't
change while they run need a rolling change, which people are told once. A worker that was changed by hand is left alone until the plan is
another one.

What the signals miss: `block_signs` says it of each. Beside that, a change costs a pool its prefix cache, which is counted nowhere; the
speed of sizes is that of the machine that was measured; and of a worker that was changed by hand a new leader does not know it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from controlplane.controllers.block_signs import Phase, Sign, figures_of, named_size, phase_of, present_size, signs_of
from controlplane.controllers.decision import Alert, BlockPlan, Decision, PolicyOf, Reblock, Severity
from controlplane.seen import WINDOW_S, NodeSeen, PlanSeen, Seen
from trimtab.blocks import CARRIED_AS_ONE, Figures, gain, nearest
from trimtab.measures import STORED_TOKENS
from trimtab.messages import NodeState
from trimtab.policy_rollouts import BlockChoice, BlockPlanPart
from trimtab.snapshot import Adjustment, Node

name = "blocks"
LOOK_S = WINDOW_S
"""Pools are looked at each time that there are new windows."""
LOOKS = 3
"""Another size has to pay so many times in a row."""
RETRY_S = 30.0
"""A worker that was told and has not changed is not told again before."""
LEFT = "left at"
SHOWN = 6
"""Sizes that a reason names."""

Process = tuple[str, str]
"""Node id and incarnation."""


@dataclass(frozen=True, slots=True)
class Pooled:
    """What is known of a pool from look to look. `target` is the size that it is to have, or None while it keeps what it has.

    `paid` is at how many looks in a row another size would have paid; `there` are the workers that have come to the target.
    """

    born: float
    phase: Phase | None = None
    by: str = ""
    """`block_plan.choose_by` as it was at the last look."""
    target: int | None = None
    aim: tuple[str, str] = ("", "")
    """Reason and evidence of the target, as it was chosen."""
    why: tuple[str, str] = ("", "")
    """Those of the plan, also where it is to leave things as they are."""
    changed_at: float | None = None
    paid: int = 0
    there: frozenset[Process] = frozenset()
    plan: BlockPlan | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """The newest command."""

    process: Process
    block_size: int
    at: float


@dataclass(frozen=True, slots=True)
class State:
    """`tried` is when a worker of each pool was last told, `asked` when each worker was. `alerts` and `holds` are those of the last look."""

    looked_at: float | None = None
    pools: Mapping[str, Pooled] = field(default_factory=dict)
    told: Told | None = None
    tried: Mapping[str, float] = field(default_factory=dict)
    alerts: tuple[Alert, ...] = ()
    holds: tuple[str, ...] = ()
    asked: Mapping[Process, float] = field(default_factory=dict)


def start(live: Iterable[Adjustment]) -> State:
    """It holds no adjustments. What was planned before it sees in its first step."""
    return State()


def step(state: State, seen: Seen, policy: PolicyOf, now: float) -> Decision:
    if state.looked_at is not None and now - state.looked_at < LOOK_S:
        return _decision(state)
    first = state.looked_at is None
    pools: dict[str, Pooled] = {}
    alerts: list[Alert] = []
    holds: list[str] = []
    workers: dict[str, list[NodeSeen]] = {}
    for n in seen.workers():
        workers.setdefault(n.node.pool, []).append(n)
    for pool, mine in sorted(workers.items()):
        rule = policy(Node("", pool)).block_plan
        before = state.pools.get(pool) or _met(mine, seen.plans.get(pool) if first else None)
        pools[pool], missing = _look(pool, mine, before, rule, seen, now)
        holds += missing
        alerts += _cold(pool, mine, pools[pool])
    # A pool without workers for a moment is the same pool afterwards.
    known = {n.node.pool for n in seen.nodes.values()}
    pools |= {pool: p for pool, p in state.pools.items() if pool in known and pool not in pools}
    # Who is started anew by people is left to them.
    free = {pool: [n for n in mine if n.node_id not in seen.restarting] for pool, mine in workers.items()}
    told = _next(state, pools, free, policy, now)
    tried, here = dict(state.tried), {_process(n) for n in seen.workers()}
    asked = {process: at for process, at in state.asked.items() if process in here}
    if told is not None:
        tried[seen.nodes[told.process[0]].node.pool] = asked[told.process] = now
    state = State(now, pools, told or state.told, tried, tuple(alerts), tuple(holds), asked)
    if told is None:
        return _decision(state)
    pool = seen.nodes[told.process[0]].node.pool
    reason, evidence = pools[pool].aim
    return _decision(
        state,
        Reblock(*told.process, told.block_size, reason or f"pool {pool} has blocks of {told.block_size}", evidence),
    )


def _decision(state: State, *commands: Reblock) -> Decision:
    plans = tuple(p.plan for p in state.pools.values() if p.plan is not None)
    return Decision(state, commands=commands, plans=plans, alerts=state.alerts, holds=state.holds)


def _met(workers: Sequence[NodeSeen], earlier: PlanSeen | None) -> Pooled:
    """A pool that this leader sees for the first time, with what the leader before had planned."""
    born = min(n.joined_at for n in workers)
    if earlier is None:
        return Pooled(born)
    phase = Phase(earlier.phase) if earlier.phase in set(Phase) else None
    # What has once been warm stays so; how long ago it began nobody has written down.
    born = born if phase is Phase.WARM_UP else float("-inf")
    if earlier.changed_at is None or present_size(workers) == 0:
        return Pooled(born, phase)
    # What was left as it is had been chosen for a reason that nobody has written down either.
    aim = ("", "") if earlier.reason.startswith(LEFT) else (earlier.reason, earlier.evidence)
    return Pooled(born, phase, target=earlier.planned, aim=aim, why=aim, changed_at=earlier.changed_at)


# ---- what a pool is to have


def _look(
    pool: str, workers: Sequence[NodeSeen], p: Pooled, rule: BlockPlanPart, seen: Seen, now: float
) -> tuple[Pooled, list[str]]:
    lengths = seen.lengths.get(workers[0].model)
    signs, holds = signs_of(workers, rule, now)
    binds = any(s.binds for s in signs)
    # Who lacks KV is through with starting.
    born = float("-inf") if binds else p.born
    phase, figures = phase_of(workers, lengths, now - born, p.phase, rule, now)
    if p.by not in ("", rule.choose_by):
        p = replace(p, target=None, paid=0, there=frozenset())
    p = replace(p, born=born, phase=phase, by=rule.choose_by)
    present = present_size(workers)
    mute = [n.node_id for n in workers if not (n.node.limits.block_sizes and n.node.limits.block_size)]
    if mute:
        return p, [f"pool {pool}: {', '.join(mute[:SHOWN])} does not say which KV block sizes it takes"]
    accepted = frozenset.intersection(*map(frozenset, {n.node.limits.block_sizes for n in workers}))
    named = named_size(phase, rule)
    mapped = nearest(named, accepted)
    if mapped is None:
        return p, [f"pool {pool}: there is no KV block size that all of its engines take"]
    p = _arrived(p, workers, accepted, rule, now)
    measured = figures_of(workers, lengths, accepted | {present}, now, binds=binds)
    gains = {size: x for size in sorted(accepted) if (x := gain(present, size, measured)) is not None}
    if rule.choose_by == BlockChoice.GUIDE:
        reason = f"{phase}: the guide names {named}{_mapping(named, mapped, accepted)}"
        p = _aimed(p, mapped, present, (reason, figures), rule, now)
        if by_hand := [n.node_id for n in workers if _by_hand(n, p)]:
            p = replace(p, why=(f"{reason}; changed by hand and left: {', '.join(by_hand[:SHOWN])}", figures))
    else:
        verdict, missing = _measured(pool, p, present, signs, measured, gains, rule, now)
        holds += missing
        # What was begun is gone through with.
        p = replace(verdict, why=verdict.aim) if _pending(workers, verdict) else verdict
    unsaid = [n.node_id for n in _pending(workers, p) if n.fresh(now) and STORED_TOKENS not in n.gauges]
    if unsaid:
        holds.append(f"pool {pool}: {', '.join(unsaid[:SHOWN])} does not say how many tokens are resident")
    plan = BlockPlan(
        pool, phase.value, named, p.target or present, *p.why,
        {size: round(x, 4) for size, x in gains.items()}, present, p.changed_at,
    )  # fmt: skip
    return replace(p, plan=plan), holds


def _arrived(
    p: Pooled, workers: Sequence[NodeSeen], accepted: frozenset[int], rule: BlockPlanPart, now: float
) -> Pooled:
    """Who has come to the target, and whether it still is one: not where engines do not take it, or where people took all of them off it."""
    if p.target is None:
        return p
    there = p.there | {_process(n) for n in workers if n.node.limits.block_size == p.target}
    came = there - p.there
    # Those that have it when a leader first looks have had it before.
    changed_at = now if came and p.plan is not None else p.changed_at
    p = replace(p, there=there, changed_at=changed_at)
    stale = p.plan is None and not there and (p.changed_at is None or now - p.changed_at >= rule.dwell_s)
    if len(there) > 2 * len(workers):
        p = replace(p, there=there & {_process(n) for n in workers})
    left = rule.choose_by == BlockChoice.MEASURED and all(_by_hand(n, p) for n in workers)
    if p.target not in accepted or stale or left:
        return replace(p, target=None, there=frozenset())
    return p


def _by_hand(n: NodeSeen, p: Pooled) -> bool:
    """It had the target as this very process, and has something else."""
    return n.node.limits.block_size != p.target and _process(n) in p.there


def _aimed(p: Pooled, target: int, present: int, why: tuple[str, str], rule: BlockPlanPart, now: float) -> Pooled:
    """At `target`, unless it is too early for another one."""
    if target == p.target or (p.target is None and target == present):
        return replace(p, why=why)
    if p.changed_at is not None and now - p.changed_at < rule.dwell_s:
        words = f"{why[0]}; {p.target or present} stays for {rule.dwell_s} s after the last change"
        return replace(p, why=(words, why[1]))
    return replace(p, target=target, aim=why, why=why, changed_at=now, paid=0, there=frozenset())


def _measured(
    pool: str,
    p: Pooled,
    present: int,
    signs: Sequence[Sign],
    measured: Figures,
    gains: Mapping[int, float],
    rule: BlockPlanPart,
    now: float,
) -> tuple[Pooled, list[str]]:
    """A better size once it has been the best for long enough, and what is missing to say so."""
    left = f"{LEFT} {p.target or present}"
    if not signs:
        return replace(p, why=(f"{left}: nothing says that the KV cache is badly used", ""), paid=0), []
    sign = min(signs, key=lambda s: (not s.binds, s.what))
    if len(gains) < 2:
        held = replace(p, why=(f"{left}: too little is measured", sign.figures), paid=0)
        return held, [f"pool {pool}: {sign.what}, and nobody says what block sizes waste or keep"]
    size, most = _choice(present, gains, rule.min_gain)
    evidence = f"{sign.figures}; {_said(present, size if size is not None else most, measured, gains, rule)}"
    if size is None:
        return replace(p, why=(f"{left}: {sign.what}, and no other size would pay", evidence), paid=0), []
    p = replace(p, paid=p.paid + 1)
    if p.paid < LOOKS:
        return replace(p, why=(f"{left} for now: {sign.what}", evidence)), []
    return _aimed(p, size, present, (f"{sign.what}: blocks of {size} pay", evidence), rule, now), []


def _choice(present: int, gains: Mapping[int, float], min_gain: float) -> tuple[int | None, int]:
    """The size to change to, None for none; and the one that would save most.

    Of all that pay it is the one nearest to the present size from which going on to the best would not pay again: what is not measured of
    sizes that are far off may well be against them.
    """
    most = max(gains, key=lambda size: (gains[size], -abs(size - present)))
    enough = [s for s, x in gains.items() if s != present and x >= min_gain and gains[most] - x < max(min_gain, 1e-9)]
    return nearest(present, enough), most


def _said(present: int, best: int, f: Figures, gains: Mapping[int, float], rule: BlockPlanPart) -> str:
    words = [f"{best} tokens would save {gains[best]:.1%} of the work (limit {rule.min_gain:.0%})"]
    if present in f.waste and best in f.waste:
        words.append(f"waste {f.waste[present]:.2%} at {present}, {f.waste[best]:.2%} at {best}")
    if f.hits and best in f.kept:
        words.append(
            f"{f.kept[best]:.0%} of prefix hits kept, which are {f.hits:.0%} of prompts; prompts {f.prefill:.0%} of the work"
        )
    words.append("the speed of sizes as two CPU cores have it")
    return ", ".join(words)


def _mapping(named: int, mapped: int, accepted: Iterable[int]) -> str:
    if named == mapped:
        return ""
    sizes = sorted(accepted)
    more = ", …" if len(sizes) > SHOWN else ""
    return f"; its engines take {', '.join(map(str, sizes[:SHOWN]))}{more}: {mapped}"


# ---- who is changed next


def _pending(workers: Iterable[NodeSeen], p: Pooled) -> list[NodeSeen]:
    if p.target is None:
        return []
    return [n for n in workers if n.node.limits.block_size != p.target and not _by_hand(n, p)]


def _cold(pool: str, workers: Iterable[NodeSeen], p: Pooled) -> list[Alert]:
    stuck = [n for n in _pending(workers, p) if not n.node.limits.live_blocks]
    if not stuck or p.plan is None:
        return []
    text = (
        f"pool {pool} needs a rolling change for KV blocks of {p.target} tokens: "
        f"trimtab rollout restart --pool {pool} --set worker.block_size={p.target}"
    )
    names = ", ".join(n.node_id for n in stuck[:SHOWN])
    evidence = f"{names} can't change while it runs; {p.plan.reason}"
    return [Alert(f"blocks/{pool}/{p.target}", Severity.INFO, text, evidence)]


def _next(
    state: State,
    pools: Mapping[str, Pooled],
    workers: Mapping[str, Sequence[NodeSeen]],
    policy: PolicyOf,
    now: float,
) -> Told | None:
    """The worker that is told now, if one is."""
    told = state.told
    if told is not None and now - told.at < RETRY_S:
        here = [n for mine in workers.values() for n in mine if _process(n) == told.process]
        if any(n.node.limits.block_size != told.block_size for n in here):
            return None
    waiting = {pool: _pending(mine, pools[pool]) for pool, mine in workers.items()}
    turns = sorted((pool for pool, mine in waiting.items() if mine), key=lambda pool: state.tried.get(pool, 0.0))
    begun = [pool for pool in turns if _under_way(pools[pool], policy(Node("", pool)).block_plan, now)]
    for pool in begun or turns:
        n = _idlest(waiting[pool], policy(Node("", pool)).block_plan, state.asked, now)
        target = pools[pool].target
        if n is not None and target is not None:
            return Told(_process(n), target, now)
    return None


def _under_way(p: Pooled, rule: BlockPlanPart, now: float) -> bool:
    """It has workers of both kinds, and a worker came to the target not too long ago: another pool waits for it."""
    return bool(p.there) and p.changed_at is not None and now - p.changed_at < rule.dwell_s


def _idlest(
    workers: Iterable[NodeSeen], rule: BlockPlanPart, asked: Mapping[Process, float], now: float
) -> NodeSeen | None:
    """Of those that can change now. The worker judges for itself: one that is known to refuse is not asked, and one that was asked and did
    not change lets the others go first."""
    able = []
    for n in workers:
        resident = n.gauge(STORED_TOKENS, now)
        cost = resident / CARRIED_AS_ONE if resident is not None and n.node.limits.carries_blocks else resident
        cheap = cost is not None and (cost == 0 or cost < rule.max_recompute_tokens)
        if n.node.limits.live_blocks and n.state is NodeState.SERVING and cheap:
            at = asked.get(_process(n), -math.inf)
            able.append((at if now - at < rule.dwell_s else -math.inf, resident or 0.0, n.node_id, n))
    return min(able)[3] if able else None


def _process(n: NodeSeen) -> Process:
    return n.node_id, n.incarnation
