"""What becomes of a request whose worker did not finish it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.resuming import (
    MAX_FRUITLESS,
    STRIKES,
    SUSPECTS,
    Cause,
    Next,
    Standing,
    blamed,
    ended,
    waits,
)

MANY = SUSPECTS + 1


ANOTHER = map(str, itertools.count())


def after(
    standing: Standing, cause: Cause, *, gained: int = 0, suspects: int = 0, attempts: int = 16, worker: str = ""
):
    """At another worker each time, unless it is said which."""
    worker = worker or next(ANOTHER)
    return ended(standing, cause, gained=gained, suspects=suspects, attempts=attempts, worker=worker)


def running(delivered: int = 5, **facts) -> Standing:
    return Standing(attempts=1, accepted=True, delivered=delivered, resumable=True, **facts)


def test_a_stream_that_had_begun_goes_on_elsewhere():
    standing, verdict = after(running(), Cause.DIED, gained=5)
    assert verdict.next is Next.ELSEWHERE
    assert standing.delivered == 10


def test_what_cannot_be_continued_exactly_is_cut():
    standing = Standing(attempts=1, accepted=True, resumable=False)
    assert after(standing, Cause.DIED)[1].next is Next.ELSEWHERE  # nothing was delivered: it begins anew
    assert after(standing, Cause.DIED, gained=1)[1].next is Next.CUT


def test_with_resuming_off_nothing_that_has_begun_is_moved():
    assert after(running(), Cause.DIED, attempts=1)[1].next is Next.CUT
    assert after(running(0), Cause.DIED, attempts=1)[1].next is Next.ELSEWHERE


def test_back_pressure_is_the_callers_until_a_worker_has_said_yes():
    assert after(Standing(attempts=1), Cause.FULL)[1].next is Next.GIVE_UP
    assert after(running(), Cause.FULL)[1].next is Next.ELSEWHERE


def test_what_belongs_elsewhere_does_not_wait_where_there_is_no_such_place():
    standing, verdict = after(Standing(attempts=1, accepted=True), Cause.MISPLACED)
    assert (verdict.next, waits(standing)) == (Next.ELSEWHERE, False)
    assert waits(after(Standing(attempts=1, accepted=True), Cause.LEFT)[0])


def test_attempts_that_give_nothing_are_bounded_in_a_row_and_a_token_starts_the_count_again():
    standing = running()
    for _ in range(MAX_FRUITLESS - 1):
        standing, verdict = after(standing, Cause.BROKE)
        assert verdict.next is Next.ELSEWHERE
    assert after(standing, Cause.BROKE)[1].next is Next.CUT
    standing, verdict = after(standing, Cause.BROKE, gained=1)
    assert verdict.next is Next.ELSEWHERE
    assert standing.fruitless == 0


@pytest.mark.parametrize("cause", [Cause.LEFT, Cause.FULL, Cause.DIFFERS])
def test_workers_that_say_nothing_about_it_leave_it_all_its_tries(cause):
    standing = running()
    for _ in range(MAX_FRUITLESS - 1):
        standing, verdict = after(standing, cause)
        assert verdict.next is Next.ELSEWHERE
    standing, verdict = after(standing, Cause.BROKE)
    assert (verdict.next, standing.fruitless) == (Next.ELSEWHERE, 1)


def test_a_full_or_leaving_worker_says_nothing_about_the_request():
    standing = running()
    for cause in [Cause.FULL, Cause.LEFT, Cause.DIFFERS] * MAX_FRUITLESS:
        standing, verdict = after(standing, cause)
        assert verdict.next is Next.ELSEWHERE


def test_a_request_that_two_workers_died_of_goes_to_no_third():
    standing = Standing(attempts=1, accepted=True)
    standing, verdict = after(standing, Cause.DIED, suspects=1)
    assert verdict.next is Next.ELSEWHERE
    assert after(standing, Cause.DIED, suspects=1)[1].next is Next.QUARANTINE


def test_one_worker_dies_of_it_once_whatever_is_said_of_it():
    """Its link is silent for a moment, it is given the request again, and then it hangs: that is one worker, not two."""
    standing = Standing(attempts=1, accepted=True)
    for _ in range(2):
        standing, verdict = after(standing, Cause.DIED, suspects=1, worker="w0/i1")
        assert verdict.next is Next.ELSEWHERE
    assert after(standing, Cause.DIED, suspects=1, worker="w1/i7")[1].next is Next.QUARANTINE


def test_tokens_between_two_deaths_clear_it():
    standing, _ = after(running(), Cause.DIED, suspects=1)
    standing, verdict = after(standing, Cause.DIED, gained=3)
    assert verdict.next is Next.ELSEWHERE
    assert standing.victims == ()


def test_among_many_suspects_nobody_is_blamed():
    standing = Standing(attempts=1, accepted=True)
    for _ in range(MAX_FRUITLESS - 1):
        standing, verdict = after(standing, Cause.DIED, suspects=MANY)
        assert verdict.next is Next.ELSEWHERE
    assert standing.victims == ()


def test_who_is_suspected_of_a_death():
    def by(started, gained, begun, all_running):
        return blamed(started=started, gained=gained, begun_there=begun, running_there=all_running)

    assert by(False, False, 3, 40) == 0  # it waited
    assert by(True, False, 3, 40) == 3  # it had just begun, with two others
    assert by(True, True, 3, 40) == 0  # others had just begun
    assert by(True, True, 0, 40) == 0  # one of forty
    assert by(True, True, 0, 1) == 1  # alone


@given(
    st.lists(
        st.tuples(st.sampled_from(Cause), st.integers(0, 3), st.integers(0, 12)),
        max_size=60,
    ),
    st.integers(1, 20),
)
def test_every_request_comes_to_an_end_and_none_kills_more_than_two_by_itself(ends, attempts):
    standing, killed = Standing(accepted=True, resumable=True), 0
    for cause, gained, suspects in ends:
        standing = Standing(**{**_fields(standing), "attempts": standing.attempts + 1})
        standing, verdict = after(standing, cause, gained=gained, suspects=suspects, attempts=attempts)
        killed = (0 if gained else killed) + (cause is Cause.DIED and 0 < suspects <= SUSPECTS)
        assert killed <= STRIKES
        if verdict.next is not Next.ELSEWHERE:
            assert verdict.next is not Next.GIVE_UP or standing.delivered == 0
            assert verdict.next is not Next.CUT or standing.delivered > 0
            return
        assert standing.attempts < (attempts if attempts > 1 else MAX_FRUITLESS)


def _fields(standing: Standing) -> dict[str, object]:
    return {name: getattr(standing, name) for name in Standing.__slots__}
