"""What happened to the policy, as one story."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from controlplane import story as s


def entry(revision: int, at: int = 0, *fields: str, refused: str = "", term: int = 0) -> Any:
    changes = [SimpleNamespace(field=f, before="1", after="2", scope="") for f in fields]
    identity = SimpleNamespace(epoch=1, revision=revision, sha256=b"")
    facts = {"spec_version": 0, "author": "ada", "reason": "", "kind": 1, "evidence": ""}
    return SimpleNamespace(
        identity=identity,
        written_unix_ms=at or revision * 100,
        changes=changes,
        refused_because=refused,
        term=term,
        **facts,
    )


def answer(revision: int, node: str, at: int, result: str = "applied") -> Any:
    identity = SimpleNamespace(epoch=1, revision=revision, sha256=b"")
    facts = {"incarnation": "i", "apply_ms": 0.5, "reason": "", "message": ""}
    return SimpleNamespace(identity=identity, node_id=node, at_unix_ms=at, result=result, **facts)


def places(entries: Any) -> list[tuple[int, bool]]:
    return [(e.identity.revision, bool(e.refused_because)) for e in entries]


def test_two_logs_are_one_story_newest_first() -> None:
    first, tried, mine, theirs = entry(1), entry(1, 150, refused="no"), entry(2), entry(3, term=4)
    merged = s.merged([mine, tried, first], [theirs, mine, first])
    assert places(merged) == [(3, False), (2, False), (1, True), (1, False)]


def test_answers_go_with_the_change_that_they_answer() -> None:
    told = s.chapters(
        [entry(2, 200), entry(1, 150, refused="no"), entry(1, 100)],
        [answer(1, "w0", 110), answer(2, "w1", 230), answer(2, "w0", 210)],
    )
    assert [[a.node_id for a in c.answers] for c in told] == [["w0", "w1"], [], ["w0"]]
    assert [c.took_ms for c in told] == [30.0, None, 10.0]


def test_it_is_told_of_a_field_and_of_a_time() -> None:
    told = s.chapters([entry(3, 0, "b"), entry(2, 0, "a"), entry(1, 150, refused="a=0: too small")], [])
    assert places(c.entry for c in s.of_field(told, "a")) == [(2, False), (1, True)]
    assert places(c.entry for c in s.during(told, 150, 200)) == [(2, False), (1, True)]
    found = s.in_force(told, (1, 2))
    assert found is not None
    assert places([found.entry]) == [(2, False)]
    assert s.in_force(told, (1, 1)) is None


def test_rows_are_oldest_first_and_whole() -> None:
    rows = list(s.rows(s.chapters([entry(2), entry(1)], [answer(1, "w0", 110)])))
    assert [(r["row"], r["identity"]["revision"]) for r in rows] == [("change", 1), ("answer", 1), ("change", 2)]


def test_a_node_that_joined_a_day_later_does_not_make_the_change_a_day_long() -> None:
    (told,) = s.chapters([entry(1, 1000)], [answer(1, "w0", 1040), answer(1, "w1", 1000 + 86_400_000)])
    assert told.took_ms == 40.0
    assert len(told.answers) == 2


def test_a_process_that_joined_after_the_change_is_no_part_of_how_long_it_took() -> None:
    here = answer(5, "w0", 100)
    here.incarnation = "i1"
    joins = answer(5, "w1", 20_100)
    joins.incarnation = "i2"
    (c,) = s.chapters([entry(5, 90)], [here, joins], {("w0", "i1"): 0.0, ("w1", "i2"): 20_000.0})
    assert [c.later(a) for a in c.answers] == [False, True]
    assert c.took_ms == 10


def test_a_process_whose_stream_is_a_new_one_was_there_all_the_same() -> None:
    """A control plane was started anew, or a certificate renewed: what it had answered before, it answered at once."""
    here = answer(5, "w0", 100)
    here.incarnation = "i1"
    (c,) = s.chapters([entry(5, 90)], [here], {("w0", "i1"): 20_000.0})
    assert (c.later(here), c.took_ms) == (False, 10)


def test_a_refused_file_is_told_of_the_field_that_it_failed_on() -> None:
    told = s.chapters(
        [entry(1, 150, refused="a whole spec: batch.active = 99 is above what the engine of w0 can do")], []
    )
    assert s.of_field(told, "batch.active") == told
    assert s.of_field(told, "batch.act") == s.of_field(told, "batch.active.x") == []
