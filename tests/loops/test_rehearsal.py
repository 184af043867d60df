"""A rehearsal does with decisions what the leader does: by the same fold, with the same limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from controlplane.controllers.decision import Decision, Move, PolicyOf, Restart, Want
from controlplane.rehearsal import Rehearsal, most_a_minute, turns
from controlplane.seen import Seen
from tests.loops.builders import a_fleet, people
from trimtab.policy import Value
from trimtab.simulation import Mesh
from trimtab.snapshot import Adjustment, Document, Pin, Scope
from trimtab.workload import arrivals

MOVE = Move("batch.active", Scope(), "because", "n=1", factor=0.5, ttl_s=20.0)
HALVED = Decision(None, (MOVE,))


@dataclass
class Scripted:
    """A controller called batch that wants what `holds` says for its seconds."""

    holds: tuple[tuple[float, float], ...] = ((5, 30),)
    decision: Decision = HALVED
    name: str = "batch"

    def start(self, live: Iterable[Adjustment]) -> None:
        return None

    def step(self, state: None, seen: Seen, policy: PolicyOf, now: float) -> Decision:
        wants = any(begin <= now < end for begin, end in self.holds)
        return self.decision if wants else Decision(None)


def rehearsed(
    controller: Scripted, until_s: float = 60, pins: tuple[Pin, ...] = (), **policy: Value
) -> tuple[Rehearsal, Mesh]:
    document = Document({k.replace("__", "."): v for k, v in policy.items()}, pins=pins)
    rehearsal = Rehearsal([controller], document)
    fleet = replace(a_fleet(2), document=document)
    mesh = Mesh(fleet, arrivals([people((0, 3))], until_s, 1), control=rehearsal)
    mesh.run(until_s)
    return rehearsal, mesh


def test_a_move_is_in_force_from_its_tick_and_taken_back_when_nobody_wants_it() -> None:
    rehearsal, mesh = rehearsed(Scripted(), 20)
    assert {w.policy.batch.active for w in mesh.workers} == {24}
    mesh.run(40)
    assert {w.policy.batch.active for w in mesh.workers} == {48}
    assert [(n.at_s, n.kind) for n in rehearsal.notes] == [(5, "move"), (30, "back")]
    assert rehearsal.factors == {("batch", "batch.active", ""): [(5, -0.5), (30, 0.0)]}


def test_a_move_that_is_held_outlives_its_expiry() -> None:
    rehearsal, mesh = rehearsed(Scripted(holds=((5, 1000),)), 60)
    assert {w.policy.batch.active for w in mesh.workers} == {24}
    assert len(rehearsal.notes) == 1


@pytest.mark.parametrize("mode", ["advise", "off"])
def test_a_controller_that_may_not_act_changes_nothing(mode: str) -> None:
    rehearsal, mesh = rehearsed(Scripted(), 20, loops__batch=mode)
    assert rehearsal.notes == []
    assert {w.policy.batch.active for w in mesh.workers} == {48}


def test_a_pinned_field_is_left_alone() -> None:
    rehearsal, _ = rehearsed(Scripted(), 20, pins=(Pin("batch.active", "me", "mine"),))
    assert rehearsal.notes == []


def test_what_the_policy_can_not_take_is_refused_and_noted() -> None:
    bad = Decision(None, (Move("scheduler.mode", Scope(), "because", factor=0.5),))
    rehearsal, _ = rehearsed(Scripted(decision=bad), 20)
    assert {n.kind for n in rehearsal.notes} == {"refused"}
    assert rehearsal.document.adjustments == ()


def test_a_restart_and_a_want_reach_the_workers() -> None:
    both = Decision(
        None, commands=(Restart("default-1", "default-1/1", 1.0, "because"),), wants=(Want("default", 3, "more"),)
    )
    _, mesh = rehearsed(Scripted(decision=both, holds=((5, 6),)), 60)
    assert sorted((w.node.node_id, w.life) for w in mesh.workers) == [
        ("default-1", 2),
        ("default-2", 1),
        ("default-3", 1),
    ]


def test_a_controller_that_fails_is_told_and_holds_what_it_held() -> None:
    class Broken(Scripted):
        def step(self, state: None, seen: Seen, policy: PolicyOf, now: float) -> Decision:
            if now > 10:
                raise ValueError("a fault of ours")
            return Decision(None, (MOVE,))

    rehearsal, mesh = rehearsed(Broken(), 30)
    assert {w.policy.batch.active for w in mesh.workers} == {24}
    assert len(rehearsal.failures) == 20 and "a fault of ours" in rehearsal.failures[0]


def test_turns_are_changes_of_direction() -> None:
    assert turns([(1, -0.2), (2, -0.4), (3, -0.3), (4, 0.0), (5, -0.2)]) == [3, 5]
    assert turns([(1, 1.0), (9, 0.0)]) == [9]
    assert turns([]) == []
    assert most_a_minute([0, 30, 59, 60, 200]) == 3
    assert most_a_minute([]) == 0
