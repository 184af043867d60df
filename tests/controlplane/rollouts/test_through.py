"""Moves of controllers that `rollout.through` names: on a canary first, then where they were meant to, or taken back. Virtual time."""

from __future__ import annotations

from dataclasses import replace

from controlplane.controllers.decision import Controller, Move
from controlplane.policies import Policies
from controlplane.rollouts.through import REFUSED_S, Through, unknown
from controlplane.seen import NodeSeen, Seen, Window
from controlplane.spec import Key
from controlplane.tick import changes
from trimtab import measures
from trimtab.messages import NodeState, Role, Workload
from trimtab.sketch import Sketch
from trimtab.snapshot import Adjustment, Document, Node, Scope, ScopeKind

TTFT = measures.ttft(Workload.REALTIME, measures.HOT)
POLICIES = Policies(Document({"rollout.through": ("batch",), "rollout.bake_s": 60}))
MESH = Move("batch.active", Scope(), "too slow", "P99 900", factor=0.5)
W0 = Scope(ScopeKind.NODE, ("w0",))


class Course:
    """Workers with so many milliseconds to the first token, ten requests a second, and what holds."""

    def __init__(self, workers: int = 3) -> None:
        self.through, self.live = Through(), dict[Key, Adjustment]()
        self.ttft_ms = {f"w{i}": 50.0 for i in range(workers)}
        self.now = 0.0
        self.nodes = {
            name: NodeSeen(Node(name), "i1", Role.WORKER, "m", NodeState.SERVING, connected=True, joined_at=0.0)
            for name in self.ttft_ms
        }

    def tick(self, *moves: Move, name: str = "batch") -> list[Move]:
        self.now += 1.0
        for node_id, n in self.nodes.items():
            sketch = Sketch()
            for _ in range(10):
                sketch.add(self.ttft_ms[node_id])
            n.reported_at = self.now
            n.windows.append(Window(int(self.now), self.now - 1.0, self.now, sketches={TTFT: sketch}))
        seen = Seen(self.now, 0.0, self.nodes)
        found = self.through.moves(name, moves, self.live, seen, POLICIES)
        done = changes(name, found, self.live, set(), int(1000 * self.now))
        for key in done.drop:
            del self.live[key]
        self.live |= {(a.controller, a.field, a.scope): a for a in done.put}
        return list(found)

    def until(self, until_s: float, *moves: Move) -> list[Move]:
        found: list[Move] = []
        while self.now < until_s:
            found = self.tick(*moves)
        return found


def test_a_move_for_all_is_tried_on_one_and_then_holds_for_all() -> None:
    course = Course()
    assert course.tick(MESH) == [replace(MESH, scope=W0)]
    assert course.until(60.0, MESH) == [replace(MESH, scope=W0)]
    assert course.until(61.0, MESH) == [MESH]
    assert {scope for _, _, scope in course.live} == {Scope()}
    assert course.until(90.0, MESH) == [MESH]
    assert [what for _, what, _ in course.through.told] == ["tries batch.active on w0"]


def test_a_canary_that_does_worse_takes_the_move_back_and_it_is_left_for_a_while() -> None:
    course = Course()
    course.tick(MESH)
    course.ttft_ms["w0"] = 900.0
    course.until(10.0, MESH)
    assert course.live == {}
    (_, what, evidence) = course.through.told[-1]
    assert what == "takes batch.active back from w0" and "900" in evidence
    course.ttft_ms["w0"] = 50.0
    assert course.until(REFUSED_S, MESH) == []
    # Another value is another move.
    assert course.tick(replace(MESH, factor=0.9)) == [replace(MESH, factor=0.9, scope=W0)]
    assert course.until(REFUSED_S + 15.0, MESH) == [replace(MESH, scope=W0)]


def test_on_top_of_what_holds_a_canary_comes_to_what_is_tried_and_the_others_keep_what_they_have() -> None:
    course = Course()
    course.until(62.0, MESH)
    more = replace(MESH, factor=0.25)
    found = course.tick(more)
    assert [(m.scope, m.factor) for m in found] == [(Scope(), 0.5), (W0, 0.5)]
    assert course.until(125.0, more) == [more]


def test_a_move_whose_canary_is_dead_goes_no_further_and_is_taken_back_where_it_stays_dead() -> None:
    course = Course()
    course.until(50.0, MESH)
    course.nodes["w0"].connected = False
    held = [replace(MESH, scope=W0)]
    assert course.until(75.0, MESH) == held
    course.nodes["w0"].connected = True
    assert course.until(76.0, MESH) == [MESH]

    course = Course()
    course.until(50.0, MESH)
    course.nodes["w0"].state = NodeState.HUNG
    assert course.until(90.0, MESH) == held
    assert course.until(91.0, MESH) == []
    assert course.through.told[-1] == ("batch", "takes batch.active back from w0", "w0 not serving")


def test_nobody_waits_for_what_people_have_set() -> None:
    course = Course()
    course.until(62.0, MESH)
    looser = replace(MESH, factor=0.8)
    assert course.tick(looser) == [looser]
    course.tick()
    assert course.live == {}


def test_moves_of_nodes_of_others_and_of_a_lone_worker_pass() -> None:
    node = replace(MESH, scope=W0)
    assert Course().tick(node) == [node]
    assert Course().tick(MESH, name="priority") == [MESH]
    assert Course(workers=1).tick(MESH) == [MESH]


def test_names_of_no_controller_are_told() -> None:
    class One:
        name = "batch"

    controllers: list[Controller] = [One()]  # type: ignore[list-item]
    (alert,) = unknown(("batch", "bach"), controllers)
    assert "'bach'" in alert.text and "known: batch" in alert.text
