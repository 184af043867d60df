"""What is wrong with a stream: everything that a client must not notice of a fault."""

from __future__ import annotations

import pytest

from services.drill.witness import Move, faults
from tests.drill.builders import a_right_one, accepted, delta, finish, resumed, seen
from trimtab.errors import StreamCut
from trimtab.messages import Delta, Event, Notice, NoticeKind


def test_a_stream_that_moved_and_is_the_same_is_right() -> None:
    stream = seen(accepted(), delta(0, "abc"), resumed(), Delta(3, (), "d"), Delta(3, (100, 101), "e"))
    for event in (delta(5, "f"), finish()):
        stream.take(event, 20.0)
    assert faults(stream, a_right_one()) == []
    assert stream.moves == [Move("w0", told=12.0, last=11.0, first=14.0)]
    assert stream.moves[0].gap_s == 3.0


def test_the_worker_that_a_second_move_leaves_is_the_first_ones_goal() -> None:
    stream = seen(accepted("w2"), delta(0, "a"), resumed("w0"), resumed("w1"))
    assert [move.origin for move in stream.moves] == ["w2", "w0"]
    assert stream.moves[1].gap_s is None


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([accepted(), delta(0, "abc"), delta(2, "cdef"), finish(7)], "1 indexes repeated, 0 missing"),
        ([accepted(), delta(0, "abc"), delta(5, "f"), finish(4)], "0 indexes repeated, 2 missing"),
        ([accepted(), delta(0, "abcxef"), finish()], "tokens differ from index 3 on"),
        ([accepted(), Delta(0, (97, 98, 99, 100, 101, 102), "abcde"), finish()], "text differs from byte 5 on"),
        ([accepted(), delta(0, "abcde"), finish(5)], "tokens differ from index 5 on"),
        ([accepted(), accepted("w1"), delta(0, "abcdef"), finish()], "2 Accepted"),
        ([delta(0, "abcdef"), finish()], "Delta before Accepted"),
        ([accepted(), delta(0, "abcdef"), finish(), finish()], "2 Finish"),
        ([accepted(), delta(0, "abcdef"), finish(), Notice(NoticeKind.REQUEUED)], "Notice after Finish"),
        ([accepted(), delta(0, "abcdef")], "0 Finish"),
        ([accepted(), delta(0, "abcdef"), finish(5)], "usage says 3 + 5 tokens, where 3 + 6 came"),
        ([accepted(), delta(0, "abcdef"), finish(prompt_tokens=4)], "usage says 4 + 6 tokens, where 3 + 6 came"),
        ([accepted(), delta(0, "abcdef"), finish(stop="f")], "it ended by stop 'f', not by length ''"),
    ],
)
def test_a_stream_that_differs_in_anything_is_wrong(events: list[Event], said: str) -> None:
    assert said in faults(seen(*events), a_right_one())


def test_a_lost_stream_is_not_wrong_as_long_as_what_came_was_right() -> None:
    stream = seen(accepted(), delta(0, "abc"))
    stream.fail(StreamCut("the stream was cut after 3 tokens"))
    assert stream.lost == "STREAM_CUT"
    assert faults(stream, a_right_one()) == []
    refused = seen()
    refused.fail(StreamCut("at once"))
    assert faults(refused, a_right_one()) == []


def test_a_lost_stream_whose_beginning_is_wrong_is_both() -> None:
    stream = seen(accepted(), delta(0, "abx"))
    stream.fail(StreamCut("the stream was cut after 3 tokens"))
    assert faults(stream, a_right_one()) == ["tokens differ from index 2 on", "text differs from byte 2 on"]
