"""From raw blocks to the figures of each arm. Pure.

Arms are compared over the rounds that both have, request by request: a round's arrivals are the same in every arm. Intervals resample whole
rounds, and requests within them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from services.bench.mixed.arms import BATCH_ALONE, FCFS, PRIORITY, REALTIME_ALONE, Arm
from services.bench.mixed.block import COUNTERS, Block
from services.bench.stats import MIN_GROUPS, Estimate, bootstrap, nested_bootstrap, quantiles

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
BEYOND = 2
"""A quantile is shown where so many requests lie beyond it."""
TAIL_REQUESTS = 200
"""Below this no P95 decides anything."""
METRICS = ("e2e_ms", "ttft_ms", "itl_ms")
ITL_RESAMPLES = 300

Found = Mapping[str, Sequence[Block]]
"""Blocks by arm."""


def by_arm(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    found: dict[str, list[Block]] = {}
    for block in sorted(blocks, key=lambda b: b.round):
        found.setdefault(block.arm, []).append(block)
    return found


def names(arm: Arm | None, requests: int, *, quick: bool) -> list[str]:
    """The quantiles that so many requests of such an arm carry."""
    wanted = ["p50"] if quick else ["p50", "p90"] if arm is not None and arm.ablation else list(QUANTILES)
    return [q for q in wanted if requests * (1.0 - QUANTILES[q]) >= BEYOND]


def shared(found: Found, *arms: str) -> list[tuple[Block, ...]]:
    """The blocks of the rounds that all of them have."""
    rounds = [{b.round: b for b in found.get(arm, ())} for arm in arms]
    return [tuple(r[i] for r in rounds) for i in rounds[0] if all(i in r for r in rounds)]


def latency(blocks: Sequence[Block], metric: str, qs: Sequence[str], seed: int) -> dict[str, Estimate]:
    """In milliseconds; for `itl_ms` over all gaps between a request's tokens."""
    ranks = [QUANTILES[q] for q in qs]
    if metric == "itl_ms":
        gaps = [[r.itl_ms for r in b.realtime if r.itl_ms] for b in blocks]
        if not any(gaps):
            return {}

        def pooled(sample: Sequence[tuple[float, ...]]) -> list[float]:
            return quantiles([ms for each in sample for ms in each], ranks)

        found = nested_bootstrap(gaps, pooled, seed=seed, resamples=ITL_RESAMPLES)
    else:
        values = [[float(getattr(r, metric)) for r in b.realtime] for b in blocks]
        found = nested_bootstrap(values, lambda sample: quantiles(sample, ranks), seed=seed)
    return dict(zip(qs, found, strict=True))


def e2e_ratio(found: Found, arm: str, other: str, qs: Sequence[str], seed: int) -> dict[str, Estimate]:
    """The arm's quantile over the other's. Empty where they share no request."""
    rows = []
    for mine, theirs in shared(found, arm, other):
        known = {r.index: r.e2e_ms for r in theirs.realtime}
        rows.append([(r.e2e_ms, known[r.index]) for r in mine.realtime if r.index in known])
    if not any(rows) or not qs:
        return {}
    ranks = [QUANTILES[q] for q in qs]

    def statistics(sample: Sequence[tuple[float, float]]) -> list[float]:
        mine, theirs = (quantiles(side, ranks) for side in zip(*sample, strict=True))
        return [a / b for a, b in zip(mine, theirs, strict=True)]

    return dict(zip(qs, nested_bootstrap(rows, statistics, seed=seed), strict=True))


def tail_decides(found: Found, arm: str, other: str) -> bool:
    """Whether both have rounds and requests enough for a verdict on their P95."""
    both = shared(found, arm, other)
    return len(both) >= MIN_GROUPS and sum(len(mine.realtime) for mine, _ in both) >= TAIL_REQUESTS


def speed(blocks: Sequence[Block]) -> float:
    return sum(b.tokens for b in blocks) / sum(b.measured_s for b in blocks)


def batch_speed(blocks: Sequence[Block]) -> float:
    return sum(b.tokens - b.realtime_tokens for b in blocks) / sum(b.measured_s for b in blocks)


def tokens_ratio(found: Found, arm: str, other: str, seed: int) -> Estimate | None:
    """Tokens/s of all work, to the other's."""
    both = shared(found, arm, other)
    if not both or not all(b.tokens for _, b in both):
        return None
    return bootstrap(both, lambda sample: speed([a for a, _ in sample]) / speed([b for _, b in sample]), seed=seed)


def busy_share(blocks: Sequence[Block]) -> float:
    """The share of time in which at least one realtime request was there."""
    return sum(b.busy_share for b in blocks) / len(blocks)


def share_ratio(found: Found, arm: str, seed: int) -> Estimate | None:
    """Tokens/s of all work, to what batch alone gives in the time that realtime alone leaves."""
    rounds = shared(found, arm, BATCH_ALONE.name, REALTIME_ALONE.name)
    if not rounds or not all(batch.tokens and realtime.busy_share < 1.0 for _, batch, realtime in rounds):
        return None

    def statistic(sample: Sequence[tuple[Block, ...]]) -> float:
        mine, batch, realtime = zip(*sample, strict=True)
        return speed(mine) / (speed(batch) * (1.0 - busy_share(realtime)))

    return bootstrap(rounds, statistic, seed=seed)


def arm_figures(arm: Arm, found: Found, seed: int, *, quick: bool) -> dict[str, Any]:
    """One object for the report. Latencies in milliseconds; what the sample does not carry is absent."""
    blocks = found[arm.name]
    requests = sum(len(b.realtime) for b in blocks)
    qs = names(arm, requests, quick=quick)
    steps = sum(b.counters["steps"] for b in blocks)
    figures: dict[str, Any] = {
        "arm": arm.name,
        "says": arm.says,
        "policy": dict(arm.policy),
        "ablation": arm.ablation,
        "rounds": len(blocks),
        "requests": requests,
        "unfinished": sum(not r.ended for b in blocks for r in b.realtime),
    }
    if qs:
        for metric in METRICS:
            figures[metric] = {q: asdict(e) for q, e in latency(blocks, metric, qs, seed).items()}
        figures["realtime_busy_share"] = busy_share(blocks)
    figures["tokens_per_s"] = asdict(bootstrap(blocks, speed, seed=seed))
    if arm.batch:
        figures["batch_tokens_per_s"] = asdict(bootstrap(blocks, batch_speed, seed=seed))
        figures["batch_requests_ended"] = sum(b.batch_ended for b in blocks)
        figures["max_overtake_ms"] = max(b.max_overtake_ms for b in blocks)
    figures |= {name: sum(b.counters[name] for b in blocks) for name in COUNTERS if name != "hook_us"}
    figures["hook_us_per_step"] = sum(b.counters["hook_us"] for b in blocks) / steps if steps else 0.0
    figures["ratios"] = _ratios(arm, found, qs, seed)
    figures["late_ms"] = max(b.late_ms for b in blocks)
    figures["client_cores"] = max(b.client_cores for b in blocks)
    figures["foreign_cores"] = max(b.foreign_cores for b in blocks)
    return figures


def _ratios(arm: Arm, found: Found, qs: Sequence[str], seed: int) -> dict[str, Any]:
    ratios: dict[str, Any] = {}
    for other, turned in ((REALTIME_ALONE, False), (FCFS, True), (PRIORITY, True)):
        if arm is REALTIME_ALONE or other.name == arm.name or not (arm.realtime and other.name in found):
            continue
        pair = (other.name, arm.name) if turned else (arm.name, other.name)
        for q, e in e2e_ratio(found, *pair, qs, seed).items():
            ratios[f"e2e_{q}_{other.name}_over_this" if turned else f"e2e_{q}_over_{other.name}"] = asdict(e)
    for other in (FCFS, BATCH_ALONE):
        tokens = tokens_ratio(found, arm.name, other.name, seed) if other.name != arm.name and arm.batch else None
        if tokens is not None:
            ratios[f"tokens_over_{other.name}"] = asdict(tokens)
    share = share_ratio(found, arm.name, seed) if arm.batch and arm.realtime else None
    if share is not None:
        ratios["tokens_over_batch_alone_in_time_left"] = asdict(share)
    return ratios
