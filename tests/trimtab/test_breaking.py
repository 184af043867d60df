"""A worker's breaker: what opens it, what heals it, and what does neither."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.breaking import (
    PROBED_MS,
    Breaker,
    Dimension,
    Forced,
    Gate,
    Phase,
    doubtful,
    force,
    foreign,
    gate,
    hung,
    median_of_peers,
    median_ttft_ms,
    observe,
    probing,
    retry_after_ms,
)
from trimtab.errors import Outcome
from trimtab.policy_tree import BreakerPart

RULES = BreakerPart()
OK, FAULT = Outcome.OK, Outcome.ENGINE_FAULT
NEW = Breaker()


def fed(outcomes, *, now_ms=0.0, apart_ms=10.0, breaker=NEW):
    trips = []
    for i, outcome in enumerate(outcomes):
        breaker, trip = observe(breaker, outcome, RULES, now_ms + i * apart_ms)
        trips += [trip] if trip else []
    return breaker, trips


def opened() -> Breaker:
    return fed([FAULT] * RULES.min_outcomes)[0]


def test_two_thirds_of_engine_faults_open_it_within_its_window():
    breaker, trips = fed([OK, FAULT, FAULT] * 4)
    assert breaker.phase is Phase.OPEN
    assert (trips[0].dimension, trips[0].open_ms) == (Dimension.ERRORS, 2000.0)
    assert len(trips) == 1


def test_fewer_than_the_least_number_of_outcomes_decide_nothing():
    assert fed([FAULT] * (RULES.min_outcomes - 1))[0].phase is Phase.CLOSED


def test_faults_below_the_rate_leave_it_closed():
    assert fed([OK, OK, FAULT] * 100)[0].phase is Phase.CLOSED


@pytest.mark.parametrize("outcome", [Outcome.CLIENT_FAULT, Outcome.BACK_PRESSURE, Outcome.UNKNOWN])
def test_a_flood_of_what_is_not_the_engines_fault_changes_nothing(outcome):
    breaker, trips = fed([outcome] * 10_000, apart_ms=0.1)
    assert (breaker, trips) == (Breaker(), [])
    half = foreign(Breaker(), "g1")
    assert observe(half, outcome, RULES, 0.0)[0] == half


def test_outcomes_older_than_the_window_are_forgotten():
    breaker, _ = fed([FAULT] * 9)
    assert fed([FAULT] * 9, now_ms=RULES.window_ms * 1.2, breaker=breaker)[0].phase is Phase.CLOSED


def test_open_lets_nothing_through_and_half_open_three_probes():
    breaker = opened()
    assert gate(breaker, breaker.until_ms - 1) is Gate.SHUT
    assert retry_after_ms(breaker, breaker.until_ms - 500) == 500
    now = breaker.until_ms
    for _ in range(RULES.probes):
        assert gate(breaker, now) is Gate.PROBE
        breaker = probing(breaker, RULES, now)
    assert gate(breaker, now) is Gate.SHUT
    for _ in range(RULES.probes):
        breaker, _ = observe(breaker, OK, RULES, now, probe=True)
    assert breaker.phase is Phase.CLOSED


def test_probes_that_show_nothing_are_not_waited_for_for_ever():
    """Prompts of BATCH may take hours to their first token; the worker may have been well all the time."""
    breaker = opened()
    now = breaker.until_ms
    for _ in range(RULES.probes):
        breaker = probing(breaker, RULES, now)
    assert gate(breaker, now + RULES.max_open_ms - 1) is Gate.SHUT
    assert retry_after_ms(breaker, now + RULES.max_open_ms - 500) == 500
    assert retry_after_ms(breaker, now) == PROBED_MS, "they may tell any moment"
    now += RULES.max_open_ms
    assert gate(breaker, now) is Gate.PROBE
    breaker = probing(breaker, RULES, now)
    for _ in range(RULES.probes - 1):
        assert gate(breaker, now) is Gate.PROBE
        breaker = probing(breaker, RULES, now)
    assert gate(breaker, now) is Gate.SHUT
    for _ in range(RULES.probes):
        breaker, _ = observe(breaker, OK, RULES, now, probe=True)
    assert breaker.phase is Phase.CLOSED


def test_bad_requests_never_close_a_half_open_one_and_give_their_probe_back():
    breaker = opened()
    now = breaker.until_ms
    for _ in range(20):
        assert gate(breaker, now) is Gate.PROBE
        breaker, _ = observe(probing(breaker, RULES, now), Outcome.CLIENT_FAULT, RULES, now, probe=True)
    assert breaker.phase is Phase.HALF_OPEN
    assert (breaker.out, breaker.healed) == (0, 0)


def test_successes_of_requests_that_were_no_probes_do_not_close_it():
    breaker = probing(opened(), RULES, 5000.0)
    for _ in range(10):
        breaker, _ = observe(breaker, OK, RULES, 5000.0)
    assert breaker.phase is Phase.HALF_OPEN


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_the_most():
    breaker, lasted = opened(), []
    for _ in range(8):
        now = breaker.until_ms
        breaker, trip = observe(probing(breaker, RULES, now), FAULT, RULES, now, probe=True)
        lasted.append(trip.open_ms)
    assert lasted == [4000, 8000, 16000, 30000, 30000, 30000, 30000, 30000]


def test_a_worker_much_slower_than_its_peers_opens():
    breaker = Breaker()
    for i in range(RULES.min_latencies):
        breaker, trip = observe(breaker, OK, RULES, i * 10.0, ttft_ms=900.0, peers_median_ms=200.0)
    assert trip is not None and trip.dimension is Dimension.LATENCY
    assert "900 ms" in trip.because


def test_where_little_is_known_of_its_peers_nothing_opens_by_latency():
    breaker = Breaker()
    for i in range(100):
        breaker, trip = observe(breaker, OK, RULES, i * 10.0, ttft_ms=900.0, peers_median_ms=None)
        assert trip is None
    assert median_ttft_ms(Breaker(), RULES, 1000.0) is None
    assert median_ttft_ms(breaker, RULES, 1000.0) == 900.0
    assert median_of_peers(2, 2, []) is None


def test_a_worker_is_not_opened_by_latency_where_it_is_needed():
    assert median_of_peers(2, 2, [100.0, 120.0]) == 120.0
    assert median_of_peers(1, 2, [100.0]) is None
    assert median_of_peers(2, 3, [100.0, 120.0]) == 120.0
    assert median_of_peers(0, 0, []) is None


def test_the_first_wave_of_a_burst_opens_nobody():
    """Equal workers with tails of many times their medians."""
    wave = [40.0] * 40 + [400.0] * 8
    breakers = [Breaker() for _ in range(3)]
    for i, ttft in enumerate(wave):
        for n in range(3):
            peers = [b for m, b in enumerate(breakers) if m != n]
            tails = sorted(ms for b in peers if (ms := median_ttft_ms(b, RULES, i * 10.0)) is not None)
            known = median_of_peers(2, 2, tails)
            breakers[n], trip = observe(breakers[n], OK, RULES, i * 10.0, ttft_ms=ttft + n, peers_median_ms=known)
            assert trip is None


def test_a_hung_engine_opens_it_at_once():
    breaker, trip = hung(Breaker(), RULES, 100.0)
    assert (breaker.phase, trip.dimension) == (Phase.OPEN, Dimension.HUNG)
    assert hung(breaker, RULES, 200.0) == (breaker, None)


def test_another_gateways_trip_makes_it_half_open_with_one_probe():
    breaker = foreign(Breaker(), "g1: 8 of 10 attempts failed")
    assert gate(breaker, 0.0) is Gate.PROBE
    breaker = probing(breaker, RULES, 0.0)
    assert gate(breaker, 0.0) is Gate.SHUT
    healed, _ = observe(breaker, OK, RULES, 1.0, probe=True)
    assert healed.phase is Phase.CLOSED
    worse, trip = observe(breaker, FAULT, RULES, 1.0, probe=True)
    assert (worse.phase, trip.dimension) == (Phase.OPEN, Dimension.ERRORS)


def test_what_is_known_here_counts_for_more_than_what_others_say():
    assert foreign(opened(), "g1") == opened()


def test_slow_ones_and_hearsay_are_doubtful_and_the_rest_is_not():
    slow = Breaker(Phase.OPEN, Dimension.LATENCY, until_ms=1000.0)
    assert doubtful(slow, 0.0)
    assert doubtful(foreign(Breaker(), "g1"), 0.0)
    assert not doubtful(opened(), 0.0)
    assert not doubtful(Breaker(), 0.0)
    assert not doubtful(force(slow, Forced(closed=False, until_ms=500.0)), 0.0)


def test_an_operators_word_stands_above_all_until_it_expires():
    breaker = force(opened(), Forced(closed=True, until_ms=1000.0))
    assert gate(breaker, 999.0) is Gate.PASS
    assert gate(breaker, 1000.0) is Gate.SHUT
    breaker = force(Breaker(), Forced(closed=False, until_ms=1000.0))
    assert gate(breaker, 999.0) is Gate.SHUT
    assert gate(breaker, 1000.0) is Gate.PASS


EVENTS = st.tuples(
    st.sampled_from([OK, FAULT, Outcome.CLIENT_FAULT, Outcome.BACK_PRESSURE, Outcome.UNKNOWN]),
    st.floats(0, 3000),
    st.sampled_from(["outcome", "hung", "foreign"]),
)


@given(st.lists(EVENTS, max_size=80))
def test_it_always_lets_something_through_in_the_end_and_never_more_probes_than_its_quota(events):
    """However it is used: requests pass as the gate says, and each of them ends."""
    breaker, now, out = Breaker(), 0.0, 0
    for outcome, wait_ms, kind in events:
        now += wait_ms
        if kind == "hung":
            breaker, _ = hung(breaker, RULES, now)
            continue
        if kind == "foreign":
            breaker = foreign(breaker, "g1")
            continue
        passes = gate(breaker, now)
        if passes is Gate.SHUT:
            assert breaker.phase in (Phase.OPEN, Phase.HALF_OPEN)
            continue
        if passes is Gate.PROBE:
            breaker = probing(breaker, RULES, now)
            out = breaker.out
            assert out + breaker.healed <= breaker.quota
        breaker, _ = observe(breaker, outcome, RULES, now, probe=passes is Gate.PROBE)
    assert gate(breaker, now + RULES.max_open_ms + 1) is not Gate.SHUT
