"""The figures of `peers`: our door beside the other gateway, within blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.bench.figures import Block, at
from services.bench.goals import Goal
from services.bench.stats import Bound, Estimate, bootstrap, median, quantile, spread
from trimtab.kit.cli import table

OURS, PEER = "ours", "smg"
ARMS = (OURS, PEER)
SPEED_GOAL, TTFT_GOAL = 0.95, 1.05
"""Not behind, as far as samples can show it: surely not slower than by so much."""


def speed_ratio(blocks: Sequence[Block], seed: int) -> Estimate:
    """The median over rounds of our tokens/s to the peer's."""
    return bootstrap([b.cells[OURS].tokens_per_s / b.cells[PEER].tokens_per_s for b in blocks], median, seed=seed)


def ttft_ratio(blocks: Sequence[Block], seed: int) -> Estimate:
    """The median over rounds of P50 to P50."""
    each = [median(b.cells[OURS].ttft_ms) / median(b.cells[PEER].ttft_ms) for b in blocks]
    return bootstrap(each, median, seed=seed)


def concurrencies(blocks: Sequence[Block]) -> list[int]:
    return sorted({b.concurrency for b in blocks})


def goals(blocks: Sequence[Block], of: Sequence[int], seed: int) -> list[Goal]:
    """All of them, measured or not; `of` are the concurrencies that were to be."""
    found = []
    for concurrency in of:
        mine = at(blocks, concurrency)
        speed, ttft = (speed_ratio(mine, seed), ttft_ratio(mine, seed)) if mine else (None, None)
        name = f"tokens_per_s_ratio_to_smg_lower_at_{concurrency}"
        found.append(Goal.judged(name, SPEED_GOAL, Bound.AT_LEAST, speed, show_end=True))
        name = f"ttft_p50_ratio_to_smg_upper_at_{concurrency}"
        found.append(Goal.judged(name, TTFT_GOAL, Bound.AT_MOST, ttft, show_end=True))
    return found


def arms(blocks: Sequence[Block], seed: int) -> list[dict[str, Any]]:
    """One object for each arm and concurrency."""
    return [_arm(arm, c, at(blocks, c), seed) for c in concurrencies(blocks) for arm in ARMS]


def _arm(arm: str, concurrency: int, blocks: Sequence[Block], seed: int) -> dict[str, Any]:
    cells = [b.cells[arm] for b in blocks]
    waits = [ms for c in cells for ms in c.ttft_ms]
    return {
        "arm": arm,
        "concurrency": concurrency,
        "rounds": len(cells),
        "ttft_samples": len(waits),
        "tokens": sum(c.tokens for c in cells),
        "tokens_per_s": asdict(spread([c.tokens_per_s for c in cells])),
        "tokens_per_s_ratio_to_smg": asdict(speed_ratio(blocks, seed)),
        "ttft_p50_ms": asdict(spread(waits)),
        "ttft_p95_ms": quantile(waits, 0.95),
        "ttft_p50_ratio_to_smg": asdict(ttft_ratio(blocks, seed)),
        "cpu_s_per_1000_tokens": {role: median([c.cpu_per_1000([role]) for c in cells]) for role in cells[0].cpu_s},
        "idle_cores": median([c.idle_cpu_s / c.wall_s for c in cells]),
        "foreign_cores": median([c.foreign_cpu_s / c.wall_s for c in cells]),
    }


ROLES = ("gateway", "worker", "engine", "client")


def sections(found: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    if not found:
        return []
    speed, cpu = [], []
    for a in found:
        where = (str(a["concurrency"]), a["arm"])
        ours = a["arm"] == OURS
        t, p50 = a["tokens_per_s"], a["ttft_p50_ms"]
        speed.append(
            (
                *where,
                f"{t['median']:.1f} [{t['low']:.1f}, {t['high']:.1f}]",
                _ratio(a["tokens_per_s_ratio_to_smg"]) if ours else "",
                f"{p50['median']:.1f} [{p50['low']:.1f}, {p50['high']:.1f}]",
                _ratio(a["ttft_p50_ratio_to_smg"]) if ours else "",
                f"{a['ttft_p95_ms']:.1f}",
                f"n={a['ttft_samples']}",
            )
        )
        cpu.append((*where, *(f"{a['cpu_s_per_1000_tokens'][role]:.3f}" for role in ROLES), ""))
    head = ("STREAMS", "ARM", "TOKENS/S", "TO SMG", "TTFT P50 MS", "TO SMG", "P95 MS", "REQUESTS")
    cost = ("STREAMS", "ARM", *(role.upper() for role in ROLES), "")
    return [
        ("Medians over rounds [quartiles]; to SMG's in the same round [95 %]", table(head, speed, right=(0,))),
        ("CPU seconds per 1,000 output tokens, medians over rounds", table(cost, cpu, right=(0, 2, 3, 4, 5))),
    ]


def _ratio(e: Mapping[str, float]) -> str:
    return f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]"
