"""The heal controller: who is restarted, whose policy is told again, and what people are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from controlplane.controllers import heal
from controlplane.controllers.decision import PolicyOf, Restart, Severity
from controlplane.controllers.growth import Growth
from controlplane.seen import NodeSeen
from tests.controlplane.controllers.builders import NOW, a_node, policy_of
from tests.controlplane.controllers.run import Hour, Run, restarted, say
from tests.trimtab.test_kv_shape import V4
from trimtab.measures import (
    COMPUTED_TOKENS,
    HUNG_S,
    KV_BYTES_PER_TOKEN,
    RSS_BYTES,
    STORED_TOKENS,
)
from trimtab.messages import Load, NodeState
from trimtab.snapshot import Limits

MB = 1e6
CACHE_TOKENS = 160_000


def leaking(node_id: str = "w0", *, pool: str = "default", held: int = 2, idle_since: float = NOW) -> NodeSeen:
    return a_node(node_id, pool=pool, load=Load(0, 0, 0, 10_000 - held, 10_000), idle_since=idle_since)


def a_run(*nodes: NodeSeen, policy: PolicyOf | None = None) -> Run:
    return Run(heal, list(nodes), policy or policy_of())


# ---- leaks of blocks


def test_blocks_held_by_a_worker_that_is_idle_for_a_minute_are_a_leak() -> None:
    run = a_run(leaking(), a_node("w1"))
    run.tick(59)
    assert run.commands == []
    run.tick()
    (restart,) = run.commands
    assert restart == Restart(
        "w0", "i0", 30.0, "it leaks KV blocks", "1 of 10000 KV blocks held, idle for 60 s (limit 60 s)"
    )


@pytest.mark.parametrize("held", [0, 1])
def test_the_one_block_that_vllm_keeps_for_itself_is_no_leak(held: int) -> None:
    run = a_run(leaking(held=held))
    run.tick(600)
    assert run.commands == []


def test_blocks_of_a_worker_that_works_are_no_leak() -> None:
    run = a_run(a_node(running=3, kv_used=0.5))
    run.tick(600)
    assert run.commands == []


def test_a_worker_that_drains_is_left_alone() -> None:
    node = leaking()
    node.state = NodeState.DRAINING
    run = a_run(node)
    run.tick(600)
    assert run.commands == []


def test_a_silent_worker_is_left_alone_and_that_is_said() -> None:
    run = a_run(leaking())
    run.silent.add("w0")
    d = run.tick(600)
    assert (run.commands, d.holds) == ([], ("1 workers say nothing now: they are left as they are",))


# ---- memory


def grows(run: Run, seconds: int, mb_per_min: Callable[[int], float], **more: Callable[[int], float]) -> None:
    """The memory of w0 grows so fast, second by second; `more` are other gauges, or its computed tokens."""
    for second in range(seconds):
        n = run.of("w0")
        n.gauges = {**n.gauges, RSS_BYTES: n.gauges.get(RSS_BYTES, 8e9) + mb_per_min(second) * MB / 60}
        for name, at in more.items():
            if name == COMPUTED_TOKENS:
                n.totals[COMPUTED_TOKENS] = int(at(second))
            else:
                n.gauges[name] = at(second)
        run.tick()


def test_memory_that_grows_for_ten_minutes_beside_no_more_work_is_a_leak() -> None:
    run = a_run(a_node(running=5))
    grows(run, 600, lambda _: 60.0)
    assert run.commands == []
    grows(run, 30, lambda _: 60.0)
    (restart,) = run.commands
    assert isinstance(restart, Restart)
    assert (restart.node_id, restart.drain_s, restart.reason) == ("w0", 30.0, "its memory grows")
    assert "60 MB a minute or more for 600 s (limit 50)" in restart.evidence


def test_memory_that_grows_more_slowly_or_in_one_leap_is_no_leak() -> None:
    slow, leap = a_run(a_node(running=5)), a_run(a_node(running=5))
    grows(slow, 3000, lambda _: 45.0)
    grows(leap, 3000, lambda second: 60_000.0 if second == 400 else 0.0)
    assert slow.commands == leap.commands == []


def test_memory_that_grows_with_the_work_is_no_leak() -> None:
    run = a_run(a_node(running=5))
    grows(run, 1500, lambda _: 60.0, **{STORED_TOKENS: lambda second: 1000.0 + 10.0 * second})
    assert run.commands == []


def test_memory_that_the_kv_cache_touches_for_the_first_time_is_no_leak_until_all_of_it_is_touched() -> None:
    # 1,000 bytes a token: 100 tokens a second touch 6 MB a minute.
    whole_s = CACHE_TOKENS // 100
    run = a_run(a_node(running=5), policy=policy_of({"heal.growth_mb_per_min": 5}))
    grows(run, whole_s, lambda _: 6.0, **{COMPUTED_TOKENS: lambda second: 100.0 * second})
    assert run.commands == []
    grows(run, 700, lambda _: 6.0, **{COMPUTED_TOKENS: lambda second: 100.0 * (whole_s + second)})
    assert {c.reason for c in run.commands} == {"its memory grows"}


@pytest.mark.parametrize(("computed", "blocks"), [(1000, 1000 * V4.per_token()), (10**6, 5000)])
def test_layers_that_forget_touch_blocks_too_and_all_of_them_in_the_end(computed: int, blocks: float) -> None:
    """A token costs 1,000 bytes in the layers that keep it, which is 1/256 of a block."""
    n = a_node(limits=Limits(block_size=256, total_blocks=5000, kv_groups=V4.groups), gauges={RSS_BYTES: 8e9})
    n.totals[COMPUTED_TOKENS] = computed
    (point,) = Growth("i0", 0).noted(n, NOW, 600.0).points
    assert point.bytes == pytest.approx(8e9 - 256_000 * blocks)


@pytest.mark.parametrize("missing", [RSS_BYTES, STORED_TOKENS, KV_BYTES_PER_TOKEN])
def test_without_one_of_its_figures_no_growth_is_known(missing: str) -> None:
    run = a_run(a_node(running=5))
    has = run.of("w0").gauges
    for second in range(1500):
        said = {**has, RSS_BYTES: 8e9 + second * MB}
        run.of("w0").gauges = {name: value for name, value in said.items() if name != missing}
        run.tick()
    assert run.commands == []


def test_another_process_begins_with_no_history() -> None:
    run = a_run(a_node(running=5))
    grows(run, 500, lambda _: 60.0)
    restarted(run.of("w0"), run.now)
    grows(run, 500, lambda _: 60.0)
    assert run.commands == []


def test_a_silence_of_a_tick_or_two_loses_no_history() -> None:
    run = a_run(a_node(running=5))
    grows(run, 300, lambda _: 60.0)
    run.silent.add("w0")
    run.tick(4)
    run.silent.clear()
    grows(run, 330, lambda _: 60.0)
    assert len(run.commands) == 1


# ---- no progress


def hung(node_id: str = "w0", **more: str) -> NodeSeen:
    return a_node(node_id, state=NodeState.HUNG, running=3, **more)  # type: ignore[arg-type]


def test_a_worker_that_hangs_for_fifteen_seconds_is_restarted_at_once() -> None:
    run = a_run(hung())
    run.tick(15)
    assert run.commands == []
    run.tick()
    assert run.commands == [Restart("w0", "i0", 0.0, "it makes no progress", "hung for 15 s (limit 15 s)")]


def test_it_counts_from_when_the_worker_says() -> None:
    run = a_run(hung())
    say(run.of("w0"), **{HUNG_S: 14.0})
    run.tick()
    say(run.of("w0"), **{HUNG_S: 15.0})
    run.tick()
    assert len(run.commands) == 1


def test_a_worker_that_moves_again_is_left_alone() -> None:
    run = a_run(hung())
    for _ in range(20):
        run.tick(10)
        run.of("w0").state = NodeState.SERVING
        run.tick()
        run.of("w0").state = NodeState.HUNG
    assert run.commands == []


def test_hung_workers_are_restarted_whoever_else_of_their_pool_is() -> None:
    run = a_run(hung("w0"), hung("w1"), leaking("w2", idle_since=0.0))
    run.tick(16)
    assert [c.node_id for c in run.commands] == ["w2", "w0", "w1"]


# ---- restarts in general


def test_an_incarnation_that_drains_is_told_once() -> None:
    run = a_run(leaking(idle_since=0.0))
    run.tick()
    run.of("w0").state = NodeState.DRAINING
    run.tick(2000)
    assert len(run.commands) == 1


def test_one_at_a_time_in_a_pool_until_it_serves_again() -> None:
    run = a_run(leaking("w0", idle_since=0.0), leaking("w1", idle_since=0.0), leaking("x0", pool="x", idle_since=0.0))
    run.tick(20)
    assert [c.node_id for c in run.commands] == ["w0", "x0"]
    run.of("w0").connected = False
    run.tick(5)
    restarted(run.of("w0"), run.now)
    run.of("w0").state = NodeState.STARTING
    run.tick(5)
    assert len(run.commands) == 2
    run.of("w0").state = NodeState.SERVING
    run.tick(5)
    assert [c.node_id for c in run.commands] == ["w0", "x0", "w1"]


def test_the_last_that_serves_waits_for_those_that_start() -> None:
    run = a_run(leaking(idle_since=0.0), a_node("w1", state=NodeState.STARTING))
    run.tick(20)
    assert run.commands == []
    run.of("w1").state = NodeState.SERVING
    run.tick()
    assert [c.node_id for c in run.commands] == ["w0"]


def test_an_only_worker_is_restarted_all_the_same() -> None:
    run = a_run(leaking(idle_since=0.0))
    run.tick()
    assert len(run.commands) == 1


def test_three_restarts_an_hour_and_then_people_are_told() -> None:
    run = a_run(hung())
    for _ in range(4):
        run.tick(20)
        restarted(run.of("w0"), run.now)
        run.of("w0").state = NodeState.HUNG
    assert len(run.commands) == 3
    run.tick(20)
    (alert,) = run.decision.alerts
    assert (alert.key, alert.severity) == ("heal/w0", Severity.CRITICAL)
    assert "not restarted more than 3 times an hour" in alert.text
    run.tick(3520)
    assert len(run.commands) == 4, "an hour after the first there may be another"


def test_a_node_of_which_people_want_no_restart_gets_none() -> None:
    run = a_run(hung("w0"), hung("w1"), policy=policy_of({}, {"w0": {"heal.restarts_per_h": 0}}))
    run.tick(20)
    assert [c.node_id for c in run.commands] == ["w1"]
    assert [a.key for a in run.decision.alerts] == ["heal/w0"]


def test_a_worker_that_does_not_come_back_is_told_of() -> None:
    run = a_run(leaking(idle_since=0.0))
    run.tick()
    run.of("w0").connected = False
    run.tick(628)
    assert run.decision.alerts == ()
    run.tick(5)
    assert [(a.key, a.text) for a in run.decision.alerts] == [("heal/w0", "w0 was told to restart and is not back")]
    restarted(run.of("w0"), run.now)
    assert run.tick().alerts == ()


def test_an_engine_that_loads_for_long_is_waited_for_as_long_as_the_policy_says() -> None:
    """Also where the node was silent for so long that nobody remembers it; and nobody else of its pool goes meanwhile."""
    policy = policy_of({"heal.return_s": 1800})
    run = a_run(leaking(idle_since=0.0), leaking("w1", idle_since=NOW + 5000.0), policy=policy)
    run.tick()
    assert [c.node_id for c in run.commands] == ["w0"]
    gone = run.nodes.pop(0)
    assert gone.node_id == "w0"
    run.of("w1").idle_since = NOW - 1000.0
    run.tick(1820)
    assert ([c.node_id for c in run.commands], run.decision.alerts) == (["w0"], ())
    run.tick(12)
    assert [a.text for a in run.decision.alerts] == ["w0 was told to restart and is not back"]
    assert [c.node_id for c in run.commands] == ["w0", "w1"]
    run.tick(320)
    assert "heal/w0" not in [a.key for a in run.decision.alerts], "nobody knows it any more"


def test_a_new_leader_leaves_a_worker_alone_that_the_old_one_has_told() -> None:
    run = a_run(leaking(idle_since=0.0))
    run.tick()
    run.of("w0").state = NodeState.DRAINING
    again = Run(heal, run.nodes)
    again.tick(60)
    assert again.commands == []


def test_restarts_under_an_earlier_leader_count_until_their_hour_is_over() -> None:
    run = a_run(hung())
    run.restarted = {"w0": (NOW - 3500.0, NOW - 1000.0, NOW - 900.0), "w1": (NOW,) * 9}
    run.tick(20)
    assert run.commands == []
    (alert,) = run.decision.alerts
    assert "not restarted more than 3 times an hour" in alert.text
    run.tick(79)
    assert run.commands == []
    run.tick()
    assert [c.node_id for c in run.commands] == ["w0"], "the first of them was an hour ago"
    restarted(run.of("w0"), run.now)
    run.of("w0").state = NodeState.HUNG
    run.tick(20)
    assert len(run.commands) == 1, "its own and theirs count together"


# ---- policies that are refused


def test_workers_that_refuse_the_policy_for_more_than_ten_seconds_make_one_alert_a_pool() -> None:
    run = a_run(a_node("w0", refused="TOO_HIGH: no"), a_node("w1", refused="TOO_HIGH: no"), a_node("w2"))
    assert run.tick(11).alerts == ()
    (alert,) = run.tick().alerts
    assert (alert.key, alert.text) == ("refused/default", "2 workers of pool default refuse the newest policy: w0, w1")
    assert alert.evidence == "TOO_HIGH: no"
    run.of("w0").refused = run.of("w1").refused = ""
    assert run.tick().alerts == ()


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "healthy"])
def test_an_hour_without_trouble_changes_nothing(idle: bool) -> None:
    hour = Hour(heal, idle=idle).pass_by()
    assert (hour.moves, hour.alerts, hour.run.commands) == ([], [], [])
