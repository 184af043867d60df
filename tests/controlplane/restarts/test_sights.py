"""What a restart sees of workers."""

from __future__ import annotations

import pytest

from controlplane.breakers import Notice, Side, Trip
from controlplane.fleet import Member, Refusal
from controlplane.restarts.sights import sights_of
from controlplane.restarts.steps import Sight
from controlplane.telemetry import Telemetry
from tests.controlplane.controllers.builders import a_node, a_window, policy_of
from trimtab.measures import ERRORS, REQUESTS
from trimtab.messages import Hello, NodeState, Report, Role
from trimtab.snapshot import Identity, Node

NEWEST = Identity(1, 7)
RULES = policy_of({"rollout.min_samples": 20, "objectives.ttft_p99_ms": 500})


def a_member(node_id: str = "w0", **more: object) -> Member:
    hello = Hello(Node(node_id, "default"), "i0", Role.WORKER, "tiny", told={"worker.max_num_seqs": "32"})
    said = {"hello": hello, "report": Report(0, NodeState.SERVING), "applied": NEWEST, **more}
    return Member(session=1, joined_at=0.0, heard_at=100.0, **said)  # type: ignore[arg-type]


def seen(m: Member, *, samples: int = 30, measured: bool = True, **more: object) -> Sight:
    n = a_node(m.node_id)
    n.incarnation = "i0"
    n.windows.append(a_window(ttfts_ms=[100.0] * samples))
    n.totals = {REQUESTS: 1040, ERRORS: 502}
    n.counters = {REQUESTS: 40, ERRORS: 2}
    elsewhere, notice = more.get("elsewhere", {}), more.get("notice")
    found = sights_of(
        [m], {m.node_id: n}, elsewhere, NEWEST, RULES, 100.0, {m.node_id} if measured else (),  # type: ignore[arg-type]
        noticed=lambda *_: notice,  # type: ignore[arg-type,return-value]
    )  # fmt: skip
    return found[m.node_id]


def test_it_is_what_the_worker_said_of_itself_and_what_was_measured() -> None:
    s = seen(a_member())
    assert (s.serving, s.took, s.refused, s.told) == (True, True, "", {"worker.max_num_seqs": "32"})
    assert (s.samples, s.objective_ms, s.requests, s.errors) == (30, 500.0, 40, 2)
    assert s.p99_ms == pytest.approx(100.0)


def test_a_p99_of_few_samples_or_of_one_that_nobody_asks_for_is_none() -> None:
    assert seen(a_member(), samples=19).p99_ms is None
    assert seen(a_member(), measured=False).p99_ms is None


def test_what_another_process_of_its_name_measured_says_nothing_of_this_one() -> None:
    hello = Hello(Node("w0", "default"), "i1", Role.WORKER, "tiny")
    s = seen(a_member(hello=hello))
    assert (s.p99_ms, s.samples, s.requests, s.errors) == (None, 0, 0, 0)


def test_every_replica_has_the_same_of_what_a_process_has_counted() -> None:
    """A leader goes on from what the one before it noted, also where it has heard nothing of the process before this one."""

    def report(sequence: int, requests: int, errors: int) -> Report:
        return Report(sequence, NodeState.SERVING, counters={REQUESTS: requests, ERRORS: errors})

    m = a_member()
    old = Hello(Node("w0", "default"), "i9", Role.WORKER, "tiny")
    long, newer = Telemetry(0.0), Telemetry(0.0)
    long.reported(old, report(1, 1000, 500), 90.0)
    for sequence in (1, 2):
        long.reported(m.hello, report(sequence, 10 * sequence, sequence), 100.0 + sequence)
    newer.reported(m.hello, report(2, 20, 2), 102.0)
    found = [
        sights_of([m], t.seen([m], (), 103.0).nodes, {}, NEWEST, RULES, 103.0, noticed=lambda *_: None)["w0"]
        for t in (long, newer)
    ]
    assert [(s.requests, s.errors) for s in found] == [(20, 2)] * 2


def test_one_that_has_not_reported_starts_and_one_that_is_lost_does_not_serve() -> None:
    assert seen(a_member(report=None)).state is NodeState.STARTING
    lost = seen(a_member(lost_at=98.5))
    assert (lost.serving, lost.lost_ms) == (False, 1500)


def test_what_a_worker_elsewhere_runs_by_its_replica_knows() -> None:
    there = a_member(replica="c1", applied=Identity())
    assert not seen(there).took
    assert seen(there, elsewhere={"w0": (NEWEST, "")}).took
    assert seen(there, elsewhere={"w0": (Identity(1, 6), "BAD: no")}).refused == "BAD: no"
    refusal = Refusal(NEWEST, "BAD", "f", "no")
    assert seen(a_member(applied=Identity(1, 6), refusal=refusal)).refused == "BAD: no"


TRIP = Trip(1, "w0", "i0", "g0", "errors", "5 of 6 failed", 0, 5000, 1)


@pytest.mark.parametrize(
    ("notice", "shut"),
    [
        (None, ""),
        (Notice(None, 0, Side.OPEN, 90_000), "its breaker is forced open for 1m 30s yet"),
        (Notice(TRIP, 4000, None, 0), "its breaker is open at g0, on errors"),
        (Notice(TRIP, 4000, Side.CLOSED, 90_000), ""),
    ],
)
def test_one_whose_breaker_is_open_serves_and_is_not_reached(notice: Notice | None, shut: str) -> None:
    s = seen(a_member(), notice=notice)
    assert (s.serving, s.reached, s.shut) == (True, not shut, shut)
