"""The scale controller: how many workers a pool wants."""

from __future__ import annotations

from itertools import pairwise

import pytest

from controlplane.controllers import scale
from controlplane.controllers.decision import PolicyOf
from tests.controlplane.controllers.builders import a_node, an_adjustment, policy_of, some_lengths
from tests.controlplane.controllers.run import Hour, Run, restarted, say
from trimtab.measures import BATCH_WAITING, COLD_WAITING, KV_USED, REALTIME_WAITING
from trimtab.messages import Load, NodeState, Role
from trimtab.policy import Value
from trimtab.snapshot import Scope


def scaled(**more: Value) -> PolicyOf:
    return policy_of({"scale.max_workers": 4, **{name.replace("__", "."): value for name, value in more.items()}})


def a_run(
    workers: int = 2, *, policy: PolicyOf | None = None, gateway: bool = True, warm: int = 70, **load: int
) -> Run:
    """Workers of which enough is known: each runs 20 of 48, and nobody waits."""
    nodes = [a_node(f"w{i}", joined_at=float(i), running=20, **load) for i in range(workers)]
    if gateway:
        nodes.append(a_node("g0", role=Role.GATEWAY, gauges={COLD_WAITING: 0.0}))
    run = Run(scale, nodes, policy or scaled())
    run.tick(warm)
    return run


def waits(run: Run, each: int) -> None:
    for n in run.nodes:
        if n.role is Role.WORKER:
            say(n, **{REALTIME_WAITING: float(each)})


def idles(run: Run, running: int = 0) -> None:
    for n in run.nodes:
        n.load = Load(running, 0, 0, 9000, 10_000)


def arrives(run: Run, node_id: str, **more: object) -> None:
    run.nodes.append(a_node(node_id, joined_at=run.now, **more))  # type: ignore[arg-type]


def wanted(run: Run) -> int:
    assert run.want is not None
    return run.want.workers


def test_without_a_maximum_every_pool_is_left_as_it_is() -> None:
    run = a_run(policy=policy_of())
    waits(run, 100)
    d = run.tick(100)
    assert (d.wants, d.moves, d.alerts, d.holds) == ((), (), (), ())


def test_a_leader_that_knows_of_no_want_listens_first() -> None:
    run = a_run(warm=30)
    assert run.decision.wants == ()
    assert run.decision.holds == ("pool default: its workers may not all have been heard yet",)
    run.tick()
    assert (wanted(run), run.want and run.want.surplus) == (2, ())


def test_more_than_five_realtime_requests_waiting_for_each_worker_call_for_one_more() -> None:
    run = a_run()
    waits(run, 5)
    run.tick(100)
    assert wanted(run) == 2
    waits(run, 6)
    run.tick(5)
    assert wanted(run) == 2, "a moment calls for nobody"
    run.tick()
    assert wanted(run) == 3
    assert run.want is not None and "6.0 REALTIME requests wait for each of 2 workers" in run.want.evidence


def test_one_more_each_dwell_and_never_more_than_the_maximum() -> None:
    run = a_run()
    waits(run, 100)
    sizes = []
    for _ in range(200):
        run.tick()
        sizes.append(wanted(run))
    assert [sizes.index(n) for n in (3, 4)] == [5, 35]
    assert sizes[-1] == 4
    assert [a.key for a in run.decision.alerts] == ["scale/default"]


def test_a_worker_that_is_wanted_and_not_there_yet_counts_as_there() -> None:
    run = a_run()
    waits(run, 7)
    run.tick(300)
    assert wanted(run) == 3, "fourteen that wait are under five for each of three"


def test_a_worker_that_starts_is_not_asked_what_waits_there() -> None:
    run = a_run()
    arrives(run, "w9", state=NodeState.STARTING, reported_at=None)
    run.silent.add("w9")
    waits(run, 6)
    run.of("w9").gauges = {}
    d = run.tick(29)
    assert not any("do not say" in words for words in d.holds)
    assert wanted(run) == 2, "twelve that wait are four for each of three"


def test_memory_that_will_be_nearly_full_calls_for_one_more_and_the_one_that_comes_counts() -> None:
    run = a_run(kv_used=0.95)
    run.tick(300)
    assert wanted(run) == 3
    assert run.want is not None and "KV use is foretold" in run.want.evidence


def test_a_rise_of_memory_calls_early() -> None:
    run = a_run(1, kv_used=0.2)
    run.lengths = {"m": some_lengths(totals=[8000.0] * 100)}
    for _ in range(260):
        say(run.of("w0"), **{KV_USED: min(0.7, run.of("w0").gauges[KV_USED] + 0.002)})
        run.tick()
    assert wanted(run) == 2


def test_a_calm_pool_gives_back_its_newest_worker_after_five_minutes_and_no_sooner() -> None:
    run = a_run(3)
    idles(run, 10)
    sizes = []
    for _ in range(302):
        run.tick()
        sizes.append(wanted(run))
    assert sizes == [3] * 300 + [2, 2]
    assert run.want is not None and run.want.surplus == ("w2",)
    run.of("w2").state = NodeState.DRAINING
    run.tick()
    assert (wanted(run), run.want.surplus) == (2, ()), "it is on its way"


def test_a_pool_never_wants_fewer_than_the_minimum() -> None:
    run = a_run(3, policy=scaled(scale__min_workers=2))
    idles(run)
    run.tick(3000)
    assert wanted(run) == 2
    assert run.want is not None and run.want.surplus == ("w2",)


@pytest.mark.parametrize("where", ["running", "worker", "gateway"])
def test_a_pool_that_works_or_where_anybody_waits_does_not_shrink(where: str) -> None:
    run = a_run(3)
    idles(run, 15 if where == "running" else 1)
    if where == "worker":
        run.of("w0").load = Load(1, 4, 0, 9000, 10_000)
    if where == "gateway":
        say(run.of("g0"), **{BATCH_WAITING: 4.0})
    run.tick(1000)
    assert wanted(run) == 3


def test_one_that_waits_for_the_step_in_flight_is_no_queue() -> None:
    run = a_run(3)
    idles(run)
    run.of("w0").load = Load(1, 1, 0, 9000, 10_000)
    run.tick(301)
    assert wanted(run) == 2


def test_a_worker_that_went_without_a_word_keeps_what_was_wanted_for_a_minute() -> None:
    run = a_run(3)
    idles(run)
    run.tick(200)
    run.of("w2").connected = False
    run.of("w2").reported_at = run.now
    run.tick(55)
    assert wanted(run) == 3
    assert run.decision.holds == ("pool default: w2 was there a moment ago and is not heard now",)


def test_one_moment_of_a_queue_begins_the_five_minutes_anew() -> None:
    run = a_run(3)
    idles(run)
    run.tick(299)
    run.of("w0").load = Load(1, 4, 0, 9000, 10_000)
    run.tick()
    idles(run)
    run.tick(300)
    assert wanted(run) == 3
    run.tick()
    assert wanted(run) == 2


def test_a_silent_worker_holds_what_is_wanted_and_that_is_said() -> None:
    run = a_run()
    run.silent.add("w1")
    waits(run, 50)
    d = run.tick(60)
    assert wanted(run) == 2
    assert d.holds == ("pool default: 1 workers do not say what waits there, such as w1",)
    idles(run)
    run.tick(1000)
    assert wanted(run) == 2


@pytest.mark.parametrize("gateway", ["none", "silent"])
def test_without_a_gateways_word_no_pool_shrinks(gateway: str) -> None:
    run = a_run(3, gateway=gateway == "silent")
    run.silent |= {"g0"}
    idles(run)
    d = run.tick(1000)
    assert wanted(run) == 3
    assert any("no gateway, or not every one" in words for words in d.holds)


def test_without_its_kv_use_a_pool_does_not_shrink() -> None:
    run = a_run(3, gateway=True)
    for i in range(3):
        run.of(f"w{i}").gauges = {k: v for k, v in run.of(f"w{i}").gauges.items() if k != KV_USED}
    idles(run)
    d = run.tick(1000)
    assert wanted(run) == 3
    assert "pool default: too little is known of its KV use to foretell it" in d.holds


def test_workers_that_are_gone_stay_wanted() -> None:
    run = a_run()
    for n in run.nodes:
        n.connected = False
    d = run.tick(500)
    assert wanted(run) == 2
    assert d.holds == ("pool default: none of its workers is connected",)
    restarted(run.of("w0"), run.now)
    run.tick()
    assert (wanted(run), run.want and run.want.surplus) == (2, ())


def test_a_new_leader_goes_on_with_what_the_old_one_wanted() -> None:
    run = Run(scale, [a_node(running=20)], scaled(), wants={"default": 3})
    run.tick()
    assert wanted(run) == 3


def test_what_was_wanted_before_people_left_the_pool_alone_is_forgotten() -> None:
    run = Run(scale, [a_node(f"w{i}", running=20) for i in range(3)], policy_of(), wants={"default": 1})
    run.tick(100)
    run.policy = scaled()
    run.tick()
    assert wanted(run) == 3


def test_new_bounds_hold_at_once() -> None:
    run = a_run(2)
    run.policy = scaled(scale__min_workers=3)
    run.tick()
    assert wanted(run) == 3
    run.policy = scaled(scale__max_workers=1)
    run.tick()
    assert (wanted(run), run.want and run.want.surplus) == (1, ("w1",))


def test_workers_that_people_add_are_wanted_and_none_of_them_is_given_back() -> None:
    run = a_run(2)
    arrives(run, "w8", running=20)
    arrives(run, "w9", running=20)
    surplus = set()
    for _ in range(31):
        run.tick()
        surplus |= set(run.want.surplus if run.want else ())
    assert (wanted(run), surplus) == (4, set())
    arrives(run, "w99", running=20)
    run.tick(31)
    assert (wanted(run), run.want and run.want.surplus) == (4, ("w99",)), "never more than the maximum"


def test_one_that_is_seen_for_a_moment_beside_the_one_that_replaces_it_changes_nothing() -> None:
    run = a_run(2)
    arrives(run, "w9", running=20)
    run.tick(10)
    run.of("w1").connected = False
    run.tick(60)
    assert (wanted(run), run.want and run.want.surplus) == (2, ())


def test_a_pool_that_is_new_to_a_leader_is_listened_to_first() -> None:
    run = a_run(policy=policy_of({}, {"big": {"scale.max_workers": 3}}))
    arrives(run, "b0", pool="big", running=20)
    assert run.tick(29).wants == ()
    assert [w.workers for w in run.tick(2).wants] == [1]


def test_it_does_not_hunt_between_one_and_two() -> None:
    run = a_run(1)
    sizes = []
    for _ in range(3600):
        there = sum(n.role is Role.WORKER for n in run.nodes)
        # Forty requests to run; what a worker of 48 slots does not run waits.
        for n in run.nodes:
            n.load = Load(40 // there, 0, 0, 9000, 10_000)
        if there == 1:
            waits(run, 6 if run.now < 1100 else 0)
        run.tick()
        if wanted(run) > there:
            arrives(run, "w9", running=20)
        sizes.append(wanted(run))
    assert sorted(set(sizes)) == [1, 2]
    assert sum(a != b for a, b in pairwise(sizes)) == 1


def cold(run: Run, each: float) -> None:
    for n in run.nodes:
        say(n, **{COLD_WAITING: each if n.role is Role.WORKER else 0.0})


def test_cold_requests_that_back_up_are_shed_where_no_worker_can_be_added() -> None:
    run = a_run(policy=scaled(scale__max_workers=2))
    cold(run, 65)
    run.tick(30)
    assert run.move is None
    run.tick()
    assert run.move is not None
    assert (run.move.field, run.move.scope, run.move.state) == ("admission.shed", Scope(), "cold")
    assert run.move.reason == "cold backlog"
    cold(run, 33)
    assert run.tick(100).moves
    cold(run, 32)
    assert run.tick().moves == ()


def test_cold_requests_wait_where_a_worker_can_still_be_added_or_no_pool_is_scaled() -> None:
    for policy in (scaled(), policy_of()):
        run = a_run(policy=policy)
        cold(run, 1000)
        assert run.tick(100).moves == ()


def test_a_node_that_does_not_say_its_cold_ones_holds_the_shedding() -> None:
    run = a_run(policy=scaled(scale__max_workers=2))
    run.of("g0").gauges = {k: v for k, v in run.of("g0").gauges.items() if k != COLD_WAITING}
    d = run.tick(100)
    assert (d.moves, d.holds) == ((), ("not every node says how many cold requests wait there",))


def test_a_new_leader_goes_on_shedding() -> None:
    live = [an_adjustment("scale", "admission.shed", state="cold", reason="cold backlog")]
    run = Run(scale, [a_node(running=20), a_node("g0", role=Role.GATEWAY)], scaled(scale__max_workers=1), live=live)
    assert [m.state for m in run.tick(40).moves] == ["cold"]


def test_a_pools_own_bounds_are_its_own() -> None:
    run = a_run(policy=policy_of({}, {"big": {"scale.max_workers": 3}}))
    for i in range(2):
        arrives(run, f"b{i}", pool="big", running=20)
    run.tick(40)
    assert [(w.pool, w.workers) for w in run.decision.wants] == [("big", 2)]


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "healthy"])
def test_an_hour_without_trouble_changes_nothing(idle: bool) -> None:
    hour = Hour(scale, idle=idle).pass_by()
    assert (hour.moves, hour.alerts, hour.run.commands, hour.wants) == ([], [], [], set())


def test_an_hour_of_a_healthy_load_keeps_the_size() -> None:
    hour = Hour(scale, scaled()).pass_by()
    assert (hour.moves, hour.alerts, hour.wants) == ([], [], {3})
