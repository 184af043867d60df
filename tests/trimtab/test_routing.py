"""Where a request goes: what it needs, what it has been near, and the work that waits."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from trimtab.breaking import Gate
from trimtab.errors import NoWorker, QueueFull
from trimtab.messages import Load, Workload
from trimtab.routing import SCANNED, TRIES, Candidate, Need, Ring, Want, draws, key_of, pick


def a_worker(node_id: str = "w0", **facts) -> Candidate:
    known = {"life": 1, "serving": True, "load": Load(), "in_flight": 0}
    return Candidate(node_id, **(known | facts))


def a_fleet(n: int, **facts) -> list[Candidate]:
    return [a_worker(f"w{i}", **facts) for i in range(n)]


def draw(seed: object = 0) -> list[float]:
    rng = Random(str(seed))
    return [rng.random() for _ in range(TRIES + 2)]


class Counted(list):
    """How many of them were looked at."""

    looked = 0

    def __getitem__(self, index):
        self.looked += 1
        return super().__getitem__(index)


def test_the_least_work_wins_whatever_it_is_made_of():
    fleet = [
        a_worker("running", load=Load(running=3)),
        a_worker("prefill", load=Load(running=1, queued_prefill_tokens=5000)),
        a_worker("idle", load=Load(running=1)),
    ]
    assert pick(fleet, Want(), draw()).node_id == "idle"


def test_a_choice_says_whether_its_worker_can_be_compared_with_others():
    idle, busy = a_worker("w0"), a_worker("w1", load=Load(running=3))
    assert pick([idle, busy], Want(), draw()).compared
    assert not pick([busy], Want(), draw()).compared, "nobody else could have taken it"
    assert not pick([busy, replace(idle, gate=Gate.SHUT)], Want(), draw()).compared
    assert not pick([busy, replace(idle, gate=Gate.PROBE)], Want(), draw()).compared, "a probe goes to whom it is for"
    fleet = [a_worker("w0", load=Load(running=3)), a_worker("w1")]
    keys = [key_of(f"s{i}", b"") for i in range(40)]
    ring = Ring(["w0", "w1"])
    near = {pick(fleet, Want(key=key), draw(), ring).compared for key in keys}
    assert near == {True, False}, "whoever is near may have more to do than the other"


def test_what_was_just_sent_counts_before_the_worker_reports_it():
    fleet = [a_worker("w0", in_flight=4), a_worker("w1", load=Load(running=2)), a_worker("w2", sent_tokens=9000)]
    assert pick(fleet, Want(), draw()).node_id == "w1"


def test_equals_are_drawn_evenly():
    fleet = a_fleet(4)
    found = Counter(pick(fleet, Want(), draw(i)).node_id for i in range(400))
    assert set(found) == {"w0", "w1", "w2", "w3"}
    assert min(found.values()) > 60


@pytest.mark.parametrize(
    ("facts", "why"),
    [
        ({"serving": False}, "not serving"),
        ({"gate": Gate.SHUT, "open_ms": 700.0}, "breaker open"),
    ],
)
def test_nobody_able_says_why_of_each(facts, why):
    with pytest.raises(NoWorker, match=f"w0 {why}, w1 {why}") as caught:
        pick(a_fleet(2, **facts), Want(), draw())
    assert caught.value.retry_after_ms == (701 if "open_ms" in facts else 1000)


def test_full_is_another_answer_than_gone():
    with pytest.raises(QueueFull, match="w0 full"):
        pick([a_worker("w0", room=0), a_worker("w1", serving=False)], Want(), draw())


def test_no_worker_at_all():
    with pytest.raises(NoWorker, match="there is no worker now"):
        pick([], Want(), draw())


def test_who_was_tried_is_not_tried_again_unless_it_is_another_one_now():
    fleet = a_fleet(2)
    assert pick(fleet, Want(avoid={("w0", 1)}), draw()).node_id == "w1"
    with pytest.raises(NoWorker, match="already tried"):
        pick(fleet, Want(avoid={("w0", 1), ("w1", 1)}), draw())
    fleet[0] = replace(fleet[0], life=2)
    assert pick(fleet, Want(avoid={("w0", 1), ("w1", 1)}), draw()).node_id == "w0"


def test_a_half_open_worker_gets_its_probe():
    fleet = [a_worker("w0"), a_worker("w1", gate=Gate.PROBE, load=Load(running=9))]
    found = pick(fleet, Want(), draw())
    assert (found.node_id, found.probe) == ("w1", True)


def test_a_doubtful_worker_is_better_than_nobody_and_worse_than_anybody():
    slow = a_worker("slow", gate=Gate.SHUT, doubtful=True, open_ms=900.0)
    assert pick([slow, a_worker("w1", load=Load(running=50))], Want(), draw()).node_id == "w1"
    assert pick([slow, a_worker("w1", serving=False)], Want(), draw()).node_id == "slow"
    with pytest.raises(NoWorker):
        pick([replace(slow, serving=False)], Want(), draw())
    with pytest.raises(NoWorker):
        pick([slow], Want(avoid={("slow", 1)}), draw())


def test_an_isolation_pool_is_for_those_who_need_it():
    fleet = [a_worker("plain", load=Load(running=5)), a_worker("apart", isolates=True)]
    assert pick(fleet, Want(), draw()).node_id == "plain"
    assert pick(fleet, Want(need=Need.ISOLATION), draw()).node_id == "apart"
    with pytest.raises(NoWorker, match="not for isolated"):
        pick(fleet[:1], Want(need=Need.ISOLATION), draw())
    # For others it is there where nobody else is.
    assert pick([replace(fleet[0], serving=False), fleet[1]], Want(), draw()).node_id == "apart"


def test_a_session_stays_with_its_worker_while_that_is_not_overloaded():
    fleet = a_fleet(8)
    ring, want = Ring([c.node_id for c in fleet]), Want(key=key_of("session", b""))
    home = pick(fleet, want, draw(0), ring).node_id
    assert {pick(fleet, want, draw(i), ring).node_id for i in range(50)} == {home}
    index = int(home[1:])
    fleet[index] = replace(fleet[index], load=Load(running=500))
    moved = {pick(fleet, want, draw(i), ring).node_id for i in range(50)}
    assert home not in moved
    assert len(moved) == 1  # to the next of the ring, all of them


def test_a_worker_that_joins_takes_only_its_share_of_the_keys():
    before, after = Ring([f"w{i}" for i in range(10)]), Ring([f"w{i}" for i in range(11)])
    keys = [key_of(f"s{i}", b"") for i in range(2000)]
    moved = sum(next(before.owners(k)) != next(after.owners(k)) for k in keys)
    assert moved < 2000 * 3 / 11
    assert all(next(after.owners(k)) == 10 for k in keys if next(before.owners(k)) != next(after.owners(k)))
    assert sorted(before.owners(keys[0])) == list(range(10))


def test_keys_are_of_the_session_or_else_of_the_prompts_beginning():
    assert key_of("s", b"head") == key_of("s", b"other") != key_of("", b"head")
    assert key_of("", b"head") == key_of("", b"head") != key_of("", b"tail")
    assert key_of("", b"") == b""


@pytest.mark.parametrize("size", [100, 1000])
def test_a_choice_in_a_large_fleet_looks_at_a_few(size):
    fleet = Counted(a_fleet(size))
    ring = Ring([c.node_id for c in fleet])
    for i in range(100):
        pick(fleet, Want(key=key_of(f"s{i}", b"")), draw(i), ring)
    assert fleet.looked <= 100 * (TRIES + 2)


def test_a_large_fleet_with_few_able_ones_still_finds_them():
    fleet = [replace(c, serving=i == 777) for i, c in enumerate(a_fleet(1000))]
    assert pick(fleet, Want(), draw()).node_id == "w777"


def test_two_draws_keep_a_large_fleet_even():
    """The most loaded of 200 after 20 rounds of one request for each is near the mean; one draw alone would leave some with twice of it."""
    load = dict.fromkeys(range(200), 0)
    for i in range(4000):
        fleet = [a_worker(f"w{n}", load=Load(running=load[n])) for n in range(200)] if i % 50 == 0 else fleet  # noqa: F821
        chosen = int(pick(fleet, Want(workload=Workload.BATCH), draw(i)).node_id[1:])
        load[chosen] += 1
        fleet[chosen] = replace(fleet[chosen], load=Load(running=load[chosen]))
    assert len(fleet) > SCANNED
    assert max(load.values()) <= 24


def test_a_worker_gets_its_weight_of_what_it_would_get_by_itself_and_all_of_it_where_nobody_else_is():
    fleet = [a_worker("canary", weight=0.5), *a_fleet(3)]
    found = Counter(pick(fleet, Want(), draw(i)).node_id for i in range(2000))
    assert 0.09 < found["canary"] / 2000 < 0.16  # half of a quarter
    assert pick([a_worker("canary", weight=0.01)], Want(), draw()).node_id == "canary"
    full = [a_worker("canary", weight=0.01), a_worker("w0", room=0)]
    assert pick(full, Want(), draw()).node_id == "canary"


def test_a_session_stays_in_a_workers_share_or_out_of_it_and_prompts_that_begin_alike_do_not():
    fleet = [a_worker("canary", weight=0.5), a_worker("w0", load=Load(running=3))]
    ring = Ring([c.node_id for c in fleet])
    chosen = {
        s: {pick(fleet, Want(key=key_of(f"s{s}", b"")), draw(i), ring).node_id for i in range(20)} for s in range(40)
    }
    assert all(len(nodes) == 1 for nodes in chosen.values())
    assert set().union(*chosen.values()) == {"canary", "w0"}
    prompt = {pick(fleet, Want(key=key_of("", b"the same")), draw(i), ring).node_id for i in range(40)}
    assert prompt == {"canary", "w0"}


@pytest.mark.parametrize("workers", [2, 4, 8, 40])
def test_a_canary_gets_its_share_wherever_it_stands_in_the_fleet(workers: int) -> None:
    rng = Random(7)
    for at in (0, workers // 2, workers - 1):
        fleet = [replace(a_worker(f"w{i}"), weight=0.5 if i == at else 1.0) for i in range(workers)]
        got = sum(
            pick(fleet, Want(), [rng.random() for _ in range(draws(workers))]).node_id == f"w{at}" for _ in range(4000)
        )
        assert got / 4000 == pytest.approx(0.5 / workers, abs=0.02)


@pytest.mark.parametrize("workers", [3, 16, 40])
def test_equals_get_equal_parts(workers: int) -> None:
    rng = Random(7)
    fleet = [a_worker(f"w{i}") for i in range(workers)]
    got = Counter(
        pick(fleet, Want(), [rng.random() for _ in range(draws(workers))]).node_id for _ in range(400 * workers)
    )
    assert min(got.values()) > 300 and max(got.values()) < 500
