"""The control plane's answers for people (80 columns) and for programs (JSON).

Takes the wire messages as they come, so that the verbs stay one call each; nothing here asks anybody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from trimtab.kit.cli import table
from trimtab.policy import FIELDS, Field

UNSET = "default"


def place(identity: Any) -> str:
    """epoch.revision, or a dash for none."""
    return f"{identity.epoch}.{identity.revision}" if identity.epoch else "-"


def identity_json(identity: Any) -> dict[str, Any] | None:
    if not identity.epoch:
        return None
    return {"epoch": identity.epoch, "revision": identity.revision, "sha256": identity.sha256.hex()}


def _effective(answer: Any, f: Field) -> int:
    part, name = f.path.split(".")
    value: int = getattr(getattr(answer.effective, part), name)
    return value


def store_text(store: Any) -> str:
    if store.connected:
        return f"store: {store.description}"
    return f"store: NOT CONNECTED, changes are refused: {store.description}"


def store_json(store: Any) -> dict[str, Any]:
    return {"connected": store.connected, "description": store.description}


# ---- policy


def policy_text(answer: Any, fields: Iterable[Field]) -> str:
    why = f' "{answer.reason}"' if answer.reason else ""
    head = f"policy {place(answer.snapshot.identity)}, version {answer.spec_version}, by {answer.author}{why}"
    rows = [(f.path, str(_effective(answer, f)), f.unit, answer.sources.get(f.path, ""), f.doc) for f in fields]
    lines = [head, "", table(("FIELD", "VALUE", "UNIT", "SOURCE", "WHAT IT IS"), rows, right=(1,))]
    if not answer.store.connected:
        lines += ["", store_text(answer.store)]
    return "\n".join(lines)


def policy_json(answer: Any, fields: Iterable[Field]) -> dict[str, Any]:
    return {
        "identity": identity_json(answer.snapshot.identity),
        "spec_version": answer.spec_version,
        "author": answer.author,
        "reason": answer.reason,
        "fields": {
            f.path: {
                "value": _effective(answer, f),
                "unit": f.unit,
                "source": answer.sources.get(f.path, ""),
                "default": f.default,
                "minimum": f.minimum,
                "maximum": f.maximum,
                "hot": f.hot,
                "doc": f.doc,
            }
            for f in fields
        },
        "store": store_json(answer.store),
    }


# ---- changes


def _worth(field: str, text: str) -> str:
    return f"{FIELDS[field].default} ({UNSET})" if text == UNSET and field in FIELDS else text


def changes_text(changes: Iterable[Any]) -> list[str]:
    return [f"{c.field}: {_worth(c.field, c.before)} → {_worth(c.field, c.after)}" for c in changes]


def changes_json(changes: Iterable[Any]) -> list[dict[str, str]]:
    return [{"field": c.field, "before": c.before, "after": c.after} for c in changes]


def answer_of(node: Any, identity: Any) -> str:
    """applied, refused or waiting: what a worker has said of this snapshot."""
    target = (identity.epoch, identity.revision)
    if (node.applied.epoch, node.applied.revision) >= target:
        return "applied"
    return "refused" if (node.refused.epoch, node.refused.revision) >= target else "waiting"


def set_text(answer: Any, *, dry_run: bool, waited: bool) -> str:
    if not answer.changes:
        return f"nothing to change: policy {place(answer.identity)} says so already"
    if dry_run:
        return "\n".join(["would change (nothing was written):", *(f"  {c}" for c in changes_text(answer.changes))])
    lines = [f"policy {place(answer.identity)}, version {answer.spec_version}"]
    lines += [f"  {c}" for c in changes_text(answer.changes)]
    for node in answer.nodes:
        match answer_of(node, answer.identity):
            case "applied":
                lines.append(f"  {node.node_id}: applied in {node.apply_ms:.1f} ms")
            case "refused":
                lines.append(f"  {node.node_id}: REFUSED ({node.refusal.reason}): {node.refusal.message}")
            case _:
                lines.append(f"  {node.node_id}: no answer yet; see `trimtab fleet`")
    if waited and not answer.nodes:
        lines.append("  no worker is connected; each takes it when it joins")
    lines.append(f"  trace: trimtab trace {answer.trace_id}")
    return "\n".join(lines)


def set_json(answer: Any, *, dry_run: bool) -> dict[str, Any]:
    return {
        "identity": identity_json(answer.identity),
        "spec_version": answer.spec_version,
        "written": bool(answer.changes) and not dry_run,
        "dry_run": dry_run,
        "changes": changes_json(answer.changes),
        "nodes": [{**node_policy_json(n), "answer": answer_of(n, answer.identity)} for n in answer.nodes],
        "trace_id": answer.trace_id,
    }


def node_policy_json(n: Any) -> dict[str, Any]:
    refusal = {"reason": n.refusal.reason, "field": n.refusal.field, "message": n.refusal.message}
    return {
        "node_id": n.node_id,
        "applied": identity_json(n.applied),
        "apply_ms": n.apply_ms,
        "refused": identity_json(n.refused),
        "refusal": refusal if n.refused.epoch else None,
    }


# ---- history


def history_text(entries: Iterable[Any]) -> str:
    lines: list[str] = []
    for e in entries:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(e.written_unix_ms / 1000))
        why = f' "{e.reason}"' if e.reason else ""
        lines.append(f"{place(e.identity):>8}  {when}  {e.author}{why}")
        if e.refused_because:
            lines.append(f"          REFUSED, nothing changed: {e.refused_because}")
        lines += [f"          {change}" for change in changes_text(e.changes)]
    return "\n".join(lines) or "no history"


def history_json(entries: Iterable[Any]) -> list[dict[str, Any]]:
    return [
        {
            "identity": identity_json(e.identity),
            "spec_version": e.spec_version,
            "author": e.author,
            "reason": e.reason,
            "written_unix_ms": e.written_unix_ms,
            "changes": changes_json(e.changes),
            "refused_because": e.refused_because or None,
        }
        for e in entries
    ]
