"""The figures of `giants --v4`: how far the giant is read and how long that still takes, and what streams beside it felt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.bench.goals import Goal
from services.bench.stats import Bound, quantile
from trimtab.kit.cli import table

ENOUGH = 20
"""Streams beside the giant below which a P95 of them decides nothing."""
TIMES = 2.0
"""The budget is of a step as predicted, and a token has its way to the client besides."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds until so many tokens of a prompt are read: `per_token` of them each, and `per_square` more with what each has to look back on."""

    per_token: float
    per_square: float

    def seconds(self, tokens: int) -> float:
        return self.per_token * tokens + self.per_square * tokens * tokens


REASONABLE = Curve(0.0012, 1.0e-7)
"""Of the tiny model on two cores."""


def fitted(read: Sequence[tuple[float, int]]) -> Curve:
    """By least squares through (seconds, tokens) as they were seen; nothing is ever expected to get faster on the way."""
    points = [(s, float(n)) for s, n in read if n > 0]
    a = sum(n**2 for _, n in points)
    b = sum(n**3 for _, n in points)
    c = sum(n**4 for _, n in points)
    p = sum(s * n for s, n in points)
    q = sum(s * n * n for s, n in points)
    determinant = a * c - b * b
    if len({n for _, n in points}) < 3 or determinant <= 0.0:
        return Curve(p / a, 0.0) if a else REASONABLE
    square = (a * q - b * p) / determinant
    if square <= 0.0:
        return Curve(p / a, 0.0)
    linear = (c * p - b * q) / determinant
    return Curve(linear, square) if linear >= 0.0 else Curve(0.0, q / c)


@dataclass(frozen=True, slots=True)
class Short:
    """One stream. Seconds: to its first token (None: there was none), and the longest between two of its tokens."""

    ttft_s: float | None
    gap_s: float
    lost: str = ""
    faults: tuple[str, ...] = ()
    tokens: int = 0
    message: str = ""


@dataclass(slots=True)
class Found:
    """`read` is (seconds since it was asked, tokens of the giant that are read). `steps` are the engine's while it was there."""

    tokens: int
    budget_ms: int
    alone: list[Short] = field(default_factory=list)
    beside: list[Short] = field(default_factory=list)
    giant: Short | None = None
    read: list[tuple[float, int]] = field(default_factory=list)
    steps: int = 0

    @property
    def share(self) -> float:
        return max((n for _, n in self.read), default=0) / self.tokens

    @property
    def left_s(self) -> float | None:
        """None before there is something to go by."""
        if not self.read or self.share == 0.0:
            return None
        curve, most = fitted(self.read), max(n for _, n in self.read)
        return max(0.0, curve.seconds(self.tokens) - curve.seconds(most))


def so_far(found: Found) -> str:
    """What is said on the way."""
    left = found.left_s
    said = f"{found.share:.0%} of {found.tokens:,} tokens are read"
    if left is not None:
        said += f", about {int(left) // 60}:{int(left) % 60:02d} left"
    if gaps := [x.gap_s for x in found.beside if x.tokens > 1]:
        said += f"; worst gap of {len(gaps)} short streams {1e3 * max(gaps):.0f} ms"
    return said


def arms(found: Found) -> list[dict[str, Any]]:
    """For programs."""
    giant = found.giant
    whole = {
        "arm": "giant",
        "tokens": found.tokens,
        "read": found.share,
        "steps": found.steps,
        "ttft_s": giant.ttft_s if giant else None,
        "lost": giant.lost if giant else None,
        "curve": [(round(s, 1), n) for s, n in found.read],
    }
    return [whole, *(_arm(name, streams) for name, streams in _phases(found))]


def _phases(found: Found) -> list[tuple[str, list[Short]]]:
    return [("alone", found.alone), ("beside the giant", found.beside)]


def _arm(name: str, streams: Sequence[Short]) -> dict[str, Any]:
    gaps = [x.gap_s for x in streams if x.tokens > 1]
    ttfts = [x.ttft_s for x in streams if x.ttft_s is not None]
    return {
        "arm": name,
        "streams": len(streams),
        "lost": sum(bool(x.lost) for x in streams),
        "wrong": sum(bool(x.faults) for x in streams),
        "ttft_p50_s": _quantile(ttfts, 0.5),
        "ttft_max_s": max(ttfts, default=None),
        "gap_p50_s": _quantile(gaps, 0.5),
        "gap_p95_s": _quantile(gaps, 0.95),
        "gap_max_s": max(gaps, default=None),
    }


def goals(found: Found) -> list[Goal]:
    streams = [*found.alone, *found.beside, *([found.giant] if found.giant else [])]
    beside = _arm("", found.beside)
    bound_s, p95 = TIMES * found.budget_ms / 1e3, beside["gap_p95_s"]
    met = None if p95 is None or len(found.beside) < ENOUGH or not found.budget_ms else p95 <= bound_s
    lost, wrong = sum(bool(x.lost) for x in streams), sum(bool(x.faults) for x in streams)
    answered = float(found.giant is not None and not found.giant.lost)
    return [
        Goal("giant_answered", 1.0, Bound.AT_LEAST, answered, answered == 1.0 if found.giant else None),
        Goal("lost", 0.0, Bound.AT_MOST, lost, lost == 0),
        Goal("wrong", 0.0, Bound.AT_MOST, wrong, wrong == 0),
        Goal("gap_p95_s_beside_the_giant", bound_s, Bound.AT_MOST, p95, met),
    ]


def sections(found: Found) -> list[tuple[str, str]]:
    giant = found.giant
    row = (
        f"{found.tokens:,}",
        f"{found.share:.0%}",
        _seconds(giant.ttft_s if giant else None),
        str(found.steps) if found.steps else "",
        f"{found.tokens / giant.ttft_s:.0f}" if giant and giant.ttft_s else "",
    )
    head = ("TOKENS", "READ", "TTFT S", "STEPS", "TOKENS/S")
    rows = []
    for name, streams in _phases(found):
        arm = _arm(name, streams)
        keys = ("ttft_p50_s", "ttft_max_s", "gap_p50_s", "gap_p95_s", "gap_max_s")
        rows.append((name, str(len(streams)), str(arm["lost"]), *(_seconds(arm[key]) for key in keys)))
    short = ("SHORT STREAMS", "COUNT", "LOST", "TTFT P50 S", "MAX", "WORST GAP P50 S", "P95", "MAX")
    return [
        ("The giant", table(head, [row], right=(0, 1, 2, 3, 4))),
        ("Beside it", table(short, rows, right=tuple(range(1, 8)))),
    ]


def notes(found: Found) -> list[str]:
    """The first of everything that is wrong."""
    streams = [*found.alone, *found.beside, *([found.giant] if found.giant else [])]
    said = [f"lost, {x.lost}: {x.message}" for x in streams if x.lost]
    said += ["; ".join(x.faults) for x in streams if x.faults]
    return list(dict.fromkeys(said))[:5]


def _quantile(values: Sequence[float], q: float) -> float | None:
    return quantile(values, q) if values else None


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
