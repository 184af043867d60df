"""What is free, divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimtab.credits import divide

WANTS = st.lists(st.integers(0, 40), max_size=12)
FREE = st.integers(0, 100)


@pytest.mark.parametrize(
    ("free", "wants", "parts"),
    [
        (16, [], []),
        (16, [0], [16]),
        (16, [0, 0, 0], [6, 5, 5]),
        (1, [5, 5], [1, 0]),
        (3, [5, 5], [2, 1]),
        (10, [2, 50], [2, 8]),
        (10, [50, 0], [10, 0]),
        (10, [1, 0], [6, 4]),
        (9, [1, 9, 9], [1, 4, 4]),
        (-3, [1, 0], [0, 0]),
    ],
)
def test_who_wants_comes_first_and_all_are_even(free: int, wants: list[int], parts: list[int]) -> None:
    assert divide(free, wants) == parts


@given(FREE, WANTS)
def test_all_that_is_free_is_promised_once(free: int, wants: list[int]) -> None:
    assert sum(divide(free, wants)) == (free if wants else 0)


@given(FREE, WANTS)
def test_nobody_who_wants_more_has_less_than_another_but_one(free: int, wants: list[int]) -> None:
    parts = divide(free, wants)
    short = [part for part, want in zip(parts, wants, strict=True) if part < want]
    if short:
        assert max(parts) - min(short) <= 1
        assert all(part <= want for part, want in zip(parts, wants, strict=True))
