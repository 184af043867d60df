"""The batch controller: when the running set becomes smaller, when larger, and when nothing happens."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.controllers import batch
from controlplane.controllers.decision import Decision
from controlplane.policies import Policies
from controlplane.tick import changes
from tests.controlplane.controllers.batch_course import BAD, GOOD, MIXED, Course, lowered, only
from tests.controlplane.controllers.builders import (
    NOW,
    a_node,
    a_seen,
    a_window,
    an_adjustment,
    an_outlier,
    on_node,
    policy_of,
)
from trimtab.measures import BATCH_RUNNING, COLD, REALTIME_RUNNING, ttft
from trimtab.messages import Workload
from trimtab.snapshot import Adjustment, Document, Limits


def test_three_windows_over_the_objective_take_a_fifth_of_what_runs() -> None:
    course = Course(a_node())
    assert course.window(BAD).moves == () and course.window(BAD).moves == ()
    move = only(course.window(BAD))
    assert (move.scope, course.active()) == (on_node(), 8)
    assert move.reason == "REALTIME P99 over its objective 3 times in a row: running set 48 → 8"
    assert move.evidence == "P99 TTFT 800 ms over 500 in 3 windows of 5 s, n=90; 10 ran"


def test_three_more_take_a_fifth_again() -> None:
    course = lowered()
    for _ in range(3):
        course.window(BAD)
    assert course.active() == 6


def test_what_runs_more_than_people_have_set_starts_from_what_they_set() -> None:
    course = Course(a_node(), policy_of({"batch.active": 20}))
    for _ in range(3):
        course.window(BAD, peaks={"running": 30.0, BATCH_RUNNING: 9.0})
    assert only(course.decision).factor == pytest.approx(16 / 20)


def test_without_peaks_the_load_says_what_runs() -> None:
    course = Course(a_node(running=4, batch_running=6))
    for _ in range(3):
        course.window(BAD, peaks={BATCH_RUNNING: 6.0})
    assert course.active() == 8


def test_the_outliers_features_are_kept_as_evidence() -> None:
    course = Course(a_node())
    for i in range(3):
        late = an_outlier(
            f"r{i}",
            prompt_tokens=100 * (i + 1),
            queued_ms=600.0 + i,
            preemptions=i,
            neighbours=9,
            longest_neighbour_tokens=32_000,
        )
        course.window(BAD, outliers=[late, an_outlier("b", workload=Workload.BATCH, prompt_tokens=99_999)])
    assert only(course.decision).evidence.endswith(
        "10 ran; 3 outliers: prompts 100 to 300 tokens (median 200), waited 601 ms (at most 602), preempted 3 times, "
        "at most 9 beside, the longest of 32000 tokens"
    )


def test_cold_first_tokens_count_with_hot_ones() -> None:
    course = Course(a_node())
    for _ in range(3):
        course.window(GOOD, n=10, sketches={ttft(Workload.REALTIME, COLD): [BAD] * 10})
    assert course.active() == 8


def test_first_tokens_of_batch_requests_do_not_count() -> None:
    course = Course(a_node())
    for _ in range(20):
        course.window(BAD, workload=Workload.BATCH, itls_ms=[900.0] * 50)
    assert course.decision.moves == ()


def test_gaps_between_tokens_alone_are_reason_enough() -> None:
    course = Course(a_node())
    for _ in range(3):
        course.window(GOOD, itls_ms=[300.0] * 100)
    assert only(course.decision).evidence.startswith("P99 ITL 300 ms over 200 in 3 windows of 5 s, n=90")


def test_a_few_gaps_are_no_p99() -> None:
    course = Course(a_node())
    for _ in range(6):
        course.window(GOOD, itls_ms=[300.0] * 19)
    assert course.decision.moves == ()


def test_objectives_are_the_policys() -> None:
    course = Course(a_node(), policy_of({"objectives.ttft_p99_ms": 1000}))
    for _ in range(6):
        course.window(BAD)
    assert course.decision.moves == ()


def test_strikes_are_the_policys() -> None:
    course = Course(a_node(), policy_of({"batch.strikes": 1, "batch.decrease": 0.5}))
    course.window(BAD)
    assert course.active() == 5


def test_a_decrease_of_one_lowers_nothing() -> None:
    course = Course(a_node(), policy_of({"batch.decrease": 1.0}))
    for _ in range(6):
        course.window(BAD)
    assert course.decision.moves == ()


def test_it_is_never_below_one_beside_the_reserve() -> None:
    course = Course(a_node(), policy_of({"batch.active": 10, "paths.realtime_reserve": 3}))
    for _ in range(60):
        course.window(BAD, peaks={"running": 10.0, BATCH_RUNNING: 9.0})
    assert only(course.decision).factor == pytest.approx(0.4)


def test_a_factor_is_never_below_a_tenth() -> None:
    course = Course(a_node())
    for _ in range(60):
        course.window(BAD, peaks={"running": 2.0, BATCH_RUNNING: 1.0})
    assert only(course.decision).factor == pytest.approx(5 / 48)


def test_each_good_window_gives_one_back_until_it_is_what_people_set() -> None:
    course = lowered()
    assert only(course.window(GOOD, itls_ms=[50.0] * 30)).evidence == (
        "P99 TTFT 100 ms within 500, P99 ITL 50 ms within 200, n=30"
    )
    assert course.active() == 9
    for expected in range(10, 48):
        course.window(GOOD)
        assert course.active() == expected
    assert course.window(GOOD).moves == ()


def test_good_and_bad_windows_by_turns_move_nothing() -> None:
    course = Course(a_node())
    for _ in range(100):
        assert course.window(BAD).moves == ()
        assert course.window(BAD).moves == ()
        assert course.window(GOOD).moves == ()


def test_a_request_that_is_late_alone_is_no_strike() -> None:
    course = Course(a_node())
    for _ in range(10):
        course.window(BAD, peaks={"running": 1.0, BATCH_RUNNING: 0.0})
    assert course.decision.moves == ()


def test_thin_windows_are_joined_until_they_can_be_judged() -> None:
    course = Course(a_node())
    for _ in range(5):
        assert course.window(BAD, n=10).moves == ()
    assert only(course.window(BAD, n=10)).evidence.startswith("P99 TTFT 800 ms over 500 in 3 windows of 10 s, n=60")


def test_windows_that_stay_thin_for_a_minute_are_thrown_away_and_decide_nothing() -> None:
    course = lowered()
    before = course.decision.moves
    for n in (30, 30, *[1] * 12):
        course.window(BAD, n=n)
    assert course.decision.moves == before
    assert course.decision.holds == ("w0: undecided: fewer than 20 REALTIME first tokens in 60 s",)
    for _ in range(2):
        course.window(BAD)
    assert course.decision.moves == before, "the row of strikes begins anew"
    assert course.decision.holds == ()


def test_a_silence_longer_than_a_window_can_be_ends_the_row() -> None:
    course = Course(a_node())
    course.window(BAD)
    course.window(BAD)
    course.now += 100.0
    assert course.window(BAD).moves == ()
    course.window(BAD)
    assert course.window(BAD).moves != ()


def test_no_window_at_all_changes_nothing_and_costs_no_new_state() -> None:
    course = lowered()
    before = course.decision
    for _ in range(600):
        course.now += 1.0
        assert course.tick().state is before.state
    assert course.decision.moves == before.moves


def test_an_engine_that_can_do_less_than_the_default_is_bound_all_the_same() -> None:
    policy = Policies(Document()).spec
    course = Course(a_node(limits=Limits(16, 8192, 131_072, 16, 10_000)), policy)
    assert policy(course.node.node).batch.active == 16
    for _ in range(3):
        course.window(BAD)
    assert course.active() == 8
    for expected in (9, 10, 11, 12, 13, 14, 15, 16):
        course.window(GOOD)
        assert course.active() == expected
    assert course.decision.moves == ()


def test_what_another_controller_took_away_is_not_taken_twice() -> None:
    halved = an_adjustment("oom", "batch.active", on_node(), factor=0.5)
    course = Course(a_node(), others=(halved,))
    for _ in range(3):
        course.window(BAD, peaks={"running": 24.0, BATCH_RUNNING: 9.0})
    assert course.active() == 19


def test_each_worker_has_its_own() -> None:
    slow, fast = a_node("w0"), a_node("w1")
    state = batch.step(batch.start(()), a_seen(slow, fast), policy_of(), NOW).state
    decision = Decision(state)
    for i in range(1, 4):
        slow.windows.append(a_window(i, ttfts_ms=[BAD] * 30, peaks=MIXED))
        fast.windows.append(a_window(i, ttfts_ms=[GOOD] * 30, peaks=MIXED))
        decision = batch.step(decision.state, a_seen(slow, fast, now=NOW + 5 * i), policy_of(), NOW + 5 * i)
    assert only(decision).scope == on_node("w0")


def as_live(decision: Decision) -> list[Adjustment]:
    return list(changes("batch", decision.moves, {}, set(), 1000).put)


def test_a_new_leader_goes_on_where_the_old_one_was() -> None:
    old = lowered()
    new = Course(old.node, live=as_live(old.decision), now=old.now, number=old.number)
    assert new.active() == old.active() == 8
    new.window(GOOD)
    assert new.active() == 9


def test_realtimes_own_places_are_not_taken() -> None:
    """A flood of REALTIME beside one BATCH request: fewer places than REALTIME runs would make it later still."""
    course = Course(a_node())
    for _ in range(30):
        course.window(BAD, peaks={"running": 33.0, REALTIME_RUNNING: 32.0, BATCH_RUNNING: 1.0})
    assert course.active() == 33


def test_in_order_of_arrival_it_does_nothing_and_says_so() -> None:
    course = Course(a_node(), policy_of({"scheduler.mode": "fcfs"}))
    for _ in range(6):
        course.window(BAD)
    assert course.decision.moves == ()
    assert course.decision.holds == ("w0: scheduler.mode is fcfs: fewer places would make REALTIME wait longer",)


def test_a_new_leader_judges_no_window_of_the_old_ones_time() -> None:
    node = a_node(windows=[a_window(i, ttfts_ms=[BAD] * 30, peaks=MIXED, ended=NOW - 20 + i) for i in range(1, 9)])
    course = Course(node, number=8)
    course.window(BAD)
    assert course.window(BAD).moves == ()
    assert course.window(BAD).moves != ()


def test_a_worker_that_starts_anew_has_no_strikes() -> None:
    course = Course(a_node())
    course.window(BAD)
    course.window(BAD)
    course.node.windows.clear()
    course.tick()
    assert course.window(BAD).moves == ()


def test_a_worker_that_is_away_keeps_its_place_for_a_minute() -> None:
    course = lowered()
    course.node.connected = False
    for _ in range(60):
        assert course.tick().moves != ()
        course.now += 1.0
    assert course.tick().moves == ()
    assert course.decision.state.workers == {}


@pytest.mark.parametrize("n", [0, 30])
def test_an_idle_or_healthy_hour_moves_nothing(n: int) -> None:
    course = Course(a_node())
    for _ in range(720):
        assert course.window(GOOD, n, itls_ms=[40.0] * n, peaks=MIXED if n else {}).moves == ()


class Untouched(dict[str, Any]):
    def __contains__(self, key: object) -> bool:
        raise AssertionError("a window without news was read")


def test_a_window_is_read_once() -> None:
    course = lowered()
    for w in course.node.windows:
        w.sketches = Untouched()
    course.now += 1.0
    assert only(course.tick())
    course.window(GOOD)
    assert course.active() == 9
