"""The picture: how fast decodes are by block size, next to the default, a curve for each context; and what each size wastes on each mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from services.bench.processes import BenchError
from trimtab.kit.cli import ExitCode

INCHES, DPI = (10.0, 4.6), 150


def draw(path: Path, arms: Sequence[Mapping[str, Any]], title: str) -> None:
    """Write it as PNG. What was not measured is left out."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=10)
    speed, memory = figure.subplots(1, 2)
    for context in sorted({c for a in arms for c in a["speeds"]}, key=int):
        points = [(a["size"], a["speeds"][context]["decode_ratio"]) for a in arms if context in a["speeds"]]
        points = [(size, r) for size, r in points if r is not None]
        across = [[r["value"] - r["low"] for _, r in points], [r["high"] - r["value"] for _, r in points]]
        at = [size for size, _ in points], [r["value"] for _, r in points]
        speed.errorbar(*at, yerr=across, marker="o", capsize=2, linewidth=1.2, label=f"{int(context):,} tokens")
    speed.axhline(1.0, color="#afb8c1", linestyle="--", linewidth=1)
    speed.set_ylabel("decode tokens/s, next to the default size")
    for mix in arms[0]["waste"] if arms else ():
        memory.plot(
            [a["size"] for a in arms], [100 * a["waste"][mix] for a in arms], marker=".", linewidth=1.2, label=mix
        )
    memory.set_ylabel("slots that hold no token, %")
    for axes in (speed, memory):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("tokens a block")
        axes.grid(True, color="#eaeef2", linewidth=0.6)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    try:
        figure.savefig(path, format="png")
    except OSError as e:
        raise BenchError(f"the picture can't be written: {e}", ExitCode.USAGE) from e
