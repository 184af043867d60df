"""What becomes of a rollout at one look: it bakes on, gets more canaries, is promoted, or is taken back. Pure; `driver` carries it out.

Worse canaries are taken back at the second look in a row that finds them so, at any time. Time in which nobody looked is no bake. A bake that
ends with too little to tell is lengthened; in the end what nobody could tell is taken back, not promoted. A canary that is gone is not replaced:
one that has just got the policy has no evidence to go on from, and where the policy is what ends workers the next one would end too. The rest is
judged without it, and where no canary is left for a while the policy is taken back. As long as one that may come back is away, or is compared
with nobody, the policy goes no further: what its bake came to without that canary says too little. That is waited for as long as a bake can be
lengthened. Before everybody gets it the same holds for the rest: a moment in which it is not seen is none in which nobody is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.rollouts.choose import Worker, more
from controlplane.rollouts.judge import Judgement
from controlplane.rollouts.state import Rollout, Stage

LOOKS = 2
EXTENSIONS = 3
WIDENED = 2
"""Steps between the first canaries and everybody, at most."""
LOST_S = 30.0
RESTARTS = 2
"""Of canaries, while nobody else's process ended."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What is to be known beside the measures. `present` says whether the policy still holds the rollout, `done` that all have it; `theirs`
    what people have changed of its fields, in words; `absent_s` for how long no canary has been there; `restarts` processes that ended, of
    canaries and of the rest; `out_of_memory` canaries whose engine ran out of memory; `waits` which canaries are to be waited for, in words, and
    `waits_s` for how long they have been; `rest_waits` and `rest_waits_s` the same of the rest; `others` workers that would have it next.
    """

    present: bool = True
    done: bool = False
    theirs: str = ""
    absent_s: float = 0.0
    restarts: tuple[int, int] = (0, 0)
    out_of_memory: tuple[str, ...] = ()
    waits: str = ""
    waits_s: float = 0.0
    rest_waits: str = ""
    rest_waits_s: float = 0.0
    others: Sequence[Worker] = ()


def advance(r: Rollout, j: Judgement, facts: Facts, now_unix_ms: int) -> Rollout:
    """The rollout after this look; the same one where nothing came of it but measures. It only ever ends once."""
    r = replace(r, measures=j.measures or r.measures, samples=j.samples)
    if facts.done:
        return r.ended(Stage.PROMOTED, now_unix_ms, "promoted", figures(r))
    if not facts.present:
        return r.ended(Stage.ABORTED, now_unix_ms, "aborted: its part of the policy is gone")
    if facts.theirs:
        return r.ended(Stage.ABORTED, now_unix_ms, f"aborted: {facts.theirs}")
    if facts.absent_s >= LOST_S:
        words = f"lost its canaries: {', '.join(r.canaries)} gone for {facts.absent_s:.0f} s"
        return r.ended(Stage.ROLLED_BACK, now_unix_ms, words)
    if facts.out_of_memory:
        words = f"out of memory: the engine of {', '.join(facts.out_of_memory)}"
        return r.ended(Stage.ROLLED_BACK, now_unix_ms, words)
    if facts.restarts[0] >= RESTARTS and not facts.restarts[1]:
        words = f"its canaries' processes ended {facts.restarts[0]} times, nobody else's did"
        return r.ended(Stage.ROLLED_BACK, now_unix_ms, words)
    if j.worse:
        looks = r.looks + 1
        if looks >= LOOKS:
            return replace(r, looks=looks).ended(
                Stage.ROLLED_BACK, now_unix_ms, "canaries are worse", "; ".join(j.worse)
            )
        return replace(r, looks=looks)
    r = replace(r, looks=0)
    if now_unix_ms < r.baked_unix_ms:
        return r
    if facts.waits:
        return _waits(r, facts.waits, facts.waits_s, now_unix_ms)
    if j.undecided:
        if r.extended >= EXTENSIONS:
            return r.ended(Stage.ROLLED_BACK, now_unix_ms, f"undecided: {j.undecided}")
        words = f"watched for {r.bake_s} s more: {j.undecided}"
        return replace(r.told(now_unix_ms, words, figures(r)), extended=r.extended + 1)
    extra = more(facts.others) if r.widened < WIDENED else ()
    if not extra and facts.rest_waits:
        # Nobody is left to widen it to, or those are away for a moment: then it would be everybody's without their bake.
        return _waits(r, facts.rest_waits, facts.rest_waits_s, now_unix_ms)
    if not extra:
        return r.ended(Stage.PROMOTED, now_unix_ms, "promoted: canaries are no worse than the rest", figures(r))
    canaries = tuple(sorted({*r.canaries, *extra}))
    pending = tuple(sorted(w.node_id for w in facts.others if w.node_id not in extra))
    words = f"canaries are no worse than the rest; {', '.join(extra)} have it too"
    wider = replace(
        r, stage=Stage.WIDENING, canaries=canaries, pending=pending, began_unix_ms=now_unix_ms, extended=0,
        widened=r.widened + 1, samples=(0, 0), unwatched_ms=0,
    )  # fmt: skip
    return wider.told(now_unix_ms, words, figures(r))


def _waits(r: Rollout, whom: str, waits_s: float, now_unix_ms: int) -> Rollout:
    if waits_s >= max(LOST_S, EXTENSIONS * r.bake_s):
        return r.ended(Stage.ROLLED_BACK, now_unix_ms, f"undecided: {whom}")
    words = f"waits: {whom}"
    return r if r.verdict == words else r.told(now_unix_ms, words)


def figures(r: Rollout) -> str:
    """What canaries and the rest measured, on one line."""
    shown = [f"{m.name} {m.canary:.3g} beside {m.rest:.3g}" for m in r.measures if None not in (m.canary, m.rest)]
    return "; ".join(shown)[:480]
