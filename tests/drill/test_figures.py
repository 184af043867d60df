"""From what clients saw to goals and tables."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.drill import figures
from services.drill.figures import OFF, SEVERAL, STRIKES, UNPROVOKED, Arm, Outcome, by_kind, goals, label
from services.drill.strikes import Kind, Struck
from services.drill.witness import Move

KILL = Struck(Kind.KILL, "w0", begun=100.0, ended=102.0, back=103.0)
STOP = Struck(Kind.STOP, "w1", begun=200.0, ended=204.0, back=206.0)


def an_outcome(*moves: Move, lost: str = "", faults: tuple[str, ...] = ()) -> Outcome:
    return Outcome(0, 50, lost, faults, 0, 0, moves)


def after_the_kill(gap_s: float = 0.5) -> Move:
    return Move("w0", told=100.2, last=100.0, first=100.0 + gap_s)


def met(*arms: Arm) -> dict[str, bool | None]:
    return {goal.name: goal.met for goal in goals(arms)}


@pytest.mark.parametrize(
    ("move", "of"),
    [
        (after_the_kill(), "kill"),
        (Move("w1", told=201.7, last=199.9, first=202.0), "stop"),
        (Move("", told=100.2, last=100.0, first=100.5), "kill"),
        (Move("w2", told=100.2, last=100.0, first=100.5), UNPROVOKED),
        (Move("w0", told=99.0, last=98.0, first=99.1), UNPROVOKED),
        (Move("w0", told=150.0, last=149.0, first=151.0), UNPROVOKED),
    ],
)
def test_a_move_is_the_doing_of_a_strike_on_the_worker_that_it_left(move: Move, of: str) -> None:
    assert label(move, [KILL, STOP])[0] == of


def test_a_gap_in_which_two_strikes_fell_says_nothing_of_either() -> None:
    stopped = replace(STOP, begun=98.5, ended=102.5, back=104.0)
    assert label(after_the_kill(), [KILL, stopped]) == (SEVERAL, KILL)
    early = replace(STOP, begun=97.0, ended=101.0, back=104.0)
    assert label(after_the_kill(), [KILL, early]) == ("kill", KILL), "everybody knows of it by then"
    drained = replace(STOP, kind=Kind.DRAIN, begun=99.0, ended=100.0, back=101.0)
    assert label(after_the_kill(), [KILL, drained]) == ("kill", KILL), "a drain is told at once"


def test_a_kinds_row_has_its_gaps_and_the_first_that_noticed() -> None:
    moves = [Move("w1", told=201.4 + i, last=199.9, first=201.9 + i) for i in range(3)]
    arm = Arm(STRIKES, "simulated", [an_outcome(m) for m in moves], [KILL, STOP])
    rows = {row["kind"]: row for row in by_kind(arm)}
    assert set(rows) == {"kill", "stop"}
    stop = rows["stop"]
    assert (stop["strikes"], stop["moves"]) == (1, 3)
    assert (stop["gap_p50_s"], stop["gap_max_s"]) == pytest.approx((3.0, 4.0))
    assert stop["noticed_p50_s"] == pytest.approx(1.4)
    assert stop["back_p50_s"] == pytest.approx(2.0)
    assert rows["kill"]["noticed_p50_s"] is None


def test_one_lost_or_wrong_stream_misses_its_goal() -> None:
    good = [an_outcome(after_the_kill()) for _ in range(1000)]
    assert set(met(Arm(STRIKES, "simulated", good, [KILL])).values()) == {True}
    lost = Arm(STRIKES, "simulated", [*good, an_outcome(lost="STREAM_CUT")], [KILL])
    assert met(lost)["lost"] is False
    wrong = Arm(STRIKES, "simulated", [*good, an_outcome(faults=("2 Finish",))], [KILL])
    assert met(wrong)["wrong"] is False
    twice = Arm(STRIKES, "simulated", [*good, replace(good[0], repeated=1)], [KILL])
    assert met(twice)["indexes_repeated_or_missing"] is False
    gone = Arm(STRIKES, "simulated", good, [replace(KILL, back=None)])
    assert met(gone)["workers_that_did_not_come_back"] is False


def test_the_gap_after_a_kill_is_judged_by_enough_of_them() -> None:
    slow = Arm(STRIKES, "simulated", [an_outcome(after_the_kill(1.2))] * figures.ENOUGH_GAPS, [KILL])
    assert met(slow)["gap_p99_s_after_a_kill"] is False
    few = replace(slow, outcomes=slow.outcomes[1:])
    assert met(few)["gap_p99_s_after_a_kill"] is None
    assert met(Arm(STRIKES, "simulated", [], []))["gap_p99_s_after_a_kill"] is None


def test_without_moving_streams_must_be_lost_and_still_none_is_wrong() -> None:
    cut = an_outcome(lost="STREAM_CUT")
    assert met(Arm(OFF, "simulated", [cut], [KILL])) == {"lost_with_moving_off": True, "wrong_with_moving_off": True}
    assert met(Arm(OFF, "simulated", [an_outcome()], [KILL]))["lost_with_moving_off"] is False


def test_the_report_shows_each_arm_and_the_first_of_what_is_wrong() -> None:
    arm = Arm(STRIKES, "simulated", [an_outcome(after_the_kill()), an_outcome(faults=("2 Finish",))], [KILL])
    arm.counts = {"resumes": {"died": 1.0}, "dropped_pieces": {"": 3.0}}
    titles = [title for title, _ in figures.sections([arm])]
    assert titles == ["Streams", "Gaps of streams that moved: strikes, simulated"]
    assert "died 1" in figures.sections([arm])[0][1]
    assert figures.notes([arm]) == [
        "strikes, simulated, case 0: 2 Finish",
        "strikes, simulated: gateways counted dropped pieces 3",
    ]
    assert figures.as_json(arm)["by_kind"][0]["kind"] == "kill"
