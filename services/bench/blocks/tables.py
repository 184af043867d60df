"""The tables of `blocks` as people read them, and the one for the documentation. Pure: from the objects that the JSON has too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trimtab.kit.cli import table

TABLE_AT = (8_192, 131_072)
"""Request lengths whose block tables are shown."""


def sections(arms: Sequence[Mapping[str, Any]], setup: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(title, table) of each. Every arm is a size."""
    measured = [a for a in arms if a["speeds"]]
    found = []
    if measured:
        default = setup["default"]
        found.append(
            (f"Speed, medians over rounds; [lowest, highest] of a round, next to {default}", _speeds(measured))
        )
    found.append(("What a size costs in memory: computed, exact", _memory(arms)))
    if any(a["prefixes"] for a in arms):
        found.append(("Prompt tokens found in the prefix cache: sessions with a shared system prompt", _prefixes(arms)))
    if refused := [a for a in arms if a["refused"]]:
        found.append(("Sizes that this engine refuses", "\n".join(f"{a['size']}: {a['refused']}" for a in refused)))
    if setup.get("verdicts"):
        found.append(("The best size by workload", _verdicts(setup["verdicts"], setup["default"])))
    if decode := setup.get("calibration", {}).get("decode"):
        found.append(("For trimtab.blocks.SPEED", _literal(decode)))
    found.append(("For the documentation", markdown(arms)))
    return found


def _contexts(arms: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({c for a in arms for c in a["speeds"]}, key=int)


def _interval(e: Mapping[str, Any] | None) -> str:
    return f"{e['value']:.3f} [{e['low']:.3f}, {e['high']:.3f}]" if e else ""


def _speeds(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for context in _contexts(arms):
        for a in arms:
            if (s := a["speeds"].get(context)) is None:
                continue
            decode, prefill = (
                f"{s[k]:.1f}" if s[k] is not None else "" for k in ("decode_tokens_per_s", "prefill_tokens_per_s")
            )
            rows.append(
                (context, str(a["size"]), decode, _interval(s["decode_ratio"]), prefill, _interval(s["prefill_ratio"]))
            )
    head = ("CONTEXT", "BLOCK", "DECODE TOKENS/S", "TO DEFAULT", "PREFILL TOKENS/S", "TO DEFAULT")
    return table(head, rows, right=(0, 1, 2, 4))


def _memory(arms: Sequence[Mapping[str, Any]]) -> str:
    names = list(arms[0]["waste"]) if arms else []
    rows = [
        (
            str(a["size"]),
            *(str(a["table_bytes"][str(n)]) for n in TABLE_AT),
            *(f"{a['waste'][m]:.2%}" for m in names),
            "",
        )
        for a in arms
    ]
    head = ("BLOCK", *(f"TABLE BYTES AT {n:,}" for n in TABLE_AT), *(f"WASTE {m.upper()}" for m in names), "")
    return table(head, rows, right=tuple(range(len(head) - 1)))


def _prefixes(arms: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for a in arms:
        p = a["prefixes"] or {}
        measured = f"{p['measured']:.1%}" if "measured" in p else ""
        rows.append(
            (
                str(a["size"]),
                measured,
                f"{p['computed']:.1%}" if "computed" in p else "",
                f"{a['hits_computed']:.1%}",
                "",
            )
        )
    return table(("BLOCK", "MEASURED", "COMPUTED FOR IT", "COMPUTED BEFOREHAND", ""), rows, right=(0, 1, 2, 3))


def _verdicts(verdicts: Sequence[Mapping[str, Any]], default: int) -> str:
    rows = []
    for v in verdicts:
        said = {True: "yes", False: "no: leave it", None: "undecided"}[v["worth"]]
        e = v["gain"]
        saved = f"{e['value']:+.1%} [{e['low']:+.1%}, {e['high']:+.1%}]"
        rows.append((v["workload"], "yes" if v["binds"] else "no", str(v["best"]), saved, said))
    head = ("WORKLOAD", "MEMORY BINDS", "BEST", f"SAVED NEXT TO {default}", "WORTH A CHANGE (5 %)")
    return table(head, rows, right=(2,))


def _literal(decode: Mapping[str, Mapping[str, float]]) -> str:
    rows = [f"    {context}: {{{', '.join(f'{s}: {r}' for s, r in by.items())}}}," for context, by in decode.items()]
    return "\n".join(["SPEED: Speeds = {", *rows, "}"])


def markdown(arms: Sequence[Mapping[str, Any]]) -> str:
    """One row for each size of the ladder, those that the engine refuses too, with what can be computed of them."""
    contexts, mixes = _contexts(arms), list(arms[0]["waste"]) if arms else []
    head = [
        "block", *(f"decode at {int(c):,}" for c in contexts), *(f"prefill at {int(c):,}" for c in contexts),
        *(f"waste, {m}" for m in mixes), "prefix hits", f"table at {TABLE_AT[-1]:,}",
    ]  # fmt: skip
    lines = [f"| {' | '.join(head)} |", f"|{' ---: |' * len(head)}"]
    for a in arms:
        cells = [f"{a['size']}"]
        for key in ("decode_ratio", "prefill_ratio"):
            for c in contexts:
                r = a["speeds"].get(c, {}).get(key)
                cells.append(f"{r['value']:.2f}" if r else ("refused" if a["refused"] else "-"))
        cells += [f"{a['waste'][m]:.2%}" for m in mixes]
        hits = (a["prefixes"] or {}).get("measured", a["hits_computed"])
        cells += [f"{hits:.1%}", f"{a['table_bytes'][str(TABLE_AT[-1])]:,} B"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
