"""The clusters controller: when classes are cut anew, and when they are left."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from controlplane.controllers import clusters
from controlplane.controllers.decision import Decision
from controlplane.seen import Lengths
from controlplane.spec import adjust
from controlplane.tick import changes
from tests.controlplane.controllers.builders import NOW, a_seen, policy_of, some_lengths
from trimtab.policy import Value
from trimtab.snapshot import Adjustment, Document, Node, resolve

GUIDE = (511, 1024, 4095, 8192)


def mixed(*counts: int) -> list[float]:
    """So many prompts in each of the guide's classes, spread evenly over it."""
    bounds = (64, *GUIDE, 20_000)
    classes = zip(counts, bounds, bounds[1:], strict=False)
    return [low + 1 + (high - low - 1) * i / count for count, low, high in classes for i in range(count)]


EVEN = mixed(300, 200, 300, 150, 50)
"""A mix that the guide's edges tell apart."""


def chats(scale: float, n: int = 1000, seed: int = 7) -> list[float]:
    """Lengths spread over `scale` to thirty times as much, most of them short."""
    draw = random.Random(seed)
    return [scale * 30.0 ** (draw.random() ** 2) for _ in range(n)]


@dataclass
class Course:
    """Looks a minute apart."""

    fields: Mapping[str, Value] = field(default_factory=dict)
    live: Iterable[Adjustment] = ()
    now: float = NOW
    decision: Decision = field(init=False)

    def __post_init__(self) -> None:
        self.decision = Decision(clusters.start(self.live))

    def look(self, prompts: Iterable[float], seconds: float = 60.0) -> tuple[int, ...]:
        return self.see({"m": some_lengths(prompts=prompts)}, seconds)

    def see(self, lengths: Mapping[str, Lengths], seconds: float = 60.0) -> tuple[int, ...]:
        """The edges that hold then, as a worker resolves them."""
        self.now += seconds
        seen = a_seen(now=self.now, lengths=lengths)
        self.decision = clusters.step(self.decision.state, seen, policy_of(self.fields), self.now)
        return self.edges()

    def edges(self) -> tuple[int, ...]:
        put = changes("clusters", self.decision.moves, {}, set(), 1000).put
        document = adjust(put)(Document(self.fields), (), 1000).document
        part = resolve(document, Node("w"), now_unix_ms=1000).policy.clusters
        return (part.short_to, part.standard_to, part.medium_to, part.long_to)


def test_edges_that_tell_the_mix_apart_stay() -> None:
    course = Course()
    assert {course.look(EVEN) for _ in range(60)} == {GUIDE}
    assert course.decision.holds == ()


def test_a_mix_that_has_shifted_is_cut_at_its_own_quantiles_after_three_looks() -> None:
    course, mix = Course(), chats(2000)
    assert course.look(mix) == course.look(mix) == GUIDE
    found = course.look(mix)
    ranked = sorted(mix)
    for edge, q in zip(found, (0.5, 0.75, 0.9, 0.98), strict=True):
        assert edge % 64 == 0
        assert abs(edge - ranked[int(q * 1000)]) < 0.05 * edge
    move = course.decision.moves[0]
    assert move.reason == f"the mix of lengths has shifted: classes end at {', '.join(map(str, found))} tokens"
    assert move.evidence.startswith("1000 recent prompts of m: 0.0%, ")


def test_looks_are_a_minute_apart() -> None:
    course, mix = Course(), chats(2000)
    for _ in range(60):
        assert course.look(mix, seconds=2.0) == GUIDE
    assert course.look(mix, seconds=2.0) != GUIDE


def test_a_mix_that_is_back_after_two_looks_cuts_nothing() -> None:
    course, mix = Course(), chats(2000)
    for _ in range(30):
        assert course.look(mix) == course.look(mix) == course.look(EVEN) == GUIDE


def test_mixes_by_turns_do_not_make_it_hunt() -> None:
    course, long, longer = Course(), chats(2000), chats(4000)
    for _ in range(3):
        course.look(long)
    cut = course.edges()
    assert {course.look(mix) for mix in (longer, long) * 50} == {cut}


def test_a_cut_that_would_move_no_edge_by_a_quarter_is_not_made() -> None:
    course = Course()
    for _ in range(3):
        course.look(chats(2000))
    cut = course.edges()
    assert {course.look(chats(2300, seed=i)) for i in range(20)} == {cut}
    for _ in range(3):
        course.look(chats(3000))
    assert course.edges() != cut


def test_peoples_edges_come_back_once_they_tell_the_mix_apart_clearly() -> None:
    course = Course()
    for _ in range(3):
        course.look(chats(2000))
    # 7 of 100 between two edges are enough to keep people's, and not enough to take them up again.
    scarce = mixed(390, 70, 300, 190, 50)
    kept = Course()
    assert {kept.look(scarce) for _ in range(5)} == {GUIDE}
    assert GUIDE not in {course.look(scarce) for _ in range(10)}
    for _ in range(3):
        course.look(mixed(380, 110, 280, 180, 50))
    assert (course.decision.moves, course.edges()) == ((), GUIDE)


def test_a_mix_of_one_length_is_left_as_it_is() -> None:
    course = Course()
    assert {course.look([300.0] * 1000) for _ in range(10)} == {GUIDE}


def test_edges_keep_their_order_where_quantiles_fall_together() -> None:
    mix = [100.0] * 600 + [130.0] * 250 + [200.0] * 100 + [300.0] * 50
    course = Course()
    for _ in range(3):
        course.look(mix)
    assert list(course.edges()) == sorted(set(course.edges()))


def test_a_small_mix_holds_and_says_so() -> None:
    course = Course()
    for _ in range(10):
        assert course.look(chats(2000, n=199)) == GUIDE
    assert course.decision.holds == ("no model has 200 requests yet",)
    for _ in range(3):
        course.look(chats(2000))
    cut = course.edges()
    assert cut != GUIDE
    assert {course.see({}) for _ in range(10)} == {cut}


def test_of_several_models_the_one_with_most_requests_decides() -> None:
    course = Course()
    busy = some_lengths(prompts=EVEN, day=[300.0] * 500)
    few = some_lengths(prompts=chats(2000))
    for _ in range(5):
        assert course.see({"a": few, "b": busy, "c": few}) == GUIDE


def test_peoples_edges_are_what_counts() -> None:
    own = {
        "clusters.short_to": 2500,
        "clusters.standard_to": 5000,
        "clusters.medium_to": 15_000,
        "clusters.long_to": 40_000,
    }
    course = Course(own)
    assert {course.look(chats(2000)) for _ in range(5)} == {(2500, 5000, 15_000, 40_000)}


def test_what_people_set_later_does_not_move_a_cut() -> None:
    course, mix = Course(), chats(2000)
    for _ in range(3):
        course.look(mix)
    cut = course.edges()
    course.fields = {"clusters.short_to": 300}
    assert course.look(mix, seconds=1.0) == cut


def test_a_new_leader_goes_on_with_the_edges_of_the_old_one() -> None:
    old, mix = Course(), chats(2000)
    for _ in range(3):
        old.look(mix)
    new = Course(live=changes("clusters", old.decision.moves, {}, set(), 1000).put)
    assert new.see({}) == old.edges()
    assert {new.look(mix) for _ in range(10)} == {old.edges()}


def test_an_idle_hour_moves_nothing() -> None:
    course = Course()
    assert {course.see({}, seconds=1.0) for _ in range(3600)} == {GUIDE}
