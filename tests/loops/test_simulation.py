"""The simulated mesh by itself: it loses nothing, repeats itself, and reports what happened."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise

import pytest

from tests.loops.builders import LONG, a_fleet, documents, people
from trimtab import measures
from trimtab.messages import Hello, NodeState, Report, RequestMatch, Role, Workload
from trimtab.policy import Value
from trimtab.simulation import (
    Die,
    Drain,
    Fail,
    Fate,
    Fault,
    Fleet,
    Hang,
    Leak,
    Mesh,
    Orders,
    Silence,
    Size,
    Slow,
    realtime,
    run,
)
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment, Document, Limits, Scope
from trimtab.workload import Source, arrivals

SOURCES = [people((0, 5), (60, 0)), documents((0, 1), (60, 0))]


class Listener:
    """A control plane that keeps what it hears, and orders what it was told to."""

    def __init__(self, orders: dict[int, Orders] | None = None) -> None:
        self.reports: dict[str, list[tuple[float, Report]]] = {}
        self.hellos: list[Hello] = []
        self.gone: list[tuple[str, bool]] = []
        self.limits: list[tuple[str, Limits]] = []
        self._orders = orders or {}

    def joined(self, hello: Hello, now: float) -> None:
        self.hellos.append(hello)

    def lost(self, node_id: str, now: float, *, out_of_memory: bool) -> None:
        self.gone.append((node_id, out_of_memory))

    def reported(self, node_id: str, report: Report, now: float) -> None:
        self.reports.setdefault(node_id, []).append((now, report))

    def limits_changed(self, node_id: str, limits: Limits) -> None:
        self.limits.append((node_id, limits))

    def tick(self, now: float) -> Orders:
        return self._orders.get(round(now), Orders())


def a_mesh(
    sources: Iterable[Source] = SOURCES,
    *,
    fleet: Fleet | None = None,
    control: Listener | None = None,
    faults: Iterable[Fault] = (),
    policy: dict[str, Value] | None = None,
    until_s: float = 120.0,
) -> Mesh:
    fleet = replace(fleet or a_fleet(2), document=Document(policy or {}))
    mesh = Mesh(fleet, arrivals(list(sources), until_s, 1), control=control, faults=faults, seed=1)
    mesh.run(until_s)
    return mesh


def fates(mesh: Mesh) -> Counter[Fate]:
    return Counter(r.fate for r in mesh.outcome.requests)


def nothing_is_left(mesh: Mesh) -> bool:
    return not any(w.requests or w.engine.busy for w in mesh.workers) and not any(g.in_flight for g in mesh.gateways)


@pytest.mark.slow
def test_one_seed_gives_one_course() -> None:
    def course() -> list[tuple[str, float | None, float]]:
        return [(r.request_id, r.first_ms, r.last_ms) for r in a_mesh().outcome.requests]

    assert course() == course()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["trimtab", "fcfs", "priority"])
def test_every_request_is_served_once_and_gives_all_back(mode: str) -> None:
    mesh = a_mesh(policy={"scheduler.mode": mode})
    assert fates(mesh) == {Fate.SERVED: len(mesh.outcome.requests)}
    assert all(r.delivered == r.output for r in mesh.outcome.requests)
    assert nothing_is_left(mesh)
    assert all(w.engine.free_blocks == w.engine.total_blocks for w in mesh.workers)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [Die(30, "default-1"), Hang(30, "default-1", 20), Slow(20, "default-1", 5, 20)])
def test_a_stream_outlives_its_worker_token_by_token(fault: Fault) -> None:
    mesh = a_mesh(faults=[fault], until_s=180)
    assert fates(mesh) == {Fate.SERVED: len(mesh.outcome.requests)}
    assert all(r.delivered == r.output for r in mesh.outcome.requests)
    assert nothing_is_left(mesh)
    moved = any(r.attempts > 1 for r in mesh.outcome.requests)
    assert moved is not isinstance(fault, Slow)


def test_a_request_that_no_worker_takes_on_in_time_fails() -> None:
    mesh = a_mesh(
        [people((0, 20))],
        fleet=a_fleet(1, start_s=60),
        faults=[Die(30, "default-1")],
        policy={"resume.wait_ms": 5000},
        until_s=60,
    )
    assert fates(mesh)[Fate.FAILED] > 0
    assert all(r.workload is Workload.REALTIME for r in mesh.outcome.requests if r.fate is Fate.FAILED)


def test_realtime_beyond_the_workers_queues_is_refused_at_once() -> None:
    mesh = a_mesh([people((0, 400))], fleet=a_fleet(1), policy={"admission.realtime_queue": 4}, until_s=5)
    assert fates(mesh)[Fate.REFUSED] > 0
    assert all(len(w._lines[Workload.REALTIME]) <= 4 for w in mesh.workers)
    assert not mesh.gateways[0]._line


def test_batch_waits_at_the_gateway_until_a_worker_has_room() -> None:
    mesh = a_mesh([documents((0, 20))], fleet=a_fleet(1), until_s=10)
    worker, gateway = mesh.workers[0], mesh.gateways[0]
    assert len(worker.requests) == worker.policy.batch.hard_cap + worker.policy.admission.engine_queue
    assert len(gateway._line) == len(gateway.in_flight) - len(worker.requests) > 0


def test_a_full_queue_refuses_batch_and_cold_ones_earlier() -> None:
    mesh = a_mesh([documents((0, 20))], fleet=a_fleet(1), policy={"admission.batch_queue": 40}, until_s=20)
    assert len(mesh.gateways[0]._cold) <= 30
    assert fates(mesh)[Fate.REFUSED] > 0


@pytest.mark.parametrize(
    ("policy", "shed"),
    [({"admission.shed": "cold"}, {"documents"}), ({"degraded.state": "degraded"}, {"documents"}), ({}, set())],
)
def test_what_policy_sheds_is_shed(policy: dict[str, Value], shed: set[str]) -> None:
    mesh = a_mesh(policy=policy, sources=[people((0, 5)), documents((0, 0.5), kind=LONG)], until_s=20)
    assert {r.source for r in mesh.outcome.requests if r.fate is Fate.SHED} == shed


def test_reports_say_what_happened_under_the_names_that_nodes_use() -> None:
    heard = Listener()
    mesh = a_mesh(control=heard, fleet=a_fleet(2))
    reports = [r for node_id, found in heard.reports.items() if node_id.startswith("default") for _, r in found]
    assert {name for r in reports for name in r.sketches} <= set(measures.SKETCHES)
    gauges = {name for r in reports for name in r.gauges}
    assert set(measures.GAUGES) <= gauges <= {*measures.GAUGES, *measures.AT_TIMES}
    first_tokens = sum(
        Sketch.from_bytes(data).count for r in reports for name, data in r.sketches.items()
        if name in {measures.ttft(w, p) for w in Workload for p in (measures.HOT, measures.COLD)}
    )  # fmt: skip
    served = [r for r in mesh.outcome.requests if r.fate is Fate.SERVED]
    assert first_tokens == len(served)
    last = [found[-1][1] for node_id, found in heard.reports.items() if node_id.startswith("default")]
    assert sum(r.counters[measures.REQUESTS] for r in last) == len(served)
    assert sum(r.counters[measures.OUTPUT_TOKENS] for r in last) == sum(r.output for r in served)
    assert sum(r.interval_ms for r in reports) == pytest.approx(1000 * sum(t for t, _ in [(119.2, 0)] * 2), rel=0.02)


def test_counters_never_fall_within_one_process() -> None:
    heard = Listener()
    a_mesh(control=heard)
    for found in heard.reports.values():
        for (_, before), (_, after) in pairwise(found):
            falls = {n for n, v in before.counters.items() if after.counters[n] < v}
            assert falls == set()


@pytest.mark.slow
def test_a_silent_node_loses_no_measurement() -> None:
    heard, whole = Listener(), Listener()
    a_mesh(control=whole)
    a_mesh(control=heard, faults=[Silence(20, "default-1", 30)])
    times = [at for at, _ in heard.reports["default-1"]]
    assert not [t for t in times if 20.5 < t < 49.5]

    def prompts(listener: Listener) -> int:
        found = [r.sketches.get(measures.PROMPT) for _, r in listener.reports["default-1"]]
        return sum(Sketch.from_bytes(data).count for data in found if data)

    assert prompts(heard) == prompts(whole)


def test_a_hung_worker_says_so_and_its_requests_go_on_elsewhere() -> None:
    heard = Listener()
    mesh = a_mesh(control=heard, faults=[Hang(30, "default-1")])
    states = {r.state for at, r in heard.reports["default-1"] if at > 35}
    assert states == {NodeState.HUNG}
    assert heard.reports["default-1"][-1][1].gauges[measures.HUNG_S] > 60
    assert fates(mesh) == {Fate.SERVED: len(mesh.outcome.requests)}


def test_a_leak_holds_blocks_while_the_worker_is_idle_and_ends_with_the_process() -> None:
    heard = Listener()
    mesh = a_mesh(control=heard, faults=[Leak(30, "default-1", 1000), Die(100, "default-1", out_of_memory=True)])
    leaking = next(r for at, r in heard.reports["default-1"] if at > 95)
    assert (leaking.load.running, leaking.load.total_blocks - leaking.load.free_blocks) == (0, 1000)
    assert ("default-1", True) in heard.gone
    assert mesh.workers[-1].engine.free_blocks == mesh.workers[-1].engine.total_blocks


def test_failing_engines_count_errors() -> None:
    heard = Listener()
    mesh = a_mesh(control=heard, faults=[Fail(0, "default-1", 0.5), Fail(0, "default-2", 0.5)])
    failed = fates(mesh)[Fate.FAILED]
    assert failed == pytest.approx(len(mesh.outcome.requests) / 2, rel=0.3)
    last = [found[-1][1] for node_id, found in heard.reports.items() if node_id.startswith("default")]
    assert sum(r.counters[measures.ERRORS] for r in last) == failed


def test_a_drain_ends_a_worker_and_starts_it_anew_without_losing_a_request() -> None:
    heard = Listener({30: Orders(drains=(Drain("default-1", "default-1/1", 5.0),))})
    mesh = a_mesh(control=heard)
    assert [h.incarnation for h in heard.hellos if h.node.node_id == "default-1"] == ["default-1/1", "default-1/2"]
    assert fates(mesh) == {Fate.SERVED: len(mesh.outcome.requests)}


def test_an_order_for_a_process_that_is_gone_does_nothing() -> None:
    heard = Listener({30: Orders(drains=(Drain("default-1", "default-1/0", 5.0),))})
    a_mesh(control=heard)
    assert heard.gone == []


def test_a_pool_grows_after_the_time_a_start_takes_and_shrinks_by_its_surplus() -> None:
    heard = Listener({
        10: Orders(sizes=(Size("default", 3),)),
        60: Orders(sizes=(Size("default", 1, ("default-3", "default-2")),)),
    })  # fmt: skip
    mesh = a_mesh(control=heard, fleet=a_fleet(2, start_s=15))
    sizes = dict(mesh.outcome.workers)
    assert [sizes[t] for t in (9.0, 24.0, 26.0, 119.0)] == [2, 2, 3, 1]
    assert [w.node.node_id for w in mesh.workers] == ["default-1"]
    assert fates(mesh) == {Fate.SERVED: len(mesh.outcome.requests)}


def test_released_requests_end_and_no_other() -> None:
    heard = Listener(
        {5: Orders(releases=tuple((f"default-{i}", RequestMatch(workload=Workload.BATCH)) for i in (1, 2)))}
    )
    mesh = a_mesh([people((0, 5)), documents((0, 2), kind=LONG)], control=heard, until_s=60)
    released = [r for r in mesh.outcome.requests if r.fate is Fate.RELEASED]
    assert released and all(r.workload is Workload.BATCH and r.arrival_ms <= 5000 for r in released)


def test_an_adjustment_expires_without_anybody() -> None:
    lives = Adjustment("batch", "batch.active", Scope(), "for a while", 30_000, factor=0.5)
    fleet = a_fleet(1)
    mesh = Mesh(replace(fleet, document=Document(adjustments=(lives,))), arrivals(SOURCES, 60, 1), seed=1)
    mesh.run(20)
    assert mesh.workers[0].policy.batch.active == 24
    mesh.run(40)
    assert mesh.workers[0].policy.batch.active == 48


def test_several_gateways_share_the_workers() -> None:
    heard = Listener()
    mesh = a_mesh(fleet=replace(a_fleet(2), gateways=3), control=heard)
    assert {h.node.node_id for h in heard.hellos if h.role is Role.GATEWAY} == {"gateway-0", "gateway-1", "gateway-2"}
    assert fates(mesh) == {Fate.SERVED: len(mesh.outcome.requests)}


def test_run_counts_the_tokens_of_all_workers_that_there_were() -> None:
    outcome = run(a_fleet(2), arrivals(SOURCES, 120, 1), 120, faults=[Die(30, "default-1")], seed=1)
    # The last token of a request is not computed upon.
    least = sum(r.prompt + r.output - 1 for r in outcome.requests)
    assert outcome.computed_tokens >= least
    assert len(realtime(outcome.requests)) == sum(r.source == "people" for r in outcome.requests)
