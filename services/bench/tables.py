"""The tables of `overhead` as people read them. Pure: from the objects that the JSON has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.kit.cli import table

CPU_ROLES = ("gateway", "worker", "control", "front", "engine", "client")


def sections(arms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    real = [a for a in arms if "tokens_per_s" in a]
    simulated = [a for a in arms if a["arm"].startswith("simulated")]
    lone = [a for a in arms if a["arm"].startswith("lone")]
    found = []
    if real:
        found.append(("Speed: medians over rounds; [quartiles], and for ratios and TTFT [95 % interval]", _speed(real)))
        found.append(("CPU seconds per 1,000 output tokens, medians over rounds", _cpu(real)))
    if lone:
        found.append(("TTFT of lone requests on the real engines, in neighbouring turns", _ttft(lone)))
    if simulated:
        found.append(
            ("TTFT over a simulated engine of constant steps, one request at a time, paired", _ttft(simulated))
        )
    return found


def _speed(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for a in arms:
        speed, ratio, p50, p95 = (
            a[k] for k in ("tokens_per_s", "tokens_per_s_ratio_to_bare", "ttft_p50_ms", "ttft_p95_ms")
        )
        compared = "" if a["arm"] == "bare" else f"{ratio['value']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
        rows.append(
            (
                str(a["concurrency"]),
                a["arm"],
                f"{speed['median']:.1f} [{speed['low']:.1f}, {speed['high']:.1f}]",
                compared,
                f"{p50['value']:.1f} [{p50['low']:.1f}, {p50['high']:.1f}]",
                f"{p95['value']:.1f} [{p95['low']:.1f}, {p95['high']:.1f}]",
                f"n={a['ttft_samples']}",
            )
        )
    head = ("STREAMS", "ARM", "TOKENS/S", "TO BARE", "TTFT P50 MS", "TTFT P95 MS", "SAMPLES")
    return table(head, rows, right=(0,))


def _cpu(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for a in arms:
        by_role, outside = a["cpu_s_per_1000_tokens"], a["cpu_s_per_1000_tokens_outside_engine"]
        cells = [f"{by_role[role]:.3f}" if role in by_role else "" for role in CPU_ROLES]
        whole = f"{outside['median']:.3f} [{outside['low']:.3f}, {outside['high']:.3f}]"
        rows.append((str(a["concurrency"]), a["arm"], whole, *cells, ""))
    head = ("STREAMS", "ARM", "OUTSIDE THE ENGINE", *(role.upper() for role in CPU_ROLES), "")
    return table(head, rows, right=(0, *range(3, 3 + len(CPU_ROLES))))


def _ttft(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for a in arms:
        p50, p95 = a["ttft_p50_ms"], a["ttft_p95_ms"]
        quartiles = f"{p50['median']:.2f} [{p50['low']:.2f}, {p50['high']:.2f}]"
        rows.append((a["arm"], quartiles, f"{p95['value']:.2f}", f"n={a['ttft_samples']}"))
    return table(("ARM", "P50 MS [QUARTILES]", "P95 MS", "REQUESTS"), rows)
