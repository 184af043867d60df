"""What is not REALTIME and hot is held to the safe batch, down at once and up with care."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.controllers import safe_batch_cap
from controlplane.controllers.decision import Decision, Move
from controlplane.seen import NodeSeen
from controlplane.spec import adjust
from controlplane.tick import changes
from tests.controlplane.controllers.builders import (
    NOW,
    a_node,
    a_seen,
    a_window,
    an_adjustment,
    on_node,
    policy_of,
    some_lengths,
)
from trimtab.measures import KV_BYTES_PER_TOKEN
from trimtab.snapshot import Document, resolve


@dataclass
class Course:
    node: NodeSeen = field(default_factory=a_node)
    totals: float = 12_000.0
    ended: int = 300
    now: float = NOW
    number: int = 0
    decision: Decision = field(default_factory=lambda: Decision(safe_batch_cap.start(())))

    def window(self, totals: float | None = None, *, after_s: float = 5.0) -> tuple[Move, ...]:
        self.totals = self.totals if totals is None else totals
        self.number, self.now = self.number + 1, self.now + after_s
        self.node.windows.append(a_window(self.number, ended=self.now))
        self.node.reported_at = self.now
        lengths = {"m": some_lengths(totals=[self.totals] * self.ended)}
        seen = a_seen(self.node, now=self.now, lengths=lengths)
        self.decision = safe_batch_cap.step(self.decision.state, seen, policy_of(), self.now)
        return self.decision.moves

    def cap(self) -> int:
        put = changes("safe_batch", self.decision.moves, {}, set(), 1000).put
        document = adjust(put)(Document(), [self.node.node], 1000).document
        return resolve(document, self.node.node, now_unix_ms=1000).policy.batch.hard_cap


def test_the_cap_is_the_guides_rule_with_live_lengths() -> None:
    course = Course()
    (move,) = course.window()
    assert course.cap() == 10
    assert move.reason == "of what is not REALTIME and hot, 10 are safe at once, not 16"
    assert "12000 tokens" in move.evidence


def test_it_is_off_unless_somebody_wants_it() -> None:
    assert policy_of()(None).loops.safe_batch == "off"


def test_fewer_than_two_hundred_requests_say_nothing() -> None:
    course = Course(ended=199)
    assert course.window() == ()
    assert course.decision.holds == ("w0: fewer than 200 requests have ended",)


def test_it_moves_only_once_what_fits_has_changed_by_a_tenth() -> None:
    course = Course()
    before = course.window()
    for totals in (11_500.0, 12_500.0, 11_000.0, 13_000.0):
        assert course.window(totals) == before
    course.window(15_000.0)
    assert course.cap() == 8


def test_up_takes_a_minute_and_a_quarter() -> None:
    course = Course()
    course.window()
    course.window(9_000.0)
    assert course.cap() == 10, "a minute has not passed"
    course.window(11_000.0, after_s=70.0)
    assert course.cap() == 10, "it is not a quarter"
    course.window(9_000.0)
    assert course.cap() == 13


def test_it_goes_once_enough_fit() -> None:
    course = Course()
    course.window()
    assert course.window(1_000.0, after_s=70.0) == ()
    assert course.cap() == 16


def test_a_cap_below_a_tenth_of_what_people_set_is_reached_too() -> None:
    course = Course()
    course.window(100_000.0)
    assert course.cap() == 1


def test_without_kv_bytes_it_holds_what_it_had_and_says_so() -> None:
    course = Course()
    before = course.window()
    course.node.gauges = {k: v for k, v in course.node.gauges.items() if k != KV_BYTES_PER_TOKEN}
    assert course.window(100.0) == before
    assert course.decision.holds == ("w0: its KV bytes per token are not known",)


def test_a_new_leader_goes_on_where_the_old_one_was() -> None:
    live = an_adjustment("safe_batch", "batch.hard_cap", on_node(), factor=10 / 16)
    course = Course(decision=Decision(safe_batch_cap.start((live,))))
    before = course.decision.state.workers["w0"].move
    assert course.window() == (before,)


def test_a_worker_that_is_away_keeps_its_cap_for_a_minute() -> None:
    course = Course()
    before = course.window()
    for after_s, moves in ((1.0, before), (30.0, before), (70.0, ())):
        seen = a_seen(now=course.now + after_s)
        course.decision = safe_batch_cap.step(course.decision.state, seen, policy_of(), course.now + after_s)
        assert course.decision.moves == moves


def test_a_healthy_hour_of_short_requests_moves_nothing() -> None:
    course = Course(totals=500.0)
    assert all(course.window() == () for _ in range(720))
