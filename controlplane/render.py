"""The control plane's answers for people (80 columns and more) and for programs (JSON).

Takes the wire messages as they come, so that the verbs stay one call each; nothing here asks anybody. What a control plane of another
build leaves out is shown as unknown, not as a zero.
"""

from __future__ import annotations

import shutil
import textwrap
import time
from collections.abc import Iterable, Mapping
from typing import Any

from trimtab.codec import decode_partial
from trimtab.errors import PolicyRefused, TrimtabError
from trimtab.kit.cli import WIDTH
from trimtab.policy import FIELDS, Field, Policy, Value, parse, text

UNSET = "default"
UNSET_FOR_SOME = "none of its own"
"""What a pool, a label, a node or a rollout has where it sets nothing: then what is set for more of the mesh holds, not the default."""
NOTHING = "-"
UNKNOWN = "?"
HISTORY_KINDS = {1: "person", 2: "controller", 3: "reseed", 4: "refused"}
"""By HistoryKind's numbers."""
WIDEST = 120
"""Lines that run on beyond this are hard to read."""


def place(identity: Any) -> str:
    """epoch.revision, or a dash for none."""
    return f"{identity.epoch}.{identity.revision}" if identity.epoch else "-"


def identity_json(identity: Any) -> dict[str, Any] | None:
    if not identity.epoch:
        return None
    return {"epoch": identity.epoch, "revision": identity.revision, "sha256": identity.sha256.hex()}


def _width() -> int:
    """The terminal's, within reason; WIDTH where there is none."""
    return max(WIDTH, min(WIDEST, shutil.get_terminal_size((WIDTH, 24)).columns))


def store_text(store: Any) -> str:
    if not store.connected:
        return f"store: NOT CONNECTED, changes are refused: {store.description}"
    if not store.writable:
        return f"store: READ ONLY, changes are refused: {store.description}"
    wanted = (
        f", a write is committed once {store.replicas_wanted} of its replicas have it" if store.replicas_wanted else ""
    )
    return f"store: {store.description}{wanted}"


def store_json(store: Any) -> dict[str, Any]:
    return {
        "connected": store.connected,
        "writable": store.writable,
        "replicas_wanted": store.replicas_wanted,
        "description": store.description,
    }


# ---- policy


def policy_text(answer: Any, fields: Iterable[Field]) -> str:
    """By part; each field with its value and source, and below them what it is."""
    why = f' "{answer.reason}"' if answer.reason else ""
    lines = [f"policy {place(answer.snapshot.identity)}, version {answer.spec_version}, by {answer.author}{why}"]
    values = decode_partial(answer.effective)
    parts: dict[str, list[Field]] = {}
    for f in fields:
        parts.setdefault(f.path.split(".")[0], []).append(f)
    for part, group in parts.items():
        lines += ["", f"{part}: {_about(part)}", *_part_text(group, values, answer, _width())]
    if not answer.store.connected:
        lines += ["", store_text(answer.store)]
    return "\n".join(lines)


def _about(part: str) -> str:
    said = (type(getattr(Policy(), part)).__doc__ or "").strip().rstrip(".")
    return said[:1].lower() + said[1:]


def _part_text(fields: list[Field], values: Mapping[str, Value], answer: Any, width: int) -> list[str]:
    worths = {f.path: _with_unit(f, values.get(f.path)) for f in fields}
    left = max(map(len, worths))
    # A long list of names sticks out; it does not push the rest aside.
    middle = max((len(w) for w in worths.values() if len(w) <= 24), default=0)
    lines = []
    for path, worth in worths.items():
        start = f"  {path:{left}}  {worth:{middle}}  "
        lines += textwrap.wrap(
            start + _source(path, answer), width, subsequent_indent=" " * min(len(start), width // 2)
        )
        lines += textwrap.wrap(FIELDS[path].doc, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return lines


def _with_unit(f: Field, value: Value | None) -> str:
    if value is None:
        return UNKNOWN
    # A list of names says what it is by its field.
    return f"{text(value)} {f.unit}" if f.numeric else text(value) or NOTHING


def _source(path: str, answer: Any) -> str:
    source: str = answer.sources.get(path, "this control plane does not know it")
    return f"{source}; inactive: beyond the window" if path in answer.inactive else source


def field_text(f: Field, answer: Any) -> str:
    """One field's value with its unit, and where it comes from."""
    return f"{_with_unit(f, decode_partial(answer.effective).get(f.path))} ({_source(f.path, answer)})"


def node_field_text(f: Field, answer: Any) -> str:
    """The same of a node, whose answer may be an error."""
    return answer.message if isinstance(answer, TrimtabError) else field_text(f, answer)


def node_field_json(f: Field, answer: Any) -> dict[str, Any]:
    if isinstance(answer, TrimtabError):
        return {"value": None, "source": None, "error": answer.message}
    found = policy_json(answer, [f])["fields"][f.path]
    return {"value": found["value"], "source": found["source"]}


def policy_json(answer: Any, fields: Iterable[Field]) -> dict[str, Any]:
    """Values have their JSON types; None is one that the control plane does not know. Bounds and choices where there are any."""
    values = decode_partial(answer.effective)
    return {
        "identity": identity_json(answer.snapshot.identity),
        "spec_version": answer.spec_version,
        "author": answer.author,
        "reason": answer.reason,
        "fields": {
            f.path: {
                "value": values.get(f.path),
                "kind": f.kind.value,
                "unit": f.unit,
                "source": answer.sources.get(f.path, ""),
                "inactive": f.path in answer.inactive,
                "default": f.default,
                "minimum": f.minimum if f.numeric else None,
                "maximum": f.maximum if f.numeric else None,
                "choices": list(f.choices) or None,
                "hot": f.hot,
                "doc": f.doc,
            }
            for f in fields
        },
        "store": store_json(answer.store),
    }


# ---- changes


def _worth(field: str, said: str, scope: str = "") -> str:
    if said == UNSET and scope:
        return UNSET_FOR_SOME
    if said == UNSET and field in FIELDS:
        return f"{text(FIELDS[field].default) or NOTHING} ({UNSET})"
    return said or NOTHING


def typed(field: str, said: str) -> Value | None:
    """None where the field is not set; the text itself where this build can't read it, as in the history of another."""
    if said == UNSET:
        return None
    try:
        return parse(field, said)
    except PolicyRefused:
        return said


def changes_text(changes: Iterable[Any]) -> list[str]:
    return [_change_text(c) for c in changes]


def _change_text(c: Any) -> str:
    if _about_values(c):
        whom = f"{c.scope}: " if c.scope else ""
        return f"{whom}{c.field}: {_worth(c.field, c.before, c.scope)} → {_worth(c.field, c.after, c.scope)}"
    # A pin or a controller's adjustment: words, not values of the field.
    before, after = ("none" if said == UNSET else said for said in (c.before, c.after))
    return f"{c.scope}: {c.field}: {before} → {after}"


def _about_values(c: Any) -> bool:
    return not c.scope or c.scope.startswith(("pool/", "label/", "node/", "rollout/"))


def changes_json(changes: Iterable[Any]) -> list[dict[str, Any]]:
    found = []
    for c in changes:
        said = [typed(c.field, x) if _about_values(c) else (None if x == UNSET else x) for x in (c.before, c.after)]
        found.append({"field": c.field, "scope": c.scope, "before": said[0], "after": said[1]})
    return found


def durability_text(answer: Any) -> str:
    """Empty where nothing was written, or by a control plane that does not say."""
    if not answer.HasField("durability"):
        return ""
    d = answer.durability
    if not d.wanted:
        return "committed: the store has it (no replicas are asked for)"
    if d.committed:
        return f"committed: {d.replicas} of the store's replicas have it"
    return f"ACCEPTED, NOT REPLICATED: {d.replicas} of the {d.wanted} replicas asked for have it yet; a failover of the store may lose it"


def durability_json(answer: Any) -> dict[str, Any] | None:
    if not answer.HasField("durability"):
        return None
    d = answer.durability
    return {"committed": d.committed, "replicas": d.replicas, "wanted": d.wanted}


def answer_of(node: Any, identity: Any) -> str:
    """applied, refused or waiting: what a node has said of this snapshot."""
    target = (identity.epoch, identity.revision)
    if (node.applied.epoch, node.applied.revision) >= target:
        return "applied"
    return "refused" if (node.refused.epoch, node.refused.revision) >= target else "waiting"


def set_text(answer: Any, *, dry_run: bool, waited: bool) -> str:
    if not answer.changes:
        return f"nothing to change: policy {place(answer.identity)} says so already"
    if dry_run:
        lines = ["would change (nothing was written):", *(f"  {c}" for c in changes_text(answer.changes))]
        return "\n".join([*lines, *_unmatched(answer)])
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
    lines += _unmatched(answer)
    if waited and not answer.nodes:
        lines.append("  no node is connected; each takes it when it joins")
    durable = durability_text(answer)
    if durable:
        lines.append(f"  {durable}")
    lines.append(f"  trace: trimtab trace {answer.trace_id}")
    return "\n".join(lines)


def _unmatched(answer: Any) -> list[str]:
    """Whom nobody is. A gateway of several processes has a name for each of them."""
    return [
        f"  nobody is {scope} now (see `trimtab fleet`): it holds for who comes" for scope in answer.unmatched_scopes
    ]


def set_json(answer: Any, *, dry_run: bool) -> dict[str, Any]:
    return {
        "identity": identity_json(answer.identity),
        "spec_version": answer.spec_version,
        "written": bool(answer.changes) and not dry_run,
        "durability": durability_json(answer),
        "dry_run": dry_run,
        "changes": changes_json(answer.changes),
        "nodes": [{**node_policy_json(n), "answer": answer_of(n, answer.identity)} for n in answer.nodes],
        "trace_id": answer.trace_id,
        "unmatched_scopes": list(answer.unmatched_scopes),
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
        lines.append(f"{place(e.identity):>8}  {when}  {_author(e)}{why}")
        if e.evidence:
            said = f"because it saw {e.evidence}"
            lines += textwrap.wrap(said, _width(), initial_indent=" " * 10, subsequent_indent=" " * 12)
        if e.refused_because:
            said = f"REFUSED, nothing changed: {e.refused_because}"
            lines += textwrap.wrap(said, _width(), initial_indent=" " * 10, subsequent_indent=" " * 12)
        lines += [f"          {change}" for change in changes_text(e.changes)]
    return "\n".join(lines) or "no history"


def by_controller(e: Any) -> bool:
    """A control plane that says no kind has none that the leader writes in a person's name."""
    return HISTORY_KINDS.get(e.kind) == "controller" if e.kind else bool(e.term)


def _author(e: Any) -> str:
    if by_controller(e):
        return f"controller {e.author.removeprefix('controller/')} (term {e.term})"
    # Such as the promotion of a rollout that he began.
    return f"{e.author} (by the leader, term {e.term})" if e.term else str(e.author)


def kind_text(e: Any) -> str:
    """person, controller, reseed or refused; of a control plane that does not say, what can be told."""
    if e.refused_because:
        return "refused"
    return HISTORY_KINDS.get(e.kind, UNKNOWN)


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
            "kind": kind_text(e),
            "term": e.term or None,
            "evidence": e.evidence or None,
        }
        for e in entries
    ]
