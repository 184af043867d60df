"""The fleet as a value: sessions, silence, answers, and the view for gateways."""

from __future__ import annotations

from controlplane.fleet import Fleet, Refusal
from tests.controlplane.mesh import an_identity
from trimtab.messages import Hello, NodeState, Report, Role
from trimtab.snapshot import Identity, Node

NONE = Identity()


def a_hello(node_id: str = "w0", incarnation: str = "i1", role: Role = Role.WORKER, held: Identity = NONE) -> Hello:
    return Hello(Node(node_id), incarnation, role, "tiny", held=held, address="a:1")


def a_report(state: NodeState = NodeState.SERVING, sequence: int = 1) -> Report:
    return Report(sequence, state)


def workers(fleet: Fleet) -> list[tuple[str, str, NodeState]]:
    return [(w.node.node_id, w.incarnation, w.state) for w in fleet.view.workers]


def test_a_worker_is_in_the_view_from_its_first_report_until_its_stream_ends() -> None:
    fleet = Fleet()
    session, replaced = fleet.joined(a_hello(), 0.0)
    assert (replaced, workers(fleet)) == (None, [])
    fleet.reported(session, a_report(), 0.1)
    assert workers(fleet) == [("w0", "i1", NodeState.SERVING)]
    fleet.lost(session, 1.0)
    assert workers(fleet) == []
    (member,) = fleet
    assert (member.connected, member.lost_at) == (False, 1.0)


def test_gateways_are_members_but_not_in_the_view() -> None:
    fleet = Fleet()
    session, _ = fleet.joined(a_hello("g0", role=Role.GATEWAY), 0.0)
    fleet.reported(session, a_report(), 0.1)
    assert workers(fleet) == []
    assert [m.node_id for m in fleet.connected(Role.GATEWAY)] == ["g0"]


def test_the_views_version_rises_only_when_its_content_changes() -> None:
    fleet = Fleet(first_version=10)
    session, _ = fleet.joined(a_hello(), 0.0)
    assert fleet.view.version == 10
    for i in range(5):
        fleet.reported(session, a_report(sequence=i), i)
    assert fleet.view.version == 11
    fleet.reported(session, a_report(NodeState.DRAINING), 6.0)
    assert fleet.view.version == 12


def test_a_new_incarnation_replaces_the_old_whose_late_messages_change_nothing() -> None:
    fleet = Fleet()
    old, _ = fleet.joined(a_hello(), 0.0)
    fleet.reported(old, a_report(), 0.1)
    new, replaced = fleet.joined(a_hello(incarnation="i2"), 1.0)
    assert replaced == old
    assert workers(fleet) == []
    fleet.reported(new, a_report(NodeState.STARTING), 1.1)
    before = list(fleet)
    fleet.reported(old, a_report(NodeState.HUNG, 99), 1.2)
    fleet.applied(old, an_identity(9, 9), 1.0)
    fleet.refused(old, Refusal(an_identity(9, 9), "R", "", ""))
    fleet.lost(old, 1.3)
    assert list(fleet) == before
    assert workers(fleet) == [("w0", "i2", NodeState.STARTING)]


def test_the_same_process_on_a_new_stream_stays_in_the_view() -> None:
    fleet = Fleet()
    first, _ = fleet.joined(a_hello(), 0.0)
    fleet.reported(first, a_report(), 0.1)
    version = fleet.view.version
    second, replaced = fleet.joined(a_hello(), 1.0)
    assert replaced == first
    assert fleet.view.version == version
    fleet.lost(first, 1.1)
    assert [m.session for m in fleet.connected()] == [second]


def test_a_silent_node_is_lost_and_is_back_with_its_next_message() -> None:
    fleet = Fleet()
    session, _ = fleet.joined(a_hello(), 0.0)
    fleet.reported(session, a_report(), 1.0)
    assert fleet.expire(3.4, silence_s=2.5) == []
    assert [m.node_id for m in fleet.expire(3.5, silence_s=2.5)] == ["w0"]
    assert fleet.expire(9.0, silence_s=2.5) == []
    assert workers(fleet) == []
    fleet.heard(session, 10.0)
    assert workers(fleet) == [("w0", "i1", NodeState.SERVING)]


def test_a_lost_node_is_forgotten_after_a_while_and_a_connected_one_never() -> None:
    fleet = Fleet()
    gone, _ = fleet.joined(a_hello("w0"), 0.0)
    fleet.joined(a_hello("w1"), 0.0)
    fleet.lost(gone, 1.0)
    assert fleet.forget(10.9, after_s=10.0) == []
    assert [m.node_id for m in fleet.forget(11.0, after_s=10.0)] == ["w0"]
    assert [m.node_id for m in fleet] == ["w1"]
    assert fleet.current(gone) is None


def test_an_answer_to_a_newer_push_ends_an_older_refusal() -> None:
    fleet = Fleet()
    session, _ = fleet.joined(a_hello(held=an_identity(1, 1)), 0.0)
    fleet.refused(session, Refusal(an_identity(1, 3), "ABOVE_ENGINE_LIMIT", "batch.active", "no"))
    (member,) = fleet
    assert member.answered(an_identity(1, 3))
    assert not member.answered(an_identity(1, 4))
    fleet.applied(session, an_identity(1, 2), 1.0)
    assert next(iter(fleet)).refusal is not None
    fleet.applied(session, an_identity(1, 4), 2.0)
    (member,) = fleet
    assert (member.refusal, member.applied, member.apply_ms) == (None, an_identity(1, 4), 2.0)
    fleet.applied(session, an_identity(1, 3), 9.0)
    assert next(iter(fleet)).applied == an_identity(1, 4)
