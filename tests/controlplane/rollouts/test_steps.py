"""What becomes of a rollout at one look, who is a canary, and what the document and the mark have of it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from controlplane.rollouts import builds
from controlplane.rollouts.choose import Wanted, Worker, choose, more
from controlplane.rollouts.judge import Judgement
from controlplane.rollouts.state import PREFIX, UNKNOWN, Measure, Rollout, Stage, Verdict, Wealth, decode, encode
from controlplane.rollouts.steps import Facts, advance
from controlplane.rollouts.watching import build_of
from controlplane.spec import pin, promote, set_fields
from trimtab.errors import Conflict, InvalidRequest, PolicyRefused
from trimtab.sequential import Odds, Sign
from trimtab.snapshot import Document, Limits, Node, Owner, Pin, Scope, ScopeKind, resolve

BAKE_MS = 60_000
FIELDS = {"batch.active": "8"}
WELL, WORSE = Judgement(samples=(30, 90)), Judgement(worse=("P99 900, at the rest 50",), samples=(30, 90))
UNSURE = Judgement(undecided="too few requests", samples=(3, 90))


def a_worker(name: str, pool: str = "default", **labels: str) -> Worker:
    return Worker(Node(name, pool, labels, Limits(64, 8192)), "m")


WORKERS = [a_worker(f"w{i}") for i in range(4)]
NODES = [w.node for w in WORKERS]


def a_rollout(**changes: object) -> Rollout:
    base = Rollout(
        "r-1", "ada", "why", FIELDS, {"batch.active": "default"}, Scope(), ("w0",), ("w1", "w2", "w3"), 0.5, 60, 0, 0
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def after(r: Rollout, j: Judgement, at_ms: int, **facts: object) -> Rollout:
    return advance(r, j, Facts(others=WORKERS[1:], **facts), at_ms)  # type: ignore[arg-type]


def test_worse_canaries_are_taken_back_at_the_second_look_in_a_row_at_any_time() -> None:
    once = after(a_rollout(), WORSE, 1000)
    assert once.live and once.looks == 1
    assert after(once, WELL, 2000).looks == 0
    twice = after(once, WORSE, 2000)
    assert twice.stage is Stage.ROLLED_BACK and twice.ended_unix_ms == 2000
    assert twice.lines[-1].evidence == "P99 900, at the rest 50"


def test_nothing_comes_of_a_bake_that_goes_on() -> None:
    r = after(a_rollout(), WELL, BAKE_MS - 1)
    assert r == a_rollout(samples=(30, 90))


def test_time_that_nobody_watched_is_no_bake() -> None:
    missed = a_rollout(unwatched_ms=5000)
    assert after(missed, WELL, BAKE_MS + 4999).stage is Stage.BAKING
    wider = after(missed, WELL, BAKE_MS + 5000)
    assert (wider.stage, wider.unwatched_ms) == (Stage.WIDENING, 0)
    assert after(missed, WORSE, 1000).looks == 1, "worse is worse at any time"


def test_half_of_the_rest_gets_it_then_all_and_somebody_is_always_left_to_compare_with() -> None:
    wider = after(a_rollout(), WELL, BAKE_MS)
    assert (wider.stage, wider.canaries, wider.pending) == (Stage.WIDENING, ("w0", "w1", "w2"), ("w3",))
    assert (wider.began_unix_ms, wider.samples, wider.share_of_work()) == (BAKE_MS, (0, 0), 1.0)
    rest = Facts(others=WORKERS[3:])
    assert advance(wider, WELL, rest, 2 * BAKE_MS - 1).live
    assert advance(wider, WELL, rest, 2 * BAKE_MS).stage is Stage.PROMOTED


def test_a_thousand_workers_have_it_after_three_bakes() -> None:
    r, rest = a_rollout(), [a_worker(f"x{i:03}") for i in range(999)]
    for i in range(3):
        r = advance(r, WELL, Facts(others=[w for w in rest if w.node_id not in r.canaries]), (i + 1) * BAKE_MS)
    assert r.stage is Stage.PROMOTED and len(r.canaries) == 751


def test_what_nobody_can_tell_is_watched_three_times_more_and_then_taken_back() -> None:
    r = a_rollout()
    for i in range(1, 4):
        r = after(r, UNSURE, i * BAKE_MS)
        assert r.live and r.extended == i
    assert after(r, WELL, 4 * BAKE_MS).stage is Stage.WIDENING
    lost = after(r, UNSURE, 4 * BAKE_MS)
    assert (lost.stage, lost.verdict) == (Stage.ROLLED_BACK, "undecided: too few requests")


@pytest.mark.parametrize(
    ("facts", "stage", "words"),
    [
        ({"absent_s": 31.0}, Stage.ROLLED_BACK, "lost its canaries"),
        ({"out_of_memory": ("w0",)}, Stage.ROLLED_BACK, "out of memory"),
        ({"restarts": (2, 0)}, Stage.ROLLED_BACK, "processes ended 2 times"),
        ({"theirs": "batch.active was set to 9 meanwhile"}, Stage.ABORTED, "was set to 9 meanwhile"),
        ({"present": False}, Stage.ABORTED, "its part of the policy is gone"),
        ({"present": False, "done": True, "theirs": "x"}, Stage.PROMOTED, "promoted"),
    ],
)
def test_what_ends_it_beside_the_measures(facts: dict[str, object], stage: Stage, words: str) -> None:
    r = after(a_rollout(), WELL, 1000, **facts)
    assert r.stage is stage and words in r.verdict


def test_restarts_of_everybody_and_a_short_absence_end_nothing() -> None:
    assert after(a_rollout(), WELL, 1000, restarts=(2, 1), absent_s=29.0).live


def test_no_further_while_a_canary_is_to_be_waited_for_and_not_for_ever() -> None:
    away = {"waits": "w0 not serving", "waits_s": 5.0}
    assert after(a_rollout(), WELL, BAKE_MS - 1, **away) == a_rollout(samples=(30, 90))
    held = after(a_rollout(), WELL, BAKE_MS, **away)
    assert held.live and held.canaries == ("w0",) and held.verdict == "waits: w0 not serving"
    assert after(held, UNSURE, BAKE_MS + 1000, **away).lines == held.lines
    assert after(held, WELL, BAKE_MS + 2000).stage is Stage.WIDENING
    lost = after(held, WELL, BAKE_MS + 2000, waits="w0 not serving", waits_s=180.0)
    assert (lost.stage, lost.verdict) == (Stage.ROLLED_BACK, "undecided: w0 not serving")
    twice = after(a_rollout(), WORSE, BAKE_MS, **away)
    assert after(twice, WORSE, BAKE_MS + 1000, **away).verdict == "canaries are worse"


def test_what_was_ended_or_changed_by_people_is_promoted_by_nobody() -> None:
    promotes = build_of(a_rollout(stage=Stage.PROMOTED))
    began = builds.begin("r-1", FIELDS, Scope(), ("w0",))(Document(), NODES, 1).document
    done = promotes(began, NODES, 2).document
    assert done.base == {"batch.active": 8}
    # By a leader that could not say so any more.
    assert promotes(done, NODES, 3).changes == ()
    back = builds.drop("r-1")(began, NODES, 2).document
    for build in (promotes, promote("r-1", FIELDS, Scope())):
        with pytest.raises(Conflict, match="rollout r-1 has ended"):
            build(back, NODES, 3)
    people = set_fields({"batch.active": "9"})(began, NODES, 2).document
    with pytest.raises(Conflict, match=r"batch\.active was set to 9 meanwhile"):
        promotes(people, NODES, 3)
    pinned = pin(["batch.active"], True, author="bob", reason="mine")(began, NODES, 2).document
    with pytest.raises(Conflict, match="pinned by bob"):
        promotes(pinned, NODES, 3)


def test_one_of_each_pool_and_model_is_a_canary_unless_more_are_wanted() -> None:
    both = [*WORKERS, a_worker("b0", "big"), a_worker("b1", "big"), a_worker("alone", "lone")]
    assert choose(WORKERS, Wanted()) == ("w0",)
    assert choose(WORKERS, Wanted(count=2)) == ("w0", "w1")
    assert choose(WORKERS, Wanted(share=0.5)) == ("w0", "w1")
    assert choose(WORKERS, Wanted(share=0.99)) == ("w0", "w1", "w2")
    assert choose(both[:-1], Wanted()) == ("b0", "w0")
    labelled = [*WORKERS, a_worker("l0", gpu="h200")]
    assert choose(labelled, Wanted(label="gpu=h200")) == ("l0",)
    assert choose(WORKERS, Wanted(node_ids=("w2", "w1"))) == ("w1", "w2")


@pytest.mark.parametrize(
    ("workers", "wanted", "reason"),
    [
        ([], Wanted(), "NOBODY_TO_TRY"),
        (WORKERS[:1], Wanted(), "NOBODY_LEFT"),
        (WORKERS, Wanted(count=4), "NOBODY_LEFT"),
        (WORKERS[:2], Wanted(node_ids=("w0", "w1")), "NOBODY_LEFT"),
        (WORKERS, Wanted(label="gpu=h200"), "NOBODY_TO_TRY"),
    ],
)
def test_where_nobody_is_left_to_compare_with_it_is_refused(workers: list[Worker], wanted: Wanted, reason: str) -> None:
    with pytest.raises(PolicyRefused) as refused:
        choose(workers, wanted)
    assert refused.value.cause == reason


def test_a_worker_that_is_none_is_named() -> None:
    with pytest.raises(InvalidRequest, match="w9: no worker"):
        choose(WORKERS, Wanted(node_ids=("w0", "w9")))


def test_half_of_those_without_it_are_next_rounded_up_but_one() -> None:
    assert more(WORKERS[1:]) == ("w1", "w2")
    assert more(WORKERS[2:]) == ("w2",)
    assert more(WORKERS[3:]) == ()


def test_canaries_have_it_then_all_and_nothing_of_the_rollout_stays() -> None:
    began = builds.begin("r-1", FIELDS, Scope(), ("w0",))(Document(), NODES, 1).document
    assert [resolve(began, n, now_unix_ms=1).policy.batch.active for n in NODES[:2]] == [8, 48]
    (mine,) = began.overlays
    assert (mine.owner, mine.scope) == (Owner.ROLLOUT, Scope(ScopeKind.ROLLOUT, ("w0",)))
    wider = builds.widen("r-1", ("w0", "w1"))(began, NODES, 2).document
    assert [resolve(wider, n, now_unix_ms=1).policy.batch.active for n in NODES[:3]] == [8, 8, 48]
    done = promote("r-1", FIELDS, Scope())(wider, NODES, 3).document
    assert (done.base, done.overlays) == ({"batch.active": 8}, ())
    back = builds.drop("r-1")(wider, NODES, 3).document
    assert (back.base, back.overlays) == ({}, ())
    people = set_fields({"batch.active": "9"})(wider, NODES, 3).document
    assert people.overlays == wider.overlays
    assert builds.set_now(people, FIELDS, Scope()) == {"batch.active": "9"}


def test_what_can_not_begin_is_refused_with_what_to_do() -> None:
    began = builds.begin("r-1", FIELDS, Scope(), ("w0",))(Document(), NODES, 1).document
    with pytest.raises(Conflict, match="rollout r-1 lives"):
        builds.begin("r-2", FIELDS, Scope(), ("w1",))(began, NODES, 2)
    pinned = Document(pins=(Pin("batch.active", "bob", "looking"),))
    with pytest.raises(PolicyRefused, match="pinned by bob"):
        builds.begin("r-1", FIELDS, Scope(), ("w0",))(pinned, NODES, 1)
    with pytest.raises(PolicyRefused, match="nothing would change"):
        builds.begin("r-1", FIELDS, Scope(), ("w0",))(Document({"batch.active": 8}), NODES, 1)
    # Only w3 could not have it, and w3 is no canary.
    small = [*NODES[:3], Node("w3", limits=Limits(4, 8192))]
    with pytest.raises(PolicyRefused, match="w3"):
        builds.begin("r-1", FIELDS, Scope(), ("w0",))(Document(), small, 1)


def test_a_field_that_goes_back_to_its_default_is_tried_as_that() -> None:
    document = Document({"batch.active": 8})
    began = builds.begin("r-1", {"batch.active": "default"}, Scope(), ("w0",))(document, NODES, 1).document
    assert [resolve(began, n, now_unix_ms=1).policy.batch.active for n in NODES[:2]] == [48, 8]
    assert promote("r-1", {"batch.active": "default"}, Scope())(began, NODES, 2).document.base == {}


def test_a_worker_with_a_value_of_its_own_is_no_canary_for_the_mesh() -> None:
    own = set_fields({"batch.active": "4"}, Scope(ScopeKind.NODE, ("w0",)))(Document(), NODES, 1).document
    assert builds.shadowed(own, FIELDS, Scope(), NODES[0])
    assert not builds.shadowed(own, FIELDS, Scope(), NODES[1])
    assert not builds.shadowed(own, {"batch.hard_cap": "1"}, Scope(), NODES[0])


def test_a_mark_gives_back_what_it_was_made_of_and_one_of_somebody_else_is_passed_over() -> None:
    wealth = Wealth(firsts=Odds((1.0, 2.0, 3.0, 4.0)), waits=Sign((0.5, -0.5)))
    measure = Measure("P99", 1.5, None, 3, 0, Verdict.UNDECIDED)
    r = a_rollout(wealth=wealth, measures=(measure,), samples=(1, 2), looks=1, scope=Scope(ScopeKind.POOL, ("p",)))
    r = replace(r, looked_unix_ms=7000, unwatched_ms=-3)
    r = r.told(5, "something", "figures")
    assert decode(PREFIX + "r-1", encode(r)) == r
    older = {k: v for k, v in json.loads(encode(r)).items() if k not in ("looked", "unwatched")}
    assert decode(PREFIX + "r-1", json.dumps(older).encode()) == replace(r, looked_unix_ms=UNKNOWN, unwatched_ms=0)
    for key, data in (("want/default", encode(r)), (PREFIX + "r-1", b"{"), (PREFIX + "r-1", b'{"kind": "rollout"}')):
        assert decode(key, data) is None


def test_nobody_to_widen_it_to_is_no_reason_to_promote_while_the_rest_is_away() -> None:
    def look(r: Rollout, at_ms: int, waits_s: float, others: list[Worker], waits: str = "w1 not serving") -> Rollout:
        return advance(r, WELL, Facts(rest_waits=waits, rest_waits_s=waits_s, others=others), at_ms)

    held = look(a_rollout(), BAKE_MS, 1.0, [])
    assert held.stage is Stage.BAKING and held.verdict == "waits: w1 not serving"
    assert look(held, BAKE_MS + 1000, 2.0, []).lines == held.lines
    assert look(held, BAKE_MS + 2000, 0.0, WORKERS[1:], waits="").stage is Stage.WIDENING
    assert look(held, BAKE_MS + 2000, 3.0, WORKERS[1:]).stage is Stage.WIDENING, "there is somebody to widen it to"
    assert look(held, BAKE_MS + 2000, 0.0, [], waits="").stage is Stage.PROMOTED
    lost = look(held, 4 * BAKE_MS, 180.0, [])
    assert (lost.stage, lost.verdict) == (Stage.ROLLED_BACK, "undecided: w1 not serving")
