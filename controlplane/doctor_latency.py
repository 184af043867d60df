"""The doctor's book, latency: P99 over its objectives, and requests that wait too long for their first step. Pure.

Thresholds are the policy's where it has them: what a controller would act on, the doctor finds. The others are below, with their reasons.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from controlplane import quantiles
from controlplane.doctor import (
    Case,
    Check,
    Finding,
    Fix,
    Verdict,
    because,
    before,
    gauge,
    measured,
    names,
    newest,
    rates,
    reload,
    set_fields,
)
from controlplane.render import place
from trimtab import measures
from trimtab.kit.duration import brief
from trimtab.messages import Workload

OK, UNKNOWN, SUSPECT, FOUND = Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.FOUND

RT = Workload.REALTIME
REALTIME = 1
"""Workload's number."""
TTFT = tuple(measures.ttft(RT, path) for path in (measures.HOT, measures.COLD))
ITL = (measures.itl(RT),)
LONGER = 2.0
"""Prompts this many times as long as the day before are another mix."""
MIN_LENGTHS = 100
"""Fewer prompts are no mix."""
LATELY_MS = 15 * 60_000
"""A change of the policy that a fault may come from."""
BLAMED = 0.5
"""Of the outliers, those that a cause must explain."""
INVERSION_MS, INVERSION_WAITS = 100.0, 5
"""As the heal controller has it."""


# ---- P99 jumped


def p99(case: Case) -> Finding:
    causes = [_lengths(case), giants(case), _queueing(case), full(case), _changed(case)]
    return because("p99", _over(case), causes)


def _over(case: Case) -> Check:
    """P99 of the newest windows against the objective, with that of the windows before."""
    name = "P99 against the objective"
    if not case.workers:
        return Check(name, OK, "no worker is connected, so nobody is slow")
    if not case.fresh:
        return Check(name, UNKNOWN, "no worker says anything of now")
    enough, silent = case.number("batch.min_samples"), []
    found: list[tuple[float, str]] = []
    few: list[tuple[float, str]] = []
    for n in case.fresh:
        for what, sketches, objective in (("TTFT", TTFT, n.ttft_objective_ms), ("ITL", ITL, n.itl_objective_ms)):
            now, then = measured(newest(n), sketches), measured(before(n), sketches)
            if not now.count:
                if what == "TTFT" and rates(newest(n)).of(measures.requests_of(RT)):
                    silent.append(n)
            elif objective and now.p99 > objective:
                past = f", {then.p99:.0f} before" if then.count else ""
                text = f"{n.node_id}: P99 {what} {now.p99:.0f} ms over {objective:.0f} (n={now.count}{past})"
                (found if now.count >= enough else few).append((now.p99 / objective, text))
    if found:
        return Check(name, FOUND, _worst_of(found))
    if silent:
        return Check(name, UNKNOWN, f"{names(silent)} ended REALTIME requests and says nothing of their TTFT")
    if few:
        return Check(name, SUSPECT, f"{_worst_of(few)}, too few to be sure")
    counts = sum(measured(newest(n), TTFT).count for n in case.fresh)
    return Check(name, OK, f"P99 is within its objectives (n={counts})" if counts else "no REALTIME request lately")


def _worst_of(found: list[tuple[float, str]]) -> str:
    more = f"; {len(found) - 1} more" if len(found) > 1 else ""
    return max(found)[1] + more


def _lengths(case: Case) -> Check:
    """The histogram of the last thousand prompts against the day before."""
    name = "prompt lengths, the last 1000 against the day before"
    changed, known = [], 0
    for x in case.telemetry.lengths:
        now, then = quantiles.of(x.recent_prompts), quantiles.of(x.day_prompts)
        if min(now.count, then.count) < MIN_LENGTHS:
            continue
        known += 1
        for what, a, b in (("median", now.p50, then.p50), ("P95", now.p95, then.p95)):
            if b and a / b >= LONGER:
                changed.append(f"the {what} of {x.model}'s prompts went from {b:.0f} to {a:.0f} tokens")
                break
    if changed:
        return Check(name, FOUND, "; ".join(changed), tuple(_for_long_prompts(case)))
    if not known:
        return Check(name, UNKNOWN, "too few prompts to compare")
    return Check(name, OK, "as the day before")


def _for_long_prompts(case: Case) -> Iterator[Fix]:
    yield from case.loop("clusters")
    if case.number("clusters.spread_limit") > 0.3:
        yield set_fields("prefill alike lengths together", {"clusters.spread_limit": "0.3"})
    if case.word("admission.shed") == "none" and cold_waits(case):
        yield set_fields("refuse cold BATCH requests at the gateways", {"admission.shed": "cold"})


def cold_waits(case: Case) -> bool:
    return any((gauge(n, measures.COLD_WAITING) or 0) > 0 for n in case.telemetry.nodes if n.connected and not n.stale)


def giants(case: Case) -> Check:
    """Prompts so much longer than the median that others wait for them, by the mix and by who ran beside outliers."""
    name = "giants in the mix"
    times, share, hot = case.number("giants.times_median"), case.number("giants.share"), case.number("paths.hot_below")
    found, known, lowest = [], 0, 0.0
    for x in case.telemetry.lengths:
        q = quantiles.of(x.recent_prompts)
        if q.count < MIN_LENGTHS:
            continue
        known += 1
        above = max(times * q.p50, hot)
        part = quantiles.share_of_sum_above(q, above)
        if q.max > above and part >= share:
            text = f"prompts above {above:.0f} tokens are {part:.0%} of {x.model}'s prompt tokens (longest {q.max:.0f})"
            found.append(text)
            lowest = min(lowest or above, above)
    beside = [o for n in case.fresh for w in newest(n) for o in w.outliers if o.workload == REALTIME]
    blamed = [o for o in beside if o.longest_neighbour_tokens >= max(hot, times * max(1, o.prompt_tokens))]
    if len(beside) >= INVERSION_WAITS and len(blamed) / len(beside) >= BLAMED:
        longest = statistics.median(o.longest_neighbour_tokens for o in blamed)
        found.append(
            f"{len(blamed)} of {len(beside)} slow requests ran beside a prompt of {longest:.0f} tokens (median)"
        )
        lowest = min(lowest or longest, longest)
    if found and case.number("isolate.from_tokens") <= lowest:
        return Check(name, OK, f"{found[0]}; they are isolated already, from {case.word('isolate.from_tokens')} tokens")
    if found:
        return Check(name, FOUND, "; ".join(found), tuple(_isolated(case, int(lowest))))
    if not known and not beside:
        return Check(name, UNKNOWN, "too few prompts to tell")
    return Check(name, OK, "none that weigh")


def _isolated(case: Case, above: int) -> Iterator[Fix]:
    yield set_fields("let giants run one at a time", {"isolate.from_tokens": str(max(1, above))})
    yield from case.loop("isolation")


def _queueing(case: Case) -> Check:
    """Whether slow requests spent their time waiting, or in the engine."""
    name = "where slow requests spent their time"
    slow = [o for n in case.fresh for w in newest(n) for o in w.outliers if o.workload == REALTIME and o.ttft_ms > 0]
    if not slow:
        return Check(name, OK, "no slow request is on record")
    waited = statistics.median(o.queued_ms for o in slow)
    took = statistics.median(o.ttft_ms for o in slow)
    said = f"they waited {waited:.0f} of {took:.0f} ms to their first token (medians of {len(slow)})"
    return Check(name, SUSPECT, said, tuple(_first(case))) if waited >= BLAMED * took else Check(name, OK, said)


def _changed(case: Case) -> Check:
    """What people changed lately: a fault that begins with a change often comes from it."""
    name = "changes of the policy"
    if case.history is None:
        return Check(name, UNKNOWN, "the history is not to be had now")
    for e in case.history:
        ago_ms = case.now_unix_ms - e.written_unix_ms
        if e.changes and not e.refused_because and not e.term and ago_ms <= LATELY_MS and e.identity.revision > 1:
            said = f"{e.author} changed {names([c.field for c in e.changes])} {brief(max(0, ago_ms))} ago ({place(e.identity)})"
            back = f"trimtab policy rollback {e.identity.epoch}.{e.identity.revision - 1}"
            return Check(name, SUSPECT, said, (Fix("go back to the policy before that", back),))
    return Check(name, OK, f"none within {brief(LATELY_MS)}")


# ---- scheduling delay


def delay(case: Case) -> Finding:
    causes = [_inversion(case), _rules(case), full(case)]
    return because("delay", _waits(case), causes)


def _waits(case: Case) -> Check:
    """Mean waits of requests that were first scheduled lately, and inversions: REALTIME behind BATCH."""
    name = "waits before the first step"
    if not case.workers:
        return Check(name, OK, "no worker is connected")
    if not case.fresh:
        return Check(name, UNKNOWN, "no worker says anything of now")
    found, longest, missing = [], 0.0, []
    for n in case.fresh:
        r = rates(newest(n))
        waits, wait_ms = r.of(measures.REALTIME_WAITS), r.of(measures.REALTIME_WAIT_MS)
        if not waits and r.of(measures.requests_of(RT)) and not r.of(measures.BATCH_WAITS):
            missing.append(n)
        mean = wait_ms / waits if waits else 0.0
        longest = max(longest, mean)
        objective = n.ttft_objective_ms or case.number("objectives.ttft_p99_ms")
        if waits >= INVERSION_WAITS and mean > objective / 2:
            found.append(f"{n.node_id}: REALTIME waits {mean:.0f} ms on average, of an objective of {objective:.0f} ms")
        b_waits, b_ms = r.of(measures.BATCH_WAITS), r.of(measures.BATCH_WAIT_MS)
        if b_waits and b_ms / b_waits > 1000 * case.number("objectives.max_queue_s"):
            found.append(f"{n.node_id}: BATCH waits {b_ms / b_waits / 1000:.0f} s on average")
    found += list(_inverted(case).values())[:1]
    if found:
        return Check(name, FOUND, "; ".join(found[:3]), tuple(_first(case)))
    if missing:
        return Check(name, UNKNOWN, f"{names(missing)} says nothing of waits")
    return Check(name, OK, f"REALTIME waits {longest:.0f} ms on average at most")


def _inverted(case: Case) -> dict[str, str]:
    """By node id."""
    found = {}
    for n in case.fresh:
        r = rates(newest(n))
        rt, batch = r.of(measures.REALTIME_WAITS), r.of(measures.BATCH_WAITS)
        if min(rt, batch) < INVERSION_WAITS:
            continue
        mine, theirs = r.of(measures.REALTIME_WAIT_MS) / rt, r.of(measures.BATCH_WAIT_MS) / batch
        if mine > theirs and mine > INVERSION_MS:
            found[n.node_id] = f"{n.node_id}: REALTIME waits {mine:.0f} ms, longer than BATCH ({theirs:.0f} ms)"
    return found


def _inversion(case: Case) -> Check:
    name = "inversions"
    found = _inverted(case)
    if not found:
        return Check(name, OK, "none")
    anew = [reload(node_id) for node_id in list(found)[:3]]
    return Check(name, FOUND, "; ".join(list(found.values())[:3]), (*anew, *case.loop("heal"), *_first(case)))


def _first(case: Case) -> Iterator[Fix]:
    """What puts REALTIME first, as far as the policy does not say so already."""
    if case.word("scheduler.mode") != "trimtab":
        yield set_fields("order by workload and age", {"scheduler.mode": "trimtab"})
    yield from case.loop("priority")
    if case.number("paths.realtime_reserve") < 1:
        yield set_fields("keep a slot for REALTIME", {"paths.realtime_reserve": "1"})
    if case.word("preemption.mode") == "none":
        yield set_fields("let BATCH make room for REALTIME", {"preemption.mode": "conservative"})
    if case.number("priority.realtime_delta") < case.number("priority.max_priority_diff"):
        yield set_fields("move REALTIME a level earlier", {"priority.realtime_delta": _level_up(case)})


def _level_up(case: Case) -> str:
    return str(int(case.number("priority.realtime_delta")) + 1)


def _rules(case: Case) -> Check:
    name = "the policy's order"
    odd = []
    if case.word("scheduler.mode") != "trimtab":
        odd.append(f"scheduler.mode is {case.word('scheduler.mode')}: workloads do not count")
    if case.number("paths.realtime_reserve") < 1:
        odd.append("no slot is kept for REALTIME")
    if case.word("preemption.mode") == "none":
        odd.append("nobody makes room for REALTIME")
    if case.word("loops.priority") != "on":
        odd.append(f"the priority controller is set to {case.word('loops.priority')}")
    if odd:
        return Check(name, FOUND, "; ".join(odd), tuple(_first(case)))
    return Check(name, OK, "it puts REALTIME first")


def full(case: Case) -> Check:
    """Whether there is room at all: a full running set with others waiting wants fewer requests, or more workers."""
    name = "room in the running set"
    full = [n for n in case.fresh if n.batch_active and n.load.running >= n.batch_active and n.load.waiting]
    if not full:
        return Check(name, OK, "there is some, or nobody waits for it")
    said = "; ".join(
        f"{n.node_id} runs {n.load.running} of {n.batch_active}, and {n.load.waiting} wait" for n in full[:3]
    )
    return Check(name, SUSPECT, said, tuple(_more_room(case)))


def _more_room(case: Case) -> Iterator[Fix]:
    if case.word("admission.shed") == "none" and cold_waits(case):
        yield set_fields("refuse cold BATCH requests at the gateways", {"admission.shed": "cold"})
    if case.number("scale.max_workers"):
        yield from case.loop("scale")
    else:
        yield Fix(
            "let pools grow, where somebody starts workers", "trimtab policy set scale.max_workers=N --for pool/NAME"
        )
