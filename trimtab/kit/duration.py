"""Spans of time as people type and read them: 500ms, 0.5s, 30s, 10m, 24h, 7d."""

from __future__ import annotations

import re

UNITS_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
FORM = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*")


def parse_ms(text: str) -> int:
    """Milliseconds; ValueError says what was wanted."""
    found = FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no span of time; write a number and its unit, such as 500ms, 30s, 10m or 24h")
    return round(float(found[1]) * UNITS_MS[found[2]])


def brief(ms: float) -> str:
    """In the largest unit that loses nothing worth saying: two parts at most, 1h 5m."""
    if ms < 1000:
        return f"{ms:.0f}ms"
    if ms < 10_000:
        return f"{ms / 1000:.1f}".removesuffix(".0") + "s"
    seconds = round(ms / 1000)
    parts = [(seconds // 86_400, "d"), (seconds // 3600 % 24, "h"), (seconds // 60 % 60, "m"), (seconds % 60, "s")]
    first = next(i for i, (n, _) in enumerate(parts) if n)
    return " ".join(f"{n}{unit}" for n, unit in parts[first : first + 2] if n)
