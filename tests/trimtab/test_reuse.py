"""What requests have in common with earlier ones."""

import pytest

from trimtab.blocks import kept
from trimtab.reuse import MAX_SESSIONS, RECENT_S, Prefixes, Sessions


def told(sessions, *requests):
    """Of (session, second)."""
    for name, at in requests:
        sessions.request(name, at)
    return sessions


def test_turns_are_of_sessions_that_had_two_or_more():
    sessions = told(Sessions(), ("a", 0.0), ("b", 1.0), ("", 1.0), ("", 2.0))
    assert sessions.turns(2.0) is None
    told(sessions, ("a", 3.0), ("a", 4.0), ("b", 5.0))
    assert sessions.turns(5.0) == 2.5


def test_a_session_that_was_silent_for_ten_minutes_is_over():
    sessions = told(Sessions(), ("a", 0.0), ("a", 1.0), ("b", 500.0), ("b", 501.0), ("b", 502.0))
    assert sessions.turns(RECENT_S + 1.0) == 2.5
    assert sessions.turns(RECENT_S + 1.1) == 3.0
    told(sessions, ("a", RECENT_S + 2.0))
    assert sessions.turns(RECENT_S + 2.0) == 3.0, "it begins anew"
    assert sessions.turns(5000.0) is None
    assert len(sessions) == 0


def test_however_many_sessions_there_are_few_are_kept():
    sessions = Sessions()
    told(sessions, *((f"s{i}", 0.0) for i in range(MAX_SESSIONS + 500)))
    told(sessions, *((f"s{i}", 1.0) for i in range(MAX_SESSIONS + 500)))
    assert len(sessions) == MAX_SESSIONS
    told(sessions, ("last", 2.0), ("last", 3.0))
    assert len(sessions) == MAX_SESSIONS
    assert sessions.turns(3.0) == 2.0


def test_a_prefix_counts_in_whole_blocks():
    prefixes, hits = Prefixes(), (48, 100, 640)
    assert prefixes.kept(64, 0.0) is None
    for tokens in (*hits, 0):
        prefixes.hit(tokens, 1.0)
    for size in (16, 64, 256, 2048):
        assert prefixes.kept(size, 2.0) == kept(hits, size)
    assert prefixes.kept(64, 2.0) == (0 + 64 + 640) / 788


def test_old_prefixes_are_forgotten():
    prefixes = Prefixes()
    prefixes.hit(64, 0.0)
    prefixes.hit(16, RECENT_S + 1.0)
    assert prefixes.kept(64, RECENT_S + 1.0) == 64 / 80
    assert prefixes.kept(64, 2 * RECENT_S + 2.0) == 0.0
    assert prefixes.kept(64, 5 * RECENT_S) is None


def test_a_size_that_nobody_measures_is_no_size():
    with pytest.raises(ValueError):
        Prefixes().kept(17, 0.0)
