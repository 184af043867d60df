"""What every engine asks of a change of its KV block size before it touches anything; what it then does is the engine's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from trimtab.blocks import LADDER, Geometry, Reblock, When
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
    """ReblockRefused where the change may wait and would cost too much now. What nothing is lost by never waits."""
    resident = found.recompute_tokens
    if when is When.IDLE and resident and resident >= max_recompute_tokens:
        raise ReblockRefused(
            f"{resident} tokens of {found.requests} requests are resident; at {max_recompute_tokens} and more the change "
            "waits, unless it is told to come now",
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


def to_recompute(requests: Iterable[tuple[object, Sequence[int], int]], block_size: int) -> int:
    """Tokens to compute where a prefix that several have in common is computed once, as far as it fills blocks of that size.

    Each request is its kind, its tokens, and how many of them count; prefixes of different kinds have nothing in common.
    """
    seen: set[int] = set()
    total = 0
    for kind, tokens, count in requests:
        chain, shared = hash(kind), 0
        for start in range(0, count - block_size + 1, block_size):
            chain = hash((chain, tuple(tokens[start : start + block_size])))
            if shared == start and chain in seen:
                shared += block_size
            seen.add(chain)
        total += count - shared
    return total


# The way to the engine's process and back: plain values, as vLLM carries no others.


def asked(
    accepted: tuple[int, ...], block_size: object, when: When, max_recompute_tokens: int, *, dry_run: bool
) -> dict[str, Any]:
    """ReblockRefused for what is no size, as it might be too long a number to be told."""
    size = sized(block_size, accepted)
    return {"block_size": size, "when": when.value, "max_recompute_tokens": max_recompute_tokens, "dry_run": dry_run}


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
