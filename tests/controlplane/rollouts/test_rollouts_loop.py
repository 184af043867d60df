"""Rollouts in virtual time: what is bad is taken back before anybody notices much, what is good holds for all, and what is the same is left."""

from __future__ import annotations

import pytest

from controlplane.rollouts.builds import overlay_of
from controlplane.rollouts.choose import Wanted
from controlplane.rollouts.state import Stage, Verdict
from tests.controlplane.rollouts.tried import tried
from trimtab.simulation import Die, Hang

pytestmark = pytest.mark.slow

BAKE_S = 60.0
NO_DIFFERENCE = {"heal.grace_s": "31"}
"""Of no worker's steps."""


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize(
    "fields", [{"batch.active": "1"}, {"prefill.step_tokens": "16", "batch.active": "8"}], ids=["alone", "slow prompts"]
)
def test_a_bad_policy_is_taken_back_within_its_bake_and_few_requests_notice(
    fields: dict[str, str], workers: int
) -> None:
    found = tried(fields, workers=workers)
    assert found.rollout.stage is Stage.ROLLED_BACK and found.rollout.verdict == "canaries are worse"
    assert found.took_s < BAKE_S
    assert found.over < 0.01
    assert found.document.base == {} and overlay_of(found.document) is None
    worse = [m for m in found.rollout.measures if m.verdict is Verdict.WORSE]
    assert worse and all(m.canary is not None and m.canary_n for m in worse)
    assert "at the rest" in found.rollout.lines[-1].evidence


def test_a_good_policy_gets_to_half_of_the_rest_and_then_to_all() -> None:
    found = tried({"batch.active": "40"}, workers=4)
    assert found.rollout.stage is Stage.PROMOTED
    assert found.document.base == {"batch.active": 40} and found.document.overlays == ()
    assert found.rollout.widened == 1 and len(found.rollout.canaries) == 3
    assert found.took_s == 2 * BAKE_S
    assert found.over == 0.0


def test_canaries_get_their_share_of_new_work() -> None:
    found = tried(NO_DIFFERENCE, workers=4, until_s=70.0, policy={"rollout.bake_s": 300})
    canary, rest = found.rollout.samples
    # Half of what one of four would get: 0.5 of 3.5.
    assert canary / (canary + rest) == pytest.approx(0.5 / 3.5, abs=0.04)


@pytest.mark.parametrize("rate", [5.0, 8.0], ids=["well", "with queues"])
def test_what_makes_no_difference_is_promoted(rate: float) -> None:
    stages = [tried(NO_DIFFERENCE, policy={"batch.active": 8}, rate=rate, seed=s).rollout.stage for s in range(2)]
    assert stages == [Stage.PROMOTED] * 2


def test_without_requests_nothing_is_promoted_and_in_the_end_it_is_taken_back() -> None:
    found = tried(NO_DIFFERENCE, rate=0.01)
    assert found.rollout.stage is Stage.ROLLED_BACK
    assert found.rollout.verdict.startswith("undecided: too few requests")
    assert found.rollout.extended == 3 and found.took_s == 4 * BAKE_S


def test_a_canary_that_answers_nobody_is_seen_by_who_waits_for_it() -> None:
    # Its breaker and its health are left out: the hang ends before either would act on it.
    faults = [Hang(12.0 + 2.5 * i, "default-1", 1.9) for i in range(12)]
    found = tried(NO_DIFFERENCE, faults=faults, wanted=Wanted(node_ids=("default-1",)))
    assert found.rollout.stage is Stage.ROLLED_BACK and found.took_s < BAKE_S
    assert found.rollout.verdict == "canaries are worse"


def test_a_canary_that_runs_out_of_memory_takes_the_policy_with_it() -> None:
    faults = [Die(20.0, "default-1", out_of_memory=True)]
    found = tried(NO_DIFFERENCE, faults=faults, wanted=Wanted(node_ids=("default-1",)))
    assert found.rollout.verdict == "out of memory: the engine of default-1"
    assert found.took_s < 15.0


def test_one_that_dies_and_comes_back_is_judged_on() -> None:
    faults = [Die(20.0, "default-1")]
    found = tried(NO_DIFFERENCE, faults=faults, wanted=Wanted(node_ids=("default-1",)))
    assert found.rollout.stage is Stage.PROMOTED
