"""Spans of time as people type and read them."""

from __future__ import annotations

import pytest

from trimtab.kit.duration import brief, parse_ms


@pytest.mark.parametrize(
    ("text", "ms"), [("500ms", 500), ("0.5s", 500), ("30s", 30_000), (" 10m ", 600_000), ("24h", 86_400_000), ("0s", 0)]
)
def test_a_span_is_a_number_and_its_unit(text: str, ms: int) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["", "10", "m", "-1s", "1h30m", "ten minutes"])
def test_anything_else_is_an_error_that_shows_the_form(text: str) -> None:
    with pytest.raises(ValueError, match="such as 500ms"):
        parse_ms(text)


@pytest.mark.parametrize(
    ("ms", "text"),
    [(0, "0ms"), (500, "500ms"), (1400, "1.4s"), (2000, "2s"), (30_000, "30s"), (600_000, "10m"), (599_600, "10m"),
     (3_900_000, "1h 5m"), (86_400_000, "1d"), (90_000, "1m 30s")],
)  # fmt: skip
def test_it_is_told_in_two_parts_at_most(ms: int, text: str) -> None:
    assert brief(ms) == text
