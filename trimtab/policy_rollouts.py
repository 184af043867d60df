"""The parts of the policy tree that change slowly: KV block plans, and how a policy is tried before it holds for all.

Block sizes are the field guides' (A: 1024 → 512 → 768; B: 24 for the 16k mix) and are mapped to what an engine accepts; docs/loops.md says
which numbers were measured. They act at the control plane's next tick.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.policy_field import choice, fraction, names, whole
from trimtab.policy_loops import DAY_S, MANY


class BlockChoice(enum.StrEnum):
    """What a KV block size is chosen by."""

    GUIDE = "guide"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class BlockPlanPart:
    """How large KV blocks are to be."""

    choose_by: str = choice(
        BlockChoice, BlockChoice.MEASURED, schema=105,
        doc="by the guide's sizes (guide), or only where what is measured says that a change pays (measured)",
    )  # fmt: skip
    warm_up: int = whole(1024, low=1, high=MANY, schema=106, unit="tokens", doc="of a pool that has just started")
    steady: int = whole(512, low=1, high=MANY, schema=107, unit="tokens", doc="of one that has served for a while")
    long_sessions: int = whole(768, low=1, high=MANY, schema=108, unit="tokens", doc="while sessions are long")
    mixed: int = whole(24, low=1, high=MANY, schema=109, unit="tokens", doc="while prompts are long")
    warm_up_s: int = whole(
        600, low=0, high=DAY_S, schema=110, unit="seconds", doc="for so long a pool counts as just started"
    )
    mixed_from: int = whole(
        16384, low=1, high=MANY, schema=111, unit="tokens", inactive_from="max_model_len",
        doc="median prompt from which on prompts are long",
    )  # fmt: skip
    turns_above: int = whole(20, low=1, high=MANY, schema=112, unit="turns", doc="above this many sessions are long")
    use_below: float = fraction(
        0.8, low=0.0, high=1.0, schema=113, unit="of the KV cache",
        doc="use below which it is badly used, while requests wait for it",
    )  # fmt: skip
    failures_per_h: int = whole(
        100, low=1, high=MANY, schema=114, unit="failures an hour",
        doc="allocations that failed for running requests, above which the KV cache is badly used",
    )  # fmt: skip
    deviation_above: float = fraction(
        0.3, low=0.0, high=10.0, schema=115, unit="of the mean",
        doc="deviation of the time of decode steps, of one length class, above which block sizes are looked at",
    )  # fmt: skip
    dwell_s: int = whole(
        600, low=1, high=DAY_S, schema=116, unit="seconds", doc="between two changes of one pool at least"
    )
    max_recompute_tokens: int = whole(
        2000,
        low=0,
        high=MANY,
        schema=117,
        unit="tokens",
        doc="a change that has them computed anew waits until fewer are resident in a worker",
    )
    min_gain: float = fraction(
        0.05, low=0.0, high=1.0, schema=118, unit="of the work", doc="that a change must save to be worth it"
    )


@dataclass(frozen=True, slots=True)
class RolloutPart:
    """How a policy is tried on some workers before it holds for all."""

    bake_s: int = whole(60, low=1, high=DAY_S, schema=119, unit="seconds", doc="canaries are watched for so long")
    weight: float = fraction(
        0.5, low=0.0, high=1.0, schema=120, unit="of what it would get", doc="new work that a canary gets meanwhile"
    )
    min_samples: int = whole(
        20, low=1, high=MANY, schema=121, unit="first tokens", doc="with fewer on a side nothing is promoted"
    )
    worse_above: float = fraction(
        1.2, low=1.0, high=100.0, schema=122, unit="times the rest's", doc="canaries with a P99 above this are worse"
    )
    throughput_below: float = fraction(
        0.9, low=0.0, high=1.0, schema=123, unit="of the rest's", doc="canaries with less throughput are worse"
    )
    false_alarms: float = fraction(
        0.01, low=0.0001, high=0.5, schema=124, unit="of rollouts",
        doc="in which canaries as good as the rest may be taken for worse",
    )  # fmt: skip
    through: tuple[str, ...] = names(
        schema=125, unit="controllers", doc="whose changes are tried on a canary before they hold"
    )
