"""KV blocks of workers, changes of their size, and pools' plans, for people and for programs."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from controlplane.render_workers import OPEN_ENDED
from trimtab.codec import decode_limits
from trimtab.kit.cli import WIDTH, ExitCode, table
from trimtab.kit.duration import brief

NOTHING = "-"


def blocks_text(answer: Any) -> str:
    """Three tables: what is, what each size would waste and keep, and what is planned."""
    if not answer.nodes:
        return "no worker is connected"
    head = ("WORKER", "SIZE", "BLOCKS", "CAPACITY", "IN USE", "WASTE", "PREFIX KEPT")
    parts = [table(head, [_row(n) for n in answer.nodes], right=(1, 2, 3, 4, 5))]
    for title, of in (("WASTE BY BLOCK SIZE", "waste"), ("PREFIX KEPT BY BLOCK SIZE, AT MOST", "prefix_kept")):
        rows = [(n.node_id, by_size(getattr(n, of))) for n in answer.nodes if getattr(n, of)]
        if rows:
            parts.append(table(("WORKER", title), rows))
    if answer.pools:
        rows_ = [
            (p.pool, p.phase, _size(p.named_block_size), _size(p.planned_block_size), _why(p)) for p in answer.pools
        ]
        parts.append(table(("POOL", "PHASE", "GUIDE", "PLAN", "WHY"), rows_, right=(2, 3)))
    else:
        parts.append("no plan yet: " + ("the leader has made none" if answer.leader_id else "no replica leads"))
    return "\n\n".join(parts)


def _row(n: Any) -> tuple[str, ...]:
    limits, capacity = n.limits, longest_of(n.limits)
    size = limits.block_size
    live = "" if limits.live_blocks else " (fixed)"
    return (
        n.node_id,
        f"{_size(size)}{live}",
        f"{limits.total_blocks:,}" if limits.total_blocks else NOTHING,
        f"{capacity:,}" if capacity else NOTHING,
        share(n.resident_tokens / capacity) if capacity and n.resident_tokens else NOTHING,
        share(n.waste[size]) if size in n.waste else NOTHING,
        share(n.prefix_kept[size]) if size in n.prefix_kept else NOTHING,
    )


def by_size(shares: Mapping[int, float]) -> str:
    return ", ".join(f"{size}: {share(shares[size])}" for size in sorted(shares))


def share(value: float) -> str:
    """In per cent, with the digits that tell small ones apart."""
    percent = 100.0 * value
    return f"{percent:.2f}%" if percent and abs(percent) < 10.0 else f"{percent:.0f}%"


def longest_of(limits: Any) -> int:
    """Tokens of one request that takes all blocks; 0 where the cache is not known."""
    return decode_limits(limits).kv.longest(limits.total_blocks) if limits.block_size else 0


def capacity_of(block_size: int, total_blocks: int) -> int:
    """In tokens, where all layers keep all of them: the block size of no other cache changes while it runs."""
    return block_size * total_blocks


def _size(block_size: int) -> str:
    return str(block_size) if block_size else NOTHING


def _why(p: Any) -> str:
    return f"{p.reason} ({p.evidence})" if p.evidence else p.reason


def blocks_json(answer: Any) -> dict[str, Any]:
    return {
        "nodes": [
            {
                "node_id": n.node_id,
                "pool": n.pool,
                "block_size": n.limits.block_size,
                "total_blocks": n.limits.total_blocks,
                "capacity_tokens": longest_of(n.limits),
                "resident_tokens": n.resident_tokens,
                "accepted_block_sizes": list(n.limits.block_sizes),
                "live": n.limits.live_blocks,
                "carries": n.limits.carries_blocks,
                "fragmentation": n.fragmentation if n.HasField("fragmentation") else None,
                "waste": _json_by_size(n.waste),
                "prefix_kept": _json_by_size(n.prefix_kept),
            }
            for n in answer.nodes
        ],
        "pools": [
            {
                "pool": p.pool,
                "phase": p.phase,
                "named_block_size": p.named_block_size or None,
                "planned_block_size": p.planned_block_size or None,
                "reason": p.reason,
                "evidence": p.evidence,
                "at_unix_ms": p.at_unix_ms,
                "gain": _json_by_size(p.gain),
            }
            for p in answer.pools
        ],
        "leader_id": answer.leader_id or None,
    }


def _json_by_size(shares: Mapping[int, float]) -> dict[str, float]:
    return {str(size): shares[size] for size in sorted(shares)}


def reblock_text(answer: Any) -> str:
    """Of those that did it, or would; empty where none did."""
    rows = [_change(n) for n in answer.nodes if n.done]
    return table(("WORKER", "SIZE", "BLOCKS", "CAPACITY, TOKENS", "TO COMPUTE ANEW"), rows) if rows else ""


def _change(n: Any) -> tuple[str, ...]:
    r = n.result
    before = capacity_of(r.before_block_size, r.before_total_blocks)
    after = capacity_of(r.after_block_size, r.after_total_blocks)
    return (
        n.node_id,
        _arrow(r.before_block_size, r.after_block_size),
        _arrow(r.before_total_blocks, r.after_total_blocks),
        _arrow(before, after),
        cost_text(n),
    )


def _arrow(before: int, after: int) -> str:
    return f"{after:,}, as before" if before == after else f"{before:,} → {after:,}"


def cost_text(n: Any) -> str:
    r = n.result
    if not r.recompute_tokens and not r.cached_tokens and not r.carried_tokens:
        return "nothing"
    whose = f"of {r.requests} request{'' if r.requests == 1 else 's'}"
    if r.carried_tokens:
        found = [f"{r.recompute_tokens:,} tokens {whose}" if r.recompute_tokens else f"nothing {whose}"]
        found.append(f"{r.carried_tokens:,} tokens are carried over")
    else:
        found = [f"{r.recompute_tokens:,} tokens {whose}"]
    if n.HasField("recompute_s") and r.recompute_tokens:
        found.append(f"about {brief(max(1.0, n.recompute_s * 1000.0))} of work")
    if r.cached_tokens:
        found.append(f"{r.cached_tokens:,} tokens of the prefix cache are lost")
    return "; ".join(found)


def refusals(answer: Any, block_size: int, *, dry_run: bool, left: Sequence[str]) -> list[str]:
    """What was not done and why, a line each; `left` were not asked after that."""
    lines: list[str] = []
    for n in answer.nodes:
        if n.done:
            continue
        maybe = n.reason in OPEN_ENDED
        does = (
            "has given no answer" if maybe else f"would not change to {block_size}" if dry_run else "keeps its blocks"
        )
        lines += _wrapped(f"error: {n.node_id} {does}: {n.reason}: {n.message}")
        if n.accepted_block_sizes:
            lines += _wrapped(f"it would accept {', '.join(map(str, n.accepted_block_sizes))}", indent="  ")
    if left:
        lines += _wrapped(f"left as they are: {', '.join(left)}")
    return lines


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent="  ")


def reblock_code(nodes: Iterable[Any]) -> ExitCode:
    found = list(nodes)
    failed = [n for n in found if not n.done]
    if not failed:
        return ExitCode.OK
    some = len(failed) < len(found) or any(n.reason in OPEN_ENDED for n in failed)
    return ExitCode.PARTIAL if some else ExitCode.REFUSED


def reblock_json(answer: Any, block_size: int, *, dry_run: bool, left: Sequence[str]) -> dict[str, Any]:
    return {
        "block_size": block_size,
        "dry_run": dry_run,
        "nodes": [_reblocked_json(n) for n in answer.nodes],
        "left": list(left),
    }


def _reblocked_json(n: Any) -> dict[str, Any]:
    r = n.result
    result = {
        "before": _geometry_json(r.before_block_size, r.before_total_blocks),
        "after": _geometry_json(r.after_block_size, r.after_total_blocks),
        "recompute_tokens": r.recompute_tokens,
        "requests": r.requests,
        "cached_tokens": r.cached_tokens,
        "change_ms": r.change_ms,
        "carried": r.carried,
        "carried_tokens": r.carried_tokens,
    }
    return {
        "node_id": n.node_id,
        "done": n.done,
        "result": result if n.HasField("result") else None,
        "recompute_s": n.recompute_s if n.HasField("recompute_s") else None,
        "reason": n.reason or None,
        "message": n.message or None,
        "accepted_block_sizes": list(n.accepted_block_sizes),
    }


def _geometry_json(block_size: int, total_blocks: int) -> dict[str, int]:
    capacity = capacity_of(block_size, total_blocks)
    return {"block_size": block_size, "total_blocks": total_blocks, "capacity_tokens": capacity}
