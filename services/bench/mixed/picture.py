"""The picture: realtime P95 E2E (log) against tokens/s of all work, ours as a curve over its budgets, and what it is held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.bench.mixed.arms import BATCH_ALONE, FCFS, PRIORITY, REALTIME_ALONE, budget_ms, is_ours
from services.bench.processes import BenchError
from trimtab.kit.cli import ExitCode

OURS, THEIRS, FAINT = "#1f6feb", "#57606a", "#afb8c1"
INCHES, DPI = (8.0, 5.2), 150


def check(path: Path | None) -> None:
    """BenchError, before anything is measured, where a picture is asked for that could not be drawn."""
    if path is None:
        return
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError:
        raise BenchError("--png needs matplotlib: make setup, or pip install matplotlib", ExitCode.USAGE) from None


def quantile_drawn(arms: Sequence[Mapping[str, Any]]) -> str:
    """P95, where the sample of every arm that is drawn carries it; else P50."""
    drawn = [a for a in arms if a.get("e2e_ms") and not a.get("ablation")]
    return "p95" if drawn and all("p95" in a["e2e_ms"] for a in drawn) else "p50"


def draw(path: Path, arms: Sequence[Mapping[str, Any]], title: str) -> None:
    """Write it as PNG. Arms without a figure are left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    q = quantile_drawn(arms)
    by_name = {a["arm"]: a for a in arms}
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_yscale("log")
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks(FuncFormatter(lambda seconds, _: f"{seconds:g}"))
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("tokens/s of all work (prompt and output)")
    axes.set_ylabel(f"realtime E2E {q.upper()}, seconds (log)")
    axes.grid(True, which="both", color="#eaeef2", linewidth=0.6)
    axes.set_axisbelow(True)

    def point(arm: Mapping[str, Any], colour: str, label: str, marker: str = "o") -> None:
        x, y = arm["tokens_per_s"], arm.get("e2e_ms", {}).get(q)
        if y is None:
            return
        across = [[x["value"] - x["low"]], [x["high"] - x["value"]]]
        along = [[(y["value"] - y["low"]) / 1000], [(y["high"] - y["value"]) / 1000]]
        at = (x["value"], y["value"] / 1000)
        axes.errorbar(*at, xerr=across, yerr=along, fmt=marker, color=colour, capsize=2, markersize=6, elinewidth=1)
        # Ours to the left and theirs to the right, so that neighbours do not write over each other.
        aside: Any = {"xytext": (-6, -12), "ha": "right"} if colour == OURS else {"xytext": (7, 5), "ha": "left"}
        axes.annotate(label, at, textcoords="offset points", color=colour, fontsize=9, **aside)

    ours = sorted(
        (a for a in arms if is_ours(a["arm"]) and q in a.get("e2e_ms", {})), key=lambda a: budget_ms(a["arm"])
    )
    axes.plot(
        [a["tokens_per_s"]["value"] for a in ours],
        [a["e2e_ms"][q]["value"] / 1000 for a in ours],
        color=OURS,
        linewidth=1.2,
    )
    for a in ours:
        point(a, OURS, f"{budget_ms(a['arm'])} ms")
    for arm, marker in ((FCFS, "s"), (PRIORITY, "^")):
        if arm.name in by_name:
            point(by_name[arm.name], THEIRS, arm.name, marker)
    alone, batch = by_name.get(REALTIME_ALONE.name), by_name.get(BATCH_ALONE.name)
    if alone is not None and q in alone.get("e2e_ms", {}):
        y = alone["e2e_ms"][q]["value"] / 1000
        axes.axhline(y, color=FAINT, linestyle="--", linewidth=1)
        axes.annotate("realtime alone", (0.01, y), xycoords=axes.get_yaxis_transform(), xytext=(0, 4),
                      textcoords="offset points", color=THEIRS, fontsize=9)  # fmt: skip
    if batch is not None:
        x = batch["tokens_per_s"]["value"]
        axes.axvline(x, color=FAINT, linestyle="--", linewidth=1)
        axes.annotate("batch alone", (x, 0.99), xycoords=axes.get_xaxis_transform(), xytext=(-4, 0), va="top", ha="right",
                      rotation=90, textcoords="offset points", color=THEIRS, fontsize=9)  # fmt: skip
    for a in arms:
        if a.get("ablation") and q in a.get("e2e_ms", {}):
            axes.plot(a["tokens_per_s"]["value"], a["e2e_ms"][q]["value"] / 1000, ".", color=FAINT, markersize=5)
    axes.margins(x=0.12, y=0.12)
    try:
        figure.savefig(path, format="png")
    except OSError as e:
        raise BenchError(f"the picture can't be written: {e}", ExitCode.USAGE) from e
