"""The doctor's book, the mesh itself: nodes, policy, store, leader, breakers, loops, versions. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from controlplane.doctor import (
    SERVING,
    WORKER,
    Case,
    Check,
    Finding,
    Fix,
    ResetBreaker,
    Symptom,
    Verdict,
    all_of,
    names,
    restart,
    set_fields,
    state,
)
from controlplane.render import place
from controlplane.render_workers import SIDES
from trimtab.kit.duration import brief
from trimtab.policy import FIELDS

OK, UNKNOWN, SUSPECT, FOUND = Verdict.OK, Verdict.UNKNOWN, Verdict.SUSPECT, Verdict.FOUND

DEATHS = 3
"""Of one node since it was first heard of: it ends again and again, and nobody has asked for it."""
DIED_S = 600.0
"""A death is told of for so long."""
TRIPS = 3
"""Of one process's breaker: it flaps."""
FAILED_MS = 10 * 60_000
REPLICA_S = 10.0
"""A replica that was not heard of for so long has gone."""


def workers(case: Case) -> Finding:
    checks = [_there(case), _hung(case), _lost(case), _silent(case), _restarted(case)]
    serving = sum(n.state == SERVING for n in case.workers)
    return all_of("workers", checks, f"{serving} of {len(case.workers)} connected workers serve")


def _there(case: Case) -> Check:
    if any(n.state == SERVING for n in case.workers):
        return Check("a worker that serves", OK, "there is one")
    if case.workers:
        said = f"none serves: {', '.join(f'{n.node_id} is {state(n)}' for n in case.workers[:4])}"
        return Check("a worker that serves", FOUND, said)
    gone = [n for n in case.telemetry.nodes if n.role == WORKER and state(n) == "draining"]
    said = f"no worker is connected: {names(gone)} drained" if gone else "no worker is connected"
    # A pool that nobody has said the size of has none that it could be brought back to: it is what runs.
    pools = {n.pool: sum(x.pool == n.pool for x in gone) for n in gone}
    fixes = [
        Fix(f"have whoever starts workers of pool {p} start {k} (`trimtab up` does)", f"trimtab scale set {p} {k}")
        for p, k in sorted(pools.items())
    ]
    fixes.append(Fix("start workers at this control plane's address", "trimtab-worker --control HOST:PORT"))
    return Check("a worker that serves", FOUND, said, tuple(fixes))


def _hung(case: Case) -> Check:
    hung = [n for n in case.workers if state(n) == "hung"]
    fixes = [*case.loop("heal")] if hung else []
    fixes += [restart(n.node_id, 0, f"hand on what {n.node_id} has, and have it started anew") for n in hung[:3]]
    said = "; ".join(f"{n.node_id} hangs: work is scheduled, and no step ends" for n in hung[:3])
    return Check("hung engines", FOUND if hung else OK, said or "none", tuple(fixes))


def _lost(case: Case) -> Check:
    lost = [n for n in case.telemetry.nodes if not n.connected and state(n) != "draining"]
    said = "; ".join(f"{n.node_id} is lost{_since(n)}" for n in lost[:3])
    fixes = tuple(
        Fix(f"see what it said last, and start {n.node_id} again", f"trimtab why {n.node_id}") for n in lost[:3]
    )
    return Check("lost nodes", FOUND if lost else OK, said or "none", fixes)


def _since(n: Any) -> str:
    return f", last heard of {brief(n.age_s * 1000)} ago" if n.HasField("age_s") else ""


def _silent(case: Case) -> Check:
    silent = [n for n in case.telemetry.nodes if n.connected and n.stale and n.HasField("age_s")]
    said = "; ".join(f"{n.node_id} is connected and has said nothing for {brief(n.age_s * 1000)}" for n in silent[:3])
    fixes = tuple(Fix(f"look at the log of {n.node_id}", f"trimtab why {n.node_id}") for n in silent[:3])
    return Check("silent nodes", FOUND if silent else OK, said or "none", fixes)


def _restarted(case: Case) -> Check:
    """Of those that nobody asked for: a process that is told to go drains first."""
    died = [n for n in case.telemetry.nodes if n.deaths >= DEATHS or (n.deaths and n.died_ago_s < DIED_S)]
    said = "; ".join(_died(n) for n in died[:3])
    fixes = tuple(Fix(f"see what {n.node_id} did, and look at its log", f"trimtab why {n.node_id}") for n in died[:3])
    return Check("processes that ended", SUSPECT if died else OK, said or "none that nobody asked for", fixes)


def _died(n: Any) -> str:
    times = f"{n.deaths} times, last " if n.deaths > 1 else ""
    return f"a process of {n.node_id} ended without a drain {times}{brief(n.died_ago_s * 1000)} ago"


def policy(case: Case) -> Finding:
    newest = place(case.fleet.desired)
    said = f"every node has {newest}, the newest" if case.workers else f"no worker is here to have {newest}, the newest"
    return all_of("policy", [_refused(case), _behind(case)], said)


def _refused(case: Case) -> Check:
    refusing = [n for n in case.fleet.nodes if n.connected and n.policy.refused.epoch]
    if not refusing:
        return Check("refusals", OK, "nobody refuses the policy")
    said = "; ".join(
        f"{n.hello.node_id} refuses {place(n.policy.refused)} ({n.policy.refusal.reason}): {n.policy.refusal.message}"
        for n in refusing[:3]
    )
    return Check("refusals", FOUND, said, tuple(f for n in refusing[:3] for f in _within_limits(n)))


def _within_limits(n: Any) -> Iterator[Fix]:
    """A field that the node's engine can't take is set to what it can, for that node alone."""
    path, node_id = n.policy.refusal.field, n.hello.node_id
    limit = FIELDS[path].limit if path in FIELDS else None
    most = getattr(n.hello.limits, limit, 0) if limit else 0
    if most:
        yield set_fields(f"give {node_id} what its engine can take", {path: str(most)}, f"node/{node_id}")
    else:
        yield Fix("see what it refuses, and since when", f"trimtab why {node_id}")


def _behind(case: Case) -> Check:
    newest = case.fleet.desired
    behind = [
        n.hello.node_id
        for n in case.fleet.nodes
        if n.connected
        and not n.policy.refused.epoch
        and (n.policy.applied.epoch, n.policy.applied.revision) < (newest.epoch, newest.revision)
    ]
    if not behind:
        return Check("who has the newest", OK, "every node that does not refuse it")
    fix = Fix("see who has which", "trimtab fleet")
    return Check("who has the newest", SUSPECT, f"{names(behind)} has not applied {place(newest)} yet", (fix,))


def store(case: Case) -> Finding:
    s = case.fleet.store
    if s.connected and s.writable:
        return all_of("store", [Check("the store", OK, s.description)], s.description)
    said = f"the store is {'read only' if s.connected else 'away'}, so changes are refused: {s.description}"
    fix = Fix(
        "see from a replica's machine whether it answers, with the address that the replica has",
        "redis-cli -u URL ping",
    )
    return all_of("store", [Check("the store", FOUND, said, (fix,))], "")


def leader(case: Case) -> Finding:
    found = case.telemetry.leader_id
    fix = Fix("see which replicas there are, and whether the store answers", "trimtab fleet")
    leads = (
        Check("who leads", OK, f"{found} does")
        if found
        else Check("who leads", FOUND, "nobody leads: no controller runs, what they decided runs out", (fix,))
    )
    gone = [r.replica_id for r in case.fleet.replicas if r.seconds_since_heard > REPLICA_S]
    said = f"{names(gone)} was not heard of for {REPLICA_S:.0f} s and more" if gone else "all are heard of"
    replicas = Check("replicas of the control plane", SUSPECT if gone else OK, said)
    return all_of("leader", [leads, replicas], f"{found} leads")


def breakers(case: Case) -> Finding:
    if case.breakers is None:
        return all_of("breakers", [Check("breakers", UNKNOWN, "they are not to be had now")], "")
    checks = [c for w in case.breakers.workers if w.connected for c in _breaker(w)]
    return all_of("breakers", checks or [Check("breakers", OK, "none is open or forced")], "none is open or forced")


def _breaker(w: Any) -> Iterator[Check]:
    name = f"breaker of {w.node_id}"
    if w.HasField("forced"):
        said = f"{w.node_id} is forced {SIDES.get(w.forced.forced, '?')} by {w.forced.author}"
        does = f"let every gateway decide about {w.node_id} by what it sees"
        fix = Fix(does, f"trimtab breaker reset {w.node_id}", ResetBreaker(w.node_id))
        yield Check(name, SUSPECT, said, (fix,))
    if w.HasField("trip") and (w.trip.open_ms or w.trip.trips >= TRIPS):
        t = w.trip
        when = f"open for {brief(t.open_ms)} yet" if t.open_ms else f"closed, after {t.trips} trips"
        fix = Fix(f"see what became of {w.node_id}", f"trimtab why {w.node_id}")
        said = f"{w.node_id}: {when}, on {t.dimension}: {t.because} (at {t.gateway_id})"
        yield Check(name, FOUND if t.open_ms else SUSPECT, said, (fix,))


def loops(case: Case) -> Finding:
    t = case.telemetry
    checks: list[Check] = []
    for d in t.decisions:
        if d.failed and case.now_unix_ms - d.at_unix_ms <= FAILED_MS:
            said = f"{d.controller} could not do what it decided ({d.text}): {d.failed}"
            fix = Fix("see what stands in its way", "trimtab why")
            checks.append(Check(f"a decision of {d.controller}", SUSPECT, said, (fix,)))
    if not t.controllers and t.leader_id:
        checks.append(Check("controllers", UNKNOWN, f"{t.leader_id} leads and tells of none"))
    quiet = [f"{c.name} ({c.mode})" for c in t.controllers if c.mode != "on"]
    # A mesh that is young or idle gives them little to decide by: that is no fault, and what is missing at a worker is found there.
    holding = [f"{c.name} waits: {'; '.join(c.holds)}" for c in t.controllers if c.holds and c.mode == "on"]
    well = f"not acting: {', '.join(quiet)}" if quiet else "all act"
    well = "; ".join([well, *holding])
    return all_of("loops", checks or [Check("controllers", OK, well)], well)


def versions(case: Case) -> Finding:
    nodes = [n.hello for n in case.fleet.nodes if n.connected]
    builds = sorted({h.build for h in nodes if h.build}, key=_minor)
    if len(builds) < 2:
        well = f"all nodes are of {builds[0]}" if builds else "no node says"
        return all_of("versions", [Check("builds", OK, well)], well)
    newest_major, newest_minor = _minor(builds[-1])
    old = [h.node_id for h in nodes if h.build and _behind_by(h.build, newest_major, newest_minor) > 1]
    said = f"builds {', '.join(builds)} run beside each other"
    if old:
        fix = Fix("bring them up to date", "pip install --upgrade trimtab, then drain and start each again")
        return all_of(
            "versions", [Check("builds", FOUND, f"{said}; {names(old)} more than one minor version behind", (fix,))], ""
        )
    return all_of("versions", [Check("builds", OK, said)], f"{said}, no more than a minor version apart")


def _minor(build: str) -> tuple[int, int]:
    """(major, minor); (0, 0) for what is no version."""
    parts = build.split(".")
    if len(parts) < 2 or not (parts[0].isdigit() and parts[1].isdigit()):
        return 0, 0
    return int(parts[0]), int(parts[1])


def _behind_by(build: str, major: int, minor: int) -> int:
    found = _minor(build)
    return minor - found[1] if found[0] == major else 1000


BOOK = (
    Symptom("workers", "a node hangs, is lost, or silent", workers),
    Symptom("policy", "a node refuses the policy, or is behind it", policy),
    Symptom("store", "the policy store is away", store),
    Symptom("leader", "nobody leads", leader),
    Symptom("breakers", "breakers are open or forced", breakers),
    Symptom("loops", "controllers can't decide, or can't act", loops),
    Symptom("versions", "builds do not fit each other", versions),
)
