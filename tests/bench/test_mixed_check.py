"""What the check of FCFS compares; the engines themselves are real ones, and the bench's own business."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.bench.mixed import check
from services.bench.mixed.check import Answers, differing, jobs, through
from tests.bench.mixed_builders import FakeEngine
from trimtab.messages import Workload

SAME = Answers([0, 2, 1], [[1], [2, 3], [4]])


def test_no_two_requests_can_get_their_first_token_in_one_step() -> None:
    asked = jobs(1)
    assert len(asked) == check.REQUESTS == 20
    assert all(len(job.prompt) > check.STEP_TOKENS for job in asked)
    assert {job.workload for job in asked} == set(Workload)
    assert len(asked) > 2 * check.SLOTS
    assert asked == jobs(1) != jobs(2)


@pytest.mark.parametrize(
    ("ours", "wrong"),
    [(SAME, []), (replace(SAME, order=[2, 0, 1]), [0, 2]), (replace(SAME, tokens=[[1], [2, 9], [4]]), [1]),
     (replace(SAME, tokens=[[1], [2], [4]]), [1])],
)  # fmt: skip
def test_a_request_differs_by_its_place_or_by_its_tokens(ours: Answers, wrong: list[int]) -> None:
    assert differing(ours, SAME) == wrong


async def test_requests_arrive_in_the_order_in_which_they_are_asked() -> None:
    engine, asked = FakeEngine(), jobs(1)
    answers = await through(engine.send, asked)
    assert [prompt for _, prompt, _ in engine.served] == [job.prompt for job in asked]
    assert sorted(answers.order) == list(range(20))
    assert [len(tokens) for tokens in answers.tokens] == [job.max_tokens for job in asked]
