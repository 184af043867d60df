"""Where a token's key and value lie within a KV block, as far as that is known, and moving them into blocks of another size.

Tokens are moved by runs: the longest stretches that blocks of both sizes hold undivided. A layout says how a layer's cache is seen as runs.
Which layout a back end has is found out by trial, with the operation by which it writes its cache; one that is not known moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Runs = Callable[[torch.Tensor, int], tuple[torch.Tensor, ...]]
"""From a layer's cache (blocks, heads, tokens of a block, numbers of a token) and the tokens of a run: views of it, in each of which
[block, run] is a run's part, of a shape that is the same whatever the blocks' size."""


def _token_by_token(cache: torch.Tensor, run: int) -> tuple[torch.Tensor, ...]:
    """Each token's key and value side by side: FlashAttention's and whatever else sees the cache as its shape says."""
    return (cache.unflatten(2, (-1, run)).transpose(1, 2),)


def _keys_across(cache: torch.Tensor, run: int) -> tuple[torch.Tensor, ...]:
    """Of each block and head first all keys, number by number across the tokens, then all values, token by token: a CPU's with vectors.

    RuntimeError where a block of a head is not one piece of memory.
    """
    blocks, heads, tokens, numbers = cache.shape
    sides = cache.view(blocks, heads, 2, tokens * (numbers // 2))
    keys = sides[:, :, 0].unflatten(2, (numbers // 2, tokens // run, run)).permute(0, 3, 1, 2, 4)
    values = sides[:, :, 1].unflatten(2, (tokens // run, run, numbers // 2)).transpose(1, 2)
    return keys, values


LAYOUTS: dict[str, Runs] = {"token by token": _token_by_token, "keys across": _keys_across}


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens `first` to `end` of a request, which lie in the blocks `source` and are to lie in the blocks `target`, both from its first
    token on. `first` is a whole number of `target`'s blocks."""

    first: int
    end: int
    source: Sequence[int]
    target: Sequence[int]


@dataclass(frozen=True, slots=True)
class Cut:
    """How a cache is cut: tokens of a block as requests hold them, and each layer's view, whose blocks may be parts of those."""

    block_size: int
    layers: Sequence[torch.Tensor]

    @property
    def kernel_size(self) -> int:
        return int(self.layers[0].shape[2])

    def places(self, blocks: Sequence[int], starts: torch.Tensor, run: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(block, run) in a layer's view of the runs that begin at these tokens of who holds `blocks`."""
        held = torch.tensor(blocks, dtype=torch.int64)
        slots = held[starts // self.block_size] * self.block_size + starts % self.block_size
        return slots // self.kernel_size, slots % self.kernel_size // run


def move(source: Cut, target: Cut, spans: Iterable[Span], runs: Runs) -> None:
    """Move the spans' tokens, in every layer. Both cuts may be of the same memory where each layer lies there in one piece, in the same
    order: a layer is read whole before it is written, and none is written over that is still to be read.
    """
    run = math.gcd(source.kernel_size, target.kernel_size)
    spans = list(spans)
    if not spans:
        return
    device = source.layers[0].device
    found = [(_starts(span, run), span) for span in spans]
    out_of = _together([source.places(span.source, starts, run) for starts, span in found], device)
    into = _together([target.places(span.target, starts, run) for starts, span in found], device)
    layers = list(zip(source.layers, target.layers, strict=True))
    if _stride(target.layers) > _stride(source.layers):
        layers.reverse()
    for old, new in layers:
        held = [part[out_of] for part in runs(old, run)]
        for part, kept in zip(runs(new, run), held, strict=True):
            part[into] = kept


def _starts(span: Span, run: int) -> torch.Tensor:
    """Of its runs; the last one may end after it, within its last block."""
    return torch.arange(span.first, span.end, run, dtype=torch.int64)


def _together(
    places: Sequence[tuple[torch.Tensor, torch.Tensor]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    blocks, runs = zip(*places, strict=True)
    return torch.cat(blocks).to(device), torch.cat(runs).to(device)


def _stride(layers: Sequence[torch.Tensor]) -> int:
    """Bytes from one layer's first block to the next one's."""
    return layers[1].data_ptr() - layers[0].data_ptr() if len(layers) > 1 else 0


# Which layout it is.

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""A back end's own operation: keys and values (tokens, heads, numbers), a layer's cache, and the slot of each token."""


def layout_of(write: Write, scratch: Callable[[int, int], torch.Tensor], before: int, after: int) -> str:
    """Of LAYOUTS the one by which tokens written into blocks of `before` tokens can be moved into blocks of `after`, so that all is as if
    they had been written there; "" where there is none. `scratch` makes an empty cache of one layer: (tokens of a block, blocks).
    """
    tokens = max(before, after) + min(before, after) // 2 + 3
    old_blocks, new_blocks = (_shuffled(-(-tokens // size)) for size in (before, after))
    old, wanted = scratch(before, len(old_blocks)), scratch(after, len(new_blocks))
    heads, numbers = old.shape[1], old.shape[3] // 2
    generator = torch.Generator().manual_seed(tokens)
    # Whole numbers that every format holds exactly, and none is 0, which would look like nothing written.
    key, value = (torch.randint(1, 256, (tokens, heads, numbers), generator=generator).to(old) for _ in range(2))
    for cache, size, blocks in ((old, before, old_blocks), (wanted, after, new_blocks)):
        at = torch.arange(tokens)
        slots = torch.tensor(blocks)[at // size] * size + at % size
        write(key, value, cache, slots.to(cache.device))
    if int(wanted.count_nonzero()) != key.numel() + value.numel():
        # It writes later, or something else: nothing equals nothing, whatever moved it.
        return ""
    for name, runs in LAYOUTS.items():
        moved = scratch(after, len(new_blocks))
        try:
            move(Cut(before, [old]), Cut(after, [moved]), [Span(0, tokens, old_blocks, new_blocks)], runs)
        except RuntimeError:
            continue
        if torch.equal(_bytes(moved), _bytes(wanted)):
            return name
    return ""


def _shuffled(count: int) -> list[int]:
    """All numbers below `count`, no two neighbours in their order where there are three and more."""
    return [*range(1, count, 2), *range(0, count, 2)]


def _bytes(cache: torch.Tensor) -> Any:
    return cache.contiguous().view(torch.int8)
