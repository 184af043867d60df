"""Each controller round its loop: a mesh in virtual time gets into trouble, the controller answers, and lets go when it is over.

What all have in common is asked of each: it answers, it goes back to what people set, and no adjustment turns more than once a minute.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.loops.builders import NAMES, Run, a_fleet, documents, people, rehearse
from trimtab.messages import Workload
from trimtab.simulation import Die, Fail, Fate, Fault, Grow, Hang, Leak, Silence, Slow
from trimtab.workload import Kind, Lengths

pytestmark = pytest.mark.slow

GIANTS = Kind(Lengths(40_000, 50_000, 60_000), Lengths(20, 40, 80))


def answers_and_lets_go(run: Run, field: str, *, within_s: tuple[float, float], gone_by_s: float) -> float:
    """The most that the field was moved."""
    line = run.held(field)
    assert line, f"{field} was never moved"
    assert within_s[0] <= line[0][0] <= within_s[1], line
    assert line[-1][1] == 0.0 and line[-1][0] <= gone_by_s, line
    assert run.turns_a_minute() <= 1, line
    return max((value for _, value in line), key=abs)


def test_batch_makes_the_running_set_of_a_slow_worker_smaller_and_lets_it_grow_back() -> None:
    run = rehearse(["batch"], [people((0, 5)), documents((0, 0.8))], 330, faults=[Slow(60, "default-1", 12, 60)])
    fields = {field for _, field, _ in run.rehearsal.factors}
    assert len(fields) == 1
    answers_and_lets_go(run, fields.pop(), within_s=(60, 130), gone_by_s=320)
    evidence = next(n.evidence for n in run.notes("move"))
    assert "P99" in evidence and "n=" in evidence and "outliers" in evidence


def test_priority_goes_up_in_a_flood_of_realtime_and_back_after_it() -> None:
    run = rehearse(["priority"], [people((0, 5), (30, 70), (45, 3))], 240)
    assert answers_and_lets_go(run, "priority.realtime_delta", within_s=(30, 45), gone_by_s=235) == 2
    assert answers_and_lets_go(run, "priority.batch_delta", within_s=(30, 45), gone_by_s=235) == -1


def test_priority_does_not_hunt_where_the_queue_hovers_at_its_threshold() -> None:
    run = rehearse(["priority"], [people((0, 5), (30, 40))], 150)
    assert run.turns_a_minute() <= 1


def test_overload_sheds_cold_batch_while_realtime_has_no_place_left_and_takes_it_again() -> None:
    run = rehearse(["overload"], [people((0, 5), (10, 60), (150, 2)), documents((0, 0.3), (200, 0.3))], 420)
    answers_and_lets_go(run, "admission.shed", within_s=(100, 125), gone_by_s=400)
    shed = [r for r in run.outcome.requests if r.fate is Fate.SHED]
    assert shed and all(r.workload is Workload.BATCH and r.prompt >= 4096 for r in shed)


def test_degraded_is_entered_by_full_memory_with_errors_and_left_when_there_is_room() -> None:
    faults: list[Fault] = [Leak(40, "default-1", 7600), Fail(40, "default-1", 0.5, 40), Die(100, "default-1")]
    sources = [people((0, 5)), documents((0, 0.5))]
    run = rehearse(["degraded"], sources, 180, fleet=a_fleet(blocks=8192), faults=faults)
    answers_and_lets_go(run, "degraded.state", within_s=(40, 75), gone_by_s=130)
    assert any(r.fate is Fate.SHED for r in run.outcome.requests)


def test_full_memory_without_errors_degrades_nothing() -> None:
    run = rehearse(
        ["degraded"], [people((0, 5))], 100, fleet=a_fleet(blocks=8192), faults=[Leak(20, "default-1", 7900)]
    )
    assert run.notes() == []


def test_memory_lowers_the_pressure_threshold_before_the_cache_is_full_and_lets_go() -> None:
    faults: list[Fault] = [Leak(60, "default-1", 7900), Die(200, "default-1")]
    run = rehearse(["memory"], [people((0, 1))], 600, fleet=a_fleet(blocks=8192), faults=faults)
    answers_and_lets_go(run, "memory.pressure_threshold", within_s=(60, 200), gone_by_s=590)
    assert any("KV" in text for text in run.alerts)


def test_oom_halves_the_running_set_for_a_while_and_releases_what_is_old() -> None:
    policy = {"oom.hold_s": 60, "oom.release_after_s": 5}
    run = rehearse(
        ["oom"], [people((0, 5)), documents((0, 2))], 240,
        faults=[Die(60, "default-1", out_of_memory=True)], policy=policy,
    )  # fmt: skip
    assert answers_and_lets_go(run, "batch.active", within_s=(60, 62), gone_by_s=200) == -0.5
    assert [text for text in run.alerts if text.startswith("critical")]
    assert any(n.kind == "command" and n.what.startswith("release") for n in run.notes())


def test_isolation_keeps_giants_apart_while_realtime_misses_its_objective_and_they_come() -> None:
    sources = [people((0, 5)), documents((0, 0), (40, 0.3), (120, 0), kind=GIANTS)]
    policy = {"objectives.ttft_p99_ms": 120, "giants.for_s": 60}
    run = rehearse(["isolation"], sources, 400, policy=policy)
    assert answers_and_lets_go(run, "isolate.from_tokens", within_s=(40, 90), gone_by_s=390) < 0


def test_isolation_leaves_giants_that_hurt_nobody() -> None:
    sources = [people((0, 5)), documents((0, 0), (40, 0.1), (120, 0), kind=GIANTS)]
    run = rehearse(["isolation"], sources, 150, policy={"objectives.ttft_p99_ms": 5000, "objectives.itl_p99_ms": 5000})
    assert run.notes() == []


def test_scale_adds_workers_while_realtime_waits_and_gives_them_back_one_by_one() -> None:
    policy = {"scale.max_workers": 3, "scale.out_dwell_s": 20, "scale.in_dwell_s": 60}
    run = rehearse(["scale"], [people((0, 4), (40, 100), (120, 0.1))], 420, policy=policy)
    sizes = [w for _, w in run.outcome.workers]
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 3, 1)
    wants = [(n.at_s, n.what.split()[0]) for n in run.notes("want")]
    assert [w for _, w in wants] == ["1", "2", "3", "2", "1"]
    assert all(b - a >= 20 for (a, _), (b, _) in pairwise(wants))
    assert {r.fate for r in run.outcome.requests if r.workload is Workload.REALTIME} <= {
        Fate.SERVED,
        Fate.REFUSED,
        Fate.OPEN,
    }


def test_a_pool_shrinks_also_while_a_little_goes_on() -> None:
    policy = {"scale.max_workers": 3, "scale.min_workers": 1, "scale.in_dwell_s": 60}
    run = rehearse(["scale"], [people((0, 2))], 300, fleet=a_fleet(2), policy=policy)
    assert run.outcome.workers[-1][1] == 1


def test_heal_restarts_a_worker_that_holds_blocks_while_it_is_idle() -> None:
    faults: list[Fault] = [Leak(40, "default-1", 1000)]
    run = rehearse(["heal"], [people((0, 5), (50, 0), (180, 5))], 240, fleet=a_fleet(2), faults=faults)
    assert [(n.what, 100 < n.at_s < 150) for n in run.notes("command")] == [("restart default-1", True)]
    leaking = [w for w in run.mesh.workers if w.node.node_id == "default-1"]
    assert [w.life for w in leaking] == [2]


def test_heal_restarts_a_worker_that_is_hung_and_its_requests_are_served() -> None:
    run = rehearse(["heal"], [people((0, 5))], 120, fleet=a_fleet(2), faults=[Hang(40, "default-1")])
    assert [(n.what, 55 < n.at_s < 70) for n in run.notes("command")] == [("restart default-1", True)]
    assert run.outcome.workers[-1][1] == 2
    assert {r.fate for r in run.outcome.requests} <= {Fate.SERVED, Fate.OPEN}


def test_heal_restarts_a_worker_whose_memory_grows_beside_no_more_work() -> None:
    fleet = a_fleet(2, blocks=1024, kv_bytes_per_token=1000)
    run = rehearse(
        ["heal"], [people((0, 2))], 420, fleet=fleet, faults=[Grow(20, "default-1", 200)], policy={"heal.growth_s": 120}
    )
    assert [n.what for n in run.notes("command")] == ["restart default-1"]


def test_a_worker_that_grows_again_and_again_is_restarted_a_few_times_and_then_people_are_told() -> None:
    faults: list[Fault] = [Hang(at, "default-1") for at in (20, 80, 140, 200)]
    run = rehearse(["heal"], [people((0, 5))], 260, fleet=a_fleet(2), faults=faults, policy={"heal.restarts_per_h": 2})
    assert len(run.notes("command")) == 2
    assert run.alerts


def test_silence_moves_nothing() -> None:
    """In trouble, and then blind: what is held stays held, and nothing new is done before somebody is heard."""
    policy = {"scale.max_workers": 4, "scale.out_dwell_s": 5}
    silence = [Silence(50, f"default-{i}", 60) for i in (1, 2, 3, 4)] + [Silence(50, "gateway-0", 60)]
    run = rehearse(
        NAMES,
        [people((0, 5), (20, 70)), documents((0, 0.5))],
        109,
        fleet=a_fleet(1, start_s=5),
        faults=silence,
        policy=policy,
    )
    assert {n.controller for n in run.notes() if n.at_s < 54} >= {"priority", "scale"}
    assert [n for n in run.notes() if n.at_s >= 54] == []


def test_one_silent_worker_does_not_blind_the_loops_to_the_others() -> None:
    faults: list[Fault] = [Silence(20, "default-2", 200), Hang(40, "default-1")]
    run = rehearse(["heal"], [people((0, 5))], 90, fleet=a_fleet(2), faults=faults)
    assert [n.what for n in run.notes("command")] == ["restart default-1"]


def test_batch_leaves_realtime_its_own_places() -> None:
    """REALTIME waits for places, not for BATCH: a smaller running set would only take them away."""
    sources = [people((0, 4), (30, 100)), documents((0, 0.2))]
    arms = [rehearse([name], sources, 100, policy={"batch.active": 48}) for name in ("batch", "heal")]
    served = [sum(r.workload is Workload.REALTIME and r.first_ms is not None for r in a.outcome.requests) for a in arms]
    assert served[0] >= 0.98 * served[1]


def test_loops_do_no_harm_where_requests_are_served_in_order_of_arrival() -> None:
    sources, policy = [people((0, 5), (20, 100)), documents((0, 0.5))], {"scheduler.mode": "fcfs"}
    arms = [rehearse(names, sources, 100, policy=policy) for names in (("batch", "priority"), ("heal",))]
    first = [sum(r.first_ms is not None for r in a.outcome.requests) for a in arms]
    assert first[0] >= 0.98 * first[1]
