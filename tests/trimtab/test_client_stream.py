"""What a stream's caller is shown, and when a lost one is asked for again."""

from __future__ import annotations

import pytest

from trimtab import client_stream
from trimtab.client import Unreachable
from trimtab.client_stream import Received
from trimtab.errors import (
    DeadlineExceeded,
    Draining,
    EngineDead,
    InvalidRequest,
    NoWorker,
    Quarantined,
    QueueFull,
    ResumeRefused,
    StreamCut,
    TrimtabError,
    Unauthenticated,
    Violation,
)
from trimtab.kit import rpc
from trimtab.messages import Accepted, Delta, Finish, FinishReason, Notice, NoticeKind, Request, Resume, Timings, Usage
from trimtab.snapshot import Identity

FIRST = Request("", "m", "hello")
HELD = InvalidRequest("it runs", violations=(Violation("request_id", "runs"),))


def bare(code: str, said: str = "Socket closed") -> TrimtabError:
    """A status that no server of ours has written."""
    return rpc.decode_status(
        type("Status", (), {"code": 14 if code == "UNAVAILABLE" else 13, "message": said, "details": ()})
    )


def accepted(worker: str = "w0", *, resumable: bool = True, digest: bytes = b"d") -> Accepted:
    return Accepted("given", worker, Identity(1, 1), 0, 3, digest, resumable, "m")


def having(*events: Accepted | Delta) -> Received:
    received = Received()
    for event in events:
        received.take(event)
    return received


TWO = (accepted(), Delta(0, (7,), "小"), Delta(1, (8,), "b"))


def test_tokens_and_bytes_of_text_are_counted():
    again = having(*TWO).request(FIRST, 2)
    assert again.resume == Resume((7, 8), 4, 2, b"d")
    assert again.request_id == "given"


def test_the_first_call_is_the_request_itself():
    assert Received().request(FIRST, 1) is FIRST


def test_nothing_delivered_is_asked_for_from_the_start():
    assert having(accepted()).request(FIRST, 2).resume is None


@pytest.mark.parametrize("first_index", [0, 1, 3])
def test_an_index_that_is_not_due_is_a_cut(first_index):
    with pytest.raises(StreamCut, match=f"token {first_index} came where 2 was due") as caught:
        having(*TWO).take(Delta(first_index, (9,), "c"))
    assert caught.value.metadata == {"tokens_delivered": "2"}


def test_accepted_is_shown_once_and_a_stream_that_goes_on_says_so():
    received = having(*TWO)
    assert received.take(accepted("w1"), "it died") == Notice(NoticeKind.RESUMED, "goes on at token 2 on w1: it died")


def test_a_second_accepted_before_any_token_is_not_shown_and_its_prompt_counts():
    received = having(accepted(digest=b"one"))
    assert received.take(accepted("w1", digest=b"two"), "it died") is None
    received.take(Delta(0, (1,), "a"))
    assert received.request(FIRST, 3).resume == Resume((1,), 1, 3, b"two")


def test_notices_and_the_finish_pass():
    end = Finish(FinishReason.STOP, Usage(), Timings())
    assert having(*TWO).take(end) is end
    assert having(*TWO).take(Notice(NoticeKind.PREEMPTED)) == Notice(NoticeKind.PREEMPTED)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (bare("UNAVAILABLE"), True),
        (bare("INTERNAL", "Received RST_STREAM with error code 2"), True),
        (bare("INTERNAL", "the handler failed"), False),
        (Unreachable("nothing answers"), True),
        (Draining("leaving"), False),
        (NoWorker("none"), False),
        (EngineDead("gone"), False),
    ],
)
def test_lost_is_what_no_server_of_ours_has_said(error, lost):
    assert client_stream.is_lost(error) is lost


@pytest.mark.parametrize(
    ("error", "first_time", "later"),
    [
        (bare("UNAVAILABLE"), True, True),
        (Draining("leaving"), True, True),
        (NoWorker("none yet"), False, True),
        (QueueFull("full"), False, True),
        (HELD, False, True),
        (InvalidRequest("no"), False, False),
        (ResumeRefused("another tokeniser"), False, False),
        (StreamCut("cut"), False, False),
        (EngineDead("gone"), False, False),
        (DeadlineExceeded("late"), False, False),
        (Quarantined("poison"), False, False),
        (Unauthenticated("who?"), False, False),
    ],
)
def test_what_is_asked_for_again(error, first_time, later):
    received = having(*TWO)
    assert client_stream.may_go_on(error, received, attempt=1, attempts=4) is first_time
    assert client_stream.may_go_on(error, received, attempt=2, attempts=4) is later
    assert not client_stream.may_go_on(error, received, attempt=4, attempts=4)


def test_back_pressure_is_the_callers_where_nothing_was_promised():
    assert not client_stream.may_go_on(QueueFull("full"), Received(), attempt=2, attempts=4)


def test_what_can_not_be_continued_exactly_is_not_asked_for_again():
    begun = having(accepted(resumable=False), Delta(0, (1,), "a"))
    assert not client_stream.may_go_on(bare("UNAVAILABLE"), begun, attempt=1, attempts=4)
    assert client_stream.may_go_on(bare("UNAVAILABLE"), having(accepted(resumable=False)), attempt=1, attempts=4)


def test_the_last_word_names_what_the_stream_was_lost_by():
    by, then = Draining("it has shut down"), Unreachable("nothing answers")
    said = client_stream.last_word(then, having(*TWO), by)
    assert isinstance(said, StreamCut)
    assert said.message == "the stream was cut after 2 tokens: it has shut down; then nothing answers"
    assert said.metadata == {"tokens_delivered": "2", "cause": "DRAINING"}


@pytest.mark.parametrize("error", [ResumeRefused("no"), NoWorker("none"), HELD])
def test_a_stream_that_nobody_takes_on_is_cut(error):
    assert isinstance(client_stream.last_word(error, having(*TWO), bare("UNAVAILABLE")), StreamCut)


@pytest.mark.parametrize("error", [EngineDead("gone"), DeadlineExceeded("late"), Quarantined("poison"), QueueFull("x")])
def test_what_a_server_says_of_the_request_itself_is_passed_on(error):
    assert client_stream.last_word(error, having(*TWO), error) is error


def test_before_anything_came_the_fault_itself_is_told():
    for error in (Unreachable("nothing answers"), Draining("leaving"), bare("UNAVAILABLE")):
        assert client_stream.last_word(error, Received(), error) is error


def test_pauses_grow_to_a_bound_and_are_never_shorter_than_asked_for():
    assert [client_stream.pause_ms(n, None, lambda: 0.0) for n in (1, 2, 3, 9, 10**6)] == [
        500,
        1000,
        2000,
        10_000,
        10_000,
    ]
    assert client_stream.pause_ms(1, 3000, lambda: 0.0) == 3000
    assert client_stream.pause_ms(1, None, lambda: 1.0) == 750


def test_a_caller_that_goes_on_by_himself_starts_where_he_stands():
    received = Received(Resume((7, 8), 5, 2, b"digest"))
    delta = Delta(2, (9,), "x")
    assert received.take(delta) is delta
    with pytest.raises(StreamCut, match="token 0 came where 3 was due"):
        received.take(Delta(0, (7,), "again"))
    again = received.request(FIRST, 2).resume
    assert again == Resume((7, 8, 9), 6, 2, b"digest")
