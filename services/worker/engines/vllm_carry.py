"""KV carried over a change of the block size, on the engine's side: who runs goes on running, in blocks of the new size.

Blocks are given out as vLLM gives them to a prompt that it computes, prefixes that several have in common included, so that whatever holds
of computed KV holds of what is carried. Who finds no room is left to be put back and computed anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CARRIES = "trimtab_carries"
"""Of the engine's core: block sizes between which its attention back end's KV can be carried."""


def find_out(core: Any, sizes: Sequence[int]) -> bool:
    """Between which of the sizes KV can be carried, tried out with the back end's own operation in every worker; whether that is all of them.
    Asked before the engine serves."""
    answers = core.model_executor.collective_rpc("trimtab_carries", args=(list(sizes),))
    known = frozenset.intersection(*map(frozenset, answers))
    setattr(core, CARRIES, known)
    return known.issuperset(sizes)


def can(core: Any, size: int) -> bool:
    """From the size that it has to that one."""
    known: frozenset[int] = getattr(core, CARRIES, frozenset())
    return size in known and core.scheduler.block_size in known


def held(scheduler: Any) -> dict[str, list[int]]:
    """The blocks of each that runs, in the order of its tokens."""
    (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
    return {r.request_id: [block.block_id for block in manager.req_to_blocks[r.request_id]] for r in scheduler.running}


@dataclass(frozen=True, slots=True)
class Placed:
    """`moves` say, by request: first token to move, end, the blocks of before, the blocks of now. `left` found no room."""

    moves: dict[str, tuple[int, int, list[int], list[int]]]
    left: list[str]


def place(scheduler: Any, source: Mapping[str, Sequence[int]]) -> Placed:
    """Give whoever runs, and held `source`, blocks of the manager that is in place now and is empty."""
    placed = Placed({}, [])
    for request in scheduler.running:
        name, tokens = request.request_id, request.num_computed_tokens
        first = _allocate(scheduler, request, tokens) if tokens else None
        if first is None:
            placed.left.append(name)
            continue
        (target,) = scheduler.kv_cache_manager.get_block_ids(name)
        placed.moves[name] = (first, tokens, list(source[name]), list(target))
    return placed


def _allocate(scheduler: Any, request: Any, tokens: int) -> int | None:
    """Blocks for so many tokens. How many of them are in blocks that others placed before share with it; None where there is no room."""
    manager = scheduler.kv_cache_manager
    # To the manager it is a request like one that has just come, all of whose tokens are computed in one step.
    request.num_computed_tokens = 0
    try:
        blocks, hit, *_ = manager.get_computed_blocks(request)
        shared = min(hit, tokens // scheduler.block_size * scheduler.block_size)
        found = manager.truncate_computed_blocks(blocks, shared) if shared else None
        given = manager.allocate_slots(
            request, tokens - shared, num_new_computed_tokens=shared, new_computed_blocks=found
        )
    finally:
        request.num_computed_tokens = tokens
    return None if given is None else shared
