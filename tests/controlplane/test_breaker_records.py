"""Records of breakers, pure: of those that meet in any order the highest stands; and where the store keeps them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator

import pytest

from controlplane.breakers import CLOCKS_MS, KEEP_MS, Ledger, Side, Trip, Word, decode, encode
from controlplane.store import Action, Mark, PolicyStore
from controlplane.store.memory import MemoryStore
from controlplane.store.redis import RedisStore
from tests.controlplane.mesh import PATIENCE_S

AT = 1_700_000_000_000


def tripped(
    ledger: Ledger, gateway: str = "g0", now: int = AT, *, incarnation: str = "i1", open_ms: int = 2000
) -> Trip:
    return ledger.tripped(gateway, "w0", incarnation, "errors", open_ms, "10 of 20 attempts failed", now)


def decided(ledger: Ledger, side: Side | None, now: int = AT, for_ms: int = 600_000) -> Word:
    word = ledger.decided("w0", side, for_ms, "ada", "evening", now)
    assert ledger.take(word, now)
    return word


def test_the_newest_trip_is_told_until_it_is_over_and_trips_are_counted_by_process() -> None:
    ledger = Ledger()
    tripped(ledger, "g0")
    second = tripped(ledger, "g1", AT + 500, open_ms=4000)
    notice = ledger.notice("w0", "i1", AT + 1500)
    assert notice is not None and notice.trip is second
    assert (notice.open_ms, notice.side, second.trips) == (3000, None, 2)
    assert ledger.next_end(AT + 1500) == AT + 4500
    assert ledger.notice("w0", "i1", AT + 4500) is None
    assert ledger.trip("w0", "i1") is second
    assert tripped(ledger, now=AT + 5000, incarnation="i2").trips == 1
    assert ledger.notice("w0", "i1", AT + 5001) is None, "a process is not blamed for another's faults"


def test_a_trip_has_a_higher_number_than_any_before_whatever_the_clock_says() -> None:
    ledger = Ledger()
    first = tripped(ledger)
    assert tripped(ledger, now=AT - 60_000).stamp == first.stamp + 1


def test_a_gateways_own_words_are_bounded_and_one_line() -> None:
    trip = Ledger().tripped("g0", "w0", "i1", "moonlight", 1 << 31, "a\nb " + "x" * 1000, AT)
    assert (trip.dimension, trip.open_ms, len(trip.because), trip.because[:4]) == ("unknown", 600_000, 300, "a b ")


def test_a_word_holds_for_its_time_and_stands_above_earlier_ones() -> None:
    ledger = Ledger()
    decided(ledger, Side.OPEN)
    decided(ledger, Side.CLOSED, AT + 1000, for_ms=5000)
    notice = ledger.notice("w0", "any", AT + 2000)
    assert notice is not None and (notice.side, notice.forced_ms) == (Side.CLOSED, 4000)
    assert ledger.notice("w0", "any", AT + 6000) is None, "the earlier one does not come back"


def test_a_word_that_was_taken_back_is_not_brought_back_by_whoever_missed_that() -> None:
    ledger = Ledger()
    word = decided(ledger, Side.OPEN)
    back = decided(ledger, None, AT + 1000)
    assert not ledger.take(word, AT + 2000)
    assert ledger.word("w0", AT + 2000) is None
    assert back.until_unix_ms == word.until_unix_ms, "it must be known for as long as the word would have held"
    assert list(ledger.lasting(AT + 2000)) == [back]


def test_of_records_that_meet_in_any_order_the_highest_stands() -> None:
    source = Ledger()
    records: list[Trip | Word] = [tripped(source, f"g{i}", AT + i) for i in range(3)]
    records += [decided(source, side, AT + i) for i, side in enumerate((Side.OPEN, None, Side.CLOSED))]
    for order in (records, records[::-1], records[3:] + records[:3]):
        ledger = Ledger()
        for record in order:
            ledger.take(record, AT + 10, live=False)
        assert (ledger.trip("w0", "i1"), ledger.word("w0", AT + 10)) == (records[2], records[5])


def test_a_trip_that_was_just_heard_counts_from_then_and_an_old_one_from_its_own_time() -> None:
    trip = tripped(Ledger())
    for live, late_ms, left_ms in ((True, 5000, 2000), (False, 500, 1500), (False, -5000, 2000), (True, CLOCKS_MS, 0)):
        ledger = Ledger()
        ledger.take(trip, AT + late_ms, live=live)
        assert ledger.open_ms(trip, AT + late_ms) == left_ms, (live, late_ms)


def test_what_has_been_over_for_long_is_forgotten() -> None:
    ledger = Ledger()
    trip, word = tripped(ledger), decided(ledger, Side.OPEN, for_ms=4000)
    assert ledger.forget(AT + 2000 + KEEP_MS - 1) == []
    assert ledger.forget(AT + 2000 + KEEP_MS) == [trip]
    assert ledger.forget(AT + 4000 + KEEP_MS) == [word]
    assert ledger.trip("w0", "i1") is None and not ledger.forget(AT + 2 * KEEP_MS)


def test_records_are_read_as_they_were_written_and_what_nobody_understands_is_passed_over() -> None:
    ledger = Ledger()
    for record in (tripped(ledger), decided(ledger, Side.OPEN), decided(ledger, None, AT + 1)):
        assert decode(encode(record)) == record
    newer = {**json.loads(encode(tripped(ledger))), "colour": "red"}
    assert isinstance(decode(json.dumps(newer).encode()), Trip)
    for data in (
        b"",
        b"[]",
        b'{"kind": "song"}',
        b'{"kind": "trip"}',
        encode(tripped(ledger)).replace(b"2000", b'"x"'),
    ):
        assert decode(data) is None


# ---- the store


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[PolicyStore]:
    if request.param == "memory":
        yield MemoryStore()
        return
    opened = RedisStore(request.getfixturevalue("valkey_address"), uuid.uuid4().hex)
    yield opened
    await opened.close()


async def test_of_a_key_the_highest_stamp_is_kept_and_a_resent_mark_succeeds(store: PolicyStore) -> None:
    first, second = Mark("a", 5, b"\xff one two"), Mark("a", 6, b"")
    assert await store.mark(first)
    assert await store.mark(first)
    assert not await store.mark(Mark("a", 5, b"other"))
    assert await store.mark(second)
    assert not await store.mark(first)
    assert await store.mark(Mark("b", 1, b"x"))
    assert sorted(await store.marks(), key=lambda m: m.key) == [second, Mark("b", 1, b"x")]
    await store.unmark(first)
    await store.unmark(Mark("b", 1, b"whatever"))
    assert await store.marks() == [second]


async def test_a_follower_hears_of_each_mark(store: PolicyStore) -> None:
    async with contextlib.aclosing(store.watch_marks()) as states, asyncio.timeout(PATIENCE_S):
        assert await anext(states) == []
        await store.mark(Mark("a", 1, b"x"))
        assert await anext(states) == [Mark("a", 1, b"x")]


async def test_actions_are_kept_newest_first(store: PolicyStore) -> None:
    done = [Action(f"w{i}", "drain within 30s", "ada", "ünicode", AT + i) for i in range(3)]
    for action in done:
        await store.record_action(action)
    assert await store.actions() == done[::-1]
