"""The tables of `mixed` as people read them. Pure: from the objects that the JSON has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.bench.mixed.figures import QUANTILES
from trimtab.kit.cli import table

TITLES = {
    "e2e_ms": "Realtime, whole request (E2E), ms [95 %]",
    "ttft_ms": "Realtime, time to first token (TTFT), ms [95 %]",
    "itl_ms": "Realtime, between tokens (ITL), ms [95 %]",
}


def sections(arms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    found = [(title, _latency(arms, metric)) for metric, title in TITLES.items() if any(a.get(metric) for a in arms)]
    if arms:
        found.append(("Work: tokens/s of all (prompt and output, first computations) and of batch [95 %]", _work(arms)))
        found.append(("Scheduler, over all windows of an arm", _scheduler(arms)))
    ratios = _ratios(arms)
    if ratios:
        found.append(
            ("Ratios within rounds [95 %]: how much better than FCFS and priority, how much worse than alone", ratios)
        )
    return found


def _interval(e: Mapping[str, Any] | None, digits: int = 1) -> str:
    if e is None:
        return ""
    return f"{e['value']:.{digits}f} [{e['low']:.{digits}f}, {e['high']:.{digits}f}]"


def _latency(arms: Sequence[Mapping[str, Any]], metric: str) -> str:
    digits = 1 if metric == "itl_ms" else 0
    rows = [
        (a["arm"], *(_interval(a[metric].get(q), digits) for q in QUANTILES), str(a["requests"]), "")
        for a in arms
        if a.get(metric)
    ]
    return table(("ARM", *(q.upper() for q in QUANTILES), "REQUESTS", ""), rows, right=(5,))


def _work(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (
            a["arm"],
            _interval(a["tokens_per_s"]),
            _interval(a["ratios"].get("tokens_over_fcfs"), 3),
            _interval(a.get("batch_tokens_per_s")),
            str(a.get("batch_requests_ended", "")),
            f"{a['max_overtake_ms'] / 1000:.1f}" if "max_overtake_ms" in a else "",
            str(a["rounds"]),
            "",
        )
        for a in arms
    ]
    head = ("ARM", "TOKENS/S", "TO FCFS", "BATCH TOKENS/S", "ENDED", "MAX OVERTAKE S", "BLOCKS", "")
    return table(head, rows, right=(4, 5, 6))


def _scheduler(arms: Sequence[Mapping[str, Any]]) -> str:
    names = {
        "STEPS": "steps",
        "PREEMPTED": "preemptions",
        "FOR MEMORY": "memory_preemptions",
        "SLICES BROKEN": "slices_broken",
        "RECOMPUTED TOKENS": "recomputed_tokens",
        "HELD DECODES": "held_decodes",
        "FORCED": "forced",
    }
    rows = [(a["arm"], *(f"{a[key]:.0f}" for key in names.values()), f"{a['hook_us_per_step']:.0f}", "") for a in arms]
    return table(("ARM", *names, "HOOKS µS/STEP", ""), rows, right=tuple(range(1, len(names) + 2)))


def _ratios(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for a in arms:
        r = a["ratios"]
        for q in QUANTILES:
            three = [r.get(f"e2e_{q}_{key}") for key in ("fcfs_over_this", "priority_over_this", "over_realtime-alone")]
            if any(three):
                rows.append((a["arm"], q.upper(), *(_interval(e, 2) for e in three), ""))
    head = ("ARM", "E2E", "FCFS OVER THIS", "PRIORITY OVER THIS", "THIS OVER REALTIME ALONE", "")
    return table(head, rows) if rows else ""


def batch_e2e(arms: Sequence[Mapping[str, Any]]) -> str:
    """Of simulated arms, whose batch requests all end."""
    rows = [
        (a["arm"], *(f"{a['batch_e2e_ms'][q] / 1000:.1f}" for q in QUANTILES), "") for a in arms if a["batch_e2e_ms"]
    ]
    return table(("ARM", *(q.upper() for q in QUANTILES), ""), rows, right=(1, 2, 3, 4))
