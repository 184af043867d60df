"""The tables of `reblock` as people read them. Pure: from the objects that the JSON has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from services.bench.stats import median
from trimtab.kit.cli import table


def sections(arms: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(title, table) of each."""
    by_name = {a["arm"]: a for a in arms}
    found = []
    if load := by_name.get("under load"):
        found.append(("Changes under eight streams, by FCFS", _changes(load["changes"])))
        found.append(("Over all of them", _summary(load)))
    if carried := by_name.get("carried over"):
        found.append(("Changes under eight streams that carry KV over", _changes(carried["changes"])))
        found.append(("Over all of those", _summary(carried)))
    if served := by_name.get("as served"):
        found.append(("Under the engine's default policy", _changes(served["changes"])))
    if row := by_name.get("in a row"):
        found.append(("Changes in a row, half of them idle", _in_a_row(row)))
    if refusals := by_name.get("refusals"):
        found.append(("Sizes that are refused, asked for under eight streams", _refusals(refusals["tried"])))
    if restart := by_name.get("restart"):
        found.append(("A restart of the whole engine instead", _restart(restart)))
    return found


def _changes(changes: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for c in changes:
        paused = [p for p in c["pauses_ms"] if p is not None]
        rows.append(
            (
                f"{c['before']} → {c['after']}",
                f"{c['change_ms']:.1f}",
                f"{c['call_ms']:.0f}",
                f"{median(paused):.0f}" if paused else "",
                f"{max(paused):.0f}" if paused else "",
                f"{c['predicted_tokens']}",
                f"{c['measured_tokens']}",
                f"{c['carried_tokens']}",
                "",
            )
        )
    head = ("BLOCKS", "ENGINE MS", "CALL MS", "PAUSE P50 MS", "PAUSE MAX MS", "PREDICTED", "RECOMPUTED", "CARRIED", "")
    return table(head, rows, right=(1, 2, 3, 4, 5, 6, 7))


def _summary(arm: Mapping[str, Any]) -> str:
    names = {"change_ms": "the engine's own time, ms", "call_ms": "the call's round trip, ms",
             "pause_ms": "a stream's pause, ms", "predicted_to_measured": "predicted to measured recomputation"}  # fmt: skip
    rows = [
        (says, *(f"{arm[key][q]:.3g}" for q in ("min", "p50", "p95", "max")), str(arm[key]["n"]), "")
        for key, says in names.items()
        if key in arm
    ]
    text = table(("WHAT", "MIN", "P50", "P95", "MAX", "N", ""), rows, right=(1, 2, 3, 4, 5))
    gap, shorter = arm["undisturbed_gap_ms"], arm.get("pause_anew_over_carried")
    if shorter is not None:
        text += f"\nthe median pause where KV is computed anew ÷ the one where it is carried over: {shorter:.0f}"
    return text if gap is None else f"{text}\nwithout a change tokens are {gap:.1f} ms apart (median)"


def _in_a_row(arm: Mapping[str, Any]) -> str:
    rows = [
        (name, *(f"{s[q]:.2f}" for q in ("p50", "p95", "max")), str(s["n"]), "") for name, s in arm["change_ms"].items()
    ]
    text = table(("ENGINE", "P50 MS", "P95 MS", "MAX MS", "CHANGES", ""), rows, right=(1, 2, 3, 4))
    kb = arm["resident_kb"]
    if kb:
        text += (
            f"\nresident memory: {kb[0] / 1024:.1f} MB after the first stretch, {kb[-1] / 1024:.1f} MB after the last"
        )
    if arm["growth_kb"] is not None:
        text += f"; growth {arm['growth_kb']:.0f} KB, noise {arm['noise_kb']:.0f} KB"
    return text


def _refusals(tried: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        (str(t["size"]), t["cause"] or "NOT REFUSED", f"{t['ms']:.0f}", "yes" if t["unchanged"] else "NO", "")
        for t in tried
    ]
    return table(("SIZE", "CAUSE", "MS", "ENGINE AS BEFORE", ""), rows, right=(0, 2))


def _restart(arm: Mapping[str, Any]) -> str:
    lines = [
        f"stop {r['stop_s']:.1f} s, start {r['start_s']:.1f} s, until it serves again; its streams are lost to it"
        for r in arm["restarts"]
    ]
    if "over_change" in arm:
        lines.append(f"restart ÷ the engine's own time of a change: {arm['over_change']:.0f}")
    if "over_pause" in arm:
        lines.append(f"restart ÷ the median pause of a stream, recomputation included: {arm['over_pause']:.1f}")
    return "\n".join(lines)
