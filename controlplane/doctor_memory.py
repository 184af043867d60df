"""The doctor's book, memory: leaks, and engines that ran out of it or soon will. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from controlplane import quantiles
from controlplane.doctor import (
    SERVING,
    WORKER,
    Case,
    Check,
    Finding,
    Fix,
    Release,
    Verdict,
    all_of,
    gauge,
    names,
    newest,
    rates,
    restart,
    set_fields,
)
from trimtab import measures
from trimtab.kit.duration import brief
from trimtab.messages import RequestMatch, Workload

OK, UNKNOWN, SUSPECT, FOUND = Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.FOUND

NULL_BLOCKS = 1
"""vLLM keeps one block for itself, for ever."""
OOM_NEWS_S = 600.0
"""An engine's death for want of memory is news for so long."""
TREND_S = 60.0
"""Memory that is looked at for less shows no trend."""
REACH_S = 110.0
"""Windows tell of two minutes, or nearly."""
STEADY = 1.1
"""More work than this times what there was explains more memory."""
RUNNING, WAITING = "running", "waiting"
"""Peaks of the load."""
MB = 1e6
LONG_WINDOW = 16_384
"""Up to here a prompt in one step is no risk."""


def memory(case: Case) -> Finding:
    return all_of("memory", [_leaks(case), _growth(case)], "no block is held by an idle worker, and no process grows")


# ---- memory grows


def _leaks(case: Case) -> Check:
    """Allocated against free blocks while nothing runs or waits."""
    name = "blocks held while idle"
    for_s, idle = case.number("heal.leak_s"), 0
    found: list[tuple[float, str, str]] = []
    maybe: list[tuple[float, str, str]] = []
    # Windows reach two minutes back: a longer time can't be shown.
    enough_s = min(for_s, REACH_S)
    for n in case.fresh:
        if n.load.running or n.load.waiting or not n.load.total_blocks:
            continue
        idle += 1
        held = n.load.total_blocks - n.load.free_blocks - NULL_BLOCKS
        if held <= 0:
            continue
        since_s = _idle_s(n)
        said = f"{n.node_id}: {held} of {n.load.total_blocks} blocks are held, and nothing has run there for {since_s:.0f} s"
        (found if since_s >= for_s else maybe).append((since_s, n.node_id, said))
    if found:
        return Check(name, FOUND, _texts(found), tuple(_anew(case, [i for _, i, _ in found])))
    if maybe:
        long_enough = max(since_s for since_s, *_ in maybe) >= enough_s
        fixes = tuple(_anew(case, [i for _, i, _ in maybe])) if long_enough else ()
        later = f"{_texts(maybe)}; a leak once that lasts {for_s:.0f} s"
        return Check(name, SUSPECT if long_enough else OK, later, fixes)
    if case.workers and not case.fresh:
        return Check(name, UNKNOWN, "no worker says anything of now")
    return Check(name, OK, f"none, at {idle} idle workers" if idle else "no worker is idle, so nothing shows")


def _texts(found: list[tuple[float, str, str]]) -> str:
    return "; ".join(said for *_, said in found[:3])


def _idle_s(n: Any) -> float:
    """For how long nothing ran or waited there, as far as its windows tell: back from the newest, without a gap."""
    since_s, expected_s = 0.0, None
    for w in reversed(n.windows):
        if w.peaks.get(RUNNING, 1.0) > 0 or w.peaks.get(WAITING, 1.0) > 0:
            break
        if expected_s is not None and w.ended_ago_s - expected_s > w.span_s:
            break
        since_s = expected_s = w.ended_ago_s + w.span_s
    return since_s


def _growth(case: Case) -> Check:
    """Peaks of the processes' memory over two minutes, beside the work that they did."""
    name = "memory of the processes"
    limit, found, missing = case.number("heal.growth_mb_per_min"), [], []
    for n in case.fresh:
        seen = [(w.ended_ago_s, w.peaks[measures.RSS_BYTES], w) for w in n.windows if measures.RSS_BYTES in w.peaks]
        if not seen:
            missing += [n] if n.windows else []
            continue
        span_s = seen[0][0] - seen[-1][0]
        if span_s < TREND_S:
            continue
        curve = [(-ago_s / 60, rss / MB) for ago_s, rss, _ in seen]
        half = len(curve) // 2
        # In both halves: one that has just loaded its model grew once, and grows no longer.
        steady = min(_slope(curve[:half]), _slope(curve[half:]))
        if steady > limit and not _more_work([w for *_, w in seen]):
            said = f"{n.node_id}: it grows by {_slope(curve):.0f} MB a minute, to {curve[-1][1]:.0f} MB, beside no more work"
            found.append((steady, n.node_id, said))
    if found:
        # Two minutes are less than the heal controller wants to see before it acts.
        return Check(name, SUSPECT, _texts(found), tuple(_anew(case, [i for _, i, _ in found])))
    if missing:
        return Check(name, UNKNOWN, f"{names(missing)} says nothing of its memory")
    return Check(name, OK, f"none grows by more than {limit:.0f} MB a minute beside no more work")


def _slope(points: list[tuple[float, float]]) -> float:
    """Least squares."""
    n = len(points)
    mx, my = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mx) ** 2 for x, _ in points)
    return sum((x - mx) * (y - my) for x, y in points) / spread if spread else 0.0


def _more_work(windows: list[Any]) -> bool:
    half = len(windows) // 2
    for name in (RUNNING, measures.STORED_TOKENS):
        old, new = ([w.peaks[name] for w in part if name in w.peaks] for part in (windows[:half], windows[half:]))
        if old and new and max(new) > STEADY * max(old) + 1:
            return True
    return False


def _anew(case: Case, node_ids: list[str]) -> Iterator[Fix]:
    """The heal controller restarts what it watches; else a person does."""
    yield from case.loop("heal")
    deadline_s = int(case.number("heal.grace_s"))
    for node_id in node_ids[:3]:
        fix = restart(node_id, deadline_s, f"drain {node_id} and have it started anew")
        model = next(n.model for n in case.workers if n.node_id == node_id)
        if any(n.model == model and n.node_id not in node_ids and n.state == SERVING for n in case.fresh):
            yield fix
        else:
            yield Fix(f"start another worker of {model} first, then {fix.does}", fix.command)


# ---- out of memory


def oom(case: Case) -> Finding:
    checks = [_ran_out(case), _near_the_end(case), _safe_batch(case), _chunked(case)]
    return all_of("oom", checks, "no engine ran out of memory, and the running set fits")


def _ran_out(case: Case) -> Check:
    name = "engines out of memory"
    workers = [n for n in case.telemetry.nodes if n.role == WORKER]
    lately = {n.node_id: rates(n.windows).of(measures.OUT_OF_MEMORY) for n in workers}
    died = {n.node_id: n.out_of_memory_ago_s for n in workers if n.HasField("out_of_memory_ago_s")}
    hit = {i: f"{i}: {count} requests ended for want of memory" for i, count in lately.items() if count}
    hit |= {i: f"{i}: its engine ran out of memory {brief(1000 * s)} ago" for i, s in died.items() if s < OOM_NEWS_S}
    if hit:
        said = "; ".join(list(hit.values())[:3])
        return Check(name, FOUND, said, tuple(_emergency(case, [n for n in workers if n.node_id in hit])))
    past = sum(n.totals.get(measures.OUT_OF_MEMORY, 0) for n in workers)
    return Check(name, OK, f"none lately; {past} requests since it was first looked at" if past else "none")


def _emergency(case: Case, hit: list[Any]) -> Iterator[Fix]:
    """Field guide B: release long-running requests, halve the batch, notify."""
    after_s = int(case.number("oom.release_after_s"))
    match = RequestMatch(workload=Workload.BATCH, min_age_ms=max(1, after_s) * 1000)
    yield Fix(
        f"end BATCH requests older than {after_s} s, on every worker",
        f"trimtab requests release --workload batch --older-than {max(1, after_s)}s",
        Release(match),
    )
    for n in hit[:3]:
        half = max(1, int((n.batch_active or case.number("batch.active")) * case.number("oom.decrease")))
        yield set_fields(f"halve the running set of {n.node_id}", {"batch.active": str(half)}, f"node/{n.node_id}")
    yield from case.loop("oom")


def _near_the_end(case: Case) -> Check:
    """Failed allocations: blocks ran out for requests that were running already."""
    name = "failed allocations and the peak of the KV cache"
    found, peak, missing = [], 0.0, []
    for n in case.fresh:
        seen = [w.peaks[measures.KV_USED] for w in n.windows if measures.KV_USED in w.peaks]
        if now := gauge(n, measures.KV_USED):
            seen.append(now)
        elif gauge(n, measures.KV_USED) is None and not seen:
            missing.append(n)
        peak = max([peak, *seen])
        r = rates(n.windows)
        failed = r.of(measures.ALLOCATION_FAILURES)
        # Field guide B adjusts from 100 an hour on.
        if r.span_s and failed * 3600 / r.span_s > 100 and failed > 5:
            found.append(f"{n.node_id}: {failed} allocations for running requests failed within {r.span_s:.0f} s")
    if found:
        safe = _safe(case)
        fix = (set_fields("let fewer BATCH requests run at once", {"batch.hard_cap": str(safe)}),) if safe else ()
        return Check(name, SUSPECT, "; ".join(found[:3]), fix)
    if missing:
        return Check(name, UNKNOWN, f"{names(missing)} says nothing of its KV cache")
    return Check(
        name, OK, f"the KV cache was {peak:.0%} full at most" if case.fresh else "no worker says anything of now"
    )


def _safe(case: Case) -> int:
    """A smaller bound than the policy's for what is not REALTIME and hot; 0 where none is known."""
    cap = int(case.number("batch.hard_cap"))
    found = [x.safe_batch for x in case.telemetry.lengths if x.safe_batch]
    return min(min(found), max(1, cap - 1)) if found and cap > 1 else 0


def _safe_batch(case: Case) -> Check:
    """Peak of BATCH in the running set against what the memory holds of requests as long as they are now."""
    name = "the peak against the safe batch"
    safe = {x.model: x.safe_batch for x in case.telemetry.lengths if x.safe_batch}
    over = []
    for n in case.fresh:
        peak = max((w.peaks.get(measures.BATCH_RUNNING, 0.0) for w in newest(n)), default=0.0)
        if n.model in safe and peak > safe[n.model]:
            over.append(
                (
                    safe[n.model],
                    f"{n.node_id}: {peak:.0f} BATCH requests ran at once, the safe batch is {safe[n.model]}",
                )
            )
    if over:
        least = min(bound for bound, _ in over)
        fix = set_fields("hold BATCH to the safe batch", {"batch.hard_cap": str(least)})
        return Check(name, SUSPECT, "; ".join(s for _, s in over[:3]), (*case.loop("batch"), fix))
    if not safe:
        served = any(quantiles.of(x.recent_totals).count for x in case.telemetry.lengths)
        return Check(name, OK, "not known yet" if served else "nothing has been served yet")
    return Check(name, OK, f"within it ({', '.join(f'{m}: {s}' for m, s in sorted(safe.items()))})")


def _chunked(case: Case) -> Check:
    """A step that takes a whole long prompt needs memory for all of it."""
    name = "chunked prefill"
    step = case.number("prefill.step_tokens")
    whole = [n for n in case.workers if n.limits.max_model_len > LONG_WINDOW and step >= n.limits.max_model_len]
    if whole:
        said = f"prefill.step_tokens is {step:.0f}: {names(whole)} takes a prompt of any length in one step"
        return Check(name, SUSPECT, said, (set_fields("prefill in pieces", {"prefill.step_tokens": "default"}),))
    return Check(name, OK, f"{step:.0f} tokens a step at most")
