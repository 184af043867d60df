"""What is made of a burst: availability, recovery, deaths."""

from __future__ import annotations

from services.drill.burst import AVAILABILITY, Arm, Plan, goals, recovery_s

PLAN = Plan(rate_per_s=1.0, batch=1, before_s=10.0, burst_s=10.0, after_s=20.0)


def an_arm(slow_until: float = 20.0, failed: int = 0) -> Arm:
    """One request each tenth of a second; slow from the burst's beginning to `slow_until`."""
    times = [i / 10 for i in range(400)]
    seen = [(at, 2.0 if 10.0 <= at < slow_until else 0.1, "") for at in times]
    seen[:failed] = [(at, None, "QUEUE_FULL") for at, _, _ in seen[:failed]]
    return Arm("simulated", seen, queues=[(0.0, 0, 0)], memory_mb={"g0": [1.0]})


def test_the_phases_are_told_apart():
    assert [PLAN.phase(at) for at in (0.0, 9.9, 10.0, 19.9, 20.0, 39.0)] == ["before"] * 2 + ["burst"] * 2 + [
        "after"
    ] * 2


def test_recovery_is_the_end_of_the_last_bad_window():
    assert recovery_s(PLAN, an_arm()) == 0.0
    assert recovery_s(PLAN, an_arm(slow_until=25.0)) == 6.0
    assert recovery_s(PLAN, Arm("simulated")) is None


def test_a_request_that_failed_is_one_that_was_not_available():
    assert [g.met for g in goals(PLAN, an_arm())] == [True, True, True]
    found = goals(PLAN, an_arm(failed=1))
    assert found[0].value is not None and found[0].value < AVAILABILITY
    assert found[0].met is False


def test_a_process_that_died_is_missed_at_the_next_look():
    arm = an_arm()
    arm.queues.append((0.5, 0, 0))
    assert goals(PLAN, arm)[2].met is False
