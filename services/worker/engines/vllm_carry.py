"""KV carried over a change of the block size, on the engine's side: who runs goes on running, in blocks of the new size.

Blocks are given out as vLLM gives them to a prompt that it computes, prefixes that several have in common included, so that whatever holds
of computed KV holds of what is carried. Who finds no room is left to be put back and computed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.worker.engines.vllm_memory import kv_bytes_per_token

BYTES_PER_MS = 500_000.0
"""Moved at least; two CPU cores move twice to five times as much (docs/benchmarks.md)."""
CARRIES = "trimtab_carries"
"""Of the engine's core: block sizes between which its attention back end's KV can be carried."""


def find_out(core: Any, sizes: Sequence[int]) -> bool:
    """Between which of the sizes KV can be carried, tried out with the back end's own operation in every worker; whether that is all of them.
    Asked before the engine serves."""
    answers = core.model_executor.collective_rpc("trimtab_carries", args=(list(sizes),))
    known = frozenset.intersection(*map(frozenset, answers))
    setattr(core, CARRIES, known)
    return known.issuperset(sizes)


def can(core: Any, before: int, after: int) -> bool:
    """From the one size to the other. A pair that was not tried at start is tried now."""
    known: frozenset[int] = getattr(core, CARRIES, frozenset())
    if before not in known or after not in known:
        return False
    return all(core.model_executor.collective_rpc("trimtab_carries_between", args=(before, after)))


@contextmanager
def announced(scheduler: Any) -> Iterator[None]:
    """While KV is moved the board says so, as of a step that takes as long as that: an engine that moves much is not hung, and one that gets
    stuck is found."""
    tokens = sum(r.num_computed_tokens for r in scheduler.running)
    scheduler.trimtab_begins(tokens * kv_bytes_per_token(scheduler.kv_cache_config) / BYTES_PER_MS)
    try:
        yield
    finally:
        scheduler.trimtab_ended()


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
        # With a slot for the next token: without one the request is preempted in its next step.
        given = manager.allocate_slots(
            request, tokens - shared, num_new_computed_tokens=shared, new_computed_blocks=found, num_lookahead_tokens=1
        )
    finally:
        request.num_computed_tokens = tokens
    return None if given is None else shared
