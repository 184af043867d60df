"""The overload controller: a hundred samples, one mark, and a way back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from controlplane.controllers import overload
from controlplane.controllers.decision import Decision
from controlplane.seen import NodeSeen
from controlplane.spec import adjust
from controlplane.tick import changes
from tests.controlplane.controllers.builders import NOW, a_node, a_seen, policy_of
from trimtab.measures import KV_USED, REALTIME_RUNNING
from trimtab.messages import NodeState, Role
from trimtab.policy import Policy, Value, with_fields
from trimtab.snapshot import Adjustment, Document, Limits, Node, resolve


@dataclass
class Course:
    """A mesh in virtual time, a tick each second."""

    fields: Mapping[str, Value] = field(default_factory=dict)
    live: Iterable[Adjustment] = ()
    now: float = NOW
    decision: Decision = field(init=False)

    def __post_init__(self) -> None:
        self.decision = Decision(overload.start(self.live))

    def see(self, *nodes: NodeSeen, ticks: int = 1) -> str:
        """What gateways shed then."""
        for _ in range(ticks):
            self.now += 1.0
            for node in nodes:
                node.reported_at = self.now
            seen = a_seen(*nodes, now=self.now)
            self.decision = overload.step(self.decision.state, seen, policy_of(self.fields), self.now)
        put = changes("overload", self.decision.moves, {}, set(), 1000).put
        document = adjust(put)(Document(), (), 1000).document
        return resolve(document, Node("gateway"), now_unix_ms=1000).policy.admission.shed


def full(use: float) -> NodeSeen:
    return a_node(kv_used=use)


def test_a_mean_of_a_hundred_samples_above_the_mark_sheds_cold_requests() -> None:
    course = Course()
    assert course.see(full(0.95), ticks=99) == "none"
    assert course.decision.holds == ("undecided: 99 of 100 samples",)
    assert course.see(full(0.95)) == "cold"
    assert course.decision.holds == ()
    (move,) = course.decision.moves
    assert move.reason == "the mesh is fuller than it can serve: cold BATCH requests are shed"
    assert move.evidence == "mean utilisation 0.950 over 0.9 in 100 samples; now 0.950, 1 of 1 workers above"


def test_at_the_mark_is_not_above_it() -> None:
    assert Course().see(full(0.875), ticks=300) == "none"
    assert Course({"overload.above": 0.875}).see(full(0.875), ticks=300) == "none"


def test_the_mean_decides_and_not_the_last_sample() -> None:
    course = Course()
    course.see(full(0.1), ticks=100)
    assert course.see(full(1.0), ticks=88) == "none"
    assert course.see(full(1.0)) == "cold"


def test_it_goes_back_only_a_tenth_below_the_mark() -> None:
    course = Course()
    course.see(full(1.0), ticks=100)
    assert course.see(full(0.82), ticks=500) == "cold"
    assert course.see(full(0.78), ticks=100) == "none"


def test_a_mean_around_the_mark_does_not_make_it_hunt() -> None:
    course = Course()
    course.see(full(1.0), ticks=100)
    assert {course.see(full(use), ticks=20) for use in (0.95, 0.85, 0.92, 0.84) * 25} == {"cold"}


def test_mark_and_samples_are_the_policys() -> None:
    assert Course({"overload.samples": 5, "overload.above": 0.5}).see(full(0.6), ticks=5) == "cold"


def test_a_low_mark_has_a_way_back() -> None:
    course = Course({"overload.samples": 5, "overload.above": 0.1})
    assert course.see(full(0.2), ticks=5) == "cold"
    assert course.see(full(0.0), ticks=5) == "none"


def test_fewer_samples_by_policy_count_at_once() -> None:
    course = Course()
    course.see(full(0.95), ticks=50)
    course.fields = {"overload.samples": 10}
    assert course.see(full(0.95)) == "cold"
    assert len(course.decision.state.samples) == 10


def used(node: NodeSeen, **fields: Value) -> float | None:
    named = {name.replace("__", "."): value for name, value in fields.items()}
    return overload.utilisation(node, with_fields(Policy(), named), NOW)


@pytest.mark.parametrize(
    ("node", "use"),
    [
        (a_node(kv_used=0.6, running=8, waiting=64), 0.6),
        (a_node(kv_used=0.1, running=24), 0.75),
        (a_node(kv_used=0.1, waiting=128), 0.5),
        (a_node(kv_used=0.1, running=40), 1.0),
        (a_node(kv_used=0.1, batch_running=48, batch_waiting=4000), 0.1),
        (a_node(kv_used=0.1, running=8, limits=Limits(max_num_seqs=16)), 0.5),
    ],
)
def test_a_worker_is_as_full_as_the_fullest_of_its_cache_its_realtime_places_and_its_realtime_queue(
    node: NodeSeen, use: float
) -> None:
    assert used(node) == use


def test_bounds_are_the_policys() -> None:
    assert used(a_node(running=8), paths__realtime_max_running=10) == 0.8
    assert used(a_node(running=8), batch__active=16) == 0.5
    assert used(a_node(waiting=8), admission__realtime_queue=10) == 0.8


def test_a_queue_that_may_hold_nobody_is_full_with_the_first() -> None:
    assert used(a_node(waiting=1), admission__realtime_queue=0) == 1.0
    assert used(a_node(waiting=0), admission__realtime_queue=0) == 0.1


def test_one_sample_is_the_mean_over_the_workers_that_serve() -> None:
    course = Course({"overload.samples": 1})
    half = [a_node("w0", kv_used=1.0), a_node("w1", kv_used=0.0)]
    others = [
        a_node("w2", kv_used=1.0, state=NodeState.DRAINING),
        a_node("w3", kv_used=1.0, connected=False),
        a_node("g", role=Role.GATEWAY),
    ]
    assert course.see(*half, *others) == "none"
    assert course.decision.state.samples == (0.5,)


def test_each_pools_bounds_are_its_own() -> None:
    policy = policy_of(of={"chat": {"paths.realtime_max_running": 8}})
    nodes = (a_node("w0", pool="chat", running=8), a_node("w1", pool="documents", running=8))
    state = overload.step(overload.start(()), a_seen(*nodes), policy, NOW).state
    assert state.samples == ((1.0 + 0.25) / 2,)


def test_a_busy_engine_is_no_full_one() -> None:
    busy = a_node(batch_running=48, batch_waiting=2000, cold_waiting=2000, gauges={"busy": 1.0}, kv_used=0.8)
    assert Course().see(busy, ticks=3600) == "none"


def test_without_a_sample_it_holds_and_says_so() -> None:
    course = Course()
    course.see(full(1.0), ticks=100)
    blind = a_node(gauges={KV_USED: None})
    assert course.see(blind, ticks=300) == "cold"
    assert course.decision.holds == ("no worker says how full it is (1 serve)",)
    assert Course().see(a_node(gauges={REALTIME_RUNNING: None}), ticks=300) == "none"


def test_without_any_worker_it_holds() -> None:
    course = Course()
    course.see(full(1.0), ticks=100)
    assert course.see(ticks=300) == "cold"
    assert course.decision.holds == ("no worker serves",)


def test_samples_from_before_a_gap_are_of_another_time() -> None:
    course = Course()
    course.see(full(1.0), ticks=99)
    course.see(ticks=20)
    assert course.see(full(1.0), ticks=99) == "none"
    assert course.see(full(1.0)) == "cold"


def test_a_new_leader_sheds_on_until_it_knows_better() -> None:
    old = Course()
    old.see(full(1.0), ticks=100)
    new = Course(live=changes("overload", old.decision.moves, {}, set(), 1000).put)
    assert new.see(full(0.1), ticks=99) == "cold"
    assert new.see(full(0.1)) == "none"


def test_the_words_of_a_decision_stay_the_same_while_it_holds() -> None:
    course = Course()
    course.see(full(0.95), ticks=100)
    before = course.decision.moves
    course.see(full(0.99), ticks=50)
    assert course.decision.moves == before


@pytest.mark.parametrize("node", [a_node(kv_used=0.0), a_node(running=12, batch_running=16, waiting=3, kv_used=0.7)])
def test_an_idle_or_healthy_hour_moves_nothing(node: NodeSeen) -> None:
    assert Course().see(node, ticks=3600) == "none"


def test_an_empty_mesh_lacks_nothing() -> None:
    course = Course()
    course.see(ticks=10)
    assert (course.decision.moves, course.decision.holds) == ((), ())
