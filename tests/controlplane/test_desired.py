"""What a follower does about what its pool wants, as a pure decision."""

from __future__ import annotations

from typing import Any

import pytest

from controlplane.desired import Change, Goal, change, free_number, goal_of, settled, there
from trimtab import codec
from trimtab.messages import Hello, NodeState, Role
from trimtab.snapshot import Node
from trimtab.v1 import admin_pb2, control_pb2

NONE = Change()


def an_answer(leader: str = "control", **facts: Any) -> admin_pb2.GetScaleResponse:
    pool = admin_pb2.PoolScale(**{"pool": "default", "wanted": 2, "running": 1, "max_workers": 4, **facts})
    return admin_pb2.GetScaleResponse(pools=[pool], leader_id=leader)


def test_what_is_wanted_is_bounded_by_the_pools_most() -> None:
    assert goal_of(an_answer(reason="busy", surplus=["w1"]), "default") == Goal(2, 1, ("w1",), "busy")
    assert goal_of(an_answer(wanted=9), "default") == Goal(4, 1)


@pytest.mark.parametrize(
    "answer",
    [
        an_answer(leader=""),
        an_answer(pool="other"),
        an_answer(wanted=0),
        an_answer(max_workers=0),
        admin_pb2.GetScaleResponse(leader_id="control"),
    ],
    ids=["nobody leads", "another pool", "nobody wanted", "left as it is", "no pool"],
)
def test_what_is_not_said_is_no_goal(answer: Any) -> None:
    assert goal_of(answer, "default") is None


def test_missing_ones_are_started_whoever_runs_the_others() -> None:
    assert change(Goal(3, 1), ["w0"], set()) == Change(more=2)
    assert change(Goal(3, 2), ["w0"], {"x"}) == Change(more=1)
    assert change(Goal(3, 1), ["w0", "w1", "w2"], set()) == NONE, "two of them are starting"
    assert change(Goal(9, 1), ["w0"], set(), most=3) == Change(more=2, short=6)
    assert change(Goal(9, 5), ["w0", "w1", "w2", "w3", "w4"], set(), most=3) == Change(short=4)


def test_only_ours_are_ended_and_only_those_that_the_leader_names() -> None:
    ours = ["w0", "w1", "w2"]
    assert change(Goal(1, 3, ("w2", "w1")), ours, set()) == Change(fewer=("w2", "w1"))
    assert change(Goal(2, 3, ("w2", "w1")), ours, set()) == Change(fewer=("w2",)), "no more than are too many"
    assert change(Goal(3, 4, ("x",)), ours, {"x"}) == NONE
    assert change(Goal(3, 4, ("x", "w0")), ours, {"x"}) == Change(fewer=("w0",))
    assert change(Goal(1, 1), ours, set()) == NONE, "those that have just started are not known yet"
    assert change(Goal(1, 3, ("w2",)), ["w0"], set()) == NONE, "it was told already"


def test_a_goal_that_is_met_needs_no_look_at_the_fleet() -> None:
    assert settled(Goal(2, 2))
    assert not settled(Goal(2, 1))
    assert not settled(Goal(2, 2, ("w1",)))


def test_the_lowest_free_number_is_taken() -> None:
    assert free_number("w{}".format, set()) == 0
    assert free_number("w{}".format, {"w0", "w2", "g1"}) == 1


def test_who_is_there_serves_in_that_pool() -> None:
    def node(name: str, role: Role, pool: str, state: NodeState, connected: bool = True) -> admin_pb2.FleetNode:
        hello = codec.encode_hello(Hello(Node(name, pool), "i1", role, "tiny"))
        report = control_pb2.Report(state=codec.encode_state(state))
        return admin_pb2.FleetNode(hello=hello, report=report, connected=connected)

    fleet = admin_pb2.GetFleetResponse(
        nodes=[
            node("serves", Role.WORKER, "default", NodeState.SERVING),
            node("hangs", Role.WORKER, "default", NodeState.HUNG),
            node("leaves", Role.WORKER, "default", NodeState.DRAINING),
            node("gone", Role.WORKER, "default", NodeState.SERVING, connected=False),
            node("elsewhere", Role.WORKER, "other", NodeState.SERVING),
            node("g0", Role.GATEWAY, "default", NodeState.SERVING),
        ]
    )
    assert there(fleet, "default") == {"serves", "hangs"}
