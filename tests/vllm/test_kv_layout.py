"""KV moved into blocks of another size: by layouts that are known, over the same memory, and never by one that is not known."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.worker.engines.vllm_kv_layout import LAYOUTS, Cut, Span, Write, layout_of, move

HEADS, NUMBERS, LAYERS = 3, 8, 4
SIZES = [(32, 128), (128, 32), (96, 64), (64, 96), (32, 32 * 7), (160, 96)]


def token_by_token(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """As FlashAttention's back end sees its cache."""
    size = cache.shape[2]
    cache.transpose(1, 2)[slots // size, slots % size] = torch.cat([key, value], dim=-1)


def keys_across(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    blocks, heads, size, numbers = cache.shape
    sides = cache.view(blocks, heads, 2, size * numbers // 2)
    for i, slot in enumerate(slots.tolist()):
        sides[slot // size, :, 0].view(heads, numbers // 2, size)[:, :, slot % size] = key[i]
        sides[slot // size, :, 1].view(heads, size, numbers // 2)[:, slot % size] = value[i]


def backwards(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
    """A layout that nobody knows here: where a token lies depends on the block's size."""
    size = cache.shape[2]
    cache.transpose(1, 2)[slots // size, size - 1 - slots % size] = torch.cat([key, value], dim=-1)


def scratch(size: int, blocks: int) -> torch.Tensor:
    return torch.zeros(blocks, HEADS, size, 2 * NUMBERS)


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize(
    ("write", "name"), [(token_by_token, "token by token"), (keys_across, "keys across"), (backwards, "")]
)
def test_a_layout_is_found_out_by_trial(write: Write, name: str, before: int, after: int) -> None:
    assert layout_of(write, scratch, before, after) == name


def test_a_back_end_whose_blocks_are_parts_of_those_that_requests_hold_is_tried_too() -> None:
    def in_parts(size: int, blocks: int) -> torch.Tensor:
        return scratch(32, blocks * size // 32)

    # Parts are moved whole, whatever is in them.
    assert {layout_of(write, in_parts, 128, 64) for write in (token_by_token, keys_across, backwards)} == {
        "token by token"
    }


def test_the_operation_of_vllms_back_end_for_cpus_has_a_layout_that_is_known() -> None:
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        isa = _get_attn_isa(dtype, 128, 64)

        def write(key: torch.Tensor, value: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
            blocks, heads, size, _ = cache.shape
            keys, values = cache.view(blocks, heads, 2 * size, -1).chunk(2, dim=2)
            ops.cpu_attn_reshape_and_cache(key, value, keys, values, slots, isa)  # noqa: B023

        found = layout_of(write, lambda s, b: torch.zeros(b, 3, s, 128, dtype=dtype), 128, 32)  # noqa: B023
        # With AMX keys are packed in a way that is not known here, and are computed anew.
        assert found == ("" if isa == "amx" else "keys across"), (dtype, isa)


def layers(memory: torch.Tensor, size: int) -> list[torch.Tensor]:
    """As many blocks as fit, one layer after another, as vLLM lays them out."""
    page = HEADS * size * 2 * NUMBERS
    blocks = memory.numel() // (LAYERS * page)
    return list(memory[: LAYERS * blocks * page].view(LAYERS, blocks, HEADS, size, 2 * NUMBERS))


@pytest.mark.parametrize(("before", "after"), SIZES)
@pytest.mark.parametrize(("write", "name"), [(token_by_token, "token by token"), (keys_across, "keys across")])
def test_over_the_same_memory_every_token_arrives_in_every_layer(
    write: Write, name: str, before: int, after: int
) -> None:
    """Layers lie elsewhere with another size, over those that are still to be read."""
    rng = random.Random(f"{before}/{after}/{name}")
    memory = torch.full((LAYERS * HEADS * 2 * NUMBERS * 5000,), -1.0)
    old, new = layers(memory, before), layers(memory, after)
    lengths = [1, before, before - 1, after, 3 * after + 5, 200]
    free_old, free_new = (rng.sample(range(cache[0].shape[0]), cache[0].shape[0]) for cache in (old, new))
    spans, wanted = [], []
    for i, n in enumerate(lengths):
        source = [free_old.pop() for _ in range(-(-n // before))]
        target = [free_new.pop() for _ in range(-(-n // after))]
        # The last one is not moved from its beginning on: the rest is somebody else's too.
        first = after if i == len(lengths) - 1 and n > after else 0
        spans.append(Span(first, n, source, target))
        at = torch.arange(n)
        for layer, cache in enumerate(old):
            kv = torch.randn(2, n, HEADS, NUMBERS, generator=torch.Generator().manual_seed(100 * i + layer))
            write(kv[0], kv[1], cache, torch.tensor(source)[at // before] * before + at % before)
            wanted.append((layer, target, first, n, kv))
    assert len({block for span in spans for block in span.target}) == sum(len(span.target) for span in spans)
    move(Cut(before, old), Cut(after, new), spans, LAYOUTS[name])
    for layer, target, first, n, kv in wanted:
        at = torch.arange(first, n)
        alone = torch.full_like(new[layer], -1.0)
        write(kv[0][first:], kv[1][first:], alone, torch.tensor(target)[at // after] * after + at % after)
        written = alone != -1.0
        assert torch.equal(new[layer][written], alone[written]), (layer, n)


def test_an_operation_that_writes_nothing_has_no_layout() -> None:
    assert layout_of(lambda *_: None, scratch, 32, 128) == ""


def test_nobody_to_move_moves_nothing() -> None:
    memory = torch.arange(LAYERS * HEADS * 2 * NUMBERS * 300.0)
    was = memory.clone()
    move(Cut(32, layers(memory, 32)), Cut(64, layers(memory, 64)), [], LAYOUTS["token by token"])
    assert torch.equal(memory, was)


def test_what_cannot_be_seen_as_a_layout_is_not_taken_for_it() -> None:
    """Blocks of a head that are not one piece of memory, which `keys across` needs."""

    def apart(size: int, blocks: int) -> torch.Tensor:
        return torch.zeros(blocks, size, HEADS, 2 * NUMBERS).transpose(1, 2)

    assert layout_of(token_by_token, apart, 64, 128) == "token by token"
    with pytest.raises(RuntimeError):
        LAYOUTS["keys across"](apart(64, 2), 32)


def test_an_operation_that_fails_is_the_callers_to_handle() -> None:
    def fails(*_: Any) -> None:
        raise NotImplementedError("no such operation here")

    broken: Callable[..., None] = fails
    with pytest.raises(NotImplementedError):
        layout_of(broken, scratch, 32, 64)
