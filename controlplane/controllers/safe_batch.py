"""How many requests fit into an engine's memory at once, by what requests have needed.

The field guide's rule: a request counts for more than it needs (`safety_factor`), not all of the memory may be filled (`usable`), and above
a fixed number nobody goes. Reckoned in fractions of the decimals as they are written: 0.9 · 13.2 / (1.2 · 1.1) is 9, not 8.999….

What it misses: 95 of 100 requests need less than it takes for one, so it is careful on a mixed load; a burst of the other five may still fill
the cache, and then the scheduler preempts. Bytes of KV a token cost are the engine's own; what an engine keeps beside KV is not in it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from controlplane.seen import Lengths, NodeSeen
from trimtab.measures import KV_BYTES_PER_TOKEN
from trimtab.policy_tree import BatchPart

HARD_CAP, SAFETY_FACTOR, USABLE = 16, 1.2, 0.9
"""Field guide A's."""
TAIL = 0.95


def calculate_safe_batch(
    mem_per_req: float,
    mem_total: float,
    *,
    hard_cap: int = HARD_CAP,
    safety_factor: float = SAFETY_FACTOR,
    usable: float = USABLE,
) -> int:
    """Requests that are safe at once: min(hard_cap, ⌊usable · mem_total / (safety_factor · mem_per_req)⌋), and never below 1.

    Both amounts of memory in the same unit, whatever it is. ValueError for a request that needs nothing, and for amounts that are none.
    """
    return max(1, min(hard_cap, math.floor(_fit(mem_per_req, mem_total, safety_factor, usable))))


def _fit(mem_per_req: float, mem_total: float, safety_factor: float, usable: float) -> Fraction:
    per_req, total = _exact(mem_per_req), _exact(mem_total)
    if per_req <= 0 or total < 0:
        raise ValueError(f"a request needs more than 0 of 0 or more, not {mem_per_req} of {mem_total}")
    return _exact(usable) * total / (_exact(safety_factor) * per_req)


def _exact(number: float) -> Fraction:
    """As it is written in decimals, not as a float holds it."""
    if not math.isfinite(number):
        raise ValueError(f"{number} is no amount")
    return Fraction(number) if isinstance(number, int) else Fraction(repr(float(number)))


@dataclass(frozen=True, slots=True)
class Fits:
    """How many requests fit, before it is cut to a whole number; `evidence` has the figures."""

    requests: float
    evidence: str


def fitting(node: NodeSeen, lengths: Lengths | None, rules: BatchPart, now: float) -> Fits | str:
    """Requests that fit into the KV cache of a worker now; why that can't be said where an input is missing."""
    per_token = node.gauge(KV_BYTES_PER_TOKEN, now)
    # Both from one message: the load may still be of blocks of another size.
    limits = node.node.limits
    blocks, block_size = limits.total_blocks, limits.block_size
    if not per_token:
        return "its KV bytes per token are not known"
    if not blocks or not block_size:
        return "the size of its KV cache is not known"
    ended = lengths.recent_totals.count if lengths is not None else 0
    if lengths is None or ended < rules.min_samples:
        return f"fewer than {rules.min_samples} requests have ended"
    tokens = lengths.recent_totals.quantile(TAIL)
    if tokens <= 0.0:
        return "requests have no length"
    if limits.kv_groups:
        # Where layers keep KV of several kinds, bytes a token are no measure of what is left. Blocks are.
        per_req, total = float(limits.kv.most(math.ceil(tokens))), float(blocks)
        needs, has = f"{per_req:.0f} blocks of KV", f"{total:.0f} blocks"
    else:
        per_req, total = per_token * tokens, per_token * blocks * block_size
        needs, has = f"{_size(per_req)} of KV", _size(total)
    requests = _fit(per_req, total, rules.safety_factor, rules.usable_memory)
    evidence = (
        f"95 of 100 requests take {tokens:.0f} tokens at most ({needs}, n={ended}), × {rules.safety_factor:g}; "
        f"{rules.usable_memory:.0%} of {has} holds {math.floor(requests)}"
    )
    return Fits(float(requests), evidence)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000.0:
            return f"{count:.3g} {unit}"
        count /= 1000.0
    return f"{count:.3g} GB" if count < 1000.0 else f"{count:.0f} GB"
