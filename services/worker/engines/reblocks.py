"""What every engine asks of a change of its KV block size before it touches anything; what it then does is the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from trimtab.blocks import CARRIED_AS_ONE, LADDER, Geometry, Reblock, When, context_of
from trimtab.errors import EngineDead, ReblockRefused

MAX_BLOCK_SIZE = LADDER[-1]


def sized(block_size: object, accepted: tuple[int, ...]) -> int:
    """The size, if it is one at all: True is no number, and neither is 64.0. ReblockRefused otherwise."""
    if type(block_size) is not int or not 1 <= block_size <= MAX_BLOCK_SIZE:
        why = f"a block size is a whole number of tokens from 1 to {MAX_BLOCK_SIZE}, and not {block_size!r}"
        raise ReblockRefused(why, cause="SIZE", accepted=accepted)
    return block_size


def on_the_ladder(takes: Callable[[int], bool]) -> tuple[int, ...]:
    """Those of the sizes that are asked for which an engine takes."""
    return tuple(size for size in LADDER if takes(size))


def refuse_busy(found: Reblock, when: When, max_recompute_tokens: int, accepted: tuple[int, ...]) -> None:
    """ReblockRefused where the change may wait and would cost too much now. What costs nothing never waits."""
    cost = found.recompute_tokens + found.carried_tokens / CARRIED_AS_ONE
    if when is When.IDLE and cost and cost >= max_recompute_tokens:
        carried = f" and {found.carried_tokens} carried over" if found.carried_tokens else ""
        raise ReblockRefused(
            f"{found.recompute_tokens} tokens of {found.requests} requests would be computed anew{carried}; at "
            f"{max_recompute_tokens} and more, {CARRIED_AS_ONE} carried ones as one, the change waits, unless it is told to come now",
            cause="NOT_IDLE",
            accepted=accepted,
        )


def refuse_long(longest: int, after: Geometry, accepted: tuple[int, ...], *, usable: int) -> None:
    """ReblockRefused where a request of `longest` tokens does not fit into so many `usable` blocks alone."""
    if -(-longest // after.block_size) > usable:
        raise ReblockRefused(
            f"a request of {longest} tokens does not fit into {usable} blocks of {after.block_size}",
            cause="TOO_LONG",
            accepted=accepted,
        )


def moves(requests: Iterable[tuple[object, Sequence[int], int]], block_size: int, usable: int) -> tuple[int, int, int]:
    """(carried, computed anew, and the context of those: `blocks.context_of`): what becomes of requests' tokens where their KV is carried into
    so many `usable` blocks of that size, one request after another, each whole or not at all.

    A prefix that several have in common, as far as it fills blocks of that size, counts once. Each request is its kind, its tokens, and how
    many of them count; prefixes of different kinds have nothing in common.
    """
    seen: set[int] = set()
    left: list[tuple[list[int], int]] = []
    carried = anew = context = 0
    for kind, tokens, count in requests:
        chains = _chains(kind, tokens[:count], block_size)
        own = count - _shared(chains, seen) * block_size
        # With a slot for its next token, which else would find no room.
        blocks = own // block_size + 1
        if blocks <= usable:
            usable -= blocks
            carried += own
            seen.update(chains)
        else:
            left.append((chains, count))
    for chains, count in left:
        known = _shared(chains, seen) * block_size
        anew += count - known
        context += context_of(count, known)
        seen.update(chains)
    return carried, anew, context


def _chains(kind: object, tokens: Sequence[int], block_size: int) -> list[int]:
    """For each whole block what tells it and all that is before it from any other."""
    found, chain = [], hash(kind)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        chain = hash((chain, tuple(tokens[start : start + block_size])))
        found.append(chain)
    return found


def _shared(chains: Sequence[int], seen: Collection[int]) -> int:
    return next((i for i, chain in enumerate(chains) if chain not in seen), len(chains))


# The way to the engine's process and back: plain values, as vLLM carries no others.


def asked(
    accepted: tuple[int, ...],
    block_size: object,
    when: When,
    max_recompute_tokens: int,
    *,
    carry: bool,
    dry_run: bool,
) -> dict[str, Any]:
    """ReblockRefused for what is no size, as it might be too long a number to be told."""
    size = sized(block_size, accepted)
    return {
        "block_size": size,
        "when": when.value,
        "max_recompute_tokens": max_recompute_tokens,
        "carry": carry,
        "dry_run": dry_run,
    }


def answer(done: Reblock) -> dict[str, Any]:
    return {"done": asdict(done)}


def refusal(refused: ReblockRefused) -> dict[str, Any]:
    return {"refused": {"message": refused.message, "cause": refused.cause, "accepted": list(refused.accepted)}}


def answered(said: dict[str, Any]) -> Reblock:
    """What the engine's process said: ReblockRefused, or EngineDead where it is gone of it."""
    if "dead" in said:
        raise EngineDead(f"the engine ended itself: {said['dead']}")
    if "refused" in said:
        no = said["refused"]
        raise ReblockRefused(no["message"], cause=no["cause"], accepted=tuple(no["accepted"]))
    done = dict(said["done"])
    before, after = Geometry(**done.pop("before")), Geometry(**done.pop("after"))
    return Reblock(before, after, **done)
