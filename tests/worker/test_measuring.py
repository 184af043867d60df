"""What a worker measures of its requests: against objectives, by names that are few, and never twice."""

from __future__ import annotations

import pytest

from services.worker.engines import Stamps
from services.worker.measuring import GAP_EDGES_MS, Buckets, End, Measuring
from trimtab import measures
from trimtab.messages import Request, Resume, SloTargets, Timings, Workload
from trimtab.policy import Policy, with_fields
from trimtab.scheduling import LengthClass
from trimtab.sketch import Sketch

REALTIME, BATCH = Workload.REALTIME, Workload.BATCH
ARRIVAL = 100.0


class Bench:
    """Measuring under a policy that a test may change."""

    def __init__(self, running: int = 0, longest_prefill: int = 0, **fields: object) -> None:
        self.policy = with_fields(Policy(), {k.replace("__", "."): v for k, v in fields.items()})  # type: ignore[misc]
        self.around = (running, longest_prefill)
        self.measuring = Measuring(lambda: self.policy, lambda: self.around, ARRIVAL)

    def begin(self, name="r", *, prompt=100, workload=REALTIME, age_s=0.0, slo=SloTargets(), resume=None):  # noqa: B008
        request = Request(name, "m", "", workload=workload, slo=slo, resume=resume)
        return self.measuring.accepted(request, prompt, ARRIVAL, age_s)

    def run(self, name="r", *, ttft_ms=100.0, gaps_ms=(), outcome="ok", queued_ms=1.0, preemptions=0, **facts):
        """A whole request, from its acceptance to its end."""
        one = self.begin(name, **facts)
        first = at = ARRIVAL + ttft_ms / 1000.0
        self.measuring.output(one, Stamps(ARRIVAL, first, at, 0), 0.0)
        for gap in gaps_ms:
            at += gap / 1000.0
            self.measuring.output(one, Stamps(ARRIVAL, first, at, 0), 0.0)
        total_ms = (at - ARRIVAL) * 1000.0
        self.end(one, outcome, 1 + len(gaps_ms), Timings(queued_ms, 1.0, ttft_ms, total_ms, preemptions), at)
        return one

    def end(self, one, outcome="ok", tokens=0, timings=Timings(), at=ARRIVAL, **facts):  # noqa: B008
        end = End(one.workload, outcome, one.prompt_tokens, tokens, 0, timings, at, **facts)
        self.measuring.ended(end, one)

    def take(self):
        taken = self.measuring.intervals.take(ARRIVAL + 1.0)
        return {name: Sketch.from_bytes(data) for name, data in taken.sketches.items()}, taken.outliers


def test_each_figure_goes_under_its_names():
    bench = Bench(paths__hot_below=1000)
    bench.run(ttft_ms=50.0, gaps_ms=(10.0, 30.0), prompt=300)
    bench.run(ttft_ms=70.0, prompt=5000, workload=BATCH)
    sketches, _ = bench.take()
    assert {name: (s.count, pytest.approx(s.sum, rel=1e-6)) for name, s in sketches.items()} == {
        "ttft.realtime.hot": (1, 50.0), "ttft.short": (1, 50.0), "itl.realtime": (2, 40.0), "e2e.realtime": (1, 90.0),
        "ttft.batch.cold": (1, 70.0), "ttft.long": (1, 70.0), "e2e.batch": (1, 70.0),
        "prompt": (2, 5300.0), "total": (2, 5304.0),
    }  # fmt: skip
    assert set(sketches) <= set(measures.SKETCHES)


def test_one_output_of_several_tokens_is_one_gap_and_the_newest_stamp_counts():
    bench = Bench()
    one = bench.begin()
    for at in (100.1, 100.1, 100.4):
        bench.measuring.output(one, Stamps(100.0, 100.1, at, 0), 0.0)
    assert (one.gaps.count, one.gaps.longest_ms) == (2, pytest.approx(300.0))


def test_an_engine_that_stamps_nothing_is_measured_by_when_its_outputs_came():
    bench = Bench()
    one = bench.begin()
    bench.measuring.output(one, Stamps(), ARRIVAL + 0.2)
    bench.measuring.output(one, Stamps(), ARRIVAL + 0.25)
    sketches, _ = bench.take()
    assert sketches["ttft.realtime.hot"].sum == pytest.approx(200.0)
    assert sketches["itl.realtime"].sum == pytest.approx(50.0)


def test_of_a_stream_that_goes_on_here_only_gaps_and_the_end_count():
    bench = Bench()
    resume = Resume((1, 2, 3), 3, 2, b"")
    bench.run(ttft_ms=9000.0, gaps_ms=(20.0,), queued_ms=8000.0, resume=resume, prompt=40)
    sketches, outliers = bench.take()
    assert {name: s.sum for name, s in sketches.items()} == {"itl.realtime": pytest.approx(20.0), "total": 45.0}
    assert outliers == ()
    assert bench.measuring.counters[measures.requests_of(REALTIME)] == 1


def test_who_was_refused_is_counted_and_measured_nowhere():
    bench = Bench()
    bench.measuring.ended(End(BATCH, "back_pressure", 50, 0, 0, Timings(), ARRIVAL), None)
    assert bench.take() == ({}, ())
    counted = {name: n for name, n in bench.measuring.counters.items() if n}
    assert counted == {"requests": 1, "batch_requests": 1, "prompt_tokens": 50}


def test_counters_are_those_that_are_known_and_never_fall():
    bench = Bench()
    before = dict(bench.measuring.counters)
    assert tuple(before) == measures.OWN_COUNTERS
    for i, outcome in enumerate(("ok", "engine_fault", "cancelled", "client_fault", "ok")):
        workload = (REALTIME, BATCH)[i % 2]
        bench.run(ttft_ms=1000.0 * i, outcome=outcome, workload=workload, prompt=10 ** (i + 1))
        bench.take()
        now = dict(bench.measuring.counters)
        assert now.keys() == before.keys()
        assert all(now[name] >= before[name] for name in before)
        before = now
    assert (before["requests"], before["errors"], before["realtime_requests"], before["batch_requests"]) == (5, 1, 3, 2)
    assert sum(before[measures.requests_of_length(c)] for c in LengthClass) == 5


# Objectives.


@pytest.mark.parametrize(
    ("facts", "missed"),
    [
        ({"ttft_ms": 500.0}, False),
        ({"ttft_ms": 501.0}, True),
        ({"ttft_ms": 501.0, "slo": SloTargets(ttft_ms=600)}, False),
        ({"ttft_ms": 301.0, "slo": SloTargets(ttft_ms=300)}, True),
        ({"ttft_ms": 5000.0, "workload": BATCH}, False),
        ({"ttft_ms": 5000.0, "workload": BATCH, "slo": SloTargets(ttft_ms=900)}, True),
        ({"gaps_ms": (50.0, 201.0)}, True),
        ({"gaps_ms": (50.0, 201.0), "slo": SloTargets(itl_ms=250)}, False),
        ({"gaps_ms": (50.0, 2000.0), "workload": BATCH}, False),
        ({"gaps_ms": (20.0,) * 150 + (900.0,)}, False),
        ({"gaps_ms": (20.0,) * 150 + (900.0, 900.0)}, True),
        ({"queued_ms": 599_000.0, "workload": BATCH}, False),
        ({"queued_ms": 601_000.0, "workload": BATCH}, True),
        ({"queued_ms": 1_000.0, "age_s": 600.0, "workload": BATCH}, True),
    ],
)
def test_a_request_misses_its_own_objective_else_the_policys(facts, missed):
    bench = Bench()
    one = bench.run("late", **facts)
    _, outliers = bench.take()
    assert [o.request_id for o in outliers] == (["late"] if missed else [])
    assert bench.measuring.counters[measures.over(one.workload)] == missed


def test_who_leaves_before_the_first_token_has_waited_at_least_so_long():
    bench = Bench()
    bench.end(bench.begin("patient"), "cancelled", at=ARRIVAL + 0.4)
    bench.end(bench.begin("left"), "cancelled", at=ARRIVAL + 0.7)
    (outlier,) = bench.take()[1]
    assert (outlier.request_id, outlier.ttft_ms, outlier.queued_ms) == (
        "left",
        pytest.approx(700.0),
        pytest.approx(700.0),
    )


def test_an_outlier_names_its_neighbours_and_the_longest_prompt_among_them():
    bench = Bench(running=7, longest_prefill=2000)
    beside = bench.begin("beside", prompt=900)
    bench.measuring.output(beside, Stamps(ARRIVAL, 100.1, 100.1, 0), 0.0)
    bench.begin("waits", prompt=50_000)
    bench.run("late", ttft_ms=900.0, gaps_ms=(10.0, 40.0), queued_ms=33.0, preemptions=2)
    bench.end(beside)
    bench.around = (1, 0)
    bench.run("later", ttft_ms=901.0)
    worst, late = bench.take()[1]
    assert (late.neighbours, late.longest_neighbour_tokens) == (7, 2000)
    assert (worst.request_id, worst.neighbours, worst.longest_neighbour_tokens) == ("later", 1, 0)
    assert (late.workload, late.prompt_tokens, late.output_tokens, late.ttft_ms) == (REALTIME, 100, 3, 900.0)
    assert (late.itl_ms, late.queued_ms, late.preemptions) == (pytest.approx(40.0), 33.0, 2)


def test_a_prompt_that_was_left_in_the_middle_is_not_its_own_neighbour():
    bench = Bench(running=1, longest_prefill=9000)
    bench.end(bench.begin(prompt=9000), "cancelled", at=ARRIVAL + 0.7)
    assert bench.take()[1][0].longest_neighbour_tokens == 0


def test_a_re_cut_of_lengths_and_objectives_holds_for_those_who_come_after_it():
    bench = Bench()
    before = bench.begin(prompt=700)
    changes = {"clusters.short_to": 800, "objectives.ttft_p99_ms": 50, "paths.hot_below": 600}
    bench.policy = with_fields(bench.policy, changes)
    after = bench.begin(prompt=700)
    assert (before.length, before.cold, before.targets.ttft_ms) == (LengthClass.STANDARD, False, 500.0)
    assert (after.length, after.cold, after.targets.ttft_ms) == (LengthClass.SHORT, True, 50.0)
    bench.end(before)
    bench.end(after)
    assert bench.measuring.counters["standard_requests"] == bench.measuring.counters["short_requests"] == 1


def test_whatever_comes_the_names_stay_few_and_nobody_is_left_running():
    bench = Bench()
    for i in range(1000):
        bench.run(f"r{i}", prompt=1 + 37 * i, ttft_ms=float(i), gaps_ms=(float(i),), workload=(REALTIME, BATCH)[i % 2])
    sketches, outliers = bench.take()
    assert set(sketches) == set(measures.SKETCHES)
    assert all(len(s.to_bytes()) <= 4096 for s in sketches.values())
    assert [o.request_id for o in outliers] == [f"r{i}" for i in range(998, 982, -2)]
    assert tuple(bench.measuring.counters) == measures.OWN_COUNTERS
    assert not bench.measuring._running


def test_gaps_are_counted_up_to_each_edge():
    buckets = Buckets()
    for gap in (1.0, 5.0, 5.1, 60.0, 1e6):
        buckets.add(gap)
    counts = dict(zip((*GAP_EDGES_MS, float("inf")), buckets.up_to(), strict=True))
    assert (counts[5.0], counts[10.0], counts[50.0], counts[75.0], counts[5000.0]) == (2, 3, 3, 4, 4)
    assert (counts[float("inf")], buckets.sum) == (5, pytest.approx(1_000_071.1))


def test_turns_of_sessions_and_prefixes_are_those_of_requests_that_began_and_ended_here():
    measuring = Bench().measuring
    for i, resume in enumerate((None, None, Resume((1, 2), 2, 1, b""), None)):
        request = Request(f"r{i}", "m", "", workload=REALTIME, session_id="s", resume=resume)
        one = measuring.accepted(request, 200, ARRIVAL + i, 0.0)
        measuring.ended(End(REALTIME, "ok", 200, 1, 100 * (i == 1), Timings(), ARRIVAL + i), one)
    assert measuring.reuse.sessions.turns(ARRIVAL + 9) == 3.0, "what goes on here after another worker is no turn"
    assert measuring.reuse.prefixes.kept(64, ARRIVAL + 9) == 64 / 100
