"""The blocks controller: which worker is changed when, what people have changed, and what a new leader goes on from."""

from __future__ import annotations

from itertools import pairwise

import pytest

from controlplane.controllers import blocks
from controlplane.controllers.blocks import LOOK_S, RETRY_S
from controlplane.controllers.decision import Severity
from controlplane.seen import PlanSeen
from tests.controlplane.controllers.block_pools import (
    STARVED,
    WASTEFUL,
    Pools,
    a_run,
    a_worker,
    policy,
    reblocked,
)
from tests.controlplane.controllers.builders import NOW
from tests.controlplane.controllers.run import restarted, say
from trimtab.measures import (
    SESSION_TURNS,
    STORED_TOKENS,
)
from trimtab.messages import NodeState

# ---- who is changed when


def test_where_workers_refuse_one_is_asked_each_half_minute_in_turn() -> None:
    run = a_run(a_worker("w0"), a_worker("w1"), policy=policy("guide"), obeys=False)
    told = [(run.now, c.node_id) for _ in range(100) for c in run.run(1)]
    assert [node_id for _, node_id in told] == ["w0", "w1"] * 2
    assert all(b - a == RETRY_S for (a, _), (b, _) in pairwise(told))


def test_who_has_more_tokens_than_may_be_recomputed_is_not_asked() -> None:
    run = a_run(
        a_worker("w0", gauges={STORED_TOKENS: 2000.0}), a_worker("w1", gauges={STORED_TOKENS: 1999.0}),
        policy=policy("guide"),
    )  # fmt: skip
    assert [c.node_id for c in run.run(100)] == ["w1"]
    assert run.plan().planned == 512


def test_who_does_not_say_how_many_tokens_are_there_is_not_asked_and_that_is_said() -> None:
    run = a_run(a_worker(gauges={STORED_TOKENS: None}), policy=policy("guide"))
    assert run.run(60) == []
    assert run.decision.holds == ("pool default: w0 does not say how many tokens are resident",)


@pytest.mark.parametrize("state", [NodeState.STARTING, NodeState.DRAINING, NodeState.HUNG])
def test_who_does_not_serve_is_not_asked(state: NodeState) -> None:
    run = a_run(a_worker(state=state), policy=policy("guide"))
    assert run.run(60) == []


def test_who_is_silent_is_not_asked() -> None:
    run = a_run(a_worker("w0"), a_worker("w1"), policy=policy("guide"), silent={"w0"})
    run.now += 10
    assert [c.node_id for c in run.run(60)] == ["w1"]


def test_who_is_started_anew_by_people_is_left_to_them() -> None:
    run = a_run(a_worker("w0"), a_worker("w1"), policy=policy("guide"), restarting=frozenset({"w0"}))
    assert [c.node_id for c in run.run(60)] == ["w1"]


def test_one_pool_at_a_time_and_one_that_can_not_go_on_keeps_others_waiting_for_the_dwell_at_most() -> None:
    nodes = [
        a_worker("a0", pool="a"),
        a_worker("a1", pool="a", gauges={STORED_TOKENS: 9000.0}),
        a_worker("b0", pool="b"),
    ]
    run = a_run(*nodes, policy=policy("guide", dwell_s=60))
    assert [c.node_id for c in run.run(55)] == ["a0"]
    assert [c.node_id for c in run.run(30)] == ["b0"]
    say(run.of("a1"), **{STORED_TOKENS: 0.0})
    assert [c.node_id for c in run.run(10)] == ["a1"]


def test_a_pool_whose_workers_all_refuse_keeps_no_other_waiting() -> None:
    run = a_run(a_worker("a0", pool="a"), a_worker("b0", pool="b"), policy=policy("guide"), obeys=False)
    assert [c.node_id for c in run.run(95)] == ["a0", "b0", "a0", "b0"]


def test_a_worker_that_starts_anew_or_joins_is_brought_to_the_size_of_its_pool() -> None:
    run = a_run(a_worker("w0"), a_worker("w1"), policy=policy("guide"))
    assert len(run.run(60)) == 2
    restarted(run.of("w1"), run.now)
    reblocked(run.of("w1"), 128)
    run.nodes.append(a_worker("w2", joined_at=run.now))
    assert sorted(c.node_id for c in run.run(60)) == ["w1", "w2"]


def test_a_worker_that_joins_a_pool_that_is_settled_is_told_why_the_pool_has_its_size() -> None:
    run = a_run(a_worker(gauges=WASTEFUL), **STARVED)
    run.run(60)
    run.counters, run.peaks = {}, {}
    run.run(200)
    assert run.plan().reason == "left at 32: nothing says that the KV cache is badly used"
    run.nodes.append(a_worker("w1", joined_at=run.now))
    (told,) = run.run(20)
    assert (told.node_id, told.block_size) == ("w1", 32)
    assert told.reason.endswith("blocks of 32 pay")


def test_a_worker_that_people_have_changed_is_left_alone() -> None:
    run = a_run(a_worker("w0"), a_worker("w1"), policy=policy("guide"))
    run.run(60)
    reblocked(run.of("w1"), 64)
    assert run.run(2000) == []
    assert run.plan().reason.endswith("; changed by hand and left: w1")
    reblocked(run.of("w0"), 64)
    assert run.run(2000) == []


def test_a_pool_that_people_have_changed_is_where_measuring_starts_from() -> None:
    run = a_run(a_worker(gauges=WASTEFUL), **STARVED)
    run.run(60)
    run.counters, run.peaks = {}, {}
    reblocked(run.of("w0"), 256)
    assert run.run(2000) == []
    assert (run.plan().planned, run.plan().present) == (256, 256)


def test_engines_that_can_not_change_while_they_run_need_a_rolling_change_which_people_are_told() -> None:
    run = a_run(a_worker("w0", live=False), a_worker("w1", live=True), policy=policy("guide"))
    assert [c.node_id for c in run.run(60)] == ["w1"]
    (alert,) = run.decision.alerts
    assert (alert.key, alert.severity) == ("blocks/default/512", Severity.INFO)
    assert "trimtab rollout restart --pool default --set worker.block_size=512" in alert.text
    assert alert.evidence.startswith("w0 can't change while it runs; steady: the guide names 512")
    restarted(run.of("w0"), run.now)
    reblocked(run.of("w0"), 512)
    run.run(10)
    assert run.decision.alerts == ()


# ---- leaders


def test_a_new_leader_keeps_the_dwell_of_the_one_before() -> None:
    plans = {"default": PlanSeen("steady", 512, "steady: the guide names 512", "", NOW - 200)}
    worker = a_worker(size=512, joined_at=NOW, gauges={SESSION_TURNS: 100.0})
    run = a_run(worker, policy=policy("guide"), plans=plans)
    assert run.run(390) == []
    assert run.plan().planned == 512
    assert [c.block_size for c in run.run(20)] == [1024]


def test_a_new_leader_goes_through_with_what_the_one_before_began() -> None:
    plans = {"default": PlanSeen("steady", 32, "blocks of 32 pay", "waste", NOW - 2000)}
    run = a_run(a_worker("w0", size=32), a_worker("w1"), plans=plans)
    assert [(c.node_id, c.block_size, c.reason) for c in run.run(10)] == [("w1", 32, "blocks of 32 pay")]


def test_a_new_leader_does_not_go_back_to_a_size_that_nobody_has_any_more() -> None:
    plans = {"default": PlanSeen("steady", 32, "blocks of 32 pay", "waste", NOW - 2000)}
    run = a_run(plans=plans)
    assert run.run(100) == []
    assert run.plan().planned == 128


def test_a_pool_that_was_warm_under_the_leader_before_does_not_warm_up_again() -> None:
    run = a_run(a_worker(size=512, joined_at=NOW), policy=policy("guide"), plans={"default": PlanSeen("steady", 512)})
    assert run.run(700) == []
    assert run.plan().phase == "steady"


def test_whoever_chooses_by_what_is_measured_instead_takes_back_what_the_guide_has_begun() -> None:
    run = a_run(a_worker("w0"), a_worker("w1"), policy=policy("guide"), obeys=False)
    run.run(5)
    run.policy = policy("measured")
    run.commands = []
    assert run.run(100) == []
    assert run.plan().planned == 128


def test_between_looks_nothing_is_decided_and_what_was_said_holds() -> None:
    run = a_run(a_worker(live=False), policy=policy("guide"))
    run.run(1)
    first = run.decision
    run.run(int(LOOK_S) - 1)
    assert (run.decision.plans, run.decision.alerts, run.decision.commands) == (first.plans, first.alerts, ())


def test_a_mesh_without_workers_has_no_plans() -> None:
    run = Pools(blocks, [], policy())
    run.run(20)
    assert (run.decision.plans, run.decision.alerts, run.decision.holds, run.decision.commands) == ((), (), (), ())


def test_a_pool_that_loses_its_workers_for_a_moment_keeps_its_plan() -> None:
    run = a_run(policy=policy("guide"))
    run.run(10)
    run.of("w0").connected = False
    run.run(30)
    assert run.plan().planned == 512
    restarted(run.of("w0"), run.now)
    reblocked(run.of("w0"), 128)
    assert [c.block_size for c in run.run(10)] == [512]
