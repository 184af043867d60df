"""The priority controller: the field guides' thresholds exactly, and no faster and no further than the policy lets it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pytest

from controlplane.controllers import priority
from controlplane.controllers.decision import Decision
from controlplane.seen import NodeSeen
from controlplane.tick import changes
from tests.controlplane.controllers.builders import NOW, a_node, a_seen, an_adjustment, on_pool, policy_of
from trimtab.measures import REALTIME_WAITING
from trimtab.messages import NodeState, Role
from trimtab.policy import Value
from trimtab.snapshot import Adjustment, Scope

UP, DOWN = "priority.realtime_delta", "priority.batch_delta"


@dataclass
class Course:
    """A mesh in virtual time, a tick each second."""

    fields: Mapping[str, Value] = field(default_factory=dict)
    live: Iterable[Adjustment] = ()
    now: float = NOW
    decision: Decision = field(init=False)

    def __post_init__(self) -> None:
        self.decision = Decision(priority.start(self.live))

    def tick(self, *depths: int, seconds: float = 1.0) -> dict[str, int]:
        """One worker of the default pool for each depth; the deltas that hold then."""
        return self.see(*(a_node(f"w{i}", waiting=d) for i, d in enumerate(depths)), seconds=seconds)

    def see(self, *nodes: NodeSeen, seconds: float = 1.0) -> dict[str, int]:
        self.now += seconds
        for node in nodes:
            # One of a time of its own stays as it is.
            if node.reported_at == NOW:
                node.reported_at = self.now
        seen = a_seen(*nodes, now=self.now)
        self.decision = priority.step(self.decision.state, seen, policy_of(self.fields), self.now)
        return self.deltas()

    def deltas(self, pool: str = "default") -> dict[str, int]:
        return {m.field: m.delta for m in self.decision.moves if m.scope == on_pool(pool)}


@pytest.mark.parametrize(
    ("depth", "deltas"),
    [(0, {}), (5, {}), (6, {UP: 1}), (10, {UP: 1}), (11, {UP: 2, DOWN: -1}), (200, {UP: 2, DOWN: -1})],
)
def test_the_guides_thresholds_come_out_exactly(depth: int, deltas: dict[str, int]) -> None:
    assert Course().tick(depth) == deltas


def test_with_a_difference_of_one_it_is_guide_as_rule() -> None:
    """Above 10: realtime +1, batch −1."""
    assert Course({"priority.max_priority_diff": 1}).tick(11) == {UP: 1, DOWN: -1}


def test_a_difference_of_none_moves_nothing() -> None:
    assert Course({"priority.max_priority_diff": 0}).tick(11) == {}


def test_what_people_set_counts_into_the_difference() -> None:
    assert Course({UP: 1, DOWN: -2}).tick(11) == {UP: 1}
    assert Course({UP: 2, DOWN: 1}).tick(11) == {DOWN: -1}


def test_thresholds_are_the_policys() -> None:
    fields = {"priority.raise_above": 2, "priority.raise_twice_above": 3}
    assert [Course(fields).tick(d) for d in (2, 3, 4)] == [{}, {UP: 1}, {UP: 2, DOWN: -1}]


def test_the_deepest_queue_of_the_pool_counts() -> None:
    course = Course()
    assert course.tick(0, 12, 1) == {UP: 2, DOWN: -1}
    move = course.decision.moves[0]
    assert move.reason == "more than 10 REALTIME requests wait at a worker"
    assert move.evidence == "12 REALTIME requests wait at w1, the most of 3 workers"


def test_a_scheduler_that_reads_no_deltas_gets_none() -> None:
    course = Course({"scheduler.mode": "fcfs"})
    assert course.tick(20) == {}
    assert course.decision.holds == ("pool default: scheduler.mode is fcfs, which reads no deltas",)


def test_pools_are_apart() -> None:
    course = Course()
    course.see(a_node("a", pool="chat", waiting=12), a_node("b", pool="documents", waiting=1))
    assert (course.deltas("chat"), course.deltas("documents")) == ({UP: 2, DOWN: -1}, {})


def test_gateways_are_not_asked() -> None:
    course = Course()
    assert course.see(a_node("w"), a_node("g", role=Role.GATEWAY, waiting=50)) == {}


def test_a_queue_that_no_order_makes_shorter_does_not_count() -> None:
    assert Course().see(a_node("w0"), a_node("w1", waiting=50, state=NodeState.HUNG)) == {}


def test_between_two_changes_an_interval_passes() -> None:
    course = Course({"priority.adjustment_interval_ms": 5000})
    assert course.tick(6) == {UP: 1}
    for _ in range(4):
        assert course.tick(20) == {UP: 1}
    assert course.tick(20) == {UP: 2, DOWN: -1}


def test_it_goes_down_a_level_at_a_time_once_the_queue_was_half_as_long_for_a_minute() -> None:
    course = Course()
    course.tick(11)
    assert [course.tick(5) for _ in range(60)] == [{UP: 2, DOWN: -1}] * 60
    assert course.tick(5) == {UP: 1}
    assert course.decision.moves[0].reason == "at most half of 10 REALTIME requests waited at a worker: a level down"
    # Half of the lower level's threshold is 2.5.
    assert [course.tick(3) for _ in range(10)] == [{UP: 1}] * 10
    assert [course.tick(2) for _ in range(61)] == [{UP: 1}] * 60 + [{}]


def test_a_queue_around_a_threshold_does_not_make_it_hunt() -> None:
    course = Course()
    assert course.tick(12) == {UP: 2, DOWN: -1}
    for depth in (8, 12, 5, 9, 4, 5, 6, 11) * 20:
        assert course.tick(depth) == {UP: 2, DOWN: -1}


def test_a_silent_worker_is_not_taken_for_an_empty_one() -> None:
    course = Course()
    course.see(a_node("w0", waiting=12), a_node("w1"))
    for _ in range(30):
        assert course.see(a_node("w0", reported_at=1.0), a_node("w1")) == {UP: 2, DOWN: -1}
    assert course.decision.holds == ("pool default: w0 did not say lately how many REALTIME requests wait",)


def test_without_the_metric_it_holds_and_says_so() -> None:
    course = Course()
    course.tick(12)
    for _ in range(100):
        assert course.see(a_node(gauges={REALTIME_WAITING: None})) == {UP: 2, DOWN: -1}
    assert course.decision.holds == ("pool default: no worker says how many REALTIME requests wait",)
    assert course.tick(12) == {UP: 2, DOWN: -1} and course.decision.holds == ()


def test_a_worker_that_still_starts_lacks_nothing() -> None:
    course = Course()
    course.see(a_node(state=NodeState.STARTING, gauges={REALTIME_WAITING: None}))
    assert (course.decision.moves, course.decision.holds) == ((), ())


def test_a_pool_without_workers_is_forgotten_after_a_minute() -> None:
    course = Course()
    course.tick(12)
    for _ in range(60):
        assert course.see() == {UP: 2, DOWN: -1}
    assert course.see() == {}
    assert course.decision.state.pools == {}


def test_a_new_leader_goes_on_at_the_level_of_the_old_one() -> None:
    old = Course()
    old.tick(12)
    new = Course(live=changes("priority", old.decision.moves, {}, set(), 1000).put)
    assert new.tick(8) == {UP: 2, DOWN: -1}
    assert [new.tick(0) for _ in range(130)][-1] == {}
    at_one = Course(live=[an_adjustment("priority", UP, on_pool(), delta=1)])
    assert at_one.tick(4) == {UP: 1}


def test_what_is_not_its_own_kind_is_no_level() -> None:
    assert Course(live=[an_adjustment("priority", UP, Scope(), delta=1)]).tick(4) == {}


@pytest.mark.parametrize("depths", [(0,), (0, 1, 3, 5, 2)])
def test_an_idle_or_healthy_hour_moves_nothing(depths: tuple[int, ...]) -> None:
    course = Course()
    for second in range(3600):
        assert course.tick(depths[second % len(depths)]) == {}
    assert course.decision.state.pools == {}
