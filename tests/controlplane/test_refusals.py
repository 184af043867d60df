"""Controllers' moves that a node can't take, or that are too many: the others are written and renewed all the same."""

from __future__ import annotations

import pytest

from controlplane import spec
from controlplane.controllers.decision import Move
from controlplane.refusals import REFUSED_S, Refusals
from controlplane.spec import adjust, set_fields
from controlplane.tick import Changes, changes, live_of, without
from tests.controlplane.mesh import FakeNode, a_mesh
from tests.controlplane.test_loop import Told, until
from trimtab.errors import PolicyRefused
from trimtab.snapshot import Adjustment, Document, Limits, Node, Scope, ScopeKind

ROOMY, SMALL = Limits(256, 8192), Limits(64, 8192)


def at(node_id: str) -> Scope:
    return Scope(ScopeKind.NODE, (node_id,))


def an_adjustment(
    node_id: str = "", expires: int = 60_000, factor: float = 0.5, path: str = "batch.active"
) -> Adjustment:
    return Adjustment("batch", path, at(node_id) if node_id else Scope(), "slow", expires, factor=factor)


def a_move(node_id: str, factor: float = 0.5, path: str = "batch.active") -> Move:
    return Move(path, at(node_id), "slow", factor=factor)


# ---- what the document takes


def test_a_node_that_cannot_do_what_people_have_set_keeps_nobodys_adjustments_from_being_renewed() -> None:
    a, c = Node("a", limits=ROOMY), Node("c", limits=ROOMY)
    first = adjust([an_adjustment("a"), an_adjustment("c")])(Document({"batch.active": 128}), [a, c], 1).document
    nodes = [a, Node("c", limits=SMALL)]
    renewed = adjust([an_adjustment("a", 90_000), an_adjustment("c", 90_000)])(first, nodes, 30_000).document
    assert [x.expires_unix_ms for x in renewed.adjustments] == [90_000, 90_000]
    moved = adjust([an_adjustment("a", 90_000, 0.25), an_adjustment("c", 90_000, 0.25)])(renewed, nodes, 31_000)
    assert [x.factor for x in moved.document.adjustments] == [0.25, 0.25], "c could not do it before either"
    assert adjust((), [spec.key_of(x) for x in renewed.adjustments])(renewed, nodes, 31_000).document.adjustments == ()


def test_a_move_that_a_node_cannot_take_is_refused_when_it_is_new_and_not_when_it_is_renewed() -> None:
    tight = Document({"batch.active": 128, "prefill.step_tokens": 512})
    node, starves = Node("a", limits=ROOMY), an_adjustment(factor=0.1, path="prefill.step_tokens")
    with pytest.raises(PolicyRefused, match=r"prefill\.step_tokens"):
        adjust([starves])(tight, [node], 1)
    held = adjust([starves])(tight, [], 1).document
    renewed = an_adjustment(expires=90_000, factor=0.1, path="prefill.step_tokens")
    assert adjust([renewed])(held, [node], 30_000).document.adjustments == (renewed,)
    with pytest.raises(PolicyRefused):
        adjust([renewed])(held, [node], 60_001)
    # What people set is judged as before.
    with pytest.raises(PolicyRefused, match="above what the engine of a can do"):
        set_fields({"batch.active": "300"})(tight, [node], 1)


# ---- what is left of a write


def refused(node: str = "", cause: str = "ABOVE_ENGINE_LIMIT") -> PolicyRefused:
    return PolicyRefused("no", reason=cause, node=node)


def test_without_the_moves_of_the_node_that_is_named_the_rest_stands() -> None:
    moves = [a_move("a"), a_move("c"), Move("batch.hard_cap", Scope(), "all", factor=0.5)]
    found = changes("batch", moves, {}, set(), 0)
    c = Node("c")
    rest = without(found, refused("c"), c, {})
    assert [str(x.scope) for x in rest.put] == ["node/a", ""]
    assert rest.texts == ("batch.active at node/a ×0.5", "batch.hard_cap ×0.5")
    last = without(rest, refused("c"), c, {})
    assert [str(x.scope) for x in last.put] == ["node/a"], "what holds for all is to blame where nothing of its own is"
    assert without(last, refused("c"), c, {}) == Changes()
    assert without(found, refused(), None, {}) == Changes()


def test_of_too_many_those_that_live_already_go_on() -> None:
    live = live_of(changes("batch", [a_move("a")], {}, set(), 0).put, 0)
    found = changes("batch", [a_move("a", 0.25), a_move("c")], live, set(), 0)
    rest = without(found, refused(cause=spec.TOO_MANY), None, live)
    assert [(str(x.scope), x.factor) for x in rest.put] == [("node/a", 0.25)]


def test_what_was_refused_is_neither_put_nor_taken_back() -> None:
    live = live_of(changes("batch", [a_move("a")], {}, set(), 0).put, 0)
    key = ("batch", "batch.active", at("a"))
    assert changes("batch", [a_move("a", 0.25)], live, set(), 0, {key}).empty
    assert changes("batch", [], live, set(), 0, {key}).drop == (key,)


def test_what_is_refused_again_and_again_is_tried_ever_more_rarely() -> None:
    """Else many of them would take all the attempts of every tick, and nobody else's move would ever be written."""
    refusals, key, now = Refusals(), ("batch", "batch.active", at("a")), 0.0
    for rest_s in (30.0, 60.0, 120.0, 240.0):
        refusals.note([key], now)
        assert refusals.of("batch", now + rest_s - 1.0) and not refusals.of("batch", now + rest_s)
        now += rest_s
    later = now + 1000.0
    refusals.note([("batch", "batch.active", at("b"))], later)
    refusals.note([key], later)
    assert not refusals.of("batch", later + REFUSED_S), "it was well for a while"


def test_a_refusal_is_remembered_for_half_a_minute_and_told() -> None:
    refusals, key = Refusals(), ("batch", "batch.active", at("a"))
    refusals.note([key], 100.0)
    assert refusals.of("batch", 100.0 + REFUSED_S - 1) == frozenset({key})
    assert refusals.of("scale", 100.0) == frozenset()
    assert [a.key for a in refusals.alerts(101.0)] == ["refused-moves/batch"]
    assert (refusals.of("batch", 100.0 + REFUSED_S), refusals.alerts(100.0 + REFUSED_S)) == (frozenset(), [])


# ---- the loop


@pytest.mark.slow
async def test_a_node_that_can_not_take_its_move_keeps_nobody_else_from_theirs() -> None:
    told = Told()
    async with a_mesh(controllers=(told,)) as mesh:
        a, c = (mesh.start_node(FakeNode(mesh.address, name)) for name in "ac")
        await mesh.until(lambda fleet: len(fleet) == 2 and all(m.report for m in fleet.values()))
        await mesh.admin.set_policy({"prefill.step_tokens": "300"}, author="t", reason="t")
        await mesh.admin.set_policy({"batch.active": "40"}, author="t", reason="t", scope=at("c"))
        told.moves = (a_move("a"), a_move("c", 0.1, "prefill.step_tokens"))
        await until(lambda: a.active and a.active[-1] == 24 and len(mesh.plane.loop.decisions) == 2)
        said = {d.text: d.failed for d in mesh.plane.loop.decisions}
        assert said["batch.active at node/a ×0.5"] == ""
        assert "less than batch.active = 40" in said["prefill.step_tokens at node/c ×0.1"]
        # Within the half minute in which that one is left alone.
        told.moves = (a_move("a", 0.25), told.moves[1])
        await until(lambda: a.active[-1] == 12)
        assert c.active[-1] == 40
        await until(lambda: [x.key for x in mesh.plane.loop._alerts.firing] == ["refused-moves/batch"])


@pytest.mark.slow
async def test_one_adjustment_too_many_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "MAX_ADJUSTMENTS", 2)
    told = Told(moves=(a_move("a"), a_move("b")))
    async with a_mesh(controllers=(told,)) as mesh:
        a, b, c = (mesh.start_node(FakeNode(mesh.address, name)) for name in "abc")
        await until(lambda: a.active and b.active and (a.active[-1], b.active[-1]) == (24, 24))
        told.moves = (a_move("a", 0.25), a_move("b"), a_move("c"))
        await until(lambda: a.active[-1] == 12)
        assert (b.active[-1], c.active[-1]) == (24, 48)
        await until(lambda: any(d.failed for d in mesh.plane.loop.decisions))
        failed = {d.text: d.failed for d in mesh.plane.loop.decisions if d.failed}
        assert failed == {"batch.active at node/c ×0.5": "at most 2 adjustments can live at a time"}
