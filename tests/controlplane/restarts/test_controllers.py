"""Controllers beside a rolling restart: heal leaves its workers alone, and scale does not miss them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType

from controlplane.controllers import heal, scale
from controlplane.controllers.decision import PolicyOf
from controlplane.seen import NodeSeen, Seen
from tests.controlplane.controllers.builders import NOW, a_node, policy_of
from tests.controlplane.controllers.run import Run, restarted
from trimtab.measures import COLD_WAITING, HUNG_S, REALTIME_WAITING
from trimtab.messages import Load, NodeState, Role


@dataclass
class Rolling(Run):
    """`restarting` are away for a restart, or watched after it."""

    restarting: set[str] = field(default_factory=set)

    def seen(self) -> Seen:
        seen = super().seen()
        seen.restarting = frozenset(self.restarting)
        return seen


def a_run(controller: ModuleType, nodes: list[NodeSeen], policy: PolicyOf) -> Rolling:
    return Rolling(controller, nodes, policy)


def leaking(node_id: str, pool: str = "default") -> NodeSeen:
    return a_node(node_id, pool=pool, load=Load(0, 0, 0, 9998, 10_000), idle_since=NOW)


def test_heal_leaves_a_worker_alone_that_is_started_anew_or_watched() -> None:
    run = a_run(heal, [leaking("w0"), a_node("w1")], policy_of())
    run.restarting = {"w0"}
    run.tick(600)
    assert run.commands == []
    run.restarting = set()
    run.tick()
    assert [c.node_id for c in run.commands] == ["w0"]  # type: ignore[union-attr]


def test_heal_sends_nobody_else_of_the_pool_away_meanwhile() -> None:
    run = a_run(
        heal,
        [leaking("w0"), a_node("w1"), a_node("w2"), leaking("x0", "other"), a_node("x1", pool="other")],
        policy_of(),
    )
    run.restarting = {"w2"}
    run.of("w2").state = NodeState.DRAINING
    run.tick(600)
    assert {c.node_id for c in run.commands} == {"x0"}, "another pool is another matter"  # type: ignore[union-attr]


def test_heal_does_not_wait_for_it_where_a_worker_hangs() -> None:
    hung = a_node("w0", state=NodeState.HUNG, gauges={HUNG_S: 1000.0})
    run = a_run(heal, [hung, a_node("w1"), a_node("w2")], policy_of())
    run.restarting = {"w2"}
    run.tick(2)
    assert [c.node_id for c in run.commands] == ["w0"]  # type: ignore[union-attr]


def test_scale_wants_as_many_as_before_while_each_goes_in_its_turn() -> None:
    nodes = [a_node(f"w{i}", joined_at=float(i), running=20) for i in range(3)]
    nodes.append(a_node("g0", role=Role.GATEWAY, gauges={COLD_WAITING: 0.0}))
    run = a_run(scale, nodes, policy_of({"scale.max_workers": 4}))
    run.tick(70)
    for node_id in ("w0", "w1", "w2"):
        gone = run.of(node_id)
        for n in run.nodes:
            if n.role is Role.WORKER:
                # Those that stay have the work of all.
                n.gauges = {**n.gauges, REALTIME_WAITING: 6.0}
        gone.state = NodeState.DRAINING
        run.tick(20)
        gone.connected = False
        run.tick(40)
        assert run.want is not None
        assert (run.want.workers, run.want.surplus) == (3, ())
        assert not any("not heard" in words for words in run.decision.holds), "it said that it goes"
        restarted(gone, run.now)
        gone.state = NodeState.STARTING
        for n in run.nodes:
            if n.role is Role.WORKER:
                n.gauges = {**n.gauges, REALTIME_WAITING: 0.0}
        run.tick(20)
        gone.state = NodeState.SERVING
        run.tick(20)
    assert run.want is not None and (run.want.workers, run.want.surplus) == (3, ())
