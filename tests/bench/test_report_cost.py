"""The bench of what reporting costs: that it measures what it says, and what it makes of figures."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.bench import report_cost
from services.bench.options import Options
from services.bench.processes import BenchError
from services.bench.report_cost import PARTS, REQUESTS_PER_S, TOKENS, Found, Load
from trimtab import codec, measures
from trimtab.sketch import Sketch
from trimtab.v1 import control_pb2


async def test_a_second_of_load_is_what_it_is_said_to_be(tmp_path: Path) -> None:
    load = Load(tmp_path, 1)
    assert load.second() > 0 and load.second() > 0
    report = codec.decode_report(load._membership.report())
    counts = {name: Sketch.from_bytes(data).count for name, data in report.sketches.items()}
    assert counts["total"] == counts["prompt"] == 2 * REQUESTS_PER_S
    assert counts["itl.realtime"] + counts["itl.batch"] == 2 * REQUESTS_PER_S * (TOKENS - 1)
    assert report.counters[measures.REQUESTS] == 2 * REQUESTS_PER_S
    assert set(counts) == set(measures.SKETCHES), "every sketch costs something"
    assert 1 <= len(report.outliers) <= 8


async def test_a_report_is_one_that_goes_over_the_wire(tmp_path: Path) -> None:
    load = Load(tmp_path, 1)
    load.second()
    cost, size = load.report()
    empty = control_pb2.Report().ByteSize()
    assert cost > 0 and size > 2000 > empty


async def test_it_reports_every_part_their_sum_and_the_goal() -> None:
    report = await report_cost.run(Options(quick=True, rounds=6))
    shares = {a["arm"]: a["share"] for a in report.arms if "share" in a}
    assert list(shares) == [*PARTS, "all"]
    assert all(share > 0 for share in shares.values())
    assert shares["all"] == pytest.approx(sum(shares[part] for part in PARTS), rel=0.5)
    (goal,) = report.goals
    assert (goal.name, goal.goal, goal.value) == ("share_of_a_core", 0.01, shares["all"])
    assert "PART" in report.text() and "bytes (median)" in report.text()


def test_what_was_not_measured_is_not_judged() -> None:
    assert [g.met for g in report_cost._goals(Found(), 1)] == [None]
    assert report_cost._sections(report_cost._rows(Found(), 1)) == []


@pytest.mark.parametrize(("cost", "met"), [(0.004, True), (0.02, False)])
def test_the_goal_is_judged_by_the_sum(cost: float, met: bool) -> None:
    found = Found({part: [cost / len(PARTS)] * 8 for part in PARTS})
    assert [g.met for g in report_cost._goals(found, 1)] == [met]


async def test_an_interrupted_run_reports_what_it_has() -> None:
    run = asyncio.ensure_future(report_cost.run(Options()))
    for _ in range(3):
        await asyncio.sleep(0)
    run.cancel()
    report = await run
    assert (report.whole, report.exit_code(check=True)) == (False, 130)


async def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="nothing that could be resumed"):
        await report_cost.run(Options(resume=tmp_path))
