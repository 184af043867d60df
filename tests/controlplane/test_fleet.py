"""The fleet as a value: sessions, silence, answers, and the view for gateways."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet import Fleet, Member, Refusal
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


def test_gateways_that_take_requests_are_counted_wherever_they_are() -> None:
    fleet = Fleet(first_version=10)
    first, _ = fleet.joined(a_hello("g0", role=Role.GATEWAY), 0.0)
    second, _ = fleet.joined(a_hello("g1.1", role=Role.GATEWAY), 0.0)
    assert (fleet.view.gateways, fleet.view.version) == (2, 12)
    fleet.reported(first, a_report(), 0.1)
    assert fleet.view.version == 12
    far = Member(a_hello("g2", role=Role.GATEWAY), 7, 0.0, 0.0, replica="c1")
    fleet.told("c1", [far, Member(a_hello("w0"), 8, 0.0, 0.0, report=a_report(), replica="c1")])
    assert (fleet.view.gateways, fleet.view.version, len(workers(fleet))) == (3, 13, 1)
    fleet.reported(first, a_report(NodeState.DRAINING, 2), 0.2)
    assert (fleet.view.gateways, fleet.view.version) == (2, 14)
    fleet.lost(second, 0.3)
    assert (fleet.view.gateways, fleet.view.version) == (1, 15)
    fleet.told("c1", ())
    assert (fleet.view.gateways, fleet.view.version) == (0, 16)


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


def test_a_control_plane_that_slept_counts_nobody_as_silent_before_it_has_read_what_was_said() -> None:
    fleet = Fleet()
    session, _ = fleet.joined(a_hello(), 0.0)
    fleet.reported(session, a_report(), 0.5)
    assert fleet.expire(1.0, silence_s=2.5) == []
    assert fleet.expire(11.0, silence_s=2.5) == []
    assert workers(fleet) != []
    assert [m.node_id for m in fleet.expire(11.5, silence_s=2.5)] == ["w0"]


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


def elsewhere(replica: str, incarnation: str = "i1", joined_at: float = 0.0, node_id: str = "w0") -> Member:
    return Member(a_hello(node_id, incarnation), 0, joined_at, 0.0, report=a_report(), replica=replica)


def test_a_worker_that_moves_here_stays_in_the_view_and_is_back_there_when_it_leaves() -> None:
    fleet = Fleet()
    fleet.told("b", [elsewhere("b")])
    session, _ = fleet.joined(a_hello(), 1.0)
    assert workers(fleet) == [("w0", "i1", NodeState.SERVING)]
    fleet.reported(session, a_report(NodeState.DRAINING), 1.1)
    assert workers(fleet) == [("w0", "i1", NodeState.DRAINING)]
    fleet.lost(session, 1.2)
    assert workers(fleet) == [("w0", "i1", NodeState.SERVING)]


def test_a_worker_that_is_seen_here_for_a_moment_hides_the_one_elsewhere_no_longer() -> None:
    fleet = Fleet()
    fleet.told("b", [elsewhere("b")])
    session, _ = fleet.joined(a_hello(incarnation="i2"), 1.0)
    assert workers(fleet) == []
    fleet.lost(session, 1.1)
    assert workers(fleet) == [("w0", "i1", NodeState.SERVING)]


STEPS = st.tuples(
    st.sampled_from(["join", "report", "hear", "lose", "tell", "end", "expire", "forget"]),
    st.sampled_from(["w0", "w1"]),
    st.sampled_from(["a", "b"]),
    st.integers(0, 3),
)


@given(st.lists(STEPS, max_size=25))
def test_the_view_is_of_the_fleet_as_it_is_and_its_version_rises_with_it(
    steps: list[tuple[str, str, str, int]],
) -> None:
    fleet = Fleet()
    sessions: dict[str, int] = {}
    seen = {fleet.view.version: fleet.view.workers}
    for now, (step, node, replica, n) in enumerate(steps):
        session = sessions.get(node, -1)
        match step:
            case "join":
                sessions[node], _ = fleet.joined(a_hello(node, f"i{n}"), now)
            case "report":
                fleet.reported(session, a_report(list(NodeState)[n]), now)
            case "hear":
                fleet.heard(session, now)
            case "lose":
                fleet.lost(session, now)
            case "tell":
                fleet.told(replica, [elsewhere(replica, f"i{n}", now - n, node)])
            case "end":
                fleet.told(replica, ())
            case "expire":
                fleet.expire(now, silence_s=2.5)
            case "forget":
                fleet.forget(now, after_s=1.0)
        whole = [m for m in fleet if m.connected and m.report is not None]
        assert workers(fleet) == [(m.node_id, m.hello.incarnation, m.report.state) for m in whole if m.report]
        assert seen.setdefault(fleet.view.version, fleet.view.workers) == fleet.view.workers
