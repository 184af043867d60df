"""The figures of `sizing`: what each process took, as rows for people and for programs. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trimtab.kit.cli import table

HEAD = ("PROCESS", "WITH", "TOKENS/S", "MEMORY MB", "KB FOR EACH MORE", "CORES")
MB = 1 << 20
TOLD_FROM = 2 * MB
"""A difference below this is no more than what a process's memory moves by anyway."""


@dataclass(frozen=True, slots=True)
class Taken:
    """What one process took while it had `count` of `what`: resident bytes, and cores busy. `tokens_per_s` is what clients got meanwhile."""

    process: str
    what: str
    count: int
    rss_bytes: int
    cores: float
    tokens_per_s: float = 0.0


def arms(taken: Sequence[Taken]) -> list[dict[str, Any]]:
    """For programs: each with what one more of its kind takes, by the smallest and it."""
    return [{**asdict(t), "bytes_for_each": each_bytes(t, taken)} for t in taken]


def each_bytes(one: Taken, taken: Sequence[Taken]) -> float | None:
    """Bytes for each of `what` beyond the fewest that the same process had; None where that can't be told."""
    others = [t for t in taken if (t.process, t.what) == (one.process, one.what)]
    least = min(others, key=lambda t: t.count)
    if one.rss_bytes - least.rss_bytes < TOLD_FROM:
        return None
    return (one.rss_bytes - least.rss_bytes) / (one.count - least.count)


def text(taken: Sequence[Taken]) -> str:
    rows = []
    for t in taken:
        each = each_bytes(t, taken)
        more = "" if each is None else f"{each / 1024:.0f}"
        rate = f"{t.tokens_per_s:,.0f}" if t.tokens_per_s else ""
        rows.append((t.process, f"{t.count} {t.what}", rate, f"{t.rss_bytes / MB:.0f}", more, f"{t.cores:.3f}"))
    return table(HEAD, rows, right=(2, 3, 4))
