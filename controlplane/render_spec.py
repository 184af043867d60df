"""Whole specs for people and for programs (JSON): what people have set, for whom, and what they pinned."""

from __future__ import annotations

from typing import Any

from controlplane.render import identity_json, place, typed
from trimtab.codec import decode_scope


def spec_text(found: Any) -> str:
    """What people had set, as one line for each field."""
    e, spec = found.entry, found.spec
    why = f' "{e.reason}"' if e.reason else ""
    lines = [f"policy {place(e.identity)}, version {e.spec_version}, by {e.author}{why}"]
    lines += [f"  {path}={said}" for path, said in sorted(spec.fields.items())] or ["  no field is set for everyone"]
    for overlay in spec.overlays:
        lines.append(f"  for {scope_text(overlay.scope)}:")
        lines += [f"    {path}={said}" for path, said in sorted(overlay.fields.items())]
    for pin in spec.pins:
        why = f' "{pin.reason}"' if pin.reason else ""
        lines.append(f"  pinned by {pin.author}: {pin.field}{why}")
    lines.append("  all else is as the guides say")
    return "\n".join(lines)


def spec_json(found: Any, version: int) -> dict[str, Any]:
    """`version` is the policy's now, to be expected by the next write."""
    e, spec = found.entry, found.spec
    return {
        "identity": identity_json(e.identity),
        "spec_version": version,
        "written_by": e.author,
        "reason": e.reason,
        "fields": {path: typed(path, said) for path, said in sorted(spec.fields.items())},
        "overlays": [
            {
                "scope": scope_text(o.scope),
                "fields": {path: typed(path, said) for path, said in sorted(o.fields.items())},
            }
            for o in spec.overlays
        ],
        "pins": [{"field": p.field, "author": p.author, "reason": p.reason} for p in spec.pins],
    }


def scope_text(pb: Any) -> str:
    return str(decode_scope(pb)) or "everyone"
