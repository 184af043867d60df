"""The doctor's book, throughput: fewer tokens a second than before, and what they may be lost to. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from controlplane import quantiles
from controlplane.doctor import (
    NEW_S,
    SERVING,
    WORKER,
    Case,
    Check,
    Finding,
    Fix,
    Verdict,
    because,
    before,
    gauge,
    names,
    newest,
    rates,
    reblock,
    set_fields,
)
from controlplane.doctor_latency import MIN_LENGTHS, giants
from trimtab import measures

OK, UNKNOWN, SUSPECT, FOUND = Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.FOUND

DROP = 0.3
"""Less of the throughput than before: field guides A and B both begin there."""
BUSY = 0.7
"""An engine that spends this share of its time in steps is at work."""
FRAGMENTED = 0.25
"""Of the slots in held blocks, empty ones. Blocks below 128 tokens waste less on real traces (RESEARCH)."""
WASTE = 0.1
"""Half a block at the end of each request, as a share of the median request."""
REWORK = 0.15
"""Of computed tokens, those computed again, or for nothing."""
LOWERED = 0.7
"""Of the running set that people set: controllers hold it below this."""
BATCH_WORDS = {"cold": "cold BATCH requests", "batch": "all BATCH requests"}


def throughput(case: Case) -> Finding:
    causes = [
        _fragmentation(case),
        _block_size(case),
        giants(case),
        _rework(case),
        _lowered(case),
        _left_out(case),
        _away(case),
    ]
    return because("throughput", _less(case), causes)


def _less(case: Case) -> Check:
    """Output tokens a second of the newest windows against those before; less that was asked for is no fault."""
    name = "output tokens a second"
    waiting = _waiting(case)
    if not case.workers:
        words = f"{waiting:.0f} requests wait, and no worker is connected" if waiting else "no worker is connected"
        return Check(name, FOUND if waiting else OK, words)
    if not case.fresh:
        return Check(name, UNKNOWN, "no worker says anything of now")
    # A worker that was lost has done its part of what was before.
    workers = [n for n in case.telemetry.nodes if n.role == WORKER]
    now = sum(rates(newest(n)).per_s(measures.OUTPUT_TOKENS) for n in workers)
    then = sum(rates(before(n)).per_s(measures.OUTPUT_TOKENS) for n in workers)
    said = f"{now:.0f} tokens/s in the newest {NEW_S:.0f} s, {then:.0f} in the two minutes before"
    if then < 1 and waiting and now < 1:
        runs = sum(n.load.running for n in case.fresh)
        words = f"{waiting:.0f} requests wait, {runs} run, and hardly a token has come in {NEW_S:.0f} s"
        # What runs may be long prompts that are read.
        return Check(name, SUSPECT if runs else FOUND, words)
    if then < 1:
        return Check(name, OK, f"{said}: it has just begun" if now >= 1 else "hardly anything was asked for")
    if now > (1 - DROP) * then:
        return Check(name, OK, said)
    if waiting:
        return Check(name, FOUND, f"{said}, and {waiting:.0f} requests wait")
    busy = [b for n in case.fresh if (b := gauge(n, measures.BUSY)) is not None]
    if not busy:
        return Check(name, UNKNOWN, f"{said}, and no worker says how busy it is")
    if statistics.fmean(busy) >= BUSY:
        return Check(name, FOUND, f"{said}, and the engines are busy for {statistics.fmean(busy):.0%} of the time")
    return Check(name, OK, f"{said}: less was asked for")


def _waiting(case: Case) -> float:
    """At workers and in gateways."""
    heard = (n for n in case.telemetry.nodes if n.connected and not n.stale and n.role != WORKER)
    lines: float = sum(
        (gauge(n, name) or 0.0) for n in heard for name in (measures.REALTIME_WAITING, measures.BATCH_WAITING)
    )
    return lines + float(sum(n.load.waiting for n in case.fresh))


def _fragmentation(case: Case) -> Check:
    name = "fragmentation of the KV cache"
    found, missing, most = [], [], 0.0
    for n in case.fresh:
        used, empty = gauge(n, measures.KV_USED), gauge(n, measures.FRAGMENTATION)
        if used == 0.0:
            empty = 0.0
        if used is None or empty is None:
            # Where blocks hold different numbers of tokens nobody can tell.
            missing.append(n)
            continue
        most = max(most, empty)
        if empty > FRAGMENTED:
            found.append(
                f"{n.node_id}: {empty:.0%} of the slots in held blocks are empty (block size {n.limits.block_size})"
            )
    if found:
        return Check(name, FOUND, "; ".join(found[:3]), tuple(_smaller(case)))
    if missing:
        return Check(name, UNKNOWN, f"{names(missing)} says nothing of it")
    return Check(name, OK, f"{most:.0%} of the slots in held blocks are empty at most")


def _block_size(case: Case) -> Check:
    """Half a block is lost at the end of each request: blocks must be small beside it."""
    name = "block size against the length mix"
    found, known = [], 0
    for n in case.fresh:
        median, size = _median(case, n), n.limits.block_size
        if median is None or not size:
            continue
        known += 1
        waste = size / 2 / max(1.0, median)
        # An engine that takes no smaller blocks has none too large.
        if waste > WASTE and _accepts(n, size):
            found.append(
                f"{n.node_id}: half a block of {size} is {waste:.0%} of the median request of {median:.0f} tokens"
            )
    if found:
        return Check(name, SUSPECT, "; ".join(found[:3]), tuple(_smaller(case)))
    return Check(name, OK, "small enough") if known else Check(name, UNKNOWN, "too few requests to tell")


def _median(case: Case, n: Any) -> float | None:
    """Of its model's requests, prompt and output, in tokens."""
    lengths = next((x for x in case.telemetry.lengths if x.model == n.model), None)
    q = quantiles.of(lengths.recent_totals) if lengths is not None else None
    return q.p50 if q is not None and q.count >= MIN_LENGTHS else None


def _accepts(n: Any, below: int) -> list[int]:
    return sorted(size for size in n.limits.block_sizes if size < below)


def _smaller(case: Case) -> Iterator[Fix]:
    """For the first of them that takes smaller blocks; the others are found again once it has them."""
    for n in case.fresh:
        size, median = n.limits.block_size, _median(case, n)
        accepted = _accepts(n, size)
        if not accepted or (median is not None and size / 2 / max(1.0, median) <= WASTE and not _fragmented(n)):
            continue
        most = 2 * WASTE * median if median is not None else size / 2
        wanted = max((s for s in accepted if s <= most), default=accepted[0])
        if n.limits.live_blocks:
            yield reblock(n.node_id, wanted, size)
        else:
            by = f"trimtab rollout restart --node {n.node_id} --set worker.block_size={wanted}"
            yield Fix(f"start {n.node_id} anew with KV blocks of {wanted} tokens", by)
        return


def _fragmented(n: Any) -> bool:
    empty = gauge(n, measures.FRAGMENTATION)
    return empty is not None and empty > FRAGMENTED


def _rework(case: Case) -> Check:
    """Tokens computed twice after preemptions, or for requests that left."""
    name = "tokens computed for nothing"
    total = rates(w for n in case.fresh for w in newest(n))
    computed = total.of(measures.COMPUTED_TOKENS)
    again, left = total.of(measures.RECOMPUTED_TOKENS), total.of(measures.ABORTED_TOKENS)
    if not computed:
        said = (
            "nothing was computed lately" if not total.of(measures.OUTPUT_TOKENS) else "no worker says what it computed"
        )
        return Check(name, UNKNOWN if total.of(measures.OUTPUT_TOKENS) else OK, said)
    said = f"of {computed} computed, {again / computed:.0%} again after preemptions, {left / computed:.0%} for requests that left"
    if again / computed >= REWORK:
        smaller = max(1, int(0.75 * case.number("batch.hard_cap")))
        fix = set_fields("let fewer BATCH requests run at once", {"batch.hard_cap": str(smaller)})
        return Check(name, FOUND, said, (fix,))
    return Check(name, SUSPECT if left / computed >= REWORK else OK, said)


def _lowered(case: Case) -> Check:
    name = "the running set"
    low = [n for n in case.workers if n.batch_active_spec and n.batch_active < LOWERED * n.batch_active_spec]
    if not low:
        return Check(name, OK, "as people set it, or near")
    said = "; ".join(f"controllers hold {n.node_id} at {n.batch_active} of {n.batch_active_spec}" for n in low[:3])
    return Check(name, SUSPECT, said, (Fix("see why", "trimtab why batch.active"),))


def _left_out(case: Case) -> Check:
    name = "what gateways refuse"
    shed, state = case.word("admission.shed"), case.word("degraded.state")
    if state == "degraded":
        return Check(name, FOUND, "the mesh is degraded", (Fix("see why", "trimtab why degraded.state"),))
    if shed != "none":
        fix = Fix("see why", "trimtab why admission.shed")
        return Check(name, FOUND, f"gateways refuse {BATCH_WORDS.get(shed, shed)}", (fix,))
    return Check(name, OK, "nothing by policy")


def _away(case: Case) -> Check:
    name = "workers that do not serve"
    workers = [n for n in case.telemetry.nodes if n.role == WORKER]
    away = [n for n in workers if not n.connected or n.state != SERVING]
    if not away:
        return Check(name, OK, "all serve")
    return Check(name, SUSPECT, f"{names(away)}, of {len(workers)} workers")
