"""The drills of the loops, on small meshes of real processes with simulated engines; how soon is the drills' own affair."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.bench.progress import Progress
from services.drill import hang, inversion, leak, silence
from services.drill.admin import Decided, Telemetry
from services.drill.figures import Outcome
from services.drill.loop_figures import Trial, goals, notes, sections
from services.drill.loops import Demand, decided, mixed, simulated, stand
from trimtab.messages import Workload

SMALL = Demand(8, 10)


def missed(trials: list[Trial]) -> list[str]:
    """Goals that are not met, but for those of time; with what there is to say of them."""
    bad = [g.name for g in goals(trials) if not g.met and not g.name.endswith("detected_s")]
    return [*bad, *notes(trials)] if bad else []


@pytest.mark.slow
async def test_a_leak_is_healed_by_a_restart_and_stays_with_the_loop_off(tmp_path: Path) -> None:
    trials: list[Trial] = []
    plan = replace(leak.QUICK, demand=SMALL, load_s=1.0)
    async with stand(tmp_path, simulated(leak.POLICY)) as s:
        await s.undisturbed(plan.demand, 1)
        await leak.drilled(s, plan, trials, Progress(1.0))
        assert [end.code for end in s.supervisor.ends] == [75]
    assert missed(trials) == []
    assert [t.controller for t in trials] == ["heal", ""]
    assert trials[0].did == "restart w0"


@pytest.mark.slow
async def test_a_hung_engine_is_started_anew_and_its_streams_go_on(tmp_path: Path) -> None:
    trials: list[Trial] = []
    plan = replace(hang.QUICK, demand=SMALL, off_s=0.0)
    async with stand(tmp_path, simulated(hang.POLICY)) as s:
        await s.undisturbed(plan.demand, 1)
        await hang.drilled(s, plan, trials, Progress(1.0))
        assert [end.code for end in s.supervisor.ends] == [75]
    assert missed(trials) == []
    assert trials[0].did == "restart w0"


@pytest.mark.slow
async def test_an_engine_that_serves_batch_first_is_told_its_policy_again(tmp_path: Path) -> None:
    trials: list[Trial] = []
    async with stand(tmp_path, simulated(inversion.POLICY, flags=inversion.FLAGS)) as s:
        await s.undisturbed(inversion.QUICK.demand, 1)
        await inversion.drilled(s, inversion.QUICK, trials, Progress(1.0))
        assert not s.supervisor.ends
    assert missed(trials) == []
    assert trials[0].did == "reload w0"


@pytest.mark.slow
async def test_nobody_acts_on_the_silence_of_a_worker_that_serves(tmp_path: Path) -> None:
    trials: list[Trial] = []
    plan = replace(silence.QUICK, demand=SMALL)
    async with silence.overheard(tmp_path) as (s, proxy):
        await s.undisturbed(plan.demand, 1)
        await silence.drilled(s, proxy, plan, trials)
    assert missed(trials) == []
    assert not trials[0].did


def test_three_in_ten_of_what_is_asked_are_realtime() -> None:
    kinds = [case.workload for case in mixed(1, 40)]
    assert (kinds.count(Workload.REALTIME), kinds.count(Workload.BATCH)) == (12, 28)


def test_a_decision_counts_where_it_was_done_since_and_by_whom_it_should_be() -> None:
    def a_decision(controller: str = "heal", at: float = 100.0, text: str = "restart w0", failed: str = "") -> Decided:
        return Decided(controller, int(at * 1000), text, "why", "figures", failed)

    right = a_decision(at=101.0)
    others = [a_decision(at=99.0), a_decision("scale", 101.0), a_decision(at=101.0, failed="LOST: gone")]
    others += [a_decision(at=102.0, text="restart w1"), a_decision(at=103.0)]
    told = Telemetry({}, tuple(reversed([*others[:3], right, *others[3:]])), {}, {})
    assert decided(told, "heal", "restart w0", 100.5) == right
    assert decided(told, "heal", "reload", 100.5) is None


def a_trial(**what: object) -> Trial:
    good = {"controller": "heal", "detected_s": 5.0, "healed_s": 9.0, "told": True}
    return Trial("leak", "simulated", "heal", 7.0, **(good | what))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "goal"),
    [
        ({"detected_s": 7.1}, "detected_s"),
        ({"detected_s": None, "controller": ""}, "detected_s"),
        ({"controller": "scale"}, "by_heal"),
        ({"healed_s": None}, "healed"),
        ({"told": False}, "told_by_why"),
        ({"others": ["scale: 3 workers in pool default"]}, "other_decisions"),
        ({"outcomes": [Outcome(0, 3, "STREAM_CUT", (), 0, 0, ())]}, "streams_lost"),
        ({"outcomes": [Outcome(0, 3, "", ("2 Finish",), 0, 0, ())]}, "streams_wrong"),
    ],
)
def test_what_a_trial_misses_is_a_goal_missed(what: dict[str, object], goal: str) -> None:
    assert all(g.met for g in goals([a_trial()]))
    assert f"leak: {goal}" in [g.name for g in goals([a_trial(**what)]) if g.met is False]


def test_the_report_says_who_healed_what_and_what_else_was_done() -> None:
    trial = a_trial(did="restart w0", reason="it leaks KV blocks", evidence="50 held", others=["scale: 3 workers"])
    trial.figures["blocks"] = 50
    titles = [title for title, _ in sections([trial])]
    assert titles == ["Faults", "Figures"]
    assert "heal: restart w0" in sections([trial])[0][1]
    assert notes([trial]) == ["leak: heal says: it leaks KV blocks; 50 held", "leak: beside it, scale: 3 workers"]
