"""The rules by which requests are measured: objectives, what is missed and by how much, and under which names; the same for served requests and
simulated ones.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

from services.worker.engines import Stamps
from services.worker.measuring import End
from services.worker.measuring import Measuring as Served
from trimtab import measures
from trimtab.measuring import Ended, Gaps, Measured, Targets, badness, is_cold, targets_of
from trimtab.messages import Load, NodeState, Outlier, SloTargets, Timings, Workload
from trimtab.messages import Request as ServedRequest
from trimtab.policy import Policy, with_fields
from trimtab.scheduling import LengthClass
from trimtab.simulation.measuring import Measuring as Simulated
from trimtab.simulation.request import Fate, Request
from trimtab.sketch import Sketch

REALTIME, BATCH = Workload.REALTIME, Workload.BATCH
POLICY = with_fields(
    Policy(),
    {
        "objectives.ttft_p99_ms": 400,
        "objectives.itl_p99_ms": 60,
        "objectives.max_queue_s": 20,
        "paths.hot_below": 1000,
    },
)


def test_a_requests_own_objectives_come_before_the_policys() -> None:
    assert targets_of(POLICY, REALTIME) == Targets(400.0, 60.0, math.inf)
    assert targets_of(POLICY, REALTIME, SloTargets(ttft_ms=90)) == Targets(90.0, 60.0, math.inf)
    assert targets_of(POLICY, BATCH) == Targets(math.inf, math.inf, 20_000.0)
    assert targets_of(POLICY, BATCH, SloTargets(itl_ms=30)) == Targets(math.inf, 30.0, 20_000.0)


def test_prompts_are_cold_from_the_policys_edge_on() -> None:
    assert [is_cold(POLICY, tokens) for tokens in (999, 1000)] == [False, True]


@pytest.mark.parametrize(
    ("targets", "ttft_ms", "queued_ms", "gaps", "expected"),
    [
        (Targets(400, 60, math.inf), 800.0, 9e9, Gaps(), 2.0),
        (Targets(400, 60, math.inf), 100.0, 0.0, Gaps(200, 2, 600.0), 0.25),
        (Targets(400, 60, math.inf), 100.0, 0.0, Gaps(200, 3, 600.0), 10.0),
        (Targets(math.inf, math.inf, 20_000), 9e9, 30_000.0, Gaps(9, 9, 9e9), 1.5),
    ],
    ids=["first token", "one gap in a hundred may be late", "more may not", "a wait"],
)
def test_how_bad_it_was_is_by_the_objective_that_it_missed_most(
    targets: Targets, ttft_ms: float, queued_ms: float, gaps: Gaps, expected: float
) -> None:
    assert badness(targets, ttft_ms, queued_ms, gaps) == expected


def test_gaps_above_the_objective_are_late_and_those_at_it_are_not() -> None:
    gaps = Gaps()
    for ms in (60.0, 61.0, 5.0):
        gaps.add(ms, 60.0)
    assert gaps == Gaps(3, 1, 61.0)


def test_an_outlier_is_wanted_of_those_alone_that_missed_and_are_among_the_worst() -> None:
    measured = Measured(0.0)

    def ended(how_bad: float) -> bool:
        return measured.ended(Ended(REALTIME, False, 1, 1, length=LengthClass.SHORT, badness=how_bad))

    assert not ended(1.0)
    assert measured.counters[measures.over(REALTIME)] == 0
    for i in range(8):
        assert ended(2.0 + i)
        measured.intervals.keep(2.0 + i, Outlier(f"r{i}", REALTIME, 1))
    assert not ended(1.5) and ended(3.0)
    assert measured.counters[measures.over(REALTIME)] == 10


def test_a_gateway_says_less_and_counts_nobody_by_what_engines_know() -> None:
    gateway = Measured(0.0, engine=False)
    gateway.first_token(BATCH, LengthClass.LONG, 7.0, cold=True)
    end = Ended(BATCH, True, 3, 5, length=LengthClass.LONG, total_tokens=8, e2e_ms=9.0, badness=50.0)
    assert not gateway.ended(end)
    assert set(gateway.intervals.take(1.0).sketches) == {"ttft.batch.cold", "e2e.batch"}
    assert {k: n for k, n in gateway.counters.items() if n} == {"requests": 1, "errors": 1, "output_tokens": 3}


# One story, told to both.


@dataclass
class Story:
    """What became of one request: it came, was scheduled, gave outputs, and ended. Milliseconds, and the ends of its gaps add up."""

    name: str
    workload: Workload
    prompt: int
    came_ms: float
    queued_ms: float
    ttft_ms: float
    gaps_ms: list[float] = field(default_factory=list)
    fate: Fate = Fate.SERVED
    preemptions: int = 0

    @property
    def ended_ms(self) -> float:
        return self.came_ms + self.ttft_ms + sum(self.gaps_ms)


def stories(seed: int) -> list[Story]:
    rng, found, at = random.Random(seed), [], 0.0
    for i in range(600):
        at += float(rng.randint(0, 40))
        queued = float(rng.choice([0, 3, 40, 19_000, 25_000]))
        gaps = [float(rng.choice([8, 8, 8, 30, 61, 300])) for _ in range(rng.choice([0, 1, 5, 150]))]
        fate = rng.choice([Fate.SERVED, Fate.SERVED, Fate.SERVED, Fate.FAILED, Fate.RELEASED])
        found.append(
            Story(
                f"r{i}", rng.choice([REALTIME, BATCH]), int(rng.lognormvariate(6, 2)) + 1, at, queued,
                queued + rng.choice([5.0, 80.0, 399.0, 900.0]), gaps, fate, rng.randint(0, 2),
            )
        )  # fmt: skip
    return found


def as_served(s: Story, to: Served) -> None:
    """Of a worker: seconds of its engine's clock."""
    at = s.came_ms / 1000.0
    one = to.accepted(ServedRequest(s.name, "m", "", workload=s.workload), s.prompt, at, 0.0)
    first = newest = (s.came_ms + s.ttft_ms) / 1000.0
    to.output(one, Stamps(at, first, newest, 0), 0.0)
    passed = s.came_ms + s.ttft_ms
    for gap in s.gaps_ms:
        passed += gap
        to.output(one, Stamps(at, first, passed / 1000.0, 0), 0.0)
    outcome = {Fate.SERVED: "ok", Fate.FAILED: "engine_fault", Fate.RELEASED: "cancelled"}[s.fate]
    timings = Timings(s.queued_ms, 0.0, s.ttft_ms, s.ended_ms - s.came_ms, s.preemptions)
    to.ended(End(s.workload, outcome, s.prompt, 1 + len(s.gaps_ms), 0, timings, s.ended_ms / 1000.0), one)


def as_simulated(s: Story, to: Simulated) -> None:
    """Of a simulated worker: milliseconds of virtual time."""
    r = Request(s.name, s.workload, s.prompt, 1 + len(s.gaps_ms), s.came_ms, attempts=1)
    to.accepted(r)
    r.scheduled_ms, r.first_ms, r.delivered = s.came_ms + s.queued_ms, s.came_ms + s.ttft_ms, 1
    to.first_token(r, POLICY)
    for gap in s.gaps_ms:
        to.gap(r, POLICY, gap)
        r.delivered += 1
    r.fate, r.preemptions = s.fate, s.preemptions
    to.ended(r, POLICY, s.ended_ms)


def rounded(o: Outlier) -> tuple[object, ...]:
    return (
        o.request_id, o.workload, o.prompt_tokens, o.output_tokens, round(o.ttft_ms, 3), round(o.itl_ms, 3),
        round(o.queued_ms, 3), o.preemptions, o.neighbours,
    )  # fmt: skip


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_simulated_worker_reports_of_a_story_what_a_real_one_does(seed: int) -> None:
    served, simulated = Served(lambda: POLICY, lambda: (0, 0), 0.0), Simulated(0.0)
    told = stories(seed)
    for s in told:
        as_served(s, served)
        as_simulated(s, simulated)
    real = served.intervals.take(60.0)
    virtual = simulated.report(60_000.0, NodeState.SERVING, Load(), 0, {}, {})
    assert virtual.counters == served.counters
    assert served.counters[measures.REQUESTS] == len(told) and served.counters[measures.over(REALTIME)] > 8
    assert virtual.sketches.keys() == real.sketches.keys() == set(measures.SKETCHES)
    for name, data in real.sketches.items():
        a, b = Sketch.from_bytes(data), Sketch.from_bytes(virtual.sketches[name])
        assert (a.count, round(a.sum, 1)) == (b.count, round(b.sum, 1)), name
        assert a.quantile(0.99) == pytest.approx(b.quantile(0.99), rel=1e-6), name
    assert virtual.interval_ms == real.interval_ms == 60_000
    assert list(map(rounded, virtual.outliers)) == list(map(rounded, real.outliers)) and len(real.outliers) == 8
