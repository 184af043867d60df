"""Reports folded into windows: what counts, what does not, and what a restart, a silence or another replica's copy does to it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.fleet import Member
from controlplane.seen import STALE_S, WINDOW_S, Seen
from controlplane.telemetry import HOUR_S, RECENT, Telemetry
from trimtab import measures
from trimtab.messages import Hello, Load, NodeState, Outlier, Report, Role, Workload
from trimtab.sketch import Sketch
from trimtab.snapshot import Node

EVERY_S = 1.0


def a_hello(node_id: str = "w0", incarnation: str = "i1", role: Role = Role.WORKER) -> Hello:
    return Hello(Node(node_id), incarnation, role, "tiny")


def a_sketch(*values: float) -> bytes:
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    return sketch.to_bytes()


def a_report(sequence: int, counters: dict[str, int] | None = None, running: int = 1, **more: object) -> Report:
    return Report(
        sequence, NodeState.SERVING, Load(running=running), counters=counters or {}, interval_ms=1000, **more  # type: ignore[arg-type]
    )  # fmt: skip


def seen(telemetry: Telemetry, now: float, *hellos: Hello) -> Seen:
    members = [Member(h, 1, 0.0, now) for h in hellos or (a_hello(),)]
    return telemetry.seen(members, (), now)


def fed(telemetry: Telemetry, reports: list[Report], hello: Hello | None = None, at: float = 0.0) -> float:
    """One a second; the moment of the last."""
    for report in reports:
        at += EVERY_S
        telemetry.reported(hello or a_hello(), report, at)
    return at


def test_a_window_closes_after_five_seconds_with_all_that_was_said_in_it() -> None:
    telemetry = Telemetry(0.0)
    name = measures.ttft(Workload.REALTIME, measures.HOT)
    reports = [a_report(i, {"requests": 2 * i}, sketches={name: a_sketch(100.0 * i)}) for i in range(1, 6)]
    now = fed(telemetry, reports)
    (window,) = seen(telemetry, now).nodes["w0"].windows
    assert (window.number, window.ended - window.begun) == (1, WINDOW_S)
    assert window.counters == {"requests": 10}
    assert window.sketches[name].count == 5
    assert window.sketches[name].quantiles().max == 500.0


def test_nothing_is_in_two_windows() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(i, {"requests": i}, sketches={"prompt": a_sketch(float(i))}) for i in range(1, 24)])
    windows = seen(telemetry, now).nodes["w0"].windows
    assert [w.number for w in windows] == [1, 2, 3, 4]
    assert [w.counters["requests"] for w in windows] == [5, 5, 5, 5]
    assert [w.sketches["prompt"].count for w in windows] == [5, 5, 5, 5]


def test_counters_survive_a_restart_and_never_go_down() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(1, {"requests": 10}), a_report(2, {"requests": 12})])
    now = fed(telemetry, [a_report(1, {"requests": 3}), a_report(2, {"requests": 5})], a_hello(incarnation="i2"), now)
    node = seen(telemetry, now, a_hello(incarnation="i2")).nodes["w0"]
    assert (node.totals["requests"], node.restarts, node.incarnation) == (17, 1, "i2")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), min_size=1, max_size=40))
def test_whatever_restarts_the_total_is_all_that_was_counted(steps: list[tuple[bool, int]]) -> None:
    telemetry, total, value, sequence, incarnation, now = Telemetry(0.0), 0, 0, 0, 0, 0.0
    for anew, rose in steps:
        if anew:
            incarnation, value, sequence = incarnation + 1, 0, 0
        value, total, sequence, now = value + rose, total + rose, sequence + 1, now + EVERY_S
        telemetry.reported(a_hello(incarnation=str(incarnation)), a_report(sequence, {"requests": value}), now)
    node = seen(telemetry, now, a_hello(incarnation=str(incarnation))).nodes["w0"]
    assert node.totals.get("requests", 0) == total


def test_a_report_that_comes_twice_counts_once() -> None:
    telemetry = Telemetry(0.0)
    report = a_report(1, {"requests": 4}, sketches={"prompt": a_sketch(5.0)})
    assert telemetry.reported(a_hello(), report, 1.0)
    assert not telemetry.reported(a_hello(), report, 1.5)
    assert seen(telemetry, 2.0).nodes["w0"].totals == {"requests": 4}


def test_a_late_report_of_a_process_that_is_gone_changes_nothing() -> None:
    telemetry = Telemetry(0.0)
    telemetry.reported(a_hello(incarnation="i1"), a_report(1, {"requests": 4}), 1.0)
    telemetry.reported(a_hello(incarnation="i2"), a_report(1, {"requests": 1}), 2.0)
    assert not telemetry.reported(a_hello(incarnation="i1"), a_report(2, {"requests": 9}), 2.5)
    node = seen(telemetry, 3.0, a_hello(incarnation="i2")).nodes["w0"]
    assert (node.incarnation, node.totals["requests"], node.restarts) == ("i2", 5, 1)


def test_high_water_marks_and_queues_are_no_totals() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(1, {"scheduler_max_overtake_ms": 9, "scheduler_short_waiting": 3, "errors": 1})])
    assert seen(telemetry, now).nodes["w0"].totals == {"errors": 1}


def test_a_node_that_is_silent_is_stale_and_says_nothing_of_now() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(1, gauges={measures.KV_USED: 0.5})])
    assert seen(telemetry, now + STALE_S).nodes["w0"].gauge(measures.KV_USED, now + STALE_S) == 0.5
    late = now + STALE_S + 0.1
    assert seen(telemetry, late).nodes["w0"].gauge(measures.KV_USED, late) is None


def test_a_gauge_that_a_node_can_not_measure_is_absent() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(1)])
    assert seen(telemetry, now).nodes["w0"].gauge(measures.RSS_BYTES, now) is None


def test_a_window_that_a_silence_cut_ends_where_the_silence_began() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(1, {"requests": 1}), a_report(2, {"requests": 2})])
    telemetry.reported(a_hello(), a_report(3, {"requests": 9}), now + 60.0)
    (window,) = seen(telemetry, now + 60.0).nodes["w0"].windows
    assert (window.ended, window.counters) == (now, {"requests": 2})


def test_peaks_are_the_highest_within_a_window() -> None:
    telemetry = Telemetry(0.0)
    loads = [1, 7, 3, 2, 1]
    now = fed(telemetry, [a_report(i + 1, running=n, gauges={"kv_used": n / 10}) for i, n in enumerate(loads)])
    (window,) = seen(telemetry, now).nodes["w0"].windows
    assert (window.peaks["running"], window.peaks["kv_used"]) == (7.0, 0.7)


def test_idle_counts_from_when_nothing_ran_or_waited() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(1, running=1), a_report(2, running=0), a_report(3, running=0)])
    assert seen(telemetry, now).nodes["w0"].idle_since == 2.0
    telemetry.reported(a_hello(), a_report(4, running=2), now + 1)
    assert seen(telemetry, now + 1).nodes["w0"].idle_since is None


def test_outliers_come_with_their_window() -> None:
    telemetry = Telemetry(0.0)
    worst = Outlier("r1", Workload.REALTIME, 4000, ttft_ms=900.0, neighbours=3)
    now = fed(telemetry, [a_report(i, outliers=(worst,) if i == 2 else ()) for i in range(1, 6)])
    (window,) = seen(telemetry, now).nodes["w0"].windows
    assert window.outliers == [worst]


def test_the_last_thousand_lengths_are_apart_from_the_day_before() -> None:
    telemetry, hello = Telemetry(0.0), a_hello()
    now, sequence = 0.0, 0
    for length, windows in ((100.0, 30), (5000.0, 21)):
        for _ in range(windows * 5):
            sequence, now = sequence + 1, now + EVERY_S
            telemetry.reported(hello, a_report(sequence, sketches={"prompt": a_sketch(*[length] * 10)}), now)
    lengths = seen(telemetry, now).lengths["tiny"]
    assert RECENT <= lengths.recent_prompts.count <= RECENT + 50
    assert lengths.recent_prompts.quantile(0.05) == pytest.approx(5000.0)
    assert lengths.day_prompts.quantile(0.9) == pytest.approx(100.0, rel=0.01)
    assert lengths.recent_prompts.count + lengths.day_prompts.count == 51 * 50


def test_lengths_of_the_day_before_yesterday_are_forgotten() -> None:
    telemetry, hello = Telemetry(0.0), a_hello()
    for hour in range(60):
        for i in range(5):
            now = hour * HOUR_S + i * EVERY_S
            telemetry.reported(
                hello, a_report(hour * 5 + i + 1, sketches={"prompt": a_sketch(*[float(hour)] * 400)}), now
            )
    lengths = seen(telemetry, now).lengths["tiny"]
    assert lengths.day_prompts.quantile(0.0) >= 60 - 24 - 3
    assert lengths.day_span_s == 24 * HOUR_S


def test_what_is_no_sketch_is_passed_over() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(i, {"requests": i}, sketches={"prompt": b"nonsense"}) for i in range(1, 6)])
    (window,) = seen(telemetry, now).nodes["w0"].windows
    assert (window.sketches, window.counters) == ({}, {"requests": 5})


def test_a_node_that_left_is_not_connected_and_in_the_end_forgotten() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(1, {"requests": 1})])
    assert telemetry.seen((), (), now + 10).nodes["w0"].connected is False
    assert telemetry.seen((), (), now + 1000).nodes == {}


def test_out_of_memory_outlives_the_process_that_it_ended() -> None:
    telemetry = Telemetry(0.0)
    fed(telemetry, [a_report(1)])
    telemetry.ran_out_of_memory(a_hello(), 2.0)
    telemetry.reported(a_hello(incarnation="i2"), a_report(1), 9.0)
    assert seen(telemetry, 9.0, a_hello(incarnation="i2")).nodes["w0"].out_of_memory_at == 2.0


def test_what_a_process_did_before_anybody_listened_is_of_no_window() -> None:
    telemetry = Telemetry(0.0)
    now = fed(telemetry, [a_report(i, {"requests": 1000 + i}) for i in range(101, 107)])
    node = seen(telemetry, now).nodes["w0"]
    assert node.totals["requests"] == 1106
    assert sum(w.counters.get("requests", 0) for w in node.windows) == 4


def test_a_process_that_drained_was_told_to_go_and_one_that_did_not_has_died() -> None:
    telemetry = Telemetry(0.0)
    telemetry.reported(a_hello(), a_report(1), 1.0)
    told = Member(a_hello(), 1, 0.0, 1.5, report=Report(2, NodeState.DRAINING))
    telemetry.seen([told], (), 2.0)
    telemetry.reported(a_hello(incarnation="i2"), a_report(1), 4.0)
    node = seen(telemetry, 5.0, a_hello(incarnation="i2")).nodes["w0"]
    assert (node.restarts, node.deaths, node.died_at) == (1, 0, None)
    telemetry.reported(a_hello(incarnation="i3"), a_report(1), 9.0)
    node = seen(telemetry, 10.0, a_hello(incarnation="i3")).nodes["w0"]
    assert (node.restarts, node.deaths, node.died_at) == (2, 1, 4.0)
