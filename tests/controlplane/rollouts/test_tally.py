"""What one worker has done, counted from its folded reports through the end of its process."""

from __future__ import annotations

from controlplane.fleet import Fleet
from controlplane.rollouts.tally import Counts, Tally
from controlplane.telemetry import Telemetry
from trimtab import measures
from trimtab.messages import Hello, NodeState, Report, Role, Workload
from trimtab.sketch import Sketch
from trimtab.snapshot import Node

TTFT = measures.ttft(Workload.REALTIME, measures.HOT)


class Canary:
    """Ten first tokens of `ttft_ms` in each report; reports are 0.8 s apart."""

    def __init__(self) -> None:
        self.telemetry, self.fleet, self.tally = Telemetry(0.0), Fleet(), Tally(500.0, 200.0)
        self.now, self.sequence, self.ttft_ms = 0.0, 0, 50.0
        self.runs("i1")

    def runs(self, incarnation: str) -> None:
        self.hello = Hello(Node("c"), incarnation, Role.WORKER, "m")
        self.sequence = 0
        self.fleet.joined(self.hello, self.now)

    def reports(self, times: int, *, waiting: float = 0.0) -> Counts:
        for _ in range(times):
            self.now, self.sequence = self.now + 0.8, self.sequence + 1
            sketch = Sketch()
            for _ in range(10):
                sketch.add(self.ttft_ms)
            report = Report(
                self.sequence, NodeState.SERVING, interval_ms=800, sketches={TTFT: sketch.to_bytes()},
                gauges={measures.REALTIME_WAITING: waiting},
            )  # fmt: skip
            self.telemetry.reported(self.hello, report, self.now)
            self.looks()
        return self.tally.counts

    def looks(self) -> None:
        self.tally.look(self.telemetry.seen(list(self.fleet), (), self.now).nodes["c"], self.now)


def test_what_a_worker_does_as_another_process_counts_from_its_first_report_on() -> None:
    canary = Canary()
    canary.reports(1)
    assert canary.reports(30).firsts == 300
    canary.runs("i2")
    canary.ttft_ms = 900.0
    for times in (1, 2, 3, 4):
        before = canary.tally.counts
        after = canary.reports(times)
        gained = after.plus(before, -1)
        assert (gained.firsts, gained.late, gained.samples) == (10 * times,) * 3
    assert (canary.tally.counts.firsts, canary.tally.counts.late) == (400, 100)


def test_windows_that_a_new_process_closes_count_once() -> None:
    canary = Canary()
    canary.reports(1)
    canary.reports(10)
    canary.runs("i2")
    assert canary.reports(20).firsts == 300
    canary.runs("i3")
    canary.looks()
    assert canary.tally.counts.firsts == 300
    assert canary.reports(20).firsts == 500


def test_nobody_waits_for_a_process_that_has_ended() -> None:
    canary = Canary()
    canary.reports(3, waiting=40.0)
    counted = canary.tally.counts
    canary.runs("i2")
    canary.looks()
    assert canary.tally.overdue == 0
    after = canary.reports(2)
    assert (after.late, after.firsts) == (counted.late, counted.firsts + 20)
